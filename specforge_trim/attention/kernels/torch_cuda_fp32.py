"""torch's memory-efficient CUDA operator: fp32, for which there is no flash operator.

It knows no grouped heads. Unmasked keys are seen alike by every row, so a group's heads go in as
further rows; only the causal square, whose keys are the rows' own, repeats them.

Letters: R queries, L keys, N heads, M key/value heads, G = N / M, H head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specforge_trim.attention.kernel import Kernel

_FORWARD = torch.ops.aten._efficient_attention_forward
_BACKWARD = torch.ops.aten._efficient_attention_backward

_NO_MASK, _CAUSAL_TOP_LEFT = 0, 1

# The backward reads a row's log-sum-exp from lines of this length; beyond the rows it is +inf,
# which makes their probabilities zero.
_LSE_ALIGN = 32


def _forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    assert mask is None, "this kernel takes no mask"
    heads = q.shape[1]
    q, k, v = _operands(q, k, v, causal)
    kind = _CAUSAL_TOP_LEFT if causal else _NO_MASK
    o, lse = _FORWARD(
        q[None], k[None], v[None], None, None, None, None, None, 0.0, kind, True, scale=scale
    )[:2]
    lse = lse[0, :, : q.shape[0]].transpose(0, 1)
    return _by_head(o[0], heads), _by_head(lse[..., None], heads)[..., 0]


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
    assert mask is None, "this kernel takes no mask"
    heads, kv_heads = q.shape[1], k.shape[1]
    q, k, v = _operands(q, k, v, causal)
    do, o, lse = (_by_group(x, k.shape[1]) for x in (do, o, lse[..., None]))
    lines = lse.new_full((k.shape[1], -(-lse.shape[0] // _LSE_ALIGN) * _LSE_ALIGN), float("inf"))
    lines[:, : lse.shape[0]] = lse[..., 0].transpose(0, 1)
    unread = torch.empty((), dtype=torch.int64, device=q.device)  # the dropout's random state
    dq, dk, dv = _BACKWARD(
        do[None],
        q[None],
        k[None],
        v[None],
        None,
        o[None],
        None,
        None,
        q.shape[0],
        k.shape[0],
        lines[None],
        0.0,
        unread,
        unread,
        _CAUSAL_TOP_LEFT if causal else _NO_MASK,
        False,
        scale=scale,
    )[:3]
    dk, dv = (x[0].unflatten(1, (kv_heads, -1)).sum(2) for x in (dk, dv))
    return _by_head(dq[0], heads), dk, dv


def _operands(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values with as many heads each."""
    if causal:
        assert q.shape[0] == k.shape[0], (q.shape, k.shape)
        group = q.shape[1] // k.shape[1]
        return q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return _by_group(q, k.shape[1]), k, v


def _by_group(x: Tensor, heads: int) -> Tensor:
    """[R, N, ...] -> [R G, heads, ...]: the heads of a group become rows."""
    if x.shape[1] == heads:
        return x.contiguous()
    return x.unflatten(1, (heads, -1)).transpose(1, 2).flatten(0, 1).contiguous()


def _by_head(x: Tensor, heads: int) -> Tensor:
    """The inverse of _by_group: [R G, N / G, ...] -> [R, N, ...]."""
    if x.shape[1] == heads:
        return x
    group = heads // x.shape[1]
    return x.unflatten(0, (-1, group)).transpose(1, 2).flatten(1, 2)


KERNEL = Kernel("torch-cuda-fp32", False, False, _forward, _backward)
