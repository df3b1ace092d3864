"""Batches made ahead of time, in loader processes, in the order of the schedule.

A document whose features are damaged is left out, named in the log and counted. Nothing here asks
the accelerator anything. Ranks that share documents agree here on what each micro-batch holds.
"""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from specforge_trim.data.document_features import BadFeatures
from specforge_trim.drafts.eagle3.batch import (
    Batch,
    PackedAux,
    PlanSettings,
    StoredFeatures,
    TokenDocument,
    make_batch,
)
from specforge_trim.ranks.group import RankGroup
from specforge_trim.ranks.world import PeerFailed
from specforge_trim.train import wire
from specforge_trim.train.sampler import Schedule
from specforge_trim.train.workers import start_worker, surviving

logger = logging.getLogger(__name__)


class Documents(Protocol):
    """A data set: tokens and features of document i.  Copied into loader processes by fork."""

    def tokens(self, number: int) -> TokenDocument: ...
    def features(self, number: int) -> StoredFeatures: ...


@dataclass(frozen=True)
class _Ahead:
    """A micro-batch as it comes from the loader.

    numbers: its documents; batch: planned, packed if it crosses processes, or the error that
    stops the run; skipped: documents left out, each with place and reason.
    """

    numbers: tuple[int, ...]
    batch: Batch | wire.Packed | Exception | None
    skipped: tuple[str, ...]


class _Planned(Dataset):
    """Micro-batch k of this rank, planned; without documents the batch is None."""

    def __init__(
        self,
        documents: Documents,
        schedule: Schedule,
        settings: PlanSettings,
        *,
        rank: int,
        pack_up: bool,
    ) -> None:
        self.documents, self.schedule, self.settings = documents, schedule, settings
        self.rank, self.pack_up = rank, pack_up

    def __getitem__(self, k: int) -> _Ahead:
        step, index = divmod(k, self.schedule.accumulate)
        numbers, tokens, stored, skipped = list[int](), [], [], list[str]()
        try:
            for number in self.schedule.micro_batch(step, rank=self.rank, index=index):
                place = f"document {number}"
                try:
                    document = self.documents.tokens(number)
                    place = document.source
                    features = self.documents.features(number)
                    features.check()
                except BadFeatures as error:
                    skipped.append(f"{place}: {error}")
                    continue
                numbers.append(number)
                tokens.append(document)
                stored.append(features)
            batch = make_batch(tokens, stored, self.settings) if numbers else None
        except (ValueError, OSError) as error:
            # Raised in the main process, without the loader's traceback in its text.
            return _Ahead((), error, ())
        return _Ahead(tuple(numbers), self._packed(batch), tuple(skipped))

    def batch(self, numbers: tuple[int, ...], kept: Tensor) -> Batch:
        """A micro-batch of these documents, those of `kept` [docs] with trimmed rows."""
        tokens = [self.documents.tokens(n) for n in numbers]
        stored = [self.documents.features(n) for n in numbers]
        return make_batch(tokens, stored, self.settings, kept=kept)

    def _packed(self, batch: Batch | None) -> Batch | wire.Packed | None:
        if batch is None or not self.pack_up:
            return batch
        return wire.pack(replace(batch, aux=None))  # features stay on disk until they are read


def _as_it_is(item: Any) -> Any:
    return item


def document_name(document: Any) -> str:
    """How a log calls a tokenised document."""
    return f"{document.source} (document {document.doc_id[:12]})"


