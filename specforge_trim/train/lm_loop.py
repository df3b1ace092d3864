"""The training loop of a dense language model.

Fetch, count, step, reduce, clip, update, log, save.
As in train/loop.py, the denominator is a sum over ranks and accumulated micro-batches, and every
rank reaches every collective, whatever its data.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import Any, Protocol

import torch
from torch import nn

from specforge_trim.config.training import RunConfig
from specforge_trim.ranks.gradients import FullySharded, ensure_gradients
from specforge_trim.ranks.world import World, sum_gradients
from specforge_trim.train.evaluation import undisturbed
from specforge_trim.train.guards import (
    all_finite,
    clear_gradients,
    name_documents,
    refuse_too_many,
)
from specforge_trim.train.keeper import About, Keeper
from specforge_trim.train.lm_batch import LmBatch, LmLoader, LmPlan, TokenDocuments, make_lm_batch
from specforge_trim.train.lm_step import LmResult, LmStepSettings, SoftTargets, lm_step
from specforge_trim.train.metrics import Throughput
from specforge_trim.train.optimizer import build_optimizer, clip_gradients, set_learning_rate
from specforge_trim.train.profiling import profiled
from specforge_trim.train.sampler import Schedule
from specforge_trim.train.settings import rate_of
from specforge_trim.train.stopping import counted_steps, stopped_by
from specforge_trim.train.trackers import JsonLines, Progress, Trackers, open_trackers

logger = logging.getLogger(__name__)


class _Reducer(Protocol):
    def begin(self) -> None: ...
    def finish(self) -> None: ...
    def whole(self) -> AbstractContextManager[None]: ...


class _Replicated:
    """Every rank holds all weights; one sum of all gradients."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._model, self._world = model, world

    def begin(self) -> None:
        ensure_gradients(self._model)

    def finish(self) -> None:
        sum_gradients(self._model.parameters(), self._world)

    def whole(self) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True)
