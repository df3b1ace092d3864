"""torch's own CUDA flash operator: bf16 and fp16, grouped heads, causal aligned bottom-right."""

from __future__ import annotations

import torch
from torch import Tensor

from specforge_trim.attention.kernel import Kernel


def _forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    assert mask is None, "this kernel takes no mask"
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
    # Without dropout the random state is not read; empty tensors of its type stand in.
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
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


KERNEL = Kernel("torch-cuda", True, False, _forward, _backward)