class BatchLoader:
    """This rank's batches in order, from a step on, made ahead by loader processes."""

    def __init__(
        self,
        documents: Documents,
        schedule: Schedule,
        settings: PlanSettings,
        *,
        rank: int,
        num_workers: int,
        group: RankGroup | None = None,
    ) -> None:
        """rank: of the data parallel ranks. group: the ranks that share this one's documents."""
        self._documents, self._rank, self._group = documents, rank, group
        self._schedule = schedule
        self._planned = _Planned(documents, schedule, settings, rank=rank, pack_up=num_workers > 0)
        self._num_workers = num_workers
        self._skipped = 0
        self._numbers: tuple[int, ...] = ()  # documents of the step yielded last

    def take_skipped(self) -> int:
        """Documents left out of the steps yielded since the last call."""
        count, self._skipped = self._skipped, 0
        return count

    def documents(self) -> Iterator[tuple[str, Batch]]:
        """Each document of the step yielded last: its name, and a batch of it alone."""
        for number in self._numbers:
            name = document_name(self._documents.tokens(number))
            yield name, self._planned.batch((number,), torch.ones(1, dtype=torch.bool))

    def steps(self, start: int) -> Generator[list[Batch], None, None]:
        """The non-empty micro-batches of each optimizer step from `start` to the end."""
        accumulate = self._schedule.accumulate
        order = range(start * accumulate, self._schedule.total_steps * accumulate)
        loader = DataLoader(
            self._planned,
            batch_size=None,
            sampler=order,
            num_workers=self._num_workers,
            collate_fn=_as_it_is,
            worker_init_fn=start_worker,
            prefetch_factor=2 if self._num_workers else None,
        )
        batches: list[Batch] = []
        numbers: tuple[int, ...] = ()
        with closing(self._fetched(loader)) as items:
            for k, ahead in zip(order, items, strict=True):
                for line in ahead.skipped:
                    logger.error("document left out: %s", line)  # an error: shown on every rank
                if self._group is not None:
                    ahead = self._agreed(k, ahead, self._group)
                self._skipped += len(ahead.skipped)
                if isinstance(ahead.batch, Exception):
                    raise ahead.batch
                if ahead.batch is not None:
                    batches.append(self._unpack(ahead))
                    numbers += ahead.numbers
                if (k + 1) % accumulate == 0:
                    self._numbers = numbers
                    yield batches
                    batches, numbers = [], ()

    def _fetched(self, loader: DataLoader) -> Generator[_Ahead, None, None]:
        """The loader's items; a dead loader process is an item too, for the ranks to agree on."""
        try:
            yield from surviving(loader)
        except ChildProcessError as error:
            yield _Ahead((), error, ())

    def _agreed(self, k: int, ahead: _Ahead, group: RankGroup) -> _Ahead:
        """The micro-batch as all ranks of the group can run it: same documents, same rows.

        One minimum over ranks of a vector with an entry per scheduled document: -1 the rank has
        to stop, 0 left out, 1 all rows, 2 trimmed rows. Every rank gets here for every
        micro-batch that the schedule gives the group, whatever its own plan holds.
        """
        step, index = divmod(k, self._schedule.accumulate)
        scheduled = self._schedule.micro_batch(step, rank=self._rank, index=index)
        if not scheduled:
            return ahead
        failed = isinstance(ahead.batch, Exception)
        votes = torch.full((len(scheduled),), -1 if failed else 0, dtype=torch.int32)
        batch = None if failed or ahead.batch is None else self._unpack(ahead)
        shard = None if batch is None else batch.shard
        if shard is not None:
            here = torch.isin(torch.tensor(scheduled), torch.tensor(ahead.numbers))
            votes[here] = 1 + torch.minimum(shard.votes, shard.kept).int()
        answer = group.agree_min(votes)
        if failed:
            return ahead
        if bool((answer < 0).any()):
            raise PeerFailed("another rank could not make its batch")
        numbers = tuple(n for n, vote in zip(scheduled, answer.tolist(), strict=True) if vote)
        kept = answer[answer > 0] == 2
        if not numbers:
            batch = None
        elif shard is None or numbers != ahead.numbers or not torch.equal(kept, shard.kept):
            batch = self._planned.batch(numbers, kept)
        # Counted once for the group.
        left_out = ("",) * (len(scheduled) - len(numbers)) if group.rank == 0 else ()
        return _Ahead(numbers, batch, left_out)

    def _unpack(self, ahead: _Ahead) -> Batch:
        if isinstance(ahead.batch, Batch):
            return ahead.batch
        assert isinstance(ahead.batch, wire.Packed)
        batch: Batch = wire.unpack(ahead.batch)
        features = tuple(self._documents.features(n) for n in ahead.numbers)
        return replace(batch, aux=PackedAux(features, tuple(batch.cu_seqlens[:-1].tolist())))
