"""The planned batches made of the documents that sampler.py chooses.

    make_batch    documents + stored features -> a packed stream with its plan

loader.py makes batches ahead of time. Nothing here asks the accelerator or another rank anything.

Letters: T tokens, S supervised rows, A aux layers, Dt target width, K ttt_length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specforge_trim.plan.cost import DraftDims, PackCost, pack_cost
from specforge_trim.plan.guard import documents_in_budget, select_documents
from specforge_trim.plan.pack import TrimPack, build_trim_pack, dense_pack, restrict_pack
from specforge_trim.plan.rows import row_mask
from specforge_trim.plan.segments import RowChunk, plan_chunks
from specforge_trim.plan.shard import (
    SequenceSplit,
    Shard,
    budget_votes,
    expected_answer,
    row_edges,
    shard_chunks,
    shard_pack,
)


class TokenDocument(Protocol):
    """What is read of a prepared document."""

    @property
    def input_ids(self) -> Tensor: ...
    @property
    def loss_mask(self) -> Tensor: ...
    @property
    def doc_id(self) -> str: ...
    @property
    def source(self) -> str: ...


class StoredFeatures(Protocol):
    """What is read of a document's target features; `aux` is lazy."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def last_positions(self) -> Tensor: ...
    def aux(self, lo: int, hi: int) -> Tensor: ...
    def last(self) -> Tensor: ...
    def check(self) -> None:
        """Raise BadFeatures unless the features are whole and finite."""


@dataclass(frozen=True)
class PlanSettings:
    """How a batch is planned; see the settings of the same names in drafts/eagle3/settings.py."""

    ttt_length: int
    alignment: str = "served"
    chain: str = "shift"
    trim_loss_positions: bool = False
    trim_backbone_rows: bool = False
    max_density: float = 1.0
    chunk_rows: int = 1024
    stop_grad: bool = False
    dims: DraftDims | None = None  # None: the batch carries no cost
    sequence: SequenceSplit | None = None  # None: this rank trains on its documents alone


@dataclass(frozen=True)
class PackedAux:
    """aux(lo, hi) over a packed stream: rows [lo, hi) of the documents laid end to end."""

    documents: tuple[StoredFeatures, ...]
    starts: tuple[int, ...]

    def __call__(self, lo: int, hi: int) -> Tensor:
        parts = []
        for start, document in zip(self.starts, self.documents, strict=True):
            a, b = max(lo - start, 0), min(hi - start, document.num_tokens)
            if a < b:
                parts.append(document.aux(a, b))
        return parts[0] if len(parts) == 1 else torch.cat(parts)


@dataclass(frozen=True)
class Batch:
    """A packed stream of T tokens with its plan, on the CPU.

    input_ids, position_ids  int64 [T]; positions restart per document
    doc_end                  int64 [T], exclusive end of each token's document
    cu_seqlens               int64 [docs+1]
    pack, chunks             what is computed
    aux                      (lo, hi) -> [hi-lo, A*Dt], read when the context stage asks
    teacher_hidden           [S, Dt], row s of pack.supervised -> last hidden at token s+1; zeros
                             where none is stored, which only happens under weight 0
    loss_weights             per step, aligned to pack.steps[i].loss_rows; None = all 1
    num_rows                 T, the denominator `rows`
    num_loss_rows            per step, rows with a loss that counts: the denominator `supervised`
    doc_ids                  for messages
    cost                     FLOPs of the pack, where asked for
    shard                    this rank's share of a sequence that ranks share; pack, chunks,
                             teachers, weights and counts then cover this rank's rows only
    grad_rows                int64, rows whose g^0 takes a gradient: those that reach a loss,
                             trimmed or not; None = all (stop_grad_context_tokens off)
    """

    input_ids: Tensor
    position_ids: Tensor
    doc_end: Tensor
    cu_seqlens: Tensor
    pack: TrimPack
    chunks: tuple[RowChunk, ...]
    aux: Callable[[int, int], Tensor] | None
    teacher_hidden: Tensor
    loss_weights: tuple[Tensor, ...] | None = None
    num_rows: int = 0
    num_loss_rows: tuple[int, ...] = ()
    doc_ids: tuple[str, ...] = ()
    cost: PackCost | None = None
    shard: Shard | None = None
    grad_rows: Tensor | None = None


def make_batch(
    documents: Sequence[TokenDocument],
    stored: Sequence[StoredFeatures],
    settings: PlanSettings,
    *,
    kept: Tensor | None = None,
) -> Batch:
    """Packs documents into one stream and plans it.

    kept: bool [docs], documents that keep their trimmed rows; None = as the guard says.
    Raises ValueError naming the document whose features do not belong to its tokens.
    """
    lengths = [document.input_ids.numel() for document in documents]
    for document, features, length in zip(documents, stored, lengths, strict=True):
        if features.num_tokens != length:
            raise ValueError(
                f"features of document {document.doc_id} have {features.num_tokens} tokens, the "
                f"document has {length}: the feature store was made from other data"
            )
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    starts, ends = cu_seqlens[:-1], cu_seqlens[1:]
    per_token = cu_seqlens.diff()
    m = row_mask(
        torch.cat([document.loss_mask for document in documents]),
        alignment=settings.alignment,
        cu_seqlens=cu_seqlens,
    )
    plan = _plan(m, cu_seqlens, settings, kept)
    return Batch(
        input_ids=torch.cat([document.input_ids for document in documents]),
        position_ids=torch.arange(int(cu_seqlens[-1])) - starts.repeat_interleave(per_token),
        doc_end=ends.repeat_interleave(per_token),
        cu_seqlens=cu_seqlens,
        pack=plan.pack,
        chunks=plan.chunks,
        aux=PackedAux(tuple(stored), tuple(starts.tolist())),
        teacher_hidden=_teacher_hidden(documents, stored, plan.pack, m, settings),
        loss_weights=plan.weights,
        num_rows=plan.num_rows,
        num_loss_rows=tuple(step.num_loss_rows for step in plan.counting.steps),
        doc_ids=tuple(document.doc_id for document in documents),
        cost=plan.cost,
        shard=plan.shard,
        grad_rows=_grad_rows(m, cu_seqlens, settings),
    )


