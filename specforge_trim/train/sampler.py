"""Which documents every rank trains on at every step: a function of seed and sizes alone."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Schedule:
    """Documents of every optimizer step, rank and micro-batch.

    An epoch is one shuffle by (seed, epoch), cut in order into micro-batches of at most
    tokens_per_batch tokens (a longer document is one alone).  An optimizer step takes
    world_size * accumulate of them in order; the last step of an epoch may leave ranks without
    documents, so that every rank has the same number of steps.  A run on one rank with
    accumulate = N therefore sees the batches of N ranks.
    """

    lengths: tuple[int, ...]
    tokens_per_batch: int
    seed: int
    epochs: int
    world_size: int = 1
    accumulate: int = 1
    max_steps: int | None = None
    _steps: tuple[tuple[tuple[int, ...], ...], ...] = field(init=False, repr=False)
    _epochs: tuple[int, ...] = field(init=False, repr=False)  # of each step

    def __post_init__(self) -> None:
        per_step = self.world_size * self.accumulate
        steps: list[tuple[tuple[int, ...], ...]] = []
        epochs: list[int] = []
        for epoch in range(self.epochs):
            packed = self._micro_batches(epoch)
            steps += [tuple(packed[i : i + per_step]) for i in range(0, len(packed), per_step)]
            epochs += [epoch] * (len(steps) - len(epochs))
            if self.max_steps is not None and len(steps) >= self.max_steps:
                break
        object.__setattr__(self, "_steps", tuple(steps[: self.max_steps]))
        object.__setattr__(self, "_epochs", tuple(epochs[: self.max_steps]))

    def _micro_batches(self, epoch: int) -> list[tuple[int, ...]]:
        """Document numbers of each micro-batch of an epoch, in order."""
        digest = hashlib.sha256(f"{self.seed}/{epoch}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
        packed: list[tuple[int, ...]] = []
        current: list[int] = []
        tokens = 0
        for number in torch.randperm(len(self.lengths), generator=generator).tolist():
            if current and tokens + self.lengths[number] > self.tokens_per_batch:
                packed.append(tuple(current))
                current, tokens = [], 0
            current.append(number)
            tokens += self.lengths[number]
        return packed + ([tuple(current)] if current else [])

    @property
    def total_steps(self) -> int:
        return len(self._steps)

    def epoch_of(self, step: int) -> int:
        return self._epochs[step]

    def micro_batch(self, step: int, *, rank: int, index: int) -> tuple[int, ...]:
        """Document numbers of one micro-batch; () for a rank that has none left."""
        place = rank * self.accumulate + index
        step_batches = self._steps[step]
        return step_batches[place] if place < len(step_batches) else ()
