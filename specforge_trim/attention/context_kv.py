"""The context side of row attention: step-0 keys and values, and where their gradients add up.

K0/V0 are not autograd inputs of row attention. A full-length gradient per row chunk and step
would cost more than the attention itself, so the backward adds into two buffers of at least fp32
that the context backward reads once.

Letters: T tokens, R rows, N heads, M key/value heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specforge_trim.attention.kernel import Kernel
from specforge_trim.attention.kernels import masked_block
from specforge_trim.attention.merge import merge
from specforge_trim.plan.segments import ChunkStep, Segment


class ContextKV(Protocol):
    """One home of the context keys. `step` names the rows and their key segments."""

    def forward(self, q: Tensor, step: ChunkStep) -> tuple[Tensor, Tensor]:
        """o [R, N, H] and lse [R, N] over the context keys of q [R, N, H]."""
        ...

    def backward(self, do: Tensor, q: Tensor, o: Tensor, lse: Tensor, step: ChunkStep) -> Tensor:
        """dq [R, N, H] of the context part from the merged o and lse; keeps dk and dv."""
        ...

    def finish(self) -> tuple[Tensor, Tensor]:
        """dk and dv [n, M, H] of all backwards so far, of the n tokens this process put in."""
        ...


def gradient_buffers(k0: Tensor, v0: Tensor) -> tuple[Tensor, Tensor]:
    """Zeroed buffers for the gradients of k0 and v0, in at least fp32.

    In bf16 the chunks' contributions would round away: 2 % error at 512 chunks.
    """
    dtype = torch.float64 if k0.dtype == torch.float64 else torch.float32
    return torch.zeros_like(k0, dtype=dtype), torch.zeros_like(v0, dtype=dtype)


@dataclass(frozen=True)
class Part:
    """Keys [lo, hi) of a segment in one kernel call."""

    lo: int
    hi: int
    causal: bool = False
    mask: Tensor | None = None


def segment_parts(
    segment: Segment, *, bottom_right: bool, max_keys: int | None = None
) -> Iterator[Part]:
    """The kernel calls that together show a segment's queries their keys, each key once.

        run, causal square only   [k_lo, k_mid) unmasked, [k_mid, k_hi) causal
        run, bottom-right         [k_lo, k_hi) causal
        group                     [k_lo, k_mid) unmasked, [k_mid, k_hi) by its mask

    max_keys caps the keys of a call: unmasked keys are cut into several. A run's or group's own
    block [k_mid, k_hi) is never cut; its size is bounded by the plan's chunks and groups.
    """
    mask = segment.mask  # built when read
    start = segment.k_mid  # where the call with the rows' own keys begins
    if bottom_right and mask is None and segment.k_mid < segment.k_hi:
        start = segment.k_lo
        if max_keys is not None:
            start = min(segment.k_mid, max(start, segment.k_hi - max_keys))
    width = max_keys or max(1, start - segment.k_lo)
    for lo in range(segment.k_lo, start, width):
        yield Part(lo, min(lo + width, start))
    if start < segment.k_hi:
        yield Part(start, segment.k_hi, causal=mask is None, mask=mask)


@dataclass(frozen=True)
class SegmentAttention:
    """Attention of a step's rows over one stretch of context keys, segment by segment.

    The parts of a segment meet by log-sum-exp. Nothing of size rows x context is allocated.
    scale: 1 / sqrt(H). max_keys: most keys of a kernel call, None = no limit.
    """

    kernel: Kernel
    scale: float
    max_keys: int | None = None

    def _parts(self, segment: Segment) -> Iterator[Part]:
        return segment_parts(
            segment, bottom_right=self.kernel.bottom_right, max_keys=self.max_keys
        )

    def _kernel(self, part: Part) -> Kernel:
        if part.mask is None or self.kernel.takes_mask:
            return self.kernel
        return masked_block.KERNEL

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Sequence[Segment], *, origin: int = 0
    ) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(rows, o, lse) of each segment; k, v hold the keys from position `origin` on."""
        for segment in segments:
            rows = slice(segment.q0, segment.q1)
            merged: tuple[Tensor, Tensor] | None = None
            for part in self._parts(segment):
                keys = slice(part.lo - origin, part.hi - origin)
                own = self._kernel(part).forward(
                    q[rows], k[keys], v[keys],
                    causal=part.causal, mask=part.mask, scale=self.scale,
                )  # fmt: skip
                merged = own if merged is None else merge(merged, own)
            assert merged is not None, "a segment has keys"
            yield rows, *merged

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        segments: Sequence[Segment],
        *,
        dk: Tensor,
        dv: Tensor,
        origin: int = 0,
    ) -> Iterator[tuple[slice, Tensor]]:
        """(rows, dq) of each segment from the merged o and lse; adds into dk and dv."""
        for segment in segments:
            rows = slice(segment.q0, segment.q1)
            dq: Tensor | None = None
            for part in self._parts(segment):
                keys = slice(part.lo - origin, part.hi - origin)
                own, dk_part, dv_part = self._kernel(part).backward(
                    do[rows], q[rows], k[keys], v[keys], o[rows], lse[rows],
                    causal=part.causal, mask=part.mask, scale=self.scale,
                )  # fmt: skip
                dk[keys] += dk_part
                dv[keys] += dv_part
                dq = own if dq is None else dq + own
            assert dq is not None, "a segment has keys"
            yield rows, dq


class GatheredKV:
    """All context keys in this process's memory."""

    def __init__(
        self, k0: Tensor, v0: Tensor, *, kernel: Kernel, max_keys: int | None = None
    ) -> None:
        """k0, v0 [T, M, H], positions absolute; max_keys caps the keys of a kernel call."""
        self.k0, self.v0 = k0, v0
        self.dk, self.dv = gradient_buffers(k0, v0)
        self.attention = SegmentAttention(kernel, k0.shape[-1] ** -0.5, max_keys)

    def forward(self, q: Tensor, step: ChunkStep) -> tuple[Tensor, Tensor]:
        o = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=self.dk.dtype, device=q.device)
        for rows, own, own_lse in self.attention.forward(q, self.k0, self.v0, step.segments):
            o[rows], lse[rows] = own, own_lse
        return o, lse

    def backward(self, do: Tensor, q: Tensor, o: Tensor, lse: Tensor, step: ChunkStep) -> Tensor:
        dq = torch.empty_like(q)
        for rows, own in self.attention.backward(
            do, q, self.k0, self.v0, o, lse, step.segments, dk=self.dk, dv=self.dv
        ):
            dq[rows] = own
        return dq

    def finish(self) -> tuple[Tensor, Tensor]:
        return self.dk, self.dv
