"""Steps whose loss or gradient is not finite: left out on all ranks alike, their documents named.

Features are checked for such values as they are read (loader.py). What is found here arises in
the computation: sums that overflow, or weights that have run away.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from specforge_trim.ranks.group import RankGroup
from specforge_trim.ranks.world import World
from specforge_trim.train.metrics import StepCounts

logger = logging.getLogger(__name__)
Batch = TypeVar("Batch")  # of either trainer


class HasLoss(Protocol):
    """What a micro-batch gave; loss: a tensor of any shape."""

    @property
    def loss(self) -> Tensor: ...


def all_finite(results: Sequence[HasLoss], norm: float, world: World) -> bool:
    """Whether the losses on every rank and the gradients' sum are finite.

    norm: of the sum, the same on every rank. One agreement, reached by every rank: ranks that
    answered differently would hold different weights from here on.
    """
    losses = [result.loss for result in results]
    mine = math.isfinite(norm) and (not losses or bool(torch.stack(losses).isfinite().all()))
    return bool(world.agree_min(torch.tensor([mine], dtype=torch.int32)))


def without_loss(counts: StepCounts) -> StepCounts:
    """What a step covers that was left out: none of its rows has a loss."""
    return replace(counts, loss_rows=torch.zeros_like(counts.loss_rows))


def name_documents(
    step: int,
    documents: Iterable[tuple[str, Batch]],
    *,
    model: nn.Module,
    run: Callable[[Batch], HasLoss],
    world: World,
    group: RankGroup | None,
) -> None:
    """Logs which of this rank's documents, each alone, has a loss or gradient that is not finite.

    documents: names and batches of one document; run adds a batch's gradients to the model's,
    without a sum over ranks. group: the ranks that share documents; all of them call this with
    the same ones. Every rank of the world calls this; gradients are zero afterwards.
    """
    bad, count = list[str](), 0
    clear_gradients(model)
    for name, batch in documents:
        result = run(batch)
        found = [result.loss] + [p.grad for p in model.parameters() if p.grad is not None]
        fine = torch.tensor([_finite(found)], dtype=torch.int32)
        if group is not None:
            fine = group.agree_min(fine)
        clear_gradients(model)
        count += 1
        if not fine:
            bad.append(name)
    speaks = group is None or group.rank == 0
    for name in bad if speaks else ():
        # An error: shown on every rank, since each knows its own documents only.
        logger.error("step %d left out, loss or gradient not finite: %s", step, name)
    totals = world.sum(torch.tensor([len(bad), count] if speaks else [0, 0], dtype=torch.float64))
    found_total, all_documents = int(totals[0]), int(totals[1])
    if world.is_main and (found_total == 0 or found_total == all_documents > 1):
        which = "none of its documents alone is" if found_total == 0 else "all its documents are"
        logger.error(
            "step %d left out, loss or gradient not finite: %s the cause, so the weights are "
            "near overflow: lower --learning-rate or raise --warmup-ratio",
            step,
            which,
        )


def refuse_too_many(found: int, limit: int) -> None:
    """Raises ValueError when more steps than `limit` were left out; the same on every rank."""
    if found > limit:
        raise ValueError(
            f"{found} steps had a loss or gradient that is not finite, more than "
            f"max_non_finite_steps {limit}: the log names their documents; remove those, or lower "
            "--learning-rate; the weights are those of the last step that counted"
        )


def clear_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()


def _finite(tensors: Sequence[Tensor]) -> bool:
    return bool(torch.stack([t.isfinite().all() for t in tensors]).all())
