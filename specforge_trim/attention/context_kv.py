"""The context side of row attention: step-0 keys and values, and where their gradients add up.

K0/V0 are not autograd inputs of row attention. A full-length gradient per row chunk and step
would cost more than the attention itself, so the backward adds into two buffers of at least fp32
that the context backward reads once.

Letters: T tokens, R rows, N heads, M key/value heads, H head dim.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..plan.segments import ChunkStep, Segment
from .kernels import torch_flash
from .merge import merge


class ContextKV(Protocol):
    """One home of the context keys. `step` names the rows and their key segments."""

    dk: Tensor
    dv: Tensor

    def forward(self, q: Tensor, step: ChunkStep) -> tuple[Tensor, Tensor]:
        """o [R, N, H] and lse [R, N] over the context keys of q [R, N, H]."""
        ...

    def backward(self, do: Tensor, q: Tensor, o: Tensor, lse: Tensor, step: ChunkStep) -> Tensor:
        """dq [R, N, H] of the context part from the merged o and lse; adds into dk and dv."""
        ...


def gradient_buffers(k0: Tensor, v0: Tensor) -> tuple[Tensor, Tensor]:
    """Zeroed buffers for the gradients of k0 and v0, in at least fp32.

    In bf16 the chunks' contributions would round away: 2 % error at 512 chunks.
    """
    dtype = torch.float64 if k0.dtype == torch.float64 else torch.float32
    return torch.zeros_like(k0, dtype=dtype), torch.zeros_like(v0, dtype=dtype)


class GatheredKV:
    """All context keys in this process's memory, attended segment by segment.

    A segment's queries see keys [k_lo, k_mid) unmasked and [k_mid, k_hi) by a square causal mask
    or a small explicit one; the two parts meet by log-sum-exp. Nothing of size rows x context is
    allocated.
    """

    def __init__(self, k0: Tensor, v0: Tensor) -> None:
        """k0, v0 [T, M, H], positions absolute in the packed stream."""
        self.k0, self.v0 = k0, v0
        self.dk, self.dv = gradient_buffers(k0, v0)
        self.scale = k0.shape[-1] ** -0.5

    @staticmethod
    def _parts(segment: Segment) -> list[tuple[int, int, bool, Tensor | None]]:
        """(first key, last key + 1, causal, mask) of the non-empty parts."""
        parts: list[tuple[int, int, bool, Tensor | None]] = []
        if segment.k_lo < segment.k_mid:
            parts.append((segment.k_lo, segment.k_mid, False, None))
        if segment.k_mid < segment.k_hi:
            mask = segment.mask  # built when read
            parts.append((segment.k_mid, segment.k_hi, mask is None, mask))
        return parts

    def forward(self, q: Tensor, step: ChunkStep) -> tuple[Tensor, Tensor]:
        o = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=self.dk.dtype, device=q.device)
        for segment in step.segments:
            rows = slice(segment.q0, segment.q1)
            outputs = [
                torch_flash.forward(
                    q[rows], self.k0[a:b], self.v0[a:b], causal=c, mask=m, scale=self.scale
                )
                for a, b, c, m in self._parts(segment)
            ]
            o[rows], lse[rows] = outputs[0] if len(outputs) == 1 else merge(*outputs)
        return o, lse

    def backward(self, do: Tensor, q: Tensor, o: Tensor, lse: Tensor, step: ChunkStep) -> Tensor:
        dq = torch.empty_like(q)
        for segment in step.segments:
            rows = slice(segment.q0, segment.q1)
            for n, (a, b, causal, mask) in enumerate(self._parts(segment)):
                part, dk, dv = torch_flash.backward(
                    do[rows],
                    q[rows],
                    self.k0[a:b],
                    self.v0[a:b],
                    o[rows],
                    lse[rows],
                    causal=causal,
                    mask=mask,
                    scale=self.scale,
                )
                self.dk[a:b] += dk
                self.dv[a:b] += dv
                dq[rows] = part if n == 0 else dq[rows] + part
        return dq
