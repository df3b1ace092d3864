"""Packed batches of a dense language model, planned ahead of time in loader processes.

Letters: T tokens, R kept rows.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from specforge_trim.drafts.lm.rows import RowPlan, loss_rows, plan_rows
from specforge_trim.train import wire
from specforge_trim.train.loader import document_name
from specforge_trim.train.sampler import Schedule
from specforge_trim.train.workers import start_worker, surviving


class TokenDocuments(Protocol):
    """Tokenised documents by number: input_ids int64 and loss_mask bool, both [length]."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Any: ...


@dataclass(frozen=True)
class LmPlan:
    """How batches are planned. skip_head: the head at rows that a loss reads only."""

    skip_head: bool = True


@dataclass(frozen=True)
class LmBatch:
    """A packed stream of T tokens.

    input_ids, position_ids  int64 [T], positions restart per document
    labels      int64 [T], token t+1 of the same document; a filler (0) at its end
    plan        kept rows: those that a loss reads, or all of them
    head_rows   int64, rows the head runs on: the plan's, or all
    weights     [head_rows], 1 where the row's loss counts; None = everywhere
    num_loss_rows            rows whose loss counts
    cu_seqlens               int64 [docs+1]
    numbers                  of the documents, as the loader knows them
    """

    input_ids: Tensor
    position_ids: Tensor
    labels: Tensor
    plan: RowPlan
    head_rows: Tensor
    weights: Tensor | None
    num_loss_rows: int
    cu_seqlens: Tensor
    numbers: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        return self.input_ids.shape[0]


def make_lm_batch(documents: Sequence[Any], plan: LmPlan) -> LmBatch:
    """Packs documents and names the rows that predict a supervised token."""
    lengths = torch.tensor([document.input_ids.numel() for document in documents])
    cu = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)))
    ids = torch.cat([document.input_ids for document in documents])
    kept = loss_rows([torch.cat([d.loss_mask for d in documents])], cu_seqlens=cu)
    labels = torch.cat((ids[1:], ids[:1]))
    labels[cu[1:] - 1] = 0
    rows = plan_rows(kept, cu_seqlens=cu)
    head_rows, weights = rows.keep, None
    if not plan.skip_head:
        head_rows, weights = torch.arange(ids.numel()), kept.float()
    return LmBatch(
        input_ids=ids,
        position_ids=torch.arange(ids.numel()) - cu[:-1].repeat_interleave(lengths),
        labels=labels,
        plan=rows,
        head_rows=head_rows,
        weights=weights,
        num_loss_rows=rows.num_kept,
        cu_seqlens=cu,
    )


class _Planned(Dataset):
    """Micro-batch k of this rank; None without documents, or the error that stops the run."""

    def __init__(
        self, documents: TokenDocuments, schedule: Schedule, plan: LmPlan, rank: int
    ) -> None:
        self.documents, self.schedule = documents, schedule
        self.plan, self.rank = plan, rank

    def __getitem__(self, k: int) -> wire.Packed | Exception | None:
        step, index = divmod(k, self.schedule.accumulate)
        numbers = self.schedule.micro_batch(step, rank=self.rank, index=index)
        if not numbers:
            return None
        try:
            batch = make_lm_batch([self.documents[n] for n in numbers], self.plan)
            return wire.pack(replace(batch, numbers=numbers))
        except (ValueError, OSError) as error:
            return error  # raised in the main process, without the loader's traceback


def _as_it_is(item: Any) -> Any:
    return item


@dataclass(frozen=True)
class LmLoader:
    """This rank's batches in the order of the schedule."""

    documents: TokenDocuments
    schedule: Schedule
    plan: LmPlan
    rank: int
    num_workers: int

    def documents_of(self, batches: Sequence[LmBatch]) -> Iterator[tuple[str, LmBatch]]:
        """Each document of these batches: its name, and a batch of it alone."""
        for number in (n for batch in batches for n in batch.numbers):
            document = self.documents[number]
            yield document_name(document), make_lm_batch([document], self.plan)

    def steps(self, start: int) -> Generator[list[LmBatch], None, None]:
        """The non-empty micro-batches of each optimizer step from `start` to the end."""
        accumulate = self.schedule.accumulate
        order = range(start * accumulate, self.schedule.total_steps * accumulate)
        loader = DataLoader(
            _Planned(self.documents, self.schedule, self.plan, self.rank),
            batch_size=None,
            sampler=order,
            num_workers=self.num_workers,
            collate_fn=_as_it_is,
            worker_init_fn=start_worker,
            prefetch_factor=2 if self.num_workers else None,
        )
        batches: list[LmBatch] = []
        with closing(surviving(loader)) as items:
            for k, ahead in zip(order, items, strict=True):
                if isinstance(ahead, Exception):
                    raise ahead
                if ahead is not None:
                    batches.append(wire.unpack(ahead))
                if (k + 1) % accumulate == 0:
                    yield batches
                    batches = []
