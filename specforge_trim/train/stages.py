"""The two-stage training step: context stage, row stage, context backward.

    context stage      step-0 keys and values of the tokens some kept row attends to, and the
                       step-0 input g^0 of kept rows; cut off from the graph as leaves
    row stage          chunks of kept rows, each on its own: K steps, losses, backward at once;
                       the leaves' gradients add up
    context backward   from the leaves' gradients into fc, k, v and the input norms, recomputed
                       chunk by chunk

Rows are independent given K0/V0 and the loss is a sum over rows with denominators known from
the plan, so this is exact. Peak memory is that of one row chunk; what grows with the context is
K0/V0 and their gradients.

Letters: T tokens, R rows, D draft width, Dt target width, A aux layers, M key/value heads, H
head dim, K ttt_length.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from ..attention.context_kv import ContextKV, GatheredKV
from ..attention.reference import ReferenceKV
from ..attention.rows import row_attention
from ..model.draft import Eagle3Draft
from ..objective.linear_soft_ce import LossMetrics, linear_soft_ce
from ..objective.teacher import Teacher, TeacherTable
from ..plan.segments import ChunkStep, RowChunk

if TYPE_CHECKING:
    from .batch import Batch


@dataclass(frozen=True)
class StepSettings:
    """How a training step computes.

    backend: where row attention's context side runs. decay: step i's loss counts decay^i.
    compute_dtype: activations and matrix products; weights and their gradients keep their own.
    context_chunk: tokens of the context stage computed at once.
    """

    backend: Literal["reference", "sdpa"] = "sdpa"
    decay: float = 0.8
    compute_dtype: torch.dtype = torch.float32
    context_chunk: int = 4096


@dataclass(frozen=True)
class StepResult:
    """Sums over the loss rows of each step, tensors [K]; see LossMetrics for their meaning."""

    loss: Tensor
    correct: Tensor
    accept: Tensor
    accept_in_vocab: Tensor
    in_vocab: Tensor


@dataclass(frozen=True)
class _ContextChunk:
    """Some tokens of the context stage, and which kept rows lie among them.

    tokens: int64 [n], absolute positions, ascending. ranges: the same as [lo, hi) pairs.
    rows: slice of R_0. row_index: their positions inside `tokens`.
    """

    tokens: Tensor
    ranges: tuple[tuple[int, int], ...]
    rows: slice
    row_index: Tensor


def ensure_gradients(model: torch.nn.Module) -> None:
    """Give every trainable parameter a gradient of zero where it has none.

    A batch without supervised rows then still takes part in every reduction.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def ttt_step(
    model: Eagle3Draft,
    batch: Batch,
    *,
    teacher: Teacher,
    denominators: Tensor,
    settings: StepSettings,
) -> StepResult:
    """Add one micro-batch's gradients to the parameters' `.grad`.

    Args:
        model: the draft; parameters of any float dtype.
        batch: a packed stream with its plan, on the CPU or on the model's device.
        teacher: the target's head, on the model's device, in the compute dtype.
        denominators: [K], what each step's loss is divided by: rows or supervised rows, summed
            over ranks and accumulated micro-batches (ttt-math: denominators).
        settings: see StepSettings.

    Returns:
        Metric sums per TTT step on the model's device; nothing is read back here.
    """
    ensure_gradients(model)
    stage = _Stage(model, batch, teacher=teacher, denominators=denominators, settings=settings)
    if batch.chunks:
        context_chunks = list(_context_chunks(batch, settings.context_chunk))
        stage.context_forward(context_chunks)
        for chunk in batch.chunks:
            stage.row_chunk(chunk)
        stage.context_backward(context_chunks)
    return stage.result()


