"""A training step of a dense language model: gradients of one packed micro-batch.

    loss = label_weight / n * sum_r - log q_r(x_r+1) + distill_weight / n * sum_r L(p_r, q_r)

over the n rows whose loss counts, over all ranks and accumulated micro-batches. p_r is the
target's distribution at the same row, L the objective (loss/divergences.py).

Letters: T tokens, R head rows, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from specforge_trim.config.objective import Objective
from specforge_trim.drafts.lm.layers import RowSparseSettings, hidden_states
from specforge_trim.loss.labels import kept_log_probs, label_loss
from specforge_trim.loss.linear_loss import linear_loss
from specforge_trim.loss.products import work_dtype
from specforge_trim.loss.teacher import Teacher
from specforge_trim.ranks.gradients import ensure_gradients
from specforge_trim.train.lm_batch import LmBatch

# Rows of a teacher's table [rows, V] in elements: 64 MB in fp32 on a CPU, 1 GB.
TABLE_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}


@dataclass(frozen=True)
class LmStepSettings:
    """How a step computes; see the settings of the same names."""

    row_sparse: RowSparseSettings
    label_weight: float = 1.0
    distill_weight: float = 0.0
    objective: Objective = Objective()
    chunk_tokens: int = 8192
    compute_dtype: torch.dtype = torch.float32


@dataclass(frozen=True)
class SoftTargets:
    """A larger model that says what it would have predicted at the same rows.

    decoder: its layers, without the head; teacher: its head over the whole vocabulary.
    """

    decoder: nn.Module
    teacher: Teacher

    @torch.no_grad()
    def states(self, batch: LmBatch, rows: Tensor) -> Tensor:
        """Final hidden states [R, Dt] of the rows; the model runs each document on its own."""
        device = next(self.decoder.parameters()).device
        edges = batch.cu_seqlens.tolist()
        parts = [
            self.decoder(
                input_ids=batch.input_ids[a:b].to(device, non_blocking=True)[None], use_cache=False
            ).last_hidden_state[0]
            for a, b in zip(edges[:-1], edges[1:], strict=True)
        ]
        return torch.cat(parts).index_select(0, rows)


@dataclass(frozen=True)
class LmResult:
    """Sums over rows whose loss counts, 0-dim; divide after any reduction over ranks.

    label_loss: - log q of the data's tokens (nats); correct: they are the first choice;
    distill_loss: the objective; accept: sum_v min(p_v, q_v). The last two are 0 without a target.
    """

    label_loss: Tensor
    correct: Tensor
    distill_loss: Tensor
    accept: Tensor

    @property
    def loss(self) -> Tensor:
        """Finite where both losses are."""
        return self.label_loss + self.distill_loss


def lm_step(
    model: Any,
    batch: LmBatch,
    *,
    num_loss_rows: Tensor | float,
    settings: LmStepSettings,
    targets: SoftTargets | None = None,
    learn: bool = True,
) -> LmResult:
    """Add one micro-batch's gradients to the parameters' `.grad`, or only measure.

    Args:
        model: set up by enable_row_sparse; weights of any float dtype.
        num_loss_rows: rows whose loss counts, over ranks and accumulated micro-batches.
        targets: needed where distill_weight is not 0; measured wherever they are given.
        learn: False runs no backward.
    """
    device = model.lm_head.weight.device
    put = lambda x: x.to(device, non_blocking=True)  # noqa: E731
    rows, labels = put(batch.head_rows), put(batch.labels)
    low = settings.compute_dtype == torch.bfloat16
    if learn:
        ensure_gradients(model)
    with torch.set_grad_enabled(learn):
        with torch.autocast(device.type, torch.bfloat16, enabled=low):
            hidden = hidden_states(
                model, put(batch.input_ids), put(batch.position_ids),
                batch.plan.to(device, non_blocking=True), settings=settings.row_sparse,
            )  # fmt: skip
        kept = hidden.index_select(0, rows)
        kept = kept.bfloat16() if low else kept
    work = work_dtype(kept.dtype)
    counts = put(torch.ones(rows.shape[0]) if batch.weights is None else batch.weights).to(work)
    unit = 1 / put(torch.as_tensor(num_loss_rows, dtype=work)).clamp(min=1)
    head = _Head(model, kept.detach().requires_grad_(learn), counts, unit, learn)
    log_sum, correct = head.labels(labels.index_select(0, rows), settings)
    distill, accept = torch.zeros_like(log_sum), torch.zeros_like(log_sum)
    if targets is not None:
        distill, accept = head.distill(targets, targets.states(batch, rows), settings)
    if learn:
        kept.backward(head.gradient())
    return LmResult(log_sum, correct, distill, accept)


class _Head:
    """Head and losses at R rows, cut off from the layers; gradients of both losses add up.

    hidden: leaf [R, D]. counts: [R], 1 where the row's loss counts. unit: what a row weighs.
    """

    def __init__(
        self, model: Any, hidden: Tensor, counts: Tensor, unit: Tensor, learn: bool
    ) -> None:
        self.hidden, self.counts, self.unit, self.learn = hidden, counts, unit, learn
        weight = model.lm_head.weight
        self.weight = weight if learn else weight.detach()
        # Where the head learns, its gradient is added at once: no second [V, D] exists.
        self.buffer = weight.grad if learn and weight.requires_grad else None
        self.every = torch.arange(hidden.shape[0], device=hidden.device)

    def gradient(self) -> Tensor:
        found = self.hidden.grad
        return torch.zeros_like(self.hidden) if found is None else found

    def labels(self, labels: Tensor, settings: LmStepSettings) -> tuple[Tensor, Tensor]:
        """Sums of - log q of the labels, and of rows where they are the first choice."""
        chunk = settings.chunk_tokens
        if self.learn and settings.label_weight:
            loss, rows = label_loss(
                self.hidden, self.weight, labels, self.every,
                row_scale=self.counts * self.unit * settings.label_weight, chunk_tokens=chunk,
                weight_grad=self.buffer,
            )  # fmt: skip
            loss.backward()
        else:
            with torch.no_grad():
                rows = kept_log_probs(
                    self.hidden, self.weight, labels, self.every, chunk_tokens=chunk
                )
        return -(rows.log_probs * self.counts).sum(), (rows.right * self.counts).sum()

    def distill(
        self, targets: SoftTargets, states: Tensor, settings: LmStepSettings
    ) -> tuple[Tensor, Tensor]:
        """Sums of the objective and of the acceptance; states: the target's at these rows."""
        device, work = self.hidden.device, work_dtype(self.hidden.dtype)
        states = states.to(self.hidden.dtype)
        sums = torch.zeros(2, dtype=work, device=device)
        learn = self.learn and settings.distill_weight > 0
        size = max(16, TABLE_ELEMENTS[device.type] // self.weight.shape[0])
        for a in range(0, self.hidden.shape[0], size):
            part = slice(a, a + size)
            with torch.no_grad():
                table = targets.teacher.table(
                    states[part], log_probs=settings.objective.reads_log_probs
                )
            loss, metrics = linear_loss(
                self.hidden[part] if learn else self.hidden[part].detach(),
                self.weight if learn else self.weight.detach(),
                table,
                self.every[: table.choice.shape[0]],
                scale=settings.distill_weight * self.unit,
                objective=settings.objective,
                row_weight=self.counts[part],
                weight_grad=self.buffer if learn else None,
            )
            if learn:
                loss.backward()
            sums += torch.stack((metrics.loss, metrics.accept)).detach()
        return sums[0], sums[1]
