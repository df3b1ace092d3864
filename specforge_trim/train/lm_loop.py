"""The training loop of a dense language model.

Fetch, count, step, reduce, clip, update, log, save.
As in train/loop.py, the denominator is a sum over ranks and accumulated micro-batches, and every
rank reaches every collective, whatever its data.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from specforge_trim.config_training import RunConfig
from specforge_trim.distributed import World, sum_gradients
from specforge_trim.train.gradients import FullySharded
from specforge_trim.train.guards import refuse_too_many
from specforge_trim.train.keeper import About, Keeper
from specforge_trim.train.lm_batch import LmBatch, LmLoader, LmPlan, TokenDocuments, make_lm_batch
from specforge_trim.train.lm_step import LmResult, LmStepSettings, SoftTargets, lm_step
from specforge_trim.train.memory import PeakMemory
from specforge_trim.train.optimizer import (
    build_optimizer,
    clip_gradients,
    set_learning_rate,
)
from specforge_trim.train.sampler import Schedule
from specforge_trim.train.settings import rate_of
from specforge_trim.train.stages import ensure_gradients
from specforge_trim.train.stopping import counted_steps, stopped_by
from specforge_trim.train.trackers import JsonLines, Progress, open_trackers

logger = logging.getLogger(__name__)


class _Reducer(Protocol):
    def begin(self) -> None: ...
    def finish(self) -> None: ...


class _Replicated:
    """Every rank holds all weights; one sum of all gradients."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._model, self._world = model, world

    def begin(self) -> None:
        ensure_gradients(self._model)

    def finish(self) -> None:
        sum_gradients(self._model.parameters(), self._world)


@dataclass(frozen=True)
class LmSummary:
    """Optimizer steps done, those without a loss row, the last row of metrics."""

    steps: int
    skipped_steps: int
    last_row: Mapping[str, Any] | None


@dataclass(frozen=True)
class HeldOut:
    """Conversations that are not trained on; every: steps between measurements, 0 = at the end."""

    documents: TokenDocuments
    every: int