def _context_chunks(batch: Batch, size: int) -> Iterator[_ContextChunk]:
    """Live tokens (each document's prefix that kept rows attend to) in groups of about `size`."""
    starts = batch.cu_seqlens[:-1].tolist()
    lengths = batch.pack.context_len.tolist()
    rows = batch.pack.steps[0].rows
    group: list[tuple[int, int]] = []
    held = 0

    def emit() -> _ContextChunk:
        tokens = torch.cat([torch.arange(a, b) for a, b in group])
        edges = torch.tensor([group[0][0], group[-1][1]])
        first, last = torch.searchsorted(rows, edges).tolist()
        index = torch.searchsorted(tokens, rows[first:last])
        return _ContextChunk(tokens, tuple(group), slice(first, last), index)

    for start, length in zip(starts, lengths, strict=True):
        a, end = start, start + length
        while a < end:
            b = min(end, a + size - held)
            group.append((a, b))
            held += b - a
            a = b
            if held == size:
                yield emit()
                group, held = [], 0
    if group:
        yield emit()


class _Stage:
    """The state of one training step: leaves, their gradients, and metric sums."""

    def __init__(
        self,
        model: Eagle3Draft,
        batch: Batch,
        *,
        teacher: Teacher,
        denominators: Tensor,
        settings: StepSettings,
    ) -> None:
        self.model, self.batch, self.teacher, self.settings = model, batch, teacher, settings
        self.device = model.fc.weight.device
        self.dtype = settings.compute_dtype
        steps = batch.pack.ttt_length
        work = torch.float64 if self.dtype == torch.float64 else torch.float32
        self.input_ids = self._put(batch.input_ids)
        self.position_ids = self._put(batch.position_ids)
        self.doc_end = self._put(batch.doc_end)
        decay = settings.decay ** torch.arange(steps, dtype=work)
        # max(1): a step without loss rows anywhere has nothing to divide.
        self.scales = self._put(decay) / self._put(denominators).to(work).clamp(min=1)
        self.sums = torch.zeros(5, steps, dtype=work, device=self.device)
        self.context: ContextKV
        self.g0: Tensor
        self.d_g0: Tensor

    def _put(self, x: Tensor) -> Tensor:
        return x.to(self.device, non_blocking=True)

    def result(self) -> StepResult:
        return StepResult(*self.sums.unbind())

    # --- context stage --------------------------------------------------------------------

    def _next_ids(self, rows: Tensor, offset: int) -> Tensor:
        """Token t + offset of rows t; past the document's end a filler, token 0."""
        index = rows + offset
        inside = index < self.doc_end[rows]
        last = self.input_ids.shape[0] - 1
        return torch.where(inside, self.input_ids[index.clamp(max=last)], 0)

    def _context_inputs(self, chunk: _ContextChunk) -> tuple[Tensor, Tensor, Tensor]:
        """g^0 [n, D], k and v [n, M, H] of a chunk's tokens."""
        tokens = self._put(chunk.tokens)
        parts = [self.batch.aux(a, b) for a, b in chunk.ranges]
        aux = parts[0] if len(parts) == 1 else torch.cat(parts)
        aux = aux.to(self.device, self.dtype, non_blocking=True)
        g0 = self.model.project_aux(aux)
        embedding = self.model.embed(self._next_ids(tokens, 1))
        k, v = self.model.key_value(embedding, g0, self.position_ids[tokens])
        return g0, k, v

    @torch.no_grad()
    def context_forward(self, chunks: list[_ContextChunk]) -> None:
        config, total = self.model.config, self.input_ids.shape[0]
        shape = (total, config.num_key_value_heads, config.head_dim)
        # Tokens outside the live prefixes stay zero: the reference multiplies them by weight 0.
        k0 = torch.zeros(shape, dtype=self.dtype, device=self.device)
        v0 = torch.zeros_like(k0)
        rows = self.batch.pack.steps[0].rows.shape[0]
        self.g0 = torch.empty(rows, config.hidden_size, dtype=self.dtype, device=self.device)
        self.d_g0 = torch.empty_like(self.g0)
        for chunk in chunks:
            g0, k, v = self._context_inputs(chunk)
            done = 0
            for a, b in chunk.ranges:
                k0[a:b], v0[a:b] = k[done : done + b - a], v[done : done + b - a]
                done += b - a
            self.g0[chunk.rows] = g0.index_select(0, self._put(chunk.row_index))
        self.context = self._make_context(k0, v0)

    def _make_context(self, k0: Tensor, v0: Tensor) -> ContextKV:
        if self.settings.backend == "sdpa":
            return GatheredKV(k0, v0)
        if self.settings.backend == "reference":
            cu = self.batch.cu_seqlens
            doc_start = torch.repeat_interleave(cu[:-1], cu.diff())
            return ReferenceKV(k0, v0, doc_start=self._put(doc_start))
        raise ValueError(
            f"attention_backend={self.settings.backend!r}: expected reference or sdpa"
        )

    def context_backward(self, chunks: list[_ContextChunk]) -> None:
        for chunk in chunks:
            with torch.enable_grad():
                g0, k, v = self._context_inputs(chunk)
                g0_rows = g0.index_select(0, self._put(chunk.row_index))
            dk = torch.cat([self.context.dk[a:b] for a, b in chunk.ranges]).to(k.dtype)
            dv = torch.cat([self.context.dv[a:b] for a, b in chunk.ranges]).to(v.dtype)
            torch.autograd.backward((k, v, g0_rows), (dk, dv, self.d_g0[chunk.rows]))

    # --- row stage ------------------------------------------------------------------------

    def row_chunk(self, chunk: RowChunk) -> None:
        """Run one chunk of rows through its steps, losses and backward."""
        chunk = chunk.to(self.device, non_blocking=True)
        first, last = chunk.steps[0].row_slice
        a, b = chunk.teacher_slice
        with torch.no_grad():
            last_hidden = self.batch.teacher_hidden[a:b]
            table = self.teacher.table(last_hidden.to(self.device, self.dtype, non_blocking=True))
        leaf = self.g0[first:last].detach().requires_grad_()
        with torch.enable_grad():
            total = self._unroll(chunk, leaf, table)
            total.backward()
        assert leaf.grad is not None
        self.d_g0[first:last] = leaf.grad

    def _unroll(self, chunk: RowChunk, fed: Tensor, table: TeacherTable) -> Tensor:
        """The chunk's total loss, from its step-0 inputs [R_0, D]."""
        model = self.model
        keys: list[Tensor] = []
        values: list[Tensor] = []
        # A dense chunk without loss rows is still run whole, as the full computation does.
        total = torch.zeros((), dtype=self.scales.dtype, device=self.device)
        output = fed
        for i, step in enumerate(chunk.steps):
            if step.carry_index is not None:
                fed = fed.index_select(0, step.carry_index)
            embedding = model.embed(self._next_ids(step.rows, 1 + i))
            positions = self.position_ids[step.rows] + i
            if i == 0:
                q = model.query(embedding, fed, positions)
            else:
                q, k, v = model.query_key_value(embedding, fed, positions)
                keys.append(k)
                values.append(v)
            attended = row_attention(q, self.context, step, keys=keys, values=values)
            output = model.finish(fed, attended)
            fed = model.feedback(output)
            if step.loss_index.shape[0]:
                total = total + self._loss(i, step, output, fed, table)
        return total + output.sum().to(total.dtype) * 0

    def _loss(
        self, i: int, step: ChunkStep, output: Tensor, fed: Tensor, table: TeacherTable
    ) -> Tensor:
        """Step i's scaled loss of a chunk's loss rows; adds their metric sums."""
        model, index = self.model, step.loss_index
        if model.config.norm_output:
            hidden = fed.index_select(0, index)  # already normed: the tensor the head sees
        else:
            hidden = model.final_norm(output.index_select(0, index))
        weights = self.batch.loss_weights
        a, b = step.loss_slice
        loss, metrics = linear_soft_ce(
            hidden,
            model.lm_head.weight,
            table,
            step.teacher_index,
            scale=self.scales[i],
            draft_to_target=self.teacher.draft_to_target,
            row_weight=None if weights is None else self._put(weights[i][a:b]),
            weight_grad=model.lm_head.weight.grad,
        )
        self.sums[:, i] += _stack(metrics)
        return loss


def _stack(metrics: LossMetrics) -> Tensor:
    return torch.stack(
        (
            metrics.loss,
            metrics.correct,
            metrics.accept,
            metrics.accept_in_vocab,
            metrics.in_vocab,
        )
    ).detach()
