"""Autograd functions with a full forward and a backward over kept rows.

The gradient of a layer's output is zero outside the kept rows (the next layer cuts it), and so is
the gradient of everything a row computes for itself: q, o, MLP. Keys and values of all rows are
read by kept queries, and keep the full backward.

    row_linear     y = x W^T;  dW = dy[keep]^T x[keep],  dx[keep] = dy[keep] W
    kept_attention o = attention of all queries;  backward of the kept queries only
    packed_attention   the same forward, backward of all queries

A quantity of all rows travels as `Rows`: its values without gradient, and its kept rows with one.

Letters: T tokens, R kept rows, N heads, M key/value heads, H head dim, D and E widths.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from specforge_trim.attention.backends import select_kernel
from specforge_trim.attention.context_kv import SegmentAttention, gradient_buffers
from specforge_trim.drafts.lm.rows import RowPlan
from specforge_trim.plan.segments import Segment


class Rows(NamedTuple):
    """full: values of all rows [1, T, ...], no gradient. kept: [1, R, ...], full's kept rows."""

    full: Tensor
    kept: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Rows:
        """A function of each row alone, applied to both."""
        with torch.no_grad():
            full = function(self.full)
        return Rows(full, function(self.kept))

    def __add__(self, other: Rows) -> Rows:  # type: ignore[override]
        with torch.no_grad():
            full = self.full + other.full
        return Rows(full, self.kept + other.kept)


def take_rows(x: Tensor, plan: RowPlan) -> Tensor:
    """x [1, T, ...] -> [1, R, ...]; the gradient of every other row is zero."""
    return x.index_select(1, plan.keep)


def mask_grad(x: Tensor, plan: RowPlan) -> Tensor:
    """x [1, T, D] as it is; the gradient of rows that are not kept is zero."""
    return _MaskGrad.apply(x, plan.keep)


def as_rows(x: Tensor, plan: RowPlan) -> Rows:
    return Rows(x.detach(), take_rows(x, plan))


def join_rows(rows: Rows, plan: RowPlan) -> Tensor:
    """rows.full with the gradient of rows.kept: [1, T, ...]."""
    return _Join.apply(rows.full, rows.kept, plan.keep)


def row_linear(x: Rows, weight: Tensor, bias: Tensor | None, plan: RowPlan) -> Rows:
    """x W^T + b of all rows, x [1, T, D], W [E, D]; backward over kept rows."""
    return Rows(*_RowLinear.apply(x.full, x.kept, weight, bias, plan.keep))


class _MaskGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keep: Tensor) -> Tensor:
        ctx.save_for_backward(keep)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (keep,) = ctx.saved_tensors
        return torch.zeros_like(dy).index_copy_(1, keep, dy.index_select(1, keep)), None


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, full: Tensor, kept: Tensor, keep: Tensor) -> Tensor:
        ctx.save_for_backward(keep)
        return full.view_as(full)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (keep,) = ctx.saved_tensors
        return None, dy.index_select(1, keep), None


class _RowLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, full: Tensor, kept: Tensor, weight: Tensor, bias: Tensor | None, keep: Tensor
    ) -> tuple[Tensor, Tensor]:
        y = F.linear(full, weight, bias)
        # Autocast computes in its own dtype; the backward multiplies in that one too.
        ctx.save_for_backward(kept.to(y.dtype), weight)
        ctx.kept_dtype = kept.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.mark_non_differentiable(y)
        ctx.set_materialize_grads(False)  # or zeros of all rows are made for y
        return y, y.index_select(1, keep)

    @staticmethod
    def backward(ctx: Any, _: Tensor | None, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dy = dy[0]
        d_kept = d_weight = d_bias = None
        if ctx.needs_input_grad[1]:
            d_kept = (dy @ weight.to(dy.dtype))[None].to(ctx.kept_dtype)
        if ctx.needs_input_grad[2]:
            d_weight = (dy.T @ x[0]).to(weight.dtype)
        if ctx.needs_input_grad[3]:
            d_bias = dy.sum(0).to(ctx.bias_dtype)
        return None, d_kept, d_weight, d_bias, None


@dataclass(frozen=True)
class PackedAttention:
    """Causal attention inside each document of a plan, by the package's segment kernels.

    backend: "sdpa" or "fa", see attention/backends.py. max_keys: most keys of a kernel call.
    """

    backend: str = "sdpa"
    max_keys: int | None = 65536

    def segments(self, q: Tensor, scale: float) -> SegmentAttention:
        kernel = select_kernel(self.backend, device=q.device, dtype=q.dtype)
        return SegmentAttention(kernel, scale, self.max_keys)


def packed_attention(
    q: Tensor, k: Tensor, v: Tensor, plan: RowPlan, *, how: PackedAttention, scale: float
) -> Tensor:
    """Attention [T, N, H] of q [T, N, H] over k, v [T, M, H]; the backward runs all queries."""
    o, _ = _Attention.apply(q.detach(), q, k, v, None, plan.documents, plan, how, scale)
    return o


def kept_attention(
    q: Rows, k: Tensor, v: Tensor, plan: RowPlan, *, how: PackedAttention, scale: float
) -> Rows:
    """The same forward for q.full [T, N, H] and q.kept [R, N, H]; the backward runs q.kept."""
    kept, full = _Attention.apply(q.full, q.kept, k, v, plan.keep, plan.segments, plan, how, scale)
    return Rows(full, kept)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q_full: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        keep: Tensor | None,
        segments: tuple[Segment, ...],
        plan: RowPlan,
        how: PackedAttention,
        scale: float,
    ) -> tuple[Tensor, Tensor | None]:
        """(output of the queries with a gradient, output of all; None without `keep`)."""
        work = torch.float64 if q.dtype == torch.float64 else torch.float32
        full = q_full.new_empty(q_full.shape)
        lse = torch.empty(q_full.shape[:2], dtype=work, device=q.device)
        attention = how.segments(q_full, scale)
        for rows, o_part, lse_part in attention.forward(q_full, k, v, plan.documents):
            full[rows], lse[rows] = o_part, lse_part
        ctx.segments, ctx.attention = segments, attention
        ctx.set_materialize_grads(False)  # or zeros of all rows are made for `full`
        if keep is None:
            ctx.save_for_backward(q, k, v, full, lse)
            return full, None
        o = full.index_select(0, keep)
        ctx.save_for_backward(q, k, v, o, lse.index_select(0, keep))
        ctx.mark_non_differentiable(full)
        return o, full

    @staticmethod
    def backward(ctx: Any, do: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        dq = torch.empty_like(q)
        dk, dv = gradient_buffers(k, v)
        for rows, part in ctx.attention.backward(
            do.contiguous(), q, k, v, o, lse, ctx.segments, dk=dk, dv=dv
        ):
            dq[rows] = part
        return None, dq, dk.to(k.dtype), dv.to(v.dtype), None, None, None, None, None