class LmSummary:
    """Optimizer steps done, those without a loss row or left out, the last row of metrics."""

    steps: int
    skipped_steps: int
    non_finite_steps: int
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
            return LmSummary(done, keep.skipped, keep.non_finite, None)
        asked, folder = self.config.track.profile, self.config.output_dir / "profile"
        profiling = profiled(asked, folder, world=self.world, done=done, total=total)
        held = self._held_out_file(done)
        if done == 0:
            self._measure(held, 0)
        row: dict[str, Any] | None = None
        clock = Throughput(self.world)
        trackers = closing(open_trackers(self.config, done=done, world=self.world))
        # After what may fail: an error has a line of its own.
        progress = closing(Progress(total=total, done=done, show=self.world.is_main))
        loading = closing(self.loader.steps(done))
        with (
            counted_steps(done, self.world) as steps,
            loading as made_ahead,
            progress as bar,
            trackers as log,
            profiling as profiler,
        ):
            for step, batches in steps.until_stopped(clock.waiting(made_ahead)):
                counts = _count(batches, self.world)
                clock.add(counts)
                results, norm = self._gradients(batches, counts)
                if not counts.loss_rows:
                    keep.skipped += 1  # no supervised row on any rank: no weight may move or decay
                elif all_finite(results, norm, self.world):
                    self._update(step)
                else:
                    counts = self._leave_out(step, batches, counts)
                measures = self._is_due(step, total)
                if step % options.log_every == 0 or step == total or measures:
                    row = self._row(step, results, norm, counts) | clock.read()
                    if measures:
                        row |= self._measure(held, step)
                        clock.leave_out()
                    self.world.together(partial(log.write, row))
                bar.update(row)
                if step == total or (options.save_every and step % options.save_every == 0):
                    keep.save(step)
                profiler.step()
            if steps.stopped:
                keep.save(steps.done)
                raise stopped_by(steps.stopped, steps.done)
        return LmSummary(total, keep.skipped, keep.non_finite, row)

    def _gradients(
        self, batches: Sequence[LmBatch], counts: _Counts
    ) -> tuple[list[LmResult], float]:
        """Results of these micro-batches, and the norm of their gradients' sum over ranks.

        The sum is left in the model, scaled down to max_grad_norm. Without a loss on any rank
        nothing is run: [], 0.
        """
        if not counts.loss_rows:
            return [], 0.0
        self.reducer.begin()
        results = [self._one(batch, counts) for batch in batches]
        self.reducer.finish()
        return results, float(clip_gradients(self.model, self.config.train.max_grad_norm))

    def _one(self, batch: LmBatch, counts: _Counts) -> LmResult:
        settings = self.settings
        return lm_step(
            self.model,
            batch,
            num_loss_rows=counts.loss_rows,
            settings=settings,
            targets=self.targets if settings.distill_weight else None,
        )

    def _rate(self, step: int) -> float:
        return rate_of(self.config.train, step, total_steps=self.loader.schedule.total_steps)

    def _update(self, step: int) -> None:
        """One step of the optimizer on the gradients' clipped sum."""
        set_learning_rate(self.optimizer, self._rate(step))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def _leave_out(self, step: int, batches: Sequence[LmBatch], counts: _Counts) -> _Counts:
        """Names the documents of a step that is not finite and counts it; no row has a loss."""
        self.keep.non_finite += 1
        clear_gradients(self.model)
        with self.reducer.whole():
            name_documents(
                step,
                self.loader.documents_of(batches),
                model=self.model,
                run=lambda batch: self._one(batch, counts),
                world=self.world,
                group=None,
            )
        refuse_too_many(self.keep.non_finite, self.config.train.max_non_finite_steps)
        return replace(counts, loss_rows=0.0)

    def _row(
        self, step: int, results: Sequence[LmResult], norm: float, counts: _Counts
    ) -> dict[str, Any]:
        """A row of metrics.jsonl; nulls for a step that moved no weight. norm: before clipping."""
        moved, has_target = counts.loss_rows > 0, self.settings.distill_weight > 0
        sums = _sum(results if moved else (), self.world)
        return {
            "step": step,
            "epoch": self.loader.schedule.epoch_of(step - 1),
            "lr": self._rate(step),
            **_per_row(sums, counts.loss_rows, self.settings, has_target),
            "rows": int(counts.rows),
            "loss_rows": int(counts.loss_rows),
            "perf/lm_head_token_fraction": counts.head_rows / counts.rows if counts.rows else None,
            "grad_norm": norm if moved else None,
            "skipped_steps": self.keep.skipped,
            "non_finite_steps": self.keep.non_finite,
        }

    def _is_due(self, step: int, total: int) -> bool:
        if self.held_out is None:
            return False
        return step == total or (self.held_out.every > 0 and step % self.held_out.every == 0)

    def _held_out_file(self, done: int) -> Trackers:
        path, main = self.config.output_dir / "heldout.jsonl", self.world.is_main
        return self.world.together(
            lambda: Trackers([JsonLines(path, resume_step=done, write=main)])
        )

    def _measure(self, file: Trackers, step: int) -> dict[str, Any]:
        """eval/..., for a row of metrics.jsonl; the same goes to heldout.jsonl."""
        if self.held_out is None:
            return {}
        with undisturbed(self.model), self.reducer.whole():
            found = measure(
                self.model, self.held_out.documents, self.settings, self.targets, self.world
            )
        bad = [key for key, value in found.items() if value is not None and not isfinite(value)]
        if bad and self.world.is_main:
            logger.warning(
                "held-out %s after step %d: not finite, written as null. The draft's weights are "
                "not finite or far too large; see the draft's file, or lower --learning-rate",
                ", ".join(bad), step,
            )  # fmt: skip
        self.world.together(partial(file.write, {"step": step, **found}))
        return {f"eval/{key}": value for key, value in found.items()}


# ---------------------------------------------------------------------- counts and metrics


@dataclass(frozen=True)
class _Counts:
    """Over ranks and micro-batches: rows of the streams, rows of the head, rows with a loss."""

    rows: float
    head_rows: float
    loss_rows: float
    kept_flops: None = None  # not counted


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
