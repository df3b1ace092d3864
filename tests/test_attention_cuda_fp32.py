"""The fp32 CUDA kernel on the CPU, over a stand-in for torch's memory-efficient operator.

Catches: heads folded into rows and back in another order, a log-sum-exp of unpadded or zero-padded
lines, a group's key gradients not added up, a causal square that repeats the wrong heads.
"""

import math

import pytest
import torch

from specforge_trim.attention.backends import select_kernel
from specforge_trim.attention.kernels import torch_cpu, torch_cuda_fp32

KERNEL = torch_cuda_fp32.KERNEL
SCALE = 0.3


def _scores(q, k, kind, scale):
    """[B, N, R, L]; the operator knows no grouped heads."""
    assert q.shape[2] == k.shape[2], "one key head per query head"
    scores = torch.einsum("brnh,blnh->bnrl", q, k) * scale
    if kind == 1:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        scores = scores.masked_fill(~keep, -math.inf)
    return scores


def forward_standin(q, k, v, bias, cu_q, cu_k, max_q, max_k, dropout, kind, want_lse, *, scale):
    assert (bias, cu_q, cu_k, max_q, max_k) == (None,) * 5 and dropout == 0.0 and want_lse
    scores = _scores(q, k, kind, scale)
    lse = scores.logsumexp(-1)
    out = torch.einsum("bnrl,blnh->brnh", (scores - lse[..., None]).exp(), v)
    padding = -lse.shape[-1] % 32
    lse = torch.nn.functional.pad(lse, (0, padding), value=math.inf)
    return out, lse, None, None, q.shape[1], k.shape[1]


def backward_standin(
    do, q, k, v, bias, out, cu_q, cu_k, max_q, max_k, lse, dropout, seed, offset, kind, bias_grad,
    *, scale,
):  # fmt: skip
    assert (bias, cu_q, cu_k) == (None,) * 3 and not bias_grad
    assert (max_q, max_k) == (q.shape[1], k.shape[1])
    assert lse.is_contiguous() and lse.shape == (1, q.shape[2], math.ceil(q.shape[1] / 32) * 32)
    assert bool(torch.isinf(lse[..., q.shape[1] :]).all()), "what lies beyond the rows weighs 0"
    p = (_scores(q, k, kind, scale) - lse[..., : q.shape[1], None]).exp()
    dv = torch.einsum("bnrl,brnh->blnh", p, do)
    delta = (do * out).sum(-1).transpose(1, 2)[..., None]
    ds = p * (torch.einsum("brnh,blnh->bnrl", do, v) - delta) * scale
    dq = torch.einsum("bnrl,blnh->brnh", ds, k)
    return dq, torch.einsum("bnrl,brnh->blnh", ds, q), dv, None


@pytest.fixture(autouse=True)
def on_the_cpu(monkeypatch):
    monkeypatch.setattr(torch_cuda_fp32, "_FORWARD", forward_standin)
    monkeypatch.setattr(torch_cuda_fp32, "_BACKWARD", backward_standin)


@pytest.mark.parametrize("heads, kv_heads", [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("rows, keys, causal", [(5, 40, False), (33, 7, False), (9, 9, True)])
def test_equals_the_cpu_kernel(rows, keys, causal, heads, kv_heads):
    gen = torch.Generator().manual_seed(rows)
    q, do = torch.randn(2, rows, heads, 8, generator=gen, dtype=torch.float64)
    k, v = torch.randn(2, keys, kv_heads, 8, generator=gen, dtype=torch.float64)
    options = {"causal": causal, "mask": None, "scale": SCALE}
    o, lse = KERNEL.forward(q, k, v, **options)
    want = torch_cpu.KERNEL.forward(q, k, v, **options)
    torch.testing.assert_close((o, lse), want, rtol=1e-10, atol=1e-12)
    # A merged output and log-sum-exp, as of a softmax over further keys.
    o, lse = o * 0.7, lse + 0.4
    grads = KERNEL.backward(do, q, k, v, o, lse, **options)
    want_grads = torch_cpu.KERNEL.backward(do, q, k, v, o, lse, **options)
    for grad, expected in zip(grads, want_grads, strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-12)


def test_fp32_on_a_gpu_takes_this_kernel():
    kernel = select_kernel("sdpa", device=torch.device("cuda"), dtype=torch.float32)
    assert kernel is KERNEL


def test_the_operators_take_what_is_passed():
    """Argument names and order as torch declares them."""
    forward = [
        a.name for a in torch.ops.aten._efficient_attention_forward.default._schema.arguments
    ]
    assert (
        forward[:11]
        == (
            "query key value bias cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p "
            "custom_mask_type compute_log_sumexp"
        ).split()
    )
    backward = torch.ops.aten._efficient_attention_backward.default._schema.arguments
    assert [a.name for a in backward][:16] == (
        "grad_out_ query key value bias out cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
        "logsumexp dropout_p philox_seed philox_offset custom_mask_type bias_requires_grad"
    ).split()
