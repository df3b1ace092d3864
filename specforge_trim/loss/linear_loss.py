"""Head and objective in one: logits of a block of rows live only inside the block.

    loss = scale * sum_r w_r * L(p_r, softmax(z_r)),   z = h W^T
    dz_r = scale * w_r * dL/dz_r,   dh = dz W,   dW = dz^T h,   all made in the forward

The soft cross-entropy is computed here, in place; the other objectives L in divergences.py.  A
row whose teacher argmax lies outside the draft vocabulary has w_r = 0.

Such a row still costs its logits, because the acceptance over all loss rows reads them; accuracy,
conditional accuracy and the in-vocabulary acceptance do not (it is wrong by definition).  Which
rows those are is known on the device only, and a step may not ask it, so they cannot be left out
of the products on the steps between two log lines either.  They cost what any row costs: 6 D Vd
FLOPs of the head; their share is 1 - coverage of the draft vocabulary.

Letters: n loss rows, b rows of a block, D draft width, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specforge_trim.config.objective import Objective
from specforge_trim.loss.divergences import Rows, evaluate
from specforge_trim.loss.products import add_product_, product
from specforge_trim.loss.teacher import TeacherTable

# A [b, Vd] buffer in elements: 16 and 256 MB in fp32. Soft cross-entropy holds two and part of a
# third, other objectives up to eight. Every block reads and writes the head's whole gradient,
# which a GPU has time for only once it has some thousand rows to multiply.
_BLOCK_ELEMENTS = {"cpu": 2**22, "cuda": 2**26}
_MIN_ROWS = 16
_PARTS = 4
SOFT_CE = Objective()


@dataclass(frozen=True)
class LossMetrics:
    """Sums over loss rows, 0-dim tensors; divide after any reduction over ranks.  And `right`.

    loss: the objective's value on in-vocabulary rows (nats). correct: draft argmax equals the
    teacher's full-vocabulary argmax. accept: sum_v min(full-vocabulary teacher, draft
    probability). accept_in_vocab and in_vocab: the same sum, and the row count, over
    in-vocabulary rows.
    right: bool [n], which rows `correct` counts (before row_weight).
    """

    loss: Tensor
    correct: Tensor
    accept: Tensor
    accept_in_vocab: Tensor
    in_vocab: Tensor
    right: Tensor


def linear_loss(
    hidden_nD: Tensor,
    weight: Tensor,
    table: TeacherTable,
    index_n: Tensor,
    *,
    scale: Tensor | float,
    objective: Objective = SOFT_CE,
    row_weight: Tensor | None = None,
    weight_grad: Tensor | None = None,
) -> tuple[Tensor, LossMetrics]:
    """Loss (0-dim, differentiable) and metric sums of n rows.

    Args:
        hidden_nD: [n, D], what the head reads.
        weight: [Vd, D], read in hidden's dtype.
        table, index_n: row r's teacher is table entry index_n[r]; with log_probs where
            objective.reads_log_probs.
        scale: decay^i / denominator; a 0-dim tensor keeps the device from being asked.
        objective: what is minimised.
        row_weight: [n], multiplies each row's loss and metrics; None = 1.
        weight_grad: buffer [Vd, D] that the head's gradient is added to at once, so that no step
            keeps one of its own. The caller then owes the loss a gradient of 1. None: through
            autograd.
    """
    loss, sums, right = _LinearLoss.apply(
        hidden_nD, weight, table, index_n, scale, objective, row_weight, weight_grad
    )
    summed, correct, accept, accept_in_vocab, in_vocab = sums.unbind()
    return loss, LossMetrics(summed, correct, accept, accept_in_vocab, in_vocab, right)


@dataclass(frozen=True)
class _Buffers:
    """z and p [b, Vd], and spare [b / _PARTS, Vd] for what is only summed over the vocabulary."""

    z: Tensor
    p: Tensor
    spare: Tensor

    @staticmethod
    def new(like: Tensor, rows: int) -> _Buffers:
        sizes = (rows, rows, -(-rows // _PARTS))
        return _Buffers(*like.new_empty(sum(sizes), like.shape[1]).split(sizes))

    def parts(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """(space for them, the same rows of each), a few rows at a time."""
        for some in zip(*(x.split(self.spare.shape[0]) for x in tensors), strict=True):
            yield self.spare[: some[0].shape[0]], *some


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        table: TeacherTable,
        index: Tensor,
        scale: Tensor | float,
        objective: Objective,
        row_weight: Tensor | None,
        weight_grad: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        count, work = hidden.shape[0], table.probs.dtype
        w = weight.to(hidden.dtype)
        choice, mass = table.choice[index], table.draft_mass[index]
        in_vocab = (choice >= 0).to(work)
        row_weight = torch.ones_like(in_vocab) if row_weight is None else row_weight.to(work)
        loss_weight = in_vocab * row_weight
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = weight_grad
        if weight_grad is None and ctx.needs_input_grad[1]:
            d_weight = torch.zeros_like(weight)
        values, accept = torch.empty_like(in_vocab), torch.empty_like(in_vocab)
        right = torch.empty(count, dtype=torch.bool, device=hidden.device)
        most = max(_MIN_ROWS, _BLOCK_ELEMENTS[hidden.device.type] // weight.shape[0])
        # Near-equal blocks, so that none is a sliver that is slow for its size.
        block = max(1, -(-count // max(1, -(-count // most))))
        # One allocation a call, its size the same at every call: buffers that come, go and vary
        # leave holes in a CPU's heap, and its peak creeps up.
        buffers = _Buffers.new(table.probs, most)
        for a in range(0, count, block):
            rows = slice(a, min(a + block, count))
            z = product(hidden[rows], w, out=buffers.z[: rows.stop - a])
            values[rows], dz, accept[rows], best = _block(
                objective, z, buffers, table, index[rows], choice[rows], mass[rows]
            )
            right[rows] = best == choice[rows]
            if d_hidden is None and d_weight is None:
                continue
            dz = dz.mul_((loss_weight[rows] * scale)[:, None]).to(hidden.dtype)
            if d_hidden is not None:
                torch.mm(dz, w, out=d_hidden[rows])
            if d_weight is not None:
                add_product_(d_weight, dz, hidden[rows])
        accept *= row_weight
        by_row = (values * loss_weight, right * row_weight, accept, accept * in_vocab, loss_weight)
        sums = torch.stack(by_row).sum(-1)
        ctx.save_for_backward(d_hidden, None if weight_grad is not None else d_weight)
        ctx.mark_non_differentiable(sums, right)
        return sums[0] * scale, sums, right

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        d_hidden = None if d_hidden is None else d_hidden * d_loss.to(d_hidden.dtype)
        d_weight = None if d_weight is None else d_weight * d_loss.to(d_weight.dtype)
        return d_hidden, d_weight, None, None, None, None, None, None


def _block(
    objective: Objective,
    z: Tensor,
    buffers: _Buffers,
    table: TeacherTable,
    index: Tensor,
    choice: Tensor,
    mass: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A block's objective [b], its gradient by the logits, acceptance [b] and first choice [b].

    z: the logits [b, Vd], buffers.z or the start of it; all buffers are overwritten.
    """
    p = buffers.p[: z.shape[0]]
    torch.index_select(table.probs, 0, index, out=p)
    top, best = z.max(-1, keepdim=True)
    z.sub_(top)
    if objective.is_soft_ce:
        dot = torch.cat([torch.mul(a, b, out=o).sum(-1) for o, a, b in buffers.parts(p, z)])
        q = z.exp_()
        total = q.sum(-1, keepdim=True)
        q.div_(total)
        value = total.log()[:, 0] - dot
    else:
        q = torch.exp(z)
        total = q.sum(-1, keepdim=True)
        q.div_(total)
        log_p = None if table.log_probs is None else table.log_probs.index_select(0, index)
        log_q = z.sub_(total.log())
        value, dz = evaluate(objective, Rows(q, log_q, p, choice.clamp(min=0), log_p))
    overlap = [
        torch.minimum(torch.mul(a, m, out=o), b, out=o).sum(-1)
        for o, a, m, b in buffers.parts(p, mass[:, None], q)
    ]
    accept = torch.cat(overlap)
    if objective.is_soft_ce:
        weight = objective.terms[0][1]
        value, dz = value.mul_(weight), q.sub_(p).mul_(weight)
    return value, dz, accept, best[:, 0]
