"""A plain torch stand-in for flash-attn's private forward/backward pair, for CPU tests.

Same argument names and order, layouts and traps as flash-attn 2.8: [B, S, H, D] with grouped
heads, log-sum-exp [B, H, S] in at least fp32, causal masks aligned bottom-right, +inf for a query
without keys, gradients written into the tensors handed in. Any float dtype, so that the segment
logic can be compared in fp64.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch


def _weights(q, k, softmax_scale, causal):
    """Scores [B, H, Sq, Sk] in at least fp32, masked keys at -inf."""
    assert q.stride(-1) == k.stride(-1) == 1
    assert q.shape[1] > 0 and k.shape[1] > 0
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    k = k.repeat_interleave(q.shape[2] // k.shape[2], dim=2)
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(wide), k.to(wide)) * softmax_scale
    if causal:
        rows, keys = q.shape[1], k.shape[1]
        last = torch.arange(rows)[:, None] + keys - rows
        scores = scores.masked_fill(torch.arange(keys) > last, float("-inf"))
    return scores


def _flash_attn_forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
    alibi_slopes, return_softmax,
):  # fmt: skip
    assert (dropout_p, window_size_left, window_size_right, softcap) == (0.0, -1, -1, 0.0)
    assert alibi_slopes is None and return_softmax is False
    scores = _weights(q, k, softmax_scale, causal)
    lse = scores.logsumexp(-1)
    p = (scores - lse[..., None]).exp().nan_to_num(0.0)
    v = v.repeat_interleave(q.shape[2] // v.shape[2], dim=2)
    out = torch.einsum("bhqk,bkhd->bqhd", p, v.to(p.dtype)).to(q.dtype)
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    return out, lse, None, torch.zeros(2, dtype=torch.int64)


def _flash_attn_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal,
    window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    for x in (dout, out, softmax_lse):
        assert x.is_contiguous(), "the real kernel reads these as they lie"
    assert softmax_lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    group = q.shape[2] // k.shape[2]
    scores = _weights(q, k, softmax_scale, causal)
    wide = scores.dtype
    p = (scores - softmax_lse[..., None]).exp()
    do = dout.to(wide)
    delta = (do * out.to(wide)).sum(-1).transpose(1, 2)  # [B, H, Sq]
    v_all = v.repeat_interleave(group, dim=2).to(wide)
    k_all = k.repeat_interleave(group, dim=2).to(wide)
    ds = p * (torch.einsum("bqhd,bkhd->bhqk", do, v_all) - delta[..., None]) * softmax_scale
    dq.copy_(torch.einsum("bhqk,bkhd->bqhd", ds, k_all))
    for buffer, full in (
        (dk, torch.einsum("bhqk,bqhd->bkhd", ds, q.to(wide))),
        (dv, torch.einsum("bhqk,bqhd->bkhd", p, do)),
    ):
        buffer.copy_(full.unflatten(2, (k.shape[2], group)).sum(3))
    return delta


def install(monkeypatch) -> None:
    """Make `import flash_attn` find this stand-in for the length of a test."""
    package, interface = ModuleType("flash_attn"), ModuleType("flash_attn.flash_attn_interface")
    interface._flash_attn_forward = _flash_attn_forward
    interface._flash_attn_backward = _flash_attn_backward
    package.flash_attn_interface = interface
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", interface)
