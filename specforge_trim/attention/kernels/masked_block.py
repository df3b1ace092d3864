"""A small block with an explicit mask, by matrix products in at least fp32, on any device.

For kernels that take no mask. Its scores are [N, R, L], so callers keep L small.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specforge_trim.attention.kernel import Kernel


def _scores(q: Tensor, k: Tensor, mask: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Masked scores [M, G, R, L] and the grouped queries [R, M, G, H]."""
    work = torch.float64 if q.dtype == torch.float64 else torch.float32
    grouped = q.unflatten(1, (k.shape[1], -1)).to(work)
    scores = torch.einsum("rmgh,lmh->mgrl", grouped, k.to(work)) * scale
    return scores.masked_fill(~mask, float("-inf")), grouped


def _forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    assert mask is not None and not causal, "this kernel works by an explicit mask"
    scores, _ = _scores(q, k, mask, scale)
    lse = scores.logsumexp(-1)  # [M, G, R]
    p = (scores - lse[..., None]).exp()
    o = torch.einsum("mgrl,lmh->rmgh", p, v.to(p.dtype))
    return o.reshape(q.shape).to(q.dtype), lse.permute(2, 0, 1).reshape(q.shape[:2])


def _backward(
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
    assert mask is not None and not causal, "this kernel works by an explicit mask"
    scores, grouped = _scores(q, k, mask, scale)
    work, groups = scores.dtype, (k.shape[1], -1)
    p = (scores - lse.unflatten(1, groups).permute(1, 2, 0)[..., None]).exp()
    do_g = do.unflatten(1, groups).to(work)
    delta = (do_g * o.unflatten(1, groups).to(work)).sum(-1).permute(1, 2, 0)
    dv = torch.einsum("mgrl,rmgh->lmh", p, do_g)
    ds = p * (torch.einsum("rmgh,lmh->mgrl", do_g, v.to(work)) - delta[..., None]) * scale
    dq = torch.einsum("mgrl,lmh->rmgh", ds, k.to(work)).reshape(q.shape)
    dk = torch.einsum("mgrl,rmgh->lmh", ds, grouped)
    return dq.to(q.dtype), dk, dv


KERNEL = Kernel("masked-block", False, True, _forward, _backward)
