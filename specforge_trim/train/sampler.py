"""Which documents every rank trains on at every step: a function of seed and sizes alone.

Nothing is kept while training: the place in an epoch is the step number, so a resumed run goes on
with exactly the documents that come next.
"""

from __future__ import annotations

import hashlib
import heapq
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

_SHARED_STEPS = 8  # the last of an epoch that may be packed anew to leave no rank idle


@dataclass(frozen=True)
class Schedule:
    """Documents of every optimizer step, rank and micro-batch.

    An epoch is one shuffle by (seed, epoch), read in order. An optimizer step takes as many of the
    next documents as fit into world_size * accumulate micro-batches of tokens_per_batch tokens (a
    longer document is one alone) and spreads them so that the micro-batches are about equally
    long; what does not fit waits for the next step. Every rank has the same number of steps; only
    the last step of an epoch may leave one without documents. A run on one rank with accumulate =
    N sees the batches of N ranks.

    weights: per document, how often an epoch holds it; None = once. Of a fraction, every epoch
    takes the next share of the documents, so that all of them have their turn.
    """

    lengths: tuple[int, ...]
    tokens_per_batch: int
    seed: int
    epochs: int
    world_size: int = 1
    accumulate: int = 1
    max_steps: int | None = None
    weights: tuple[float, ...] | None = None
    # Document numbers in training order, cut into batches by _ends; a step is _per_step batches.
    _order: np.ndarray = field(init=False, repr=False, compare=False)
    _ends: np.ndarray = field(init=False, repr=False, compare=False)
    _first_steps: tuple[int, ...] = field(init=False, repr=False)  # of each epoch

    def __post_init__(self) -> None:
        per_step = self.world_size * self.accumulate
        order: list[np.ndarray] = []
        ends: list[np.ndarray] = []
        first_steps, steps, placed = [], 0, 0
        for epoch in range(self.epochs):
            first_steps.append(steps)
            numbers = self._shuffled(epoch)
            batches = pack_steps(
                numbers, self.lengths, tokens_per_batch=self.tokens_per_batch, per_step=per_step
            )
            flat = np.array([n for batch in batches for n in batch], dtype=np.int32)
            order.append(flat)
            ends.append(placed + np.cumsum([len(batch) for batch in batches], dtype=np.int64))
            placed += len(flat)
            steps += len(batches) // per_step
            if self.max_steps is not None and steps >= self.max_steps:
                steps = self.max_steps
                break
        object.__setattr__(self, "_order", np.concatenate(order))
        object.__setattr__(self, "_ends", np.concatenate([[0], *ends])[: steps * per_step + 1])
        object.__setattr__(self, "_first_steps", tuple(first_steps))

    def _shuffled(self, epoch: int) -> list[int]:
        """Document numbers of an epoch in training order."""
        pool = np.arange(len(self.lengths))
        if self.weights is not None:
            pool = _weighted_pool(self.weights, seed=self.seed, epoch=epoch)
        order = torch.randperm(len(pool), generator=_generator(f"{self.seed}/{epoch}"))
        return pool[order.numpy()].tolist()

    @property
    def total_steps(self) -> int:
        return (len(self._ends) - 1) // (self.world_size * self.accumulate)

    def epoch_of(self, step: int) -> int:
        return sum(first <= step for first in self._first_steps) - 1

    def place(self, done: int) -> dict[str, int | str]:
        """Where a run stands after `done` steps: what a checkpoint notes; JSON values."""
        epoch = self.epoch_of(done)
        return {
            "epoch": epoch,
            "step_of_epoch": done - self._first_steps[epoch],
            "total_steps": self.total_steps,
            "order": self.order_digest(done),
        }

    def order_digest(self, done: int) -> str:
        """CRC-32 of the document numbers of the first `done` steps, in order, over all ranks."""
        end = self._ends[done * self.world_size * self.accumulate]
        return f"{zlib.crc32(self._order[:end].astype('<i4').tobytes()):08x}"

    def micro_batch(self, step: int, *, rank: int, index: int) -> tuple[int, ...]:
        """Document numbers of one micro-batch; () for a rank that has none left."""
        place = (step * self.world_size + rank) * self.accumulate + index
        return tuple(self._order[self._ends[place] : self._ends[place + 1]].tolist())


