"""torch's flash operator for the CPU: any float dtype, grouped heads, an explicit mask.

Its causal mask is aligned top-left, so causal calls are square.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specforge_trim.attention.kernel import Kernel

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def _heads_first(x: Tensor) -> Tensor:
    """[R, N, H] -> [1, N, R, H], a view."""
    # The operator reads another last-dimension stride without complaint, and wrongly.
    assert x.stride(-1) == 1, f"last stride is {x.stride(-1)}, the kernel needs 1"
    assert x.shape[0] > 0, "the kernel divides by the length; never pass it no rows"
    return x.transpose(0, 1)[None]


def _bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """The mask as numbers to add: the operator refuses bool."""
    if mask is None:
        return None
    return torch.zeros(mask.shape, dtype=dtype).masked_fill_(~mask, float("-inf"))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    assert not causal or q.shape[0] == k.shape[0], (q.shape, k.shape)
    q, k, v = _heads_first(q), _heads_first(k), _heads_first(v)
    o, lse = _FORWARD(q, k, v, 0.0, causal, attn_mask=_bias(mask, q.dtype), scale=scale)
    return o[0].transpose(0, 1), lse[0].transpose(0, 1)


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
    do, q, k, v, o = (_heads_first(x) for x in (do, q, k, v, o))
    lse = lse.transpose(0, 1)[None]
    bias = _bias(mask, q.dtype)
    grads = _BACKWARD(do, q, k, v, o, lse, 0.0, causal, attn_mask=bias, scale=scale)
    dq, dk, dv = (grad[0].transpose(0, 1) for grad in grads)
    return dq, dk, dv


KERNEL = Kernel("torch-cpu", False, True, _forward, _backward)
