"""From counts and sums to a row of metrics.jsonl.  Every ratio is divided once, at the end.

Letters: K ttt_length.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from specforge_trim.distributed import World
from specforge_trim.train.batch import Batch

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

    sums: [5, K] loss, correct, accept, accept_in_vocab, in_vocab over all loss rows.

        loss/i          per loss row of TTT step i, nats;  loss = sum_i decay^i loss/i
        accuracy/i      the draft's first choice is the target's
        acceptance/i    mean over loss rows of sum_v min(target, draft probability)
        acceptance_length  1 + sum_i prod_{j<=i} acceptance/j, simulated
    A step without loss rows has null for what cannot be divided.
    """
    loss, correct, accept, accept_in_vocab, in_vocab = sums.tolist()
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


class Throughput:
    """Tokens per second over all ranks since the last reading, and peak memory."""

    def __init__(self, world: World) -> None:
        self._device = world.device
        self._start = self._since = time.perf_counter()
        self._rows = self._waited = 0.0
        self._steps = 0

    def add(self, counts: StepCounts) -> None:
        self._rows += counts.rows
        self._steps += 1

    def waiting(self, batches: Iterable[_Item]) -> Iterator[_Item]:
        """The same items; the time spent waiting for each is counted."""
        iterator = iter(batches)
        while True:
            start = time.perf_counter()
            try:
                item = next(iterator)
            except StopIteration:
                return
            self._waited += time.perf_counter() - start
            yield item

    def read(self) -> dict[str, float]:
        """Values since the last call; `time/seconds` counts from the start of this process."""
        now = time.perf_counter()
        passed = now - self._since
        values = {
            "perf/tokens_per_second": self._rows / passed,
            "perf/peak_memory_mb": peak_memory_mb(self._device),
            "time/step_seconds": passed / self._steps,
            "time/loader_wait_seconds": self._waited / self._steps,
            "time/seconds": now - self._start,
        }
        self._since, self._rows, self._steps, self._waited = now, 0.0, 0, 0.0
        return values


def peak_memory_mb(device: torch.device) -> float:
    """This rank's peak: of the device's allocator, or of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
