"""Head and soft cross-entropy in one: logits of a block of rows live only inside the block.

    loss = scale * sum_r w_r * ( logsumexp(z_r) - sum_v P_r(v) z_r(v) ),   z = h W^T
    dz_r = scale * w_r * ( softmax(z_r) - P_r )

Letters: n loss rows, D draft width, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .teacher import TeacherTable

_BLOCK_ELEMENTS = 2**24


@dataclass(frozen=True)
class LossMetrics:
    """Sums over loss rows, 0-dim tensors; divide after any reduction over ranks.  And `right`.

    loss: cross-entropy of in-vocabulary rows (nats). correct: draft argmax equals the teacher's
    full-vocabulary argmax. accept: sum_v min(full-vocabulary teacher, draft probability).
    accept_in_vocab and in_vocab: the same sum, and the row count, over in-vocabulary rows.
    right: bool [n], which rows `correct` counts (before row_weight).
    """

    loss: Tensor
    correct: Tensor
    accept: Tensor
    accept_in_vocab: Tensor
    in_vocab: Tensor
    right: Tensor


def linear_soft_ce(
    hidden_nD: Tensor,
    weight: Tensor,
    table: TeacherTable,
    index_n: Tensor,
    *,
    scale: Tensor | float,
    draft_to_target: Tensor,
    row_weight: Tensor | None = None,
    weight_grad: Tensor | None = None,
) -> tuple[Tensor, LossMetrics]:
    """Loss (0-dim, differentiable) and metric sums of n rows.

    Args:
        hidden_nD: [n, D], what the head reads.
        weight: [Vd, D].
        table, index_n: row r's teacher is table entry index_n[r].
        scale: decay^i / denominator; a 0-dim tensor keeps the device from being asked.
        draft_to_target: int64 [Vd].
        row_weight: [n], multiplies each row's loss and metrics; None = 1.
        weight_grad: buffer [Vd, D] that the head's gradient is added to at once, so that no step
            keeps one of its own. The caller then owes the loss a gradient of 1. None: through
            autograd.
    """
    loss, sums, right = _LinearSoftCE.apply(
        hidden_nD, weight, table, index_n, scale, draft_to_target, row_weight, weight_grad
    )
    return loss, LossMetrics(*sums.unbind(), right)


class _LinearSoftCE(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        table: TeacherTable,
        index: Tensor,
        scale: Tensor | float,
        draft_to_target: Tensor,
        row_weight: Tensor | None,
        weight_grad: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        count, work = hidden.shape[0], table.probs.dtype
        w = weight.to(hidden.dtype)
        in_vocab = table.in_vocab[index].to(work)
        row_weight = torch.ones_like(in_vocab) if row_weight is None else row_weight.to(work)
        loss_weight = in_vocab * row_weight
        d_hidden = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        d_weight = weight_grad
        if weight_grad is None and ctx.needs_input_grad[1]:
            d_weight = torch.zeros_like(weight)
        loss = torch.zeros((), dtype=work, device=hidden.device)
        sums = torch.zeros(5, dtype=work, device=hidden.device)
        right = torch.empty(count, dtype=torch.bool, device=hidden.device)
        block = max(16, _BLOCK_ELEMENTS // weight.shape[0])
        for a in range(0, count, block):
            rows = slice(a, min(a + block, count))
            p = table.probs[index[rows]]
            z = (hidden[rows] @ w.T).to(work)
            lse = z.logsumexp(-1)
            cross_entropy = (lse - (p * z).sum(-1)) * loss_weight[rows]
            right[rows] = draft_to_target[z.argmax(-1)] == table.argmax[index[rows]]
            q = z.sub_(lse[:, None]).exp_()
            mass = table.draft_mass[index[rows]]
            accept = torch.minimum(q, p * mass[:, None]).sum(-1) * row_weight[rows]
            loss += cross_entropy.sum()
            sums += torch.stack(
                (
                    cross_entropy.sum(),
                    (right[rows] * row_weight[rows]).sum(),
                    accept.sum(),
                    (accept * in_vocab[rows]).sum(),
                    loss_weight[rows].sum(),
                )
            )
            if d_hidden is None and d_weight is None:
                continue
            dz = q.sub_(p).mul_((loss_weight[rows] * scale)[:, None]).to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[rows] = dz @ w
            if d_weight is not None:
                _add_product(d_weight, dz.T, hidden[rows])
        ctx.save_for_backward(d_hidden, None if weight_grad is not None else d_weight)
        ctx.mark_non_differentiable(sums, right)
        return loss * scale, sums, right

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        d_hidden = None if d_hidden is None else d_hidden * d_loss.to(d_hidden.dtype)
        d_weight = None if d_weight is None else d_weight * d_loss.to(d_weight.dtype)
        return d_hidden, d_weight, None, None, None, None, None, None


def _add_product(buffer: Tensor, a: Tensor, b: Tensor) -> None:
    """buffer += a @ b; in the buffer's precision when the factors are of a lower one."""
    if a.dtype == buffer.dtype:
        buffer.addmm_(a, b)
    else:
        buffer += a @ b