def _grad_rows(m: Tensor, cu_seqlens: Tensor, settings: PlanSettings) -> Tensor | None:
    """R_0 of the trimmed pack, whatever the guard and the trim flags made of it."""
    if not settings.stop_grad:
        return None
    pack = build_trim_pack(m, settings.ttt_length, cu_seqlens=cu_seqlens, chain=settings.chain)
    first = pack.steps[0]
    return first.rows[:0] if first.is_dead else first.rows


@dataclass(frozen=True)
class _Plan:
    """What this rank computes; counting: the pack whose loss rows count (weight 1)."""

    pack: TrimPack
    counting: TrimPack
    chunks: tuple[RowChunk, ...]
    num_rows: int
    cost: PackCost | None
    shard: Shard | None = None

    @property
    def weights(self) -> tuple[Tensor, ...] | None:
        """Per step, of the pack's loss rows; None = all 1."""
        if self.counting is self.pack:
            return None
        return tuple(
            torch.isin(every.loss_rows, counting.loss_rows).float()
            for every, counting in zip(self.pack.steps, self.counting.steps, strict=True)
        )


def _plan(m: Tensor, cu_seqlens: Tensor, settings: PlanSettings, kept: Tensor | None) -> _Plan:
    """Rows, chunks and counts of a stream.

    trim_backbone_rows     rows that reach a loss; over-budget documents get all rows
    trim_loss_positions    all rows, loss end on rows that carry loss
    neither                all rows, loss end on every row that has a teacher, weights 0 or 1
    """
    steps, chain, split = settings.ttt_length, settings.chain, settings.sequence
    votes: Tensor | None = None
    if settings.trim_backbone_rows:
        counting = build_trim_pack(m, steps, cu_seqlens=cu_seqlens, chain=chain)
        if split is not None:
            votes = budget_votes(counting, split, settings.max_density)
            if kept is None:
                kept = expected_answer(counting, split, settings.max_density)
        elif kept is None:
            kept = documents_in_budget(counting, settings.max_density)
        counting = select_documents(counting, kept, settings.max_density)
    else:
        counting = dense_pack(m, steps, cu_seqlens=cu_seqlens, chain=chain)
    pack = counting
    if not settings.trim_loss_positions:
        has_teacher = torch.ones_like(m)
        has_teacher[cu_seqlens[1:] - 1] = False
        pack = dense_pack(has_teacher, steps, cu_seqlens=cu_seqlens)
    total = int(cu_seqlens[-1])
    cost = None if settings.dims is None else pack_cost(pack, settings.dims)
    if split is None:
        return _Plan(
            pack, counting, plan_chunks(pack, chunk_rows=settings.chunk_rows), total, cost
        )
    edges = row_edges(pack, split, settings.dims)
    first, last = edges[split.rank], edges[split.rank + 1]
    own = restrict_pack(pack, first, last)
    return _Plan(
        pack=own,
        counting=own if pack is counting else restrict_pack(counting, first, last),
        chunks=shard_chunks(pack, split, edges, chunk_rows=settings.chunk_rows),
        # Parts of one batch: what the ranks report adds up to it.
        num_rows=total * (split.rank + 1) // split.size - total * split.rank // split.size,
        cost=cost if split.rank == 0 else None,
        shard=shard_pack(pack, split, edges, votes=votes, kept=kept),
    )


def _teacher_hidden(
    documents: Sequence[TokenDocument],
    stored: Sequence[StoredFeatures],
    pack: TrimPack,
    m: Tensor,
    settings: PlanSettings,
) -> Tensor:
    """[S, Dt], row s of pack.supervised -> the target's last hidden state at token s+1."""
    edges = torch.searchsorted(pack.supervised, pack.cu_seqlens).tolist()
    parts = []
    for i, (document, features) in enumerate(zip(documents, stored, strict=True)):
        rows = pack.supervised[edges[i] : edges[i + 1]]
        wanted = rows + 1 - pack.cu_seqlens[i]
        positions, states = features.last_positions, features.last()
        index, found = torch.searchsorted(positions, wanted), torch.isin(wanted, positions)
        missing = m[rows] & ~found
        if bool(missing.any()):
            raise ValueError(
                f"document {document.doc_id}: no target state is stored for token "
                f"{int(wanted[missing][0])}, which loss_alignment = {settings.alignment!r} needs: "
                "make the features anew"
            )
        picked = states.new_zeros(wanted.numel(), states.shape[-1])
        picked[found] = states[index[found]]
        parts.append(picked)
    return torch.cat(parts)
