"""The planned batches made of the documents that sampler.py chooses.

    make_batch    documents + stored features -> a packed stream with its plan

loader.py makes batches ahead of time. Nothing here asks the accelerator or another rank anything.

Letters: T tokens, S supervised rows, A aux layers, Dt target width, K ttt_length.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from specforge_trim.plan.cost import DraftDims, PackCost, pack_cost
from specforge_trim.plan.guard import choose_pack_alone
from specforge_trim.plan.pack import TrimPack, build_trim_pack, dense_pack
from specforge_trim.plan.rows import row_mask
from specforge_trim.plan.segments import RowChunk, plan_chunks


class TokenDocument(Protocol):
    """What is read of a prepared document."""

    input_ids: Tensor
    loss_mask: Tensor
    doc_id: str
    source: str


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
    """How a batch is planned; see the settings of the same names in config.py."""

    ttt_length: int
    alignment: str = "served"
    chain: str = "shift"
    trim_loss_positions: bool = False
    trim_backbone_rows: bool = False
    max_density: float = 1.0
    chunk_rows: int = 1024
    dims: DraftDims | None = None  # None: the batch carries no cost


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


def make_batch(
    documents: Sequence[TokenDocument], stored: Sequence[StoredFeatures], settings: PlanSettings
) -> Batch:
    """Packs documents into one stream and plans it.

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
    pack, weights, num_loss_rows = _plan(m, cu_seqlens, settings)
    return Batch(
        input_ids=torch.cat([document.input_ids for document in documents]),
        position_ids=torch.arange(int(cu_seqlens[-1])) - starts.repeat_interleave(per_token),
        doc_end=ends.repeat_interleave(per_token),
        cu_seqlens=cu_seqlens,
        pack=pack,
        chunks=plan_chunks(pack, chunk_rows=settings.chunk_rows),
        aux=PackedAux(tuple(stored), tuple(starts.tolist())),
        teacher_hidden=_teacher_hidden(documents, stored, pack, m, settings),
        loss_weights=weights,
        num_rows=int(cu_seqlens[-1]),
        num_loss_rows=num_loss_rows,
        doc_ids=tuple(document.doc_id for document in documents),
        cost=None if settings.dims is None else pack_cost(pack, settings.dims),
    )


def _plan(
    m: Tensor, cu_seqlens: Tensor, settings: PlanSettings
) -> tuple[TrimPack, tuple[Tensor, ...] | None, tuple[int, ...]]:
    """The pack to compute, weights of its loss rows (None = 1), and counting rows per step.

    trim_backbone_rows     rows that reach a loss; over-budget documents get all rows
    trim_loss_positions    all rows, loss end on rows that carry loss
    neither                all rows, loss end on every row that has a teacher, weights 0 or 1
    """
    build: dict[str, Any] = {"cu_seqlens": cu_seqlens}
    chain = settings.chain
    if settings.trim_backbone_rows:
        trimmed = build_trim_pack(m, settings.ttt_length, chain=chain, **build)
        pack = choose_pack_alone(trimmed, settings.max_density)
    else:
        pack = dense_pack(m, settings.ttt_length, chain=chain, **build)
    num_loss_rows = tuple(step.num_loss_rows for step in pack.steps)
    if settings.trim_loss_positions:
        return pack, None, num_loss_rows
    has_teacher = torch.ones_like(m)
    has_teacher[cu_seqlens[1:] - 1] = False
    full = dense_pack(has_teacher, settings.ttt_length, chain="shift", **build)
    weights = tuple(
        torch.isin(every.loss_rows, counting.loss_rows).float()
        for every, counting in zip(full.steps, pack.steps, strict=True)
    )
    return full, weights, num_loss_rows


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