def train_lm(
    config: RunConfig,
    *,
    model: nn.Module,
    settings: LmStepSettings,
    targets: SoftTargets | None,
    documents: TokenDocuments,
    schedule: Schedule,
    plan: LmPlan,
    held_out: HeldOut | None,
    world: World,
    identity: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> LmSummary:
    """Trains `model` in place; resumes from config.output_dir where a checkpoint lies there.

    Args:
        model: set up by enable_row_sparse, the same weights on every rank.
        targets: for distillation, and for the acceptance on held-out conversations.
        identity, provenance: see train.loop.
    Raises ValueError for another run's checkpoint, and for too many gradients that are not finite.
    """
    split = config.parallel.fsdp
    reducer: _Reducer = FullySharded(model, world) if split else _Replicated(model, world)
    optimizer = build_optimizer(model, weight_decay=config.train.weight_decay)
    about = About(identity, provenance, plan)
    run = _Run(
        config,
        model=model,
        settings=settings,
        targets=targets,
        loader=LmLoader(documents, schedule, plan, world.rank, config.data.num_workers),
        reducer=reducer,
        optimizer=optimizer,
        keep=Keeper(config, model, optimizer, world, schedule, about),
        held_out=held_out,
        world=world,
    )
    return run.to_the_end(run.keep.resume())


@dataclass(frozen=True)
class _Run:
    """A run's parts, and the loop over its steps."""

    config: RunConfig
    model: nn.Module
    settings: LmStepSettings
    targets: SoftTargets | None
    loader: LmLoader
    reducer: _Reducer
    optimizer: torch.optim.Optimizer
    keep: Keeper
    held_out: HeldOut | None
    world: World

    def to_the_end(self, done: int) -> LmSummary:
        """Every optimizer step after the first `done`."""
        options, keep, total = self.config.train, self.keep, self.loader.schedule.total_steps
        if done >= total:
            logger.info("nothing left to train: %d of %d steps are done", done, total)
            return LmSummary(done, keep.skipped, None)
        path = self.config.output_dir / "heldout.jsonl"
        held = JsonLines(path, resume_step=done, write=self.world.is_main)
        if done == 0:
            self._measure(held, 0)
        row = None
        loading = closing(self.loader.steps(done))
        trackers = closing(open_trackers(self.config, done=done, world=self.world))
        bar = Progress(total=total, done=done, show=self.world.is_main)
        with (
            counted_steps(done, self.world) as steps,
            loading as made_ahead,
            closing(bar),
            trackers as log,
            _Clock(self.world) as clock,
        ):
            for step, batches in steps.until_stopped(made_ahead):
                counts = _count(batches, self.world)
                results, norm = list[LmResult](), None
                if counts.loss_rows:
                    results = self._gradients(batches, counts)
                    norm = self._update(step, batches)
                else:
                    keep.skipped += 1  # no supervised row on any rank: no weight may move or decay
                clock.add(counts.rows)
                if step % options.log_every == 0 or step == total:
                    row = self._row(step, results, norm, counts) | clock.read()
                    log.write(row)
                bar.update(None)
                if step == total or (options.save_every and step % options.save_every == 0):
                    keep.save(step)
                if self._is_due(step, total):
                    self._measure(held, step)
            if steps.stopped:
                keep.save(steps.done)
                raise stopped_by(steps.stopped, steps.done)
        return LmSummary(total, keep.skipped, row)

    def _gradients(self, batches: Sequence[LmBatch], counts: _Counts) -> list[LmResult]:
        """Gradients of one optimizer step, summed over micro-batches and ranks."""
        self.reducer.begin()
        settings = self.settings
        results = [
            lm_step(
                self.model,
                batch,
                num_loss_rows=counts.loss_rows,
                settings=settings,
                targets=self.targets if settings.distill_weight else None,
            )
            for batch in batches
        ]
        self.reducer.finish()
        return results

    def _rate(self, step: int) -> float:
        return rate_of(self.config.train, step, total_steps=self.loader.schedule.total_steps)

    def _update(self, step: int, batches: Sequence[LmBatch]) -> float | None:
        """One step on the gradients' sum; their norm before clipping.

        A step whose gradient is not finite is left out: every rank holds the same norm, so all of
        them leave it out and name their documents. Raises ValueError when there are too many.
        """
        options, keep = self.config.train, self.keep
        norm = float(clip_gradients(self.model, options.max_grad_norm))
        finite = math.isfinite(norm)
        if finite:
            set_learning_rate(self.optimizer, self._rate(step))
            self.optimizer.step()
        else:
            keep.non_finite += 1
            names = ", ".join(source for batch in batches for source in batch.sources)
            logger.error(
                "step %d left out, its gradient is not finite; this rank: %s", step, names
            )
        self.optimizer.zero_grad(set_to_none=False)
        if not finite:
            refuse_too_many(keep.non_finite, options.max_non_finite_steps)
        return norm if finite else None

    def _row(
        self, step: int, results: Sequence[LmResult], norm: float | None, counts: _Counts
    ) -> dict[str, Any]:
        """A row of metrics.jsonl."""
        has_target = self.settings.distill_weight > 0
        sums = _sum(results, self.world)
        return {
            "step": step,
            "epoch": self.loader.schedule.epoch_of(step - 1),
            "lr": self._rate(step),
            **_per_row(sums, counts.loss_rows, self.settings, has_target),
            "rows": int(counts.rows),
            "loss_rows": int(counts.loss_rows),
            "perf/lm_head_token_fraction": counts.head_rows / counts.rows if counts.rows else None,
            "grad_norm": norm,
            "skipped_steps": self.keep.skipped,
            "non_finite_steps": self.keep.non_finite,
        }

    def _is_due(self, step: int, total: int) -> bool:
        every = 0 if self.held_out is None else self.held_out.every
        return step == total or (every > 0 and step % every == 0)

    def _measure(self, file: JsonLines, step: int) -> None:
        if self.held_out is None:
            return
        self.reducer.begin()  # whole weights
        found = measure(
            self.model, self.held_out.documents, self.settings, self.targets, self.world
        )
        file.write({"step": step, **found})


# ---------------------------------------------------------------------- counts and metrics


@dataclass(frozen=True)
class _Counts:
    """Over ranks and micro-batches: rows of the streams, rows of the head, rows with a loss."""

    rows: float
    head_rows: float
    loss_rows: float


def _count(batches: Sequence[LmBatch], world: World) -> _Counts:
    """One all_reduce of a CPU tensor, reached by every rank."""
    own = [(b.num_rows, b.head_rows.shape[0], b.num_loss_rows) for b in batches]
    sums = torch.tensor(own or [(0, 0, 0)], dtype=torch.float64).sum(0)
    return _Counts(*world.sum(sums).tolist())


def _sum(results: Sequence[LmResult], world: World) -> list[float]:
    sums = torch.zeros(4, dtype=torch.float64, device=world.device)
    for r in results:
        sums += torch.stack((r.label_loss, r.correct, r.distill_loss, r.accept)).double()
    return world.sum(sums).tolist()


def _per_row(
    sums: Sequence[float], rows: float, settings: LmStepSettings, has_target: bool
) -> dict[str, Any]:
    """Means over loss rows; null without one."""
    label, correct, distill, accept = (x / rows if rows else None for x in sums)
    row: dict[str, Any] = {"loss": None, "label_loss": label, "accuracy": correct}
    if label is not None and distill is not None:
        row["loss"] = settings.label_weight * label + settings.distill_weight * distill
    if has_target:
        row |= {"distill_loss": distill, "acceptance": accept}
    return row


def measure(
    model: nn.Module,
    documents: TokenDocuments,
    settings: LmStepSettings,
    targets: SoftTargets | None,
    world: World,
) -> dict[str, Any]:
    """Held-out means per supervised token, a document at a time, shared out over ranks."""
    results, rows = [], torch.zeros(1, dtype=torch.float64)
    with torch.no_grad():
        for number in range(world.rank, len(documents), world.size):
            batch = make_lm_batch([documents[number]], LmPlan())
            rows += batch.num_loss_rows
            results.append(
                lm_step(
                    model,
                    batch,
                    num_loss_rows=1.0,
                    settings=settings,
                    targets=targets,
                    learn=False,
                )  # fmt: skip
            )
    count = float(world.sum(rows))
    return _per_row(_sum(results, world), count, settings, targets is not None)


class _Clock:
    """Speed over all ranks since the last reading, and this rank's peak memory."""

    def __init__(self, world: World) -> None:
        self._memory = PeakMemory(world.device)
        self._start = self._since = time.perf_counter()
        self._rows, self._steps = 0.0, 0

    def __enter__(self) -> _Clock:
        self._memory.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._memory.__exit__(*error)

    def add(self, rows: float) -> None:
        self._rows += rows
        self._steps += 1

    def read(self) -> dict[str, float]:
        now = time.perf_counter()
        passed, steps = now - self._since, max(1, self._steps)
        values = {
            "perf/tokens_per_second": self._rows / passed,
            "perf/peak_memory_mb": self._memory.read() / 2**20,
            "time/step_seconds": passed / steps,
            "time/seconds": now - self._start,
        }
        self._since, self._rows, self._steps = now, 0.0, 0
        return values
