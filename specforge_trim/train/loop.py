"""The training loop: fetch, count, step, reduce, clip, update, log, save.

Every denominator is a sum over ranks and accumulated micro-batches, taken from the plans before
the step, so that any split of the same documents gives the same gradient.  Collectives are
reached by every rank at every step, whatever its data.

Letters: K ttt_length.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from specforge_trim.config import Config
from specforge_trim.distributed import PeerLost, World
from specforge_trim.model.draft import Eagle3Draft
from specforge_trim.objective.teacher import Teacher
from specforge_trim.parallel.layout import Layout
from specforge_trim.train.batch import Batch
from specforge_trim.train.gradients import Reducer, make_reducer
from specforge_trim.train.keeper import About, Keeper
from specforge_trim.train.loader import BatchLoader, Documents
from specforge_trim.train.metrics import StepCounts, Throughput, count_step, metrics_row
from specforge_trim.train.optimizer import (
    build_optimizer,
    clip_gradients,
    learning_rate,
    set_learning_rate,
)
from specforge_trim.train.sampler import Schedule
from specforge_trim.train.settings import plan_settings, sequence_layout, step_settings
from specforge_trim.train.stages import StepResult, ttt_step
from specforge_trim.train.trackers import JsonLines, Progress

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainSummary:
    """What a run ended with: optimizer steps done, those without a loss, the last metrics row."""

    steps: int
    skipped_steps: int
    last_row: Mapping[str, Any] | None


def train(
    config: Config,
    *,
    model: Eagle3Draft,
    teacher: Teacher,
    documents: Documents,
    lengths: Sequence[int],
    weights: Sequence[float] | None = None,
    world: World,
    identity: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> TrainSummary:
    """Trains `model` in place; resumes from config.output_dir where a checkpoint lies there.

    Args:
        model: the same weights on every rank; teacher: in the computation's dtype; both on device.
        documents, lengths, weights: each document's features, tokens, turns per epoch (None = 1).
        identity: settings that a resumed run must share; provenance: kept beside each checkpoint.
    Raises ValueError (another run's checkpoint, gradient not finite, much bad data) or PeerLost.
    """
    options, layout = config.train, sequence_layout(config, world)
    schedule = _schedule(config, lengths, weights, layout)
    loader = _loader(config, documents, schedule, model, layout)
    reducer = make_reducer(model, world, fsdp=config.parallel.fsdp)
    left_out = _LeftOut(len(lengths), config.data.max_bad_fraction)
    optimizer = build_optimizer(model, weight_decay=options.weight_decay)
    about = About(identity, provenance, plan_settings(config, model, layout))
    keep = Keeper(config, model, optimizer, world, schedule, about)
    done, total = keep.resume(), schedule.total_steps
    if done >= total:
        logger.info("nothing left to train: %d of %d steps are done", done, total)
        return TrainSummary(done, keep.skipped, None)
    clock = Throughput(world)
    row: dict[str, Any] | None = None
    log = JsonLines(config.output_dir / "metrics.jsonl", resume_step=done, write=world.is_main)
    progress = closing(Progress(total=total, done=done, show=world.is_main))
    with _Where(done, world) as where, progress as bar:
        for step, batches in where.numbered(clock.waiting(loader.steps(done))):
            counts = _count(config, batches, loader, world)
            epoch, rate = schedule.epoch_of(step - 1), _rate(config, step - 1, total)
            left_out.add(epoch, counts.skipped_documents)
            clock.add(counts)
            results, norm = list[StepResult](), None
            if counts.has_loss:
                results = _run_micro_batches(
                    config, model, teacher, batches, counts, layout=layout, reducer=reducer
                )
                norm = _update(config, model, optimizer, rate, step, batches)
            else:
                keep.skipped += 1  # no supervised row on any rank: no weight may move, nor decay
            if step % options.log_every == 0 or step == total:
                row = {"step": step, "epoch": epoch, "lr": rate}
                row |= _loss_metrics(config, results, counts, world)
                row |= {"grad_norm": norm, "skipped_steps": keep.skipped, **clock.read()}
                log.write(row | {"skipped_documents": left_out.total})
            bar.update(row)
            if step == total or (options.save_every and step % options.save_every == 0):
                keep.save(step)
    return TrainSummary(total, keep.skipped, row)


def _count(
    config: Config, batches: Sequence[Batch], loader: BatchLoader, world: World
) -> StepCounts:
    left, length = loader.take_skipped(), config.loss.ttt_length
    return count_step(batches, ttt_length=length, skipped=left, world=world)


def _loss_metrics(
    config: Config, results: Sequence[StepResult], counts: StepCounts, world: World
) -> dict[str, Any]:
    sums = _sum_results(results, config.loss.ttt_length, world)
    return metrics_row(sums, counts, decay=config.loss.loss_decay)


class _Where:
    """Numbers optimizer steps, and names the one in which contact with another rank was lost."""

    def __init__(self, done: int, world: World) -> None:
        self.step, self._world = done, world

    def numbered(self, steps: Iterable[list[Batch]]) -> Iterator[tuple[int, list[Batch]]]:
        for batches in steps:
            self.step += 1
            self._world.together(self._world.see_launcher)
            yield self.step, batches

    def __enter__(self) -> _Where:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, PeerLost):
            raise PeerLost(f"in or after optimizer step {self.step}: {error}") from error


def _schedule(
    config: Config, lengths: Sequence[int], weights: Sequence[float] | None, layout: Layout
) -> Schedule:
    return Schedule(
        lengths=tuple(lengths),
        weights=None if weights is None else tuple(weights),
        tokens_per_batch=config.data.tokens_per_batch,
        seed=config.train.seed,
        epochs=config.train.epochs,
        world_size=layout.data_size,
        accumulate=config.train.accumulate,
        max_steps=config.train.max_steps,
    )


def _loader(
    config: Config, documents: Documents, schedule: Schedule, model: Eagle3Draft, layout: Layout
) -> BatchLoader:
    # A target that computes features while training cannot be forked into loader processes.
    workers = 0 if config.data.online else config.data.num_workers
    return BatchLoader(
        documents,
        schedule,
        plan_settings(config, model, layout),
        rank=layout.data_rank,
        num_workers=workers,
        group=layout.sequence,
    )


def _run_micro_batches(
    config: Config,
    model: Eagle3Draft,
    teacher: Teacher,
    batches: Sequence[Batch],
    counts: StepCounts,
    *,
    layout: Layout,
    reducer: Reducer,
) -> list[StepResult]:
    """Gradients of one optimizer step, summed over micro-batches and ranks."""
    denominators = _denominators(counts, config.loss.loss_denominator)
    settings = step_settings(config)
    reducer.begin()
    results = [
        ttt_step(
            model,
            batch,
            teacher=teacher,
            denominators=denominators,
            settings=settings,
            layout=layout,
            after_rows=reducer.rows_done if n == len(batches) else None,
        )
        for n, batch in enumerate(batches, start=1)
    ]
    if not batches:
        reducer.rows_done()
    reducer.finish()
    return results


def _rate(config: Config, step: int, total: int) -> float:
    return learning_rate(
        step,
        total_steps=total,
        peak=config.train.learning_rate,
        warmup_ratio=config.train.warmup_ratio,
        min_ratio=config.train.min_lr_ratio,
    )


def _update(
    config: Config,
    model: Eagle3Draft,
    optimizer: torch.optim.Optimizer,
    rate: float,
    step: int,
    batches: Sequence[Batch],
) -> float:
    """One step of the optimizer on the gradients' sum; returns their norm before clipping."""
    norm = float(clip_gradients(model, config.train.max_grad_norm))
    _refuse_non_finite(norm, step, batches)
    set_learning_rate(optimizer, rate)
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    return norm


def _denominators(counts: StepCounts, kind: str) -> Tensor:
    """[K], what each step's loss is divided by: all rows, or that step's loss rows."""
    if kind == "supervised":
        return counts.loss_rows
    return torch.full_like(counts.loss_rows, counts.rows)


def _sum_results(results: Sequence[StepResult], ttt_length: int, world: World) -> Tensor:
    """Metric sums [7, K] over micro-batches and ranks: fields of StepResult, in its order."""
    names = [field.name for field in fields(StepResult)]
    sums = torch.zeros(len(names), ttt_length, dtype=torch.float64, device=world.device)
    for result in results:
        sums += torch.stack([getattr(result, name) for name in names]).double()
    return world.sum(sums).cpu()


def _refuse_non_finite(norm: float, step: int, batches: Sequence[Batch]) -> None:
    """Every rank holds the same norm, so every rank stops here or none does."""
    if not math.isfinite(norm):
        names = ", ".join(d[:12] for batch in batches for d in batch.doc_ids)
        raise ValueError(
            f"the gradient of step {step} is not finite: lower --learning-rate, or look for a bad "
            f"value in the features of this rank's documents {names}; weights are unchanged"
        )


class _LeftOut:
    """Counts documents whose features are damaged, over all ranks; stops at too many."""

    def __init__(self, documents: int, max_fraction: float) -> None:
        self._documents, self._max_fraction = documents, max_fraction
        self._by_epoch = Counter[int]()

    @property
    def total(self) -> int:
        return self._by_epoch.total()

    def add(self, epoch: int, count: int) -> None:
        """The count is a sum over ranks, so every rank stops here or none does."""
        self._by_epoch[epoch] += count
        found = self._by_epoch[epoch]
        if found > self._max_fraction * self._documents:
            raise ValueError(
                f"{found} of {self._documents} documents had to be left out of one epoch, more "
                f"than max_bad_fraction {self._max_fraction:g}: the log names each with its file"
            )
