"""From counts and sums to a row of metrics.jsonl.  Every ratio is divided once, at the end.

Letters: K ttt_length.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from specforge_trim.drafts.eagle3.batch import Batch
from specforge_trim.ranks.world import World
from specforge_trim.train.peak import PeakMemory

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class StepCounts:
    """What one optimizer step covers, summed over ranks and micro-batches.

    rows          rows of the streams, supervised or not
    loss_rows     float64 [K], rows whose loss counts
    backbone_rows, head_rows  row-steps that run the draft layer, and its head
    kept_flops, full_flops    of the packs, and of the full backbone with a trimmed loss end
    skipped_documents         left out because their features are damaged
    """

    rows: float
    loss_rows: Tensor
    backbone_rows: float
    head_rows: float
    kept_flops: float
    full_flops: float
    skipped_documents: int = 0

    @property
    def has_loss(self) -> bool:
        return bool((self.loss_rows > 0).any())


def count_step(
    batches: Sequence[Batch], *, ttt_length: int, skipped: int = 0, world: World
) -> StepCounts:
    """Counts from the plans; one all_reduce of a CPU tensor, reached by every rank.

    skipped: documents that this rank left out of its batches.
    """
    values = torch.zeros(6 + ttt_length, dtype=torch.float64)
    values[5] = skipped
    for batch in batches:
        steps = batch.pack.steps
        kept = (0, 0) if batch.cost is None else (batch.cost.kept, batch.cost.full)
        own = (
            batch.num_rows,
            sum(step.num_rows for step in steps),
            sum(step.num_loss_rows for step in steps),
            *kept,
            0,
            *batch.num_loss_rows,
        )
        values += torch.tensor(own, dtype=torch.float64)
    world.sum(values)
    rows, backbone, head, kept_flops, full_flops, left_out = values[:6].tolist()
    return StepCounts(rows, values[6:], backbone, head, kept_flops, full_flops, int(left_out))


def metrics_row(sums: Tensor, counts: StepCounts, *, decay: float) -> dict[str, Any]:
    """Metrics of one optimizer step.

    sums: [7, K] fields of StepResult in its order, over micro-batches and ranks.

        loss/i          the objective per loss row of TTT step i, whatever scales its gradient
        loss            sum_i decay^i loss/i
        accuracy/i      share of loss rows where the draft's first choice is the target's
        conditional_accuracy/i  the same over rows that emit loss at all of steps 0..i and were
                        right at 0..i-1: what decoding would reach
        acceptance/i    mean over loss rows of sum_v min(target, draft probability)
        acceptance_in_vocab/i   the same over rows whose target choice the draft can say
        acceptance_length       1 + sum_i prod_{j<=i} acceptance/j, simulated

    Loss rows whose target choice the draft cannot say add no loss, are wrong, and count.
    A step without rows to divide by has null.
    """
    loss, correct, accept, accept_in_vocab, in_vocab, reached, reached_correct = sums.tolist()
    rows = counts.loss_rows.tolist()
    steps = range(len(rows))
    row: dict[str, Any] = {"loss": None, "acceptance_length": None}
    if counts.has_loss:
        row["loss"] = sum(decay**i * loss[i] / rows[i] for i in steps if rows[i])
        reach, length = 1.0, 1.0
        for i in steps:
            reach *= accept[i] / rows[i] if rows[i] else 0.0
            length += reach
        row["acceptance_length"] = length
    for name, top, bottom in (
        ("loss", loss, rows),
        ("accuracy", correct, rows),
        ("conditional_accuracy", reached_correct, reached),
        ("acceptance", accept, rows),
        ("acceptance_in_vocab", accept_in_vocab, in_vocab),
    ):
        row |= {f"{name}/{i}": _ratio(top[i], bottom[i]) for i in steps}
    slots = counts.rows * len(rows)
    row["rows"] = int(counts.rows)
    row["loss_rows"] = int(sum(rows))
    row["perf/backbone_row_fraction"] = _ratio(counts.backbone_rows, slots)
    row["perf/lm_head_token_fraction"] = _ratio(counts.head_rows, slots)
    row["perf/kept_flops_fraction"] = _ratio(counts.kept_flops, counts.full_flops)
    return row


def _ratio(top: float, bottom: float) -> float | None:
    return top / bottom if bottom else None


class Work(Protocol):
    """What a step covered: rows of the streams, FLOPs done (None = not counted)."""

    @property
    def rows(self) -> float: ...
    @property
    def kept_flops(self) -> float | None: ...


class Throughput:
    """Speed over all ranks since the last reading, and this rank's peak memory."""

    def __init__(self, world: World) -> None:
        self._memory = PeakMemory(world.device)
        self._start = self._since = time.perf_counter()
        self._rows = self._waited = 0.0
        self._flops: float | None = None
        self._steps = 0

    def add(self, counts: Work) -> None:
        self._rows += counts.rows
        if counts.kept_flops is not None:
            self._flops = (self._flops or 0.0) + counts.kept_flops
        self._steps += 1

    def leave_out(self) -> None:
        """What passed since the last reading is no training, and is not counted as such."""
        self._since = time.perf_counter()

    def waiting(self, batches: Iterable[_Item]) -> Iterator[_Item]:
        """The same items; the time spent waiting for each is counted, and memory watched."""
        iterator = iter(batches)
        with self._memory:
            while True:
                start = time.perf_counter()
                try:
                    item = next(iterator)
                except StopIteration:
                    return
                self._waited += time.perf_counter() - start
                yield item

    def read(self) -> dict[str, float]:
        """Values since the last call; `time/seconds` counts from the start of this process.

        perf/gflops_per_second counts the FLOPs of the packs (plan/cost.py: the draft's matrix
        products, without the teacher), so it is work done, not work left out. Left out where
        they are not counted.
        """
        now = time.perf_counter()
        passed = now - self._since
        values = {
            "perf/tokens_per_second": self._rows / passed,
            "perf/peak_memory_mb": self._memory.read() / 2**20,
            "time/step_seconds": passed / self._steps,
            "time/loader_wait_seconds": self._waited / self._steps,
            "time/seconds": now - self._start,
        }
        if self._flops is not None:
            values["perf/gflops_per_second"] = self._flops / passed / 1e9
        self._since, self._rows, self._flops = now, 0.0, None
        self._steps, self._waited = 0, 0.0
        return values
