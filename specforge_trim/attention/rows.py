"""Row attention: one softmax over the context keys and a row's own later-step keys.

Letters: R rows of this step, R_j rows of step j, N heads, M key/value heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specforge_trim.attention.context_kv import ContextKV
from specforge_trim.plan.segments import ChunkStep


def row_attention(
    q: Tensor,
    context: ContextKV,
    step: ChunkStep,
    *,
    keys: Sequence[Tensor] = (),
    values: Sequence[Tensor] = (),
) -> Tensor:
    """Attention output [R, N, H] of the rows of one step.

    Row t attends to the context keys s <= t of its document and to its own keys of steps
    1..i ("diagonals"). The context's gradients add into the context's buffers, the diagonals'
    flow through autograd.

    Args:
        q: [R, N, H].
        context: the home of the step-0 keys and values.
        step: rows, segments, and where this step's rows stand inside earlier steps' rows; its
            tensors are on q's device.
        keys, values: entry j-1: [R_j, M, H] of step j, for 1 <= j <= i; the last is this step's
            own. Held by reference: nothing is copied per step.
    """
    assert len(keys) == len(values), (len(keys), len(values))
    assert not keys or len(step.diagonal_index) == len(keys) - 1, "one index per earlier step"
    return _RowAttention.apply(q, context, step, len(keys), *keys, *values)


def _take(x: Tensor, step: ChunkStep, j: int, count: int) -> Tensor:
    """Rows of this step inside step j+1's tensor x; the last one is this step's own."""
    if j == count - 1:
        return x
    return x.index_select(0, step.diagonal_index[j])


class _RowAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, context: ContextKV, step: ChunkStep, count: int, *diagonals: Tensor
    ) -> Tensor:
        o_ctx, lse_ctx = context.forward(q, step)
        keys, values = diagonals[:count], diagonals[count:]
        o, lse = o_ctx, lse_ctx
        if count:
            groups = (keys[0].shape[1], -1)
            grouped = q.unflatten(1, groups).to(lse.dtype)  # [R, M, G, H]
            scale = q.shape[-1] ** -0.5
            logits = [
                ((grouped * _take(k, step, j, count)[:, :, None]).sum(-1) * scale).flatten(1)
                for j, k in enumerate(keys)
            ]
            lse = torch.stack([lse_ctx, *logits]).logsumexp(0)  # [R, N]
            total = o_ctx.to(lse.dtype) * (lse_ctx - lse).exp()[..., None]
            for j, (v, logit) in enumerate(zip(values, logits, strict=True)):
                weight = (logit - lse).exp().unflatten(1, groups)[..., None]  # [R, M, G, 1]
                total.unflatten(1, groups).addcmul_(
                    weight, _take(v, step, j, count)[:, :, None].to(lse.dtype)
                )
            o = total.to(q.dtype)
        ctx.context, ctx.step, ctx.count = context, step, count
        ctx.save_for_backward(q, o, lse, *diagonals)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, o, lse, *diagonals = ctx.saved_tensors
        step, count = ctx.step, ctx.count
        do = do.contiguous()
        # The merged o and lse make each part's flash backward its share of the whole softmax.
        dq = ctx.context.backward(do, q, o, lse, step)
        if not count:
            return dq, None, None, None
        keys, values = diagonals[:count], diagonals[count:]
        groups, work, scale = (keys[0].shape[1], -1), lse.dtype, q.shape[-1] ** -0.5
        q_g, do_g = q.unflatten(1, groups).to(work), do.unflatten(1, groups).to(work)
        delta = (do_g * o.unflatten(1, groups)).sum(-1)  # [R, M, G]
        lse_g = lse.unflatten(1, groups)
        dq_g = torch.zeros_like(q_g)
        dks: list[Tensor] = []
        dvs: list[Tensor] = []
        for j in range(count):
            k = _take(keys[j], step, j, count)[:, :, None].to(work)
            v = _take(values[j], step, j, count)[:, :, None].to(work)
            p = ((q_g * k).sum(-1) * scale - lse_g).exp()  # [R, M, G]
            ds = (p * ((do_g * v).sum(-1) - delta) * scale)[..., None]
            dq_g.addcmul_(ds, k.expand_as(q_g))
            dks.append(_scatter(keys[j], (ds * q_g).sum(2), step, j, count))
            dvs.append(_scatter(values[j], (p[..., None] * do_g).sum(2), step, j, count))
        return dq + dq_g.flatten(1, 2).to(q.dtype), None, None, None, *dks, *dvs


def _scatter(like: Tensor, grad: Tensor, step: ChunkStep, j: int, count: int) -> Tensor:
    """The gradient of step j+1's whole tensor: this step's rows, zero elsewhere."""
    grad = grad.to(like.dtype)
    if j == count - 1:
        return grad
    # Rows are distinct, so a copy suffices.
    return torch.zeros_like(like).index_copy_(0, step.diagonal_index[j], grad)
