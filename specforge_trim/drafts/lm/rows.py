"""Kept rows of a packed stream: which rows some loss component reads, and how they attend.

Integers only, made on the CPU in the data loader; a training step asks the device nothing.

    tokens      a b c d | e f g h        two documents
    mask 1      0 0 1 1   0 0 0 0        component 1 scores the tokens c and d
    mask 2      0 0 0 1   0 1 0 0        component 2 scores d and f
    kept rows     b c       e            the rows that predict them

Letters: T tokens, R kept rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from specforge_trim.plan.pack import build_trim_pack
from specforge_trim.plan.rows import row_mask
from specforge_trim.plan.segments import ChunkStep, RowChunk, Segment, plan_chunks


@dataclass(frozen=True, eq=False)
class RowPlan:
    """The kept rows of a stream of T tokens.

    keep         int64 [R], ascending; row t predicts token t + 1
    num_tokens   T
    documents    all rows, a causal segment per document
    segments     the kept rows, in ascending order: runs and groups with the keys they see
    longest      tokens of the longest document
    """

    keep: Tensor
    num_tokens: int
    documents: tuple[Segment, ...]
    segments: tuple[Segment, ...]
    longest: int

    @property
    def num_kept(self) -> int:
        return self.keep.shape[0]

    @property
    def keeps_all(self) -> bool:
        return self.num_kept == self.num_tokens

    @property
    def fraction(self) -> float:
        """R / T: perf/lm_head_token_fraction of this stream."""
        return self.num_kept / self.num_tokens

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> RowPlan:
        """The plan with its index tensors on `device`."""
        if self.keep.device == torch.device(device):
            return self
        none = torch.zeros(0, dtype=torch.int64)
        step = ChunkStep(
            (0, self.num_kept), self.keep, none, none, (0, 0), None, (), self.segments
        )
        chunk = RowChunk(0, self.num_tokens, (0, 0), (step,))
        moved = chunk.to(device, non_blocking=non_blocking).steps[0]
        return replace(self, keep=moved.rows, segments=moved.segments)


def loss_rows(masks: Sequence[Tensor], *, cu_seqlens: Tensor | None = None) -> Tensor:
    """bool [T]: rows that some loss component reads.

    masks: one per component, bool or 0/1 [T]; masks[c][t] = component c scores token t. Their
    union is aligned to the label here, and only here: row t counts iff token t + 1 of the same
    document is scored. Raises ValueError without a mask, or for masks of different lengths.
    """
    if not masks:
        raise ValueError("no loss mask given: expected one per loss component")
    lengths = {int(torch.as_tensor(mask).numel()) for mask in masks}
    if len(lengths) > 1:
        raise ValueError(f"loss masks of {sorted(lengths)} tokens: expected one length")
    union = torch.stack([torch.as_tensor(mask).bool() for mask in masks]).any(0)
    return row_mask(union, alignment="teacher", cu_seqlens=cu_seqlens)


def plan_rows(kept: Tensor, *, cu_seqlens: Tensor | None = None) -> RowPlan:
    """Plan of the rows of `kept`, bool [T] (see loss_rows); cu_seqlens None = one document."""
    pack = build_trim_pack(kept, 1, cu_seqlens=cu_seqlens)
    # Rows of one step have no chain to keep together: one chunk, whatever its size.
    chunks = plan_chunks(pack, chunk_rows=max(1, pack.num_tokens))
    step = chunks[0].steps[0] if chunks else None
    bounds = pack.cu_seqlens.tolist()
    documents = tuple(Segment(a, b, a, a, b) for a, b in pairwise(bounds) if a < b)
    return RowPlan(
        keep=torch.zeros(0, dtype=torch.int64) if step is None else step.rows,
        num_tokens=pack.num_tokens,
        documents=documents,
        segments=() if step is None else step.segments,
        longest=max(b - a for a, b in pairwise(bounds)),
    )
