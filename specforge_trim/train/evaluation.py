"""Evaluation while training: held-out documents as training sees them, and real decoding.

    eval/...     the metrics of training on documents it does not train on, without gradients
    decode/...   what speculative decoding of prompts measures; whoever has the target hands in how

Both are the same numbers on every rank, and neither changes what training does next: weights,
gradients, optimizer and random state stay as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, fields
from typing import Any, Protocol

import torch
from torch import Tensor

from specforge_trim.drafts.eagle3.model import Eagle3Draft
from specforge_trim.drafts.eagle3.settings import Config
from specforge_trim.drafts.eagle3.step import StepResult, ttt_metrics
from specforge_trim.loss.teacher import Teacher
from specforge_trim.ranks.layout import Layout
from specforge_trim.ranks.world import World
from specforge_trim.train.loader import BatchLoader, Documents
from specforge_trim.train.metrics import StepCounts, count_step, metrics_row
from specforge_trim.train.sampler import Schedule
from specforge_trim.train.settings import plan_settings, step_settings


class Decoder(Protocol):
    """Decodes prompts with a draft of whole weights; every rank calls it and gets all counts."""

    def __call__(self, draft: Eagle3Draft) -> Mapping[str, float | None]: ...


@dataclass(frozen=True)
class HeldOut:
    """What is measured while training. documents, lengths: None and () without eval_every;
    decoder: None without decode_every."""

    documents: Documents | None = None
    lengths: Sequence[int] = ()
    decoder: Decoder | None = None


class Evaluation:
    """Measures the draft as it stands, at the steps that the settings name."""

    def __init__(
        self,
        config: Config,
        held_out: HeldOut,
        *,
        model: Eagle3Draft,
        teacher: Teacher,
        layout: Layout,
        world: World,
        whole: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """whole: makes the model's weights whole where ranks share them; collective."""
        self._config, self._model, self._teacher = config, model, teacher
        self._held_out, self._layout, self._world = held_out, layout, world
        self._whole = whole

    @property
    def best_by(self) -> str | None:
        """The value that the best checkpoint is chosen by; None when nothing is measured."""
        if self._held_out.decoder is not None:
            return "decode/acceptance_length"
        return None if self._held_out.documents is None else "eval/acceptance_length"

    def is_due(self, step: int, total: int) -> bool:
        return self._forced_due(step, total) or self._decoding_due(step, total)

    def measure(self, step: int, total: int) -> dict[str, Any]:
        """What is due after optimizer step `step`, for its row; reached by every rank."""
        values: dict[str, Any] = {}
        with undisturbed(self._model), self._whole():
            if self._forced_due(step, total):
                values |= self._teacher_forced()
            if self._held_out.decoder is not None and self._decoding_due(step, total):
                values |= self._held_out.decoder(self._model)
        return values

    def _forced_due(self, step: int, total: int) -> bool:
        every = self._config.evaluate.eval_every if self._held_out.documents is not None else 0
        return every > 0 and (step % every == 0 or step == total)

    def _decoding_due(self, step: int, total: int) -> bool:
        every = self._config.evaluate.decode_every if self._held_out.decoder is not None else 0
        return every > 0 and (step % every == 0 or step == total)

    def _teacher_forced(self) -> dict[str, Any]:
        """eval/...: metrics over all held-out documents, each seen once."""
        steps, settings = self._config.loss.ttt_length, step_settings(self._config)
        sums = torch.zeros(len(fields(StepResult)), steps, dtype=torch.float64)
        sums, total = sums.to(self._world.device), _no_counts(steps)
        loader = self._loader()
        for batches in loader.steps(0):
            # Ranks meet at every batch here, so that none waits long for another.
            total = _added(
                total,
                count_step(
                    batches, ttt_length=steps, skipped=loader.take_skipped(), world=self._world
                ),
            )
            for batch in batches:
                result = ttt_metrics(
                    self._model,
                    batch,
                    teacher=self._teacher,
                    settings=settings,
                    layout=self._layout,
                )
                sums += _stacked(result)
        row = metrics_row(self._world.sum(sums).cpu(), total, decay=self._config.loss.loss_decay)
        row = {f"eval/{key}": value for key, value in row.items() if not key.startswith("perf/")}
        return row | {"eval/skipped_documents": total.skipped_documents}

    def _loader(self) -> BatchLoader:
        assert self._held_out.documents is not None
        schedule = Schedule(
            lengths=tuple(self._held_out.lengths),
            tokens_per_batch=self._config.data.tokens_per_batch,
            seed=0,
            epochs=1,
            world_size=self._layout.data_size,
        )
        return BatchLoader(
            self._held_out.documents,
            schedule,
            plan_settings(self._config, self._model, self._layout),
            rank=self._layout.data_rank,
            num_workers=0,
            group=self._layout.sequence,
        )


class Best:
    """The highest value of one metric so far; a run without such a metric has none."""

    def __init__(self, key: str | None, before: Mapping[str, Any]) -> None:
        """before: what the best checkpoint on disk was chosen by."""
        self.key = key
        self._value = -math.inf if key is None else float(before.get(key, -math.inf))

    def improves(self, row: Mapping[str, Any] | None) -> bool:
        """Whether a row has a higher value, which then is the one to beat."""
        value = None if row is None or self.key is None else row.get(self.key)
        if value is None or not value > self._value:
            return False
        self._value = value
        return True

    def measured(self) -> dict[str, float]:
        assert self.key is not None
        return {self.key: self._value}


@contextmanager
def undisturbed(model: torch.nn.Module) -> Iterator[None]:
    """Evaluation mode inside; training mode and the random state as before afterwards."""
    was_training = model.training
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        model.eval()
        try:
            yield
        finally:
            model.train(was_training)


def _stacked(result: StepResult) -> Tensor:
    return torch.stack([getattr(result, f.name) for f in fields(StepResult)]).double()


def _no_counts(steps: int) -> StepCounts:
    return StepCounts(0.0, torch.zeros(steps, dtype=torch.float64), 0.0, 0.0, 0.0, 0.0, 0)


def _added(a: StepCounts, b: StepCounts) -> StepCounts:
    return StepCounts(*(getattr(a, f.name) + getattr(b, f.name) for f in fields(StepCounts)))
