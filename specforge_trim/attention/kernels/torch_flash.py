"""torch's own flash attention as a forward/backward pair with log-sum-exp, on CPU and CUDA.

The backward takes the MERGED output and log-sum-exp when the keys given here are only part of a
softmax: p = exp(q.k - L) is then the part's share of the whole, and the rest of the flash
backward follows from it.

Letters: R queries, L keys, N heads, M key/value heads (N a multiple of M), H head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _heads_first(x: Tensor) -> Tensor:
    """[R, N, H] -> [1, N, R, H], a view."""
    # The CPU operator reads another last-dimension stride without complaint, and wrongly.
    assert x.stride(-1) == 1, f"last stride is {x.stride(-1)}, the kernel needs 1"
    assert x.shape[0] > 0, "the kernel divides by the length; never pass it no rows"
    return x.transpose(0, 1)[None]


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(
        ~mask, float("-inf")
    )


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """o [R, N, H] in q's dtype and lse [R, N] in at least fp32.

    Args:
        q: [R, N, H].
        k, v: [L, M, H].
        causal: square lower-triangular mask; needs R == L.
        mask: bool [R, L], True = attend; every row attends to some key. Not with causal.
        scale: multiplies q.k.
    """
    assert not causal or q.shape[0] == k.shape[0], (q.shape, k.shape)
    if q.device.type == "cpu":
        o, lse = _CPU(
            _heads_first(q),
            _heads_first(k),
            _heads_first(v),
            0.0,
            causal,
            attn_mask=_bias(mask, q.dtype),
            scale=scale,
        )
        return o[0].transpose(0, 1), lse[0].transpose(0, 1)
    if mask is not None:
        return _block_forward(q, k, v, mask=mask, scale=scale)
    _check_cuda(q)
    o, lse = torch.ops.aten._flash_attention_forward(
        q[None],
        k[None],
        v[None],
        None,
        None,
        q.shape[0],
        k.shape[0],
        0.0,
        causal,
        False,
        scale=scale,
    )[:2]
    return o[0], lse[0].transpose(0, 1)


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    causal: bool,
    mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq [R, N, H], dk and dv [L, M, H] from the merged o [R, N, H] and lse [R, N]."""
    if q.device.type == "cpu":
        dq, dk, dv = _CPU_BACKWARD(
            _heads_first(do),
            _heads_first(q),
            _heads_first(k),
            _heads_first(v),
            _heads_first(o),
            lse.transpose(0, 1)[None],
            0.0,
            causal,
            attn_mask=_bias(mask, q.dtype),
            scale=scale,
        )
        return dq[0].transpose(0, 1), dk[0].transpose(0, 1), dv[0].transpose(0, 1)
    if mask is not None:
        return _block_backward(do, q, k, v, o, lse, mask=mask, scale=scale)
    _check_cuda(q)
    # Without dropout the random state is not read; empty tensors of its type stand in.
    state = torch.empty(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        do[None].contiguous(),
        q[None],
        k[None],
        v[None],
        o[None].contiguous(),
        lse.transpose(0, 1)[None].contiguous(),
        None,
        None,
        q.shape[0],
        k.shape[0],
        0.0,
        causal,
        state,
        unused,
        scale=scale,
    )
    return dq[0], dk[0], dv[0]


def _check_cuda(q: Tensor) -> None:
    if q.dtype not in (torch.bfloat16, torch.float16):
        raise ValueError(
            f"attention_backend=sdpa on a GPU computes in bfloat16 or float16, not {q.dtype}; "
            "set dtype to bfloat16, or use attention_backend=reference"
        )


def _block_forward(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """A small block with an explicit mask, by matrix products in at least fp32."""
    scores, _ = _block_scores(q, k, mask=mask, scale=scale)
    lse = scores.logsumexp(-1)  # [M, G, R]
    p = (scores - lse[..., None]).exp()
    o = torch.einsum("mgrl,lmh->rmgh", p, v.to(p.dtype))
    return o.reshape(q.shape).to(q.dtype), lse.permute(2, 0, 1).reshape(q.shape[:2])


def _block_scores(q: Tensor, k: Tensor, *, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.unflatten(1, (k.shape[1], -1)).to(work)  # [R, M, G, H]
    scores = torch.einsum("rmgh,lmh->mgrl", grouped, k.to(work)) * scale
    return scores.masked_fill(~mask, float("-inf")), grouped


def _block_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    *,
    mask: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    scores, grouped = _block_scores(q, k, mask=mask, scale=scale)
    work, groups = scores.dtype, (k.shape[1], -1)
    lse_mgr = lse.unflatten(1, groups).permute(1, 2, 0)
    p = (scores - lse_mgr[..., None]).exp()
    do_g = do.unflatten(1, groups).to(work)
    delta = (do_g * o.unflatten(1, groups).to(work)).sum(-1).permute(1, 2, 0)
    dv = torch.einsum("mgrl,rmgh->lmh", p, do_g)
    ds = p * (torch.einsum("rmgh,lmh->mgrl", do_g, v.to(work)) - delta[..., None]) * scale
    dq = torch.einsum("mgrl,lmh->rmgh", ds, k.to(work)).reshape(q.shape)
    dk = torch.einsum("mgrl,rmgh->lmh", ds, grouped)
    return dq.to(q.dtype), dk, dv