def pack_steps(
    numbers: Sequence[int], lengths: Sequence[int], *, tokens_per_batch: int, per_step: int
) -> list[list[int]]:
    """Micro-batches of an epoch, per_step to a step, about equally long within a step.

    numbers stand in training order. A micro-batch has at most tokens_per_batch tokens, or is one
    longer document.
    """
    sizes = [min(lengths[n], tokens_per_batch) for n in numbers]
    steps: list[list[list[int]]] = []
    waiting: list[int] = []  # places in numbers that did not fit into the step before
    place = 0
    while waiting or place < len(numbers):
        chosen = waiting
        room = tokens_per_batch * per_step - sum(sizes[k] for k in chosen)
        while place < len(numbers) and sizes[place] <= room:
            chosen.append(place)
            room -= sizes[place]
            place += 1
        batches, waiting = _spread(chosen, sizes, tokens_per_batch, per_step)
        steps.append(batches)
    for count in range(2, min(len(steps), _SHARED_STEPS) + 1):
        if all(steps[-1]):
            break
        # The rest of an epoch is shared with the steps before it, so that no rank stays idle.
        rest = sorted(k for step in steps[-count:] for batch in step for k in batch)
        batches, waiting = _spread(rest, sizes, tokens_per_batch, count * per_step)
        if not waiting and all(batches):
            steps[-count:] = [batches[i::count] for i in range(count)]
    totals = [0] * per_step  # tokens of each place in a step so far: a rank has fixed places
    for step in steps:
        step.sort(key=lambda batch: -sum(lengths[numbers[k]] for k in batch))
        least_first = sorted(range(per_step), key=lambda i: totals[i])
        placed = dict(zip(least_first, step, strict=True))
        step[:] = [placed[i] for i in range(per_step)]
        totals = [
            t + sum(lengths[numbers[k]] for k in b) for t, b in zip(totals, step, strict=True)
        ]
    return [[numbers[k] for k in sorted(batch)] for step in steps for batch in step]


def _spread(
    chosen: list[int], sizes: Sequence[int], budget: int, count: int
) -> tuple[list[list[int]], list[int]]:
    """`count` batches of about equal length, longest document first, and what did not fit."""
    batches: list[list[int]] = [[] for _ in range(count)]
    loads = [(0, i) for i in range(count)]
    waiting = []
    for k in sorted(chosen, key=lambda k: -sizes[k]):
        load, i = loads[0]  # the shortest batch: where this does not fit, it fits nowhere
        if load + sizes[k] > budget:
            waiting.append(k)
            continue
        batches[i].append(k)
        heapq.heapreplace(loads, (load + sizes[k], i))
    return batches, sorted(waiting)


def _weighted_pool(weights: Sequence[float], *, seed: int, epoch: int) -> np.ndarray:
    """Document numbers of an epoch, each as often as its weight says."""
    found = np.asarray(weights)
    pool = [np.repeat(np.arange(len(found)), np.floor(found).astype(np.int64))]
    for weight in sorted({w for w in weights if w % 1}):
        own = np.flatnonzero(found == weight)
        share = weight - math.floor(weight)
        own = own[torch.randperm(len(own), generator=_generator(f"{seed}/{weight}")).numpy()]
        first, end = round(share * len(own) * epoch), round(share * len(own) * (epoch + 1))
        pool.append(own[np.arange(first, end) % len(own)])
    return np.concatenate(pool)


def _generator(name: str) -> torch.Generator:
    digest = hashlib.sha256(name.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
