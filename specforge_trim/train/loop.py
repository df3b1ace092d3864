"""The training loop: fetch, count, step, reduce, clip, update, log, save.

Every denominator is a sum over ranks and accumulated micro-batches, taken from the plans before
the step, so that any split of the same documents gives the same gradient.  Collectives are
reached by every rank at every step, whatever its data.

Letters: K ttt_length.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor

from specforge_trim.drafts.eagle3.batch import Batch
from specforge_trim.drafts.eagle3.model import Eagle3Draft, row_only_parameters
from specforge_trim.drafts.eagle3.settings import Config
from specforge_trim.drafts.eagle3.step import StepResult, ttt_step
from specforge_trim.loss.teacher import Teacher
from specforge_trim.ranks.gradients import make_reducer
from specforge_trim.ranks.layout import Layout
from specforge_trim.ranks.world import World
from specforge_trim.train.evaluation import Best, Evaluation, HeldOut
from specforge_trim.train.guards import (
    all_finite,
    clear_gradients,
    name_documents,
    refuse_too_many,
    without_loss,
)
from specforge_trim.train.keeper import About, Keeper
from specforge_trim.train.loader import BatchLoader, Documents
from specforge_trim.train.metrics import StepCounts, Throughput, count_step, metrics_row
from specforge_trim.train.optimizer import build_optimizer, clip_gradients, set_learning_rate
from specforge_trim.train.profiling import profiled
from specforge_trim.train.sampler import Schedule
from specforge_trim.train.settings import (
    make_schedule,
    plan_settings,
    rate_of,
    sequence_layout,
    step_settings,
)
from specforge_trim.train.stopping import counted_steps, stopped_by
from specforge_trim.train.trackers import Progress, open_trackers

logger = logging.getLogger(__name__)
NOTHING = HeldOut()  # is measured while training


@dataclass(frozen=True)
class TrainSummary:
    """What a run ended with.

    steps: optimizer steps done; skipped_steps: those without a loss; non_finite_steps: those
    left out because a value was not finite; last_row: of metrics.jsonl.
    """

    steps: int
    skipped_steps: int
    non_finite_steps: int
    last_row: Mapping[str, Any] | None


def train(
    config: Config,
    *,
    model: Eagle3Draft,
    teacher: Teacher,
    documents: Documents,
    lengths: Sequence[int],
    weights: Sequence[float] | None = None,
    held_out: HeldOut = NOTHING,
    world: World,
    identity: Mapping[str, Any],
    provenance: Mapping[str, Any],
) -> TrainSummary:
    """Trains `model` in place; resumes from config.output_dir where a checkpoint lies there.

    Args:
        model: the same weights on every rank; teacher: in the computation's dtype; both on device.
        documents, lengths, weights: each document's features, tokens, turns per epoch (None = 1).
        held_out: what is measured while training, and how prompts are decoded.
        identity: settings that a resumed run must share; provenance: kept beside each checkpoint.
    Raises ValueError (another run's checkpoint, too many values not finite, much bad data),
    OSError (a full disk, a dead loader process), PeerLost, or, after SIGTERM or SIGINT, Stopped.
    """
    layout = sequence_layout(config, world)
    schedule = make_schedule(config, lengths, weights, ranks=layout.data_size)
    gradients = _Gradients(config, model, teacher, layout, world)
    optimizer = build_optimizer(model, weight_decay=config.train.weight_decay)
    about = About(identity, provenance, plan_settings(config, model, layout))
    run = _Run(
        config,
        world=world,
        schedule=schedule,
        loader=_loader(config, documents, schedule, model, layout),
        gradients=gradients,
        optimizer=optimizer,
        left_out=_LeftOut(len(lengths), config.data.max_bad_fraction),
        keep=Keeper(config, model, optimizer, world, schedule, about),
        evaluation=Evaluation(
            config,
            held_out,
            model=model,
            teacher=teacher,
            layout=layout,
            world=world,
            whole=gradients.whole,
        ),
    )
    return run.to_the_end(run.keep.resume())


@dataclass(frozen=True)
class _Run:
    """A run's parts, and the loop over its steps."""

    config: Config
    world: World
    schedule: Schedule
    loader: BatchLoader
    gradients: _Gradients
    optimizer: torch.optim.Optimizer
    left_out: _LeftOut
    keep: Keeper
    evaluation: Evaluation

    def to_the_end(self, done: int) -> TrainSummary:
        """Every optimizer step after the first `done`."""
        options, keep, total = self.config.train, self.keep, self.schedule.total_steps
        if done >= total:
            logger.info("nothing left to train: %d of %d steps are done", done, total)
            return TrainSummary(done, keep.skipped, keep.non_finite, None)
        clock = Throughput(self.world)
        row: dict[str, Any] | None = None
        asked, folder = self.config.track.profile, self.config.output_dir / "profile"
        profiling = profiled(asked, folder, world=self.world, done=done, total=total)
        best = Best(self.evaluation.best_by, keep.best())
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
                counts = self._count(step, batches)
                clock.add(counts)
                results, norm = self.gradients.of(batches, counts)
                if not counts.has_loss:
                    keep.skipped += 1  # no supervised row on any rank: no weight may move or decay
                elif all_finite(results, norm, self.world):
                    self._update(step)
                else:
                    counts = self._leave_out(step, counts)
                measures = self.evaluation.is_due(step, total)
                if step % options.log_every == 0 or step == total or measures:
                    row = self._row(step, results, norm, counts) | clock.read()
                    if measures:
                        row |= self.evaluation.measure(step, total)
                        clock.leave_out()
                    self.world.together(partial(log.write, row))
                bar.update(row)
                is_best = measures and best.improves(row)
                if step == total or is_best or _divides(options.save_every, step):
                    keep.save(step)
                if is_best:
                    keep.mark_best(step, best.measured())
                profiler.step()
            if steps.stopped:
                keep.save(steps.done)
                raise stopped_by(steps.stopped, steps.done)
        return TrainSummary(total, keep.skipped, keep.non_finite, row)

    def _count(self, step: int, batches: Sequence[Batch]) -> StepCounts:
        """What the step covers, over all ranks; stops at too many damaged documents."""
        left, length = self.loader.take_skipped(), self.config.loss.ttt_length
        counts = count_step(batches, ttt_length=length, skipped=left, world=self.world)
        self.left_out.add(self.schedule.epoch_of(step - 1), counts.skipped_documents)
        return counts

    def _rate(self, step: int) -> float:
        return rate_of(self.config.train, step, total_steps=self.schedule.total_steps)

    def _update(self, step: int) -> None:
        """One step of the optimizer on the gradients' clipped sum."""
        set_learning_rate(self.optimizer, self._rate(step))
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def _leave_out(self, step: int, counts: StepCounts) -> StepCounts:
        """Names the documents of a step that is not finite and counts it; no row has a loss."""
        self.keep.non_finite += 1
        self.gradients.name_non_finite(step, self.loader, counts)
        refuse_too_many(self.keep.non_finite, self.config.train.max_non_finite_steps)
        return without_loss(counts)

    def _row(
        self, step: int, results: Sequence[StepResult], norm: float, counts: StepCounts
    ) -> dict[str, Any]:
        """A row of metrics.jsonl; nulls for a step that moved no weight. norm: before clipping."""
        moved, length = counts.has_loss, self.config.loss.ttt_length
        sums = _sum_results(results if moved else (), length, self.world)
        return {
            "step": step,
            "epoch": self.schedule.epoch_of(step - 1),
            "lr": self._rate(step),
            **metrics_row(sums, counts, decay=self.config.loss.loss_decay),
            "grad_norm": norm if moved else None,
            "skipped_steps": self.keep.skipped,
            "non_finite_steps": self.keep.non_finite,
            "skipped_documents": self.left_out.total,
        }


def _divides(every: int, step: int) -> bool:
    return every > 0 and step % every == 0


def _loader(
    config: Config, documents: Documents, schedule: Schedule, model: Eagle3Draft, layout: Layout
) -> BatchLoader:
    # A target that computes features while training cannot be forked into loader processes.
    workers = 0 if config.data.online else config.data.num_workers
    if workers != config.data.num_workers:
        logger.info("online: batches are made in the training process, num_workers has no effect")
    return BatchLoader(
        documents,
        schedule,
        plan_settings(config, model, layout),
        rank=layout.data_rank,
        num_workers=workers,
        group=layout.sequence,
    )


class _Gradients:
    """Gradients of optimizer steps, summed over micro-batches and ranks."""

    def __init__(
        self,
        config: Config,
        model: Eagle3Draft,
        teacher: Teacher,
        layout: Layout,
        world: World,
    ) -> None:
        """With parallel.fsdp this splits the model's weights: before an optimizer is built."""
        self._config, self._model, self._teacher = config, model, teacher
        self._layout, self._world = layout, world
        self._settings = step_settings(config)
        self._reducer = make_reducer(
            model, world, early=row_only_parameters(model), fsdp=config.parallel.fsdp
        )

    def of(self, batches: Sequence[Batch], counts: StepCounts) -> tuple[list[StepResult], float]:
        """Results of these micro-batches, and the norm of their gradients' sum over ranks.

        The sum is left in the model, scaled down to max_grad_norm. Without a loss on any rank
        nothing is run: [], 0.
        """
        if not counts.has_loss:
            return [], 0.0
        self._reducer.begin()
        results = [
            self._run(batch, counts, self._reducer.rows_done if n == len(batches) else None)
            for n, batch in enumerate(batches, start=1)
        ]
        if not batches:
            self._reducer.rows_done()
        self._reducer.finish()
        return results, float(clip_gradients(self._model, self._config.train.max_grad_norm))

    def whole(self) -> AbstractContextManager[None]:
        """Whole weights outside of a step; collective."""
        return self._reducer.whole()

    def name_non_finite(self, step: int, loader: BatchLoader, counts: StepCounts) -> None:
        """Logs whose loss or gradient it was; the model's gradients are zero afterwards."""
        clear_gradients(self._model)
        with self.whole():
            name_documents(
                step,
                loader.documents(),
                model=self._model,
                run=lambda batch: self._run(batch, counts, None),
                world=self._world,
                group=self._layout.sequence,
            )

    def _run(
        self, batch: Batch, counts: StepCounts, after_rows: Callable[[], None] | None
    ) -> StepResult:
        return ttt_step(
            self._model,
            batch,
            teacher=self._teacher,
            denominators=_denominators(counts, self._config.loss.loss_denominator),
            settings=self._settings,
            layout=self._layout,
            after_rows=after_rows,
        )


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
