"""The two-stage training step: context stage, row stage, context backward.

    context stage      step-0 keys and values of the tokens some kept row attends to, and the
                       step-0 input of kept rows; cut off from the graph as leaves
    row stage          chunks of kept rows, each on its own: K steps, losses, backward at once;
                       the leaves' gradients add up
    context backward   from the leaves' gradients into fc, k, v and the input norms, recomputed
                       chunk by chunk

Rows are independent given K0/V0 and the loss is a sum over rows with denominators known from
the plan, so this is exact. Peak memory is that of one row chunk; what grows with the context is
K0/V0 and their gradients.

Letters: T tokens, R rows, D draft width, K ttt_length.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from specforge_trim.attention.backends import select_kernel
from specforge_trim.attention.context_kv import ContextKV, GatheredKV
from specforge_trim.attention.reference import ReferenceKV
from specforge_trim.attention.rows import row_attention
from specforge_trim.attention.shared_kv import GatheredOverRanks, SplitKV
from specforge_trim.config.objective import Objective
from specforge_trim.drafts.eagle3.context_stage import ContextStage, StreamInputs
from specforge_trim.drafts.eagle3.model import Eagle3Draft
from specforge_trim.loss.linear_loss import SOFT_CE, LossMetrics, linear_loss
from specforge_trim.loss.teacher import Teacher, TeacherTable
from specforge_trim.plan.segments import ChunkStep, RowChunk
from specforge_trim.ranks.gradients import ensure_gradients
from specforge_trim.ranks.layout import ALONE, Layout

if TYPE_CHECKING:
    from specforge_trim.drafts.eagle3.batch import Batch


@dataclass(frozen=True)
class StepSettings:
    """How a training step computes.

    backend: where row attention's context side runs. max_keys: most context keys of one kernel
    call, None = no limit. decay: step i's loss counts decay^i. objective: what is minimised.
    compute_dtype: activations and matrix products; weights and their gradients keep their own.
    context_chunk: tokens of the context stage computed at once.
    """

    backend: Literal["reference", "sdpa", "fa"] = "sdpa"
    max_keys: int | None = 65536
    decay: float = 0.8
    objective: Objective = SOFT_CE
    compute_dtype: torch.dtype = torch.float32
    context_chunk: int = 4096


@dataclass(frozen=True)
class StepResult:
    """Sums over the loss rows of each step, tensors [K]; see LossMetrics for the first five.

    reached: rows that emit loss at all of steps 0..i and were right at 0..i-1;
    reached_correct: those that are right at step i too.
    """

    loss: Tensor
    correct: Tensor
    accept: Tensor
    accept_in_vocab: Tensor
    in_vocab: Tensor
    reached: Tensor
    reached_correct: Tensor


def ttt_step(
    model: Eagle3Draft,
    batch: Batch,
    *,
    teacher: Teacher,
    denominators: Tensor,
    settings: StepSettings,
    layout: Layout = ALONE,
    after_rows: Callable[[], None] | None = None,
) -> StepResult:
    """Add one micro-batch's gradients to the parameters' `.grad`.

    With a layout whose ranks share sequences, all of them call this with their shards of one
    batch; the gradients' sum over them is the batch's.

    Args:
        model: the draft; parameters of any float dtype.
        batch: a packed stream with its plan, on the CPU or on the model's device.
        teacher: the target's head, on the model's device, in the compute dtype.
        denominators: [K], what each step's loss is divided by: rows or supervised rows, summed
            over ranks and accumulated micro-batches (ttt-math: denominators).
        settings: see StepSettings.
        layout: the ranks that share the batch's sequence.
        after_rows: called when the gradients of the row-only weights are complete.

    Returns:
        Metric sums per TTT step on the model's device; nothing is read back here.

    Raises:
        ValueError: a draft of several layers whose context keys would stay split over ranks.
    """
    if layout.splits_context and model.config.num_hidden_layers > 1:
        raise ValueError(
            "context keys that stay split over ranks work for drafts of one layer, this one has "
            f"{model.config.num_hidden_layers}: gather them (sp_context = 'gathered')"
        )
    ensure_gradients(model)
    stream = _stream(batch, model.fc.weight.device)
    rows = _RowStage(model, batch, stream, teacher, denominators, settings)
    shard = batch.shard
    if batch.chunks if shard is None else not shard.is_empty:
        # Reached by all ranks of a shared sequence or by none: a shard knows of all rows.
        context = _context_stage(model, batch, stream, settings, layout)
        context.forward()
        for chunk in batch.chunks:
            rows.run(chunk, context)
        if after_rows is not None:
            after_rows()
        context.backward()
    elif after_rows is not None:
        after_rows()
    return StepResult(*rows.sums.unbind())


@torch.no_grad()
def ttt_metrics(
    model: Eagle3Draft,
    batch: Batch,
    *,
    teacher: Teacher,
    settings: StepSettings,
    layout: Layout = ALONE,
) -> StepResult:
    """The metric sums that `ttt_step` gives for a micro-batch; makes no gradient.

    Arguments as there. With a layout whose ranks share sequences, all of them call this.
    """
    stream = _stream(batch, model.fc.weight.device)
    ones = torch.ones(batch.pack.ttt_length)
    rows = _RowStage(model, batch, stream, teacher, ones, settings)
    if batch.chunks if batch.shard is None else not batch.shard.is_empty:
        context = _context_stage(model, batch, stream, settings, layout)
        context.forward()
        for chunk in batch.chunks:
            rows.measure(chunk, context)
    return StepResult(*rows.sums.unbind())


def _stream(batch: Batch, device: torch.device) -> StreamInputs:
    parts = (batch.input_ids, batch.position_ids, batch.doc_end)
    return StreamInputs(*(x.to(device, non_blocking=True) for x in parts))


def _context_stage(
    model: Eagle3Draft,
    batch: Batch,
    stream: StreamInputs,
    settings: StepSettings,
    layout: Layout,
) -> ContextStage:
    return ContextStage(
        model,
        batch,
        stream,
        dtype=settings.compute_dtype,
        chunk_tokens=settings.context_chunk,
        make_context=_context_maker(batch, settings, stream.ids.device, layout),
        group=layout.sequence,
    )


def _context_maker(
    batch: Batch, settings: StepSettings, device: torch.device, layout: Layout
) -> Callable[[Tensor, Tensor], ContextKV]:
    """(k0, v0) of this rank's tokens -> the home of a layer's context keys."""
    make: Callable[[Tensor, Tensor], ContextKV]
    if settings.backend == "reference":
        cu = batch.cu_seqlens
        doc_start = torch.repeat_interleave(cu[:-1], cu.diff())
        doc_start = doc_start.to(device, non_blocking=True)
        make = functools.partial(ReferenceKV, doc_start=doc_start)
    else:
        kernel = select_kernel(settings.backend, device=device, dtype=settings.compute_dtype)
        make = functools.partial(GatheredKV, kernel=kernel, max_keys=settings.max_keys)
        if layout.splits_context:
            return functools.partial(
                SplitKV,
                ulysses=layout.ulysses,
                ring=layout.ring,
                kernel=kernel,
                max_keys=settings.max_keys,
            )
    if layout.sequence is None:
        return make
    return functools.partial(GatheredOverRanks, group=layout.sequence, make_local=make)


class _RowStage:
    """Row chunks, each through its K steps, losses and backward; metric sums add up."""

    def __init__(
        self,
        model: Eagle3Draft,
        batch: Batch,
        stream: StreamInputs,
        teacher: Teacher,
        denominators: Tensor,
        settings: StepSettings,
    ) -> None:
        self.model, self.batch, self.stream, self.teacher = model, batch, stream, teacher
        self.device, self.dtype = stream.ids.device, settings.compute_dtype
        self.objective = settings.objective
        steps = batch.pack.ttt_length
        work = torch.float64 if self.dtype == torch.float64 else torch.float32
        decay = settings.decay ** torch.arange(steps, dtype=work)
        # max(1): a step without loss rows anywhere has nothing to divide.
        self.scales = self._put(decay) / self._put(denominators).to(work).clamp(min=1)
        self.sums = torch.zeros(7, steps, dtype=work, device=self.device)  # StepResult's fields

    def _put(self, x: Tensor) -> Tensor:
        return x.to(self.device, non_blocking=True)

    def run(self, chunk: RowChunk, context: ContextStage) -> None:
        """Run one chunk of rows; its gradients are complete when this returns."""
        chunk = chunk.to(self.device, non_blocking=True)
        first, last = chunk.steps[0].row_slice
        table = self._table(chunk)
        leaf = context.row_inputs[first:last].detach().requires_grad_()
        with torch.enable_grad():
            self._unroll(chunk, leaf, table, context.contexts).backward()
        assert leaf.grad is not None
        context.d_row_inputs[first:last] = leaf.grad

    def measure(self, chunk: RowChunk, context: ContextStage) -> None:
        """Add one chunk's metric sums; under no_grad."""
        chunk = chunk.to(self.device, non_blocking=True)
        first, last = chunk.steps[0].row_slice
        self._unroll(chunk, context.row_inputs[first:last], self._table(chunk), context.contexts)

    @torch.no_grad()
    def _table(self, chunk: RowChunk) -> TeacherTable:
        """The teacher's distributions of a chunk's supervised rows."""
        a, b = chunk.teacher_slice
        return self.teacher.table(
            self.batch.teacher_hidden[a:b].to(self.device, self.dtype, non_blocking=True),
            log_probs=self.objective.reads_log_probs,
        )

    def _unroll(
        self, chunk: RowChunk, x: Tensor, table: TeacherTable, contexts: list[ContextKV]
    ) -> Tensor:
        """The chunk's total loss, from the last layer's step-0 inputs [R_0, D]."""
        model = self.model
        layers = model.stack
        keys: list[list[Tensor]] = [[] for _ in layers]
        values: list[list[Tensor]] = [[] for _ in layers]
        total = torch.zeros((), dtype=self.scales.dtype, device=self.device)
        streak = total.new_ones(x.shape[0])  # 1: a loss row at every earlier step, and right
        for i, step in enumerate(chunk.steps):
            if step.carry_index is not None:
                x = x.index_select(0, step.carry_index)
                streak = streak.index_select(0, step.carry_index)
            embedding = model.embed(self.stream.next_ids(step.rows, 1 + i))
            cos, sin = model.rotary.cos_sin(self.stream.positions[step.rows] + i, x.dtype)
            # At step 0 the lower layers have run in the context stage, and so has k/v.
            for n in range(len(layers) - 1 if i == 0 else 0, len(layers)):
                z = layers[n].inputs(embedding, x)
                q = layers[n].query(z, cos, sin)
                if i > 0:
                    k, v = layers[n].key_value(z, cos, sin)
                    keys[n].append(k)
                    values[n].append(v)
                attended = row_attention(q, contexts[n], step, keys=keys[n], values=values[n])
                x = layers[n].finish(x, attended)
            output, x = x, model.feedback(x)
            reached, streak = streak, torch.zeros_like(streak)
            if step.loss_index.shape[0]:
                loss, right = self._loss(i, step, output, x, table)
                total = total + loss
                reached = reached.index_select(0, step.loss_index)
                if (counts := self._weights(i, step)) is not None:
                    reached = reached * counts
                streak.index_copy_(0, step.loss_index, reached * right)
                self.sums[5:, i] += torch.stack((reached.sum(), streak.sum()))
        # A dense chunk without loss rows is still run whole, as the full computation does.
        return total + output.sum().to(total.dtype) * 0

    def _loss(
        self, i: int, step: ChunkStep, output: Tensor, fed: Tensor, table: TeacherTable
    ) -> tuple[Tensor, Tensor]:
        """Step i's scaled loss of a chunk's n loss rows, and bool [n], which are right.

        Adds their metric sums.
        """
        model, index = self.model, step.loss_index
        if model.config.norm_output:
            hidden = fed.index_select(0, index)  # already normed: the tensor the head sees
        else:
            hidden = model.final_norm(output.index_select(0, index))
        head, trains = model.lm_head.weight, torch.is_grad_enabled()
        loss, metrics = linear_loss(
            hidden,
            head if trains else head.detach(),
            table,
            step.teacher_index,
            scale=self.scales[i],
            objective=self.objective,
            row_weight=self._weights(i, step),
            weight_grad=head.grad if trains else None,
        )
        self.sums[:5, i] += _stack(metrics)
        return loss, metrics.right

    def _weights(self, i: int, step: ChunkStep) -> Tensor | None:
        """0 or 1 per loss row of a chunk, where not every one of them counts."""
        weights = self.batch.loss_weights
        a, b = step.loss_slice
        return None if weights is None else self._put(weights[i][a:b])


def _stack(m: LossMetrics) -> Tensor:
    return torch.stack((m.loss, m.correct, m.accept, m.accept_in_vocab, m.in_vocab)).detach()
