"""Norms and rotary positions of the draft, at the precision that the computation is defined in.

Letters: R rows, D width, N heads, H head dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specforge_trim.drafts.eagle3.rope import rope_frequencies


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype that softmax, norms and losses run in: fp64 stays fp64, all else is fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias in x's dtype; gradients return in the parameters' own dtype.

    Weights are fp32 masters. Casting where they are used, rather than once for all steps, makes
    every step's gradient add up in fp32.
    """
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class RMSNorm(nn.Module):
    """w * x / sqrt(mean(x^2) + eps), normalised in at least fp32, cast back, then scaled."""

    def __init__(self, width: int, *, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        work = at_least_fp32(x.dtype)
        if x.dtype == work and self.weight.dtype == work:
            # One fused kernel; the same arithmetic when no cast lies between the two steps.
            return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)
        normed = F.rms_norm(x.to(work), (x.shape[-1],), None, self.eps)
        return normed.to(x.dtype) * self.weight.to(x.dtype)


class Rotary(nn.Module):
    """Rotate-half rotary positions, computed for the positions asked: no table can end early."""

    def __init__(
        self, rope_parameters: dict[str, Any], *, head_dim: int, max_position_embeddings: int
    ) -> None:
        super().__init__()
        inv_freq, self.scale = rope_frequencies(
            rope_parameters, head_dim=head_dim, max_position_embeddings=max_position_embeddings
        )
        # fp64 at rest: Module.to(dtype) casts buffers, so the working dtype is chosen per call.
        self._inv_freq = inv_freq
        self._on: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin [R, 1, h/2] at integer `positions` [R], in at least fp32; h <= H rotated
        dimensions."""
        work = at_least_fp32(dtype)
        key = (positions.device, work)
        if key not in self._on:
            self._on[key] = self._inv_freq.to(
                device=positions.device, dtype=work, non_blocking=True
            )
        angle = positions.to(work)[:, None] * self._on[key]
        return (angle.cos() * self.scale)[:, None], (angle.sin() * self.scale)[:, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply rotary positions to x [R, N, H]: halves (a, b) -> (a cos - b sin, b cos + a sin).

    With cos and sin of fewer than H/2 columns the dimensions behind the first h stay as they are.
    """
    width = 2 * cos.shape[-1]
    if width < x.shape[-1]:
        return torch.cat((rotate(x[..., :width], cos, sin), x[..., width:]), dim=-1)
    a, b = x.chunk(2, dim=-1)
    if x.dtype != cos.dtype:
        a, b = a.to(cos.dtype), b.to(cos.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
