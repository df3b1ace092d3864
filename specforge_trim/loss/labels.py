"""skip_masked_lm_head_tokens: log-probabilities, entropy and losses at kept rows only.

    z = cap(scale * (h W^T + b)),   cap(z) = c tanh(z / c) or z       rows that a loss reads
    log_probs = log softmax(z)_label,   entropy = - sum_v p_v log p_v,   zero at all other rows

    d log_probs / dz_v = 1[v = label] - p_v,    d entropy / dz_v = - p_v (log p_v + entropy)

Logits exist for a block of rows at a time, in at least fp32. `kept_log_probs` is differentiable in
both results and computes each block's logits again in its backward; `label_loss` knows its
gradient beforehand and makes it in the forward.

Letters: T tokens, R kept rows, b rows of a block, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specforge_trim.loss.products import add_product_, product, work_dtype

CHUNK_TOKENS = 8192
# Logits of a block in elements, 64 MB and 1 GB in fp32; three such tables are held. Every block
# reads and writes the head's whole gradient, so that small ones cost more than they save.
BLOCK_ELEMENTS = {"cpu": 2**24, "cuda": 2**28}
_MIN_ROWS = 16


@dataclass(frozen=True)
class HeadRows:
    """log_probs: of the rows' labels, entropy: of their distribution, nats, [T]; 0 where skipped.

    right: bool [T], the label is the first choice; fraction: perf/lm_head_token_fraction.
    """

    log_probs: Tensor
    entropy: Tensor
    right: Tensor
    fraction: float


@dataclass(frozen=True)
class LogitForm:
    """What a model does to its logits: times `scale`, then c tanh(z / c) with `softcap` c."""

    scale: float = 1.0
    softcap: float | None = None

    def apply_(self, z: Tensor) -> Tensor:
        if self.scale != 1.0:
            z.mul_(self.scale)
        if self.softcap is not None:
            z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z

    def backward_(self, dz: Tensor, z: Tensor) -> Tensor:
        """Gradient by the raw logits, in dz, from the one by the final logits z."""
        if self.softcap is not None:
            dz.mul_(1 - (z / self.softcap).square_())
        if self.scale != 1.0:
            dz.mul_(self.scale)
        return dz


PLAIN = LogitForm()


def kept_log_probs(
    hidden_TD: Tensor,
    weight: Tensor,
    labels_T: Tensor,
    keep_R: Tensor,
    *,
    bias: Tensor | None = None,
    form: LogitForm = PLAIN,
    chunk_tokens: int = CHUNK_TOKENS,
) -> HeadRows:
    """Differentiable log-probabilities and entropy at the rows of keep_R, zeros elsewhere.

    Args:
        hidden_TD: what the head reads.
        weight, bias: [V, D] and [V] or None, read in hidden's dtype.
        labels_T: int64, the token that row t predicts; read at kept rows only.
        keep_R: int64, ascending row numbers, of any count from 0 to T.
        chunk_tokens: most rows whose logits exist at once; fewer where they are large.
    """
    kept, labels = hidden_TD.index_select(0, keep_R), labels_T.index_select(0, keep_R)
    log_probs, entropy, right = _Rows.apply(kept, weight, bias, labels, form, chunk_tokens)
    return _expand(hidden_TD.shape[0], keep_R, log_probs, entropy, right)


def label_loss(
    hidden_TD: Tensor,
    weight: Tensor,
    labels_T: Tensor,
    keep_R: Tensor,
    *,
    row_scale: Tensor | float,
    bias: Tensor | None = None,
    form: LogitForm = PLAIN,
    chunk_tokens: int = CHUNK_TOKENS,
    weight_grad: Tensor | None = None,
) -> tuple[Tensor, HeadRows]:
    """Loss - sum_r row_scale_r log_probs_r, 0-dim and differentiable, and the rows' values.

    row_scale: [R] or one number for all; a 0-dim tensor keeps the device from being asked.
    weight_grad: buffer [V, D] that the head's gradient is added to at once; the caller then owes
    the loss a gradient of 1. None: through autograd. Otherwise as kept_log_probs.
    """
    kept, labels = hidden_TD.index_select(0, keep_R), labels_T.index_select(0, keep_R)
    work = work_dtype(kept.dtype)
    scale = torch.as_tensor(row_scale, dtype=work).to(kept.device, non_blocking=True)
    scale = scale.expand(kept.shape[0])
    loss, *rows = _Loss.apply(kept, weight, bias, labels, scale, form, chunk_tokens, weight_grad)
    return loss, _expand(hidden_TD.shape[0], keep_R, *rows)


def _expand(
    tokens: int, keep: Tensor, log_probs: Tensor, entropy: Tensor, right: Tensor
) -> HeadRows:
    def spread(x: Tensor) -> Tensor:
        return x.new_zeros(tokens).index_copy(0, keep, x)

    fraction = keep.shape[0] / max(1, tokens)
    return HeadRows(spread(log_probs), spread(entropy), spread(right), fraction)


@dataclass(frozen=True)
class _Block:
    """Final logits z, log q, q [b, V] and what they give [b]."""

    z: Tensor
    log_q: Tensor
    q: Tensor
    log_probs: Tensor
    entropy: Tensor
    right: Tensor

    def gradient(self, labels: Tensor, d_log: Tensor, d_entropy: Tensor | None) -> Tensor:
        """Gradient by the final logits [b, V]; consumes q and log_q."""
        if d_entropy is None:
            dz = self.q.mul_(-d_log[:, None])
        else:
            slope = self.log_q.add_(self.entropy[:, None]).mul_(d_entropy[:, None])
            dz = slope.add_(d_log[:, None]).mul_(self.q).neg_()
        return dz.scatter_add_(1, labels[:, None], d_log[:, None])


def _blocks(count: int, vocab: int, device: torch.device, chunk_tokens: int) -> Iterator[slice]:
    most = max(_MIN_ROWS, BLOCK_ELEMENTS[device.type] // vocab)
    most = max(1, min(most, chunk_tokens))
    # Near-equal blocks, so that none is a sliver that is slow for its size.
    size = max(1, -(-count // max(1, -(-count // most))))
    for a in range(0, count, size):
        yield slice(a, min(a + size, count))


def _run_block(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, form: LogitForm
) -> _Block:
    z = product(hidden, weight)
    if bias is not None:
        z.add_(bias.to(z.dtype))
    form.apply_(z)
    top, best = z.max(-1, keepdim=True)
    log_q = z - top
    q = log_q.exp()
    total = q.sum(-1, keepdim=True)
    q.div_(total)
    log_q.sub_(total.log())
    log_probs = log_q.gather(1, labels[:, None])[:, 0]
    entropy = -torch.mul(q, log_q).sum(-1)
    return _Block(z, log_q, q, log_probs, entropy, best[:, 0] == labels)


class _Gradients:
    """Gradients by hidden, weight and bias, added up block by block, in at least fp32."""

    def __init__(
        self, ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None,
        weight_grad: Tensor | None = None,
    ) -> None:  # fmt: skip
        needs = ctx.needs_input_grad
        self.d_hidden = torch.empty_like(hidden) if needs[0] else None
        self.d_weight, self.in_buffer = weight_grad, weight_grad is not None
        if not self.in_buffer and needs[1]:
            self.d_weight = torch.zeros_like(weight, dtype=work_dtype(weight.dtype))
        self.d_bias = None
        if bias is not None and needs[2]:
            self.d_bias = torch.zeros_like(bias, dtype=work_dtype(bias.dtype))
        self.dtypes = weight.dtype, None if bias is None else bias.dtype

    def add(self, rows: slice, dz: Tensor, hidden: Tensor, weight: Tensor) -> None:
        if self.d_bias is not None:
            self.d_bias += dz.sum(0)
        dz = dz.to(hidden.dtype)
        if self.d_hidden is not None:
            torch.mm(dz, weight, out=self.d_hidden[rows])
        if self.d_weight is not None:
            add_product_(self.d_weight, dz, hidden[rows])

    def finish(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """By hidden, weight and bias, in their own types; None for a buffer of the caller's."""
        sums = (None if self.in_buffer else self.d_weight, self.d_bias)
        d_weight, d_bias = (
            None if d is None else d.to(dtype) for d, dtype in zip(sums, self.dtypes, strict=True)
        )
        return self.d_hidden, d_weight, d_bias


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        form: LogitForm,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        log_probs, entropy, right = _empty(hidden)
        w = weight.to(hidden.dtype)
        for rows in _blocks(hidden.shape[0], w.shape[0], hidden.device, chunk_tokens):
            block = _run_block(hidden[rows], w, bias, labels[rows], form)
            log_probs[rows], entropy[rows] = block.log_probs, block.entropy
            right[rows] = block.right
        ctx.save_for_backward(hidden, weight, bias, labels)
        ctx.form, ctx.chunk_tokens = form, chunk_tokens
        ctx.mark_non_differentiable(right)
        return log_probs, entropy, right

    @staticmethod
    def backward(
        ctx: Any, d_log: Tensor, d_entropy: Tensor, _: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, labels = ctx.saved_tensors
        w, sums = weight.to(hidden.dtype), _Gradients(ctx, hidden, weight, bias)
        for rows in _blocks(hidden.shape[0], w.shape[0], hidden.device, ctx.chunk_tokens):
            block = _run_block(hidden[rows], w, bias, labels[rows], ctx.form)
            dz = block.gradient(labels[rows], d_log[rows], d_entropy[rows])
            sums.add(rows, ctx.form.backward_(dz, block.z), hidden, w)
        return *sums.finish(), None, None, None


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scale: Tensor,
        form: LogitForm,
        chunk_tokens: int,
        weight_grad: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        log_probs, entropy, right = _empty(hidden)
        w = weight.to(hidden.dtype)
        sums = _Gradients(ctx, hidden, weight, bias, weight_grad)
        for rows in _blocks(hidden.shape[0], w.shape[0], hidden.device, chunk_tokens):
            block = _run_block(hidden[rows], w, bias, labels[rows], form)
            log_probs[rows], entropy[rows] = block.log_probs, block.entropy
            right[rows] = block.right
            dz = block.gradient(labels[rows], -scale[rows], None)
            sums.add(rows, form.backward_(dz, block.z), hidden, w)
        ctx.save_for_backward(*sums.finish())
        ctx.mark_non_differentiable(log_probs, entropy, right)
        return -(log_probs * scale).sum(), log_probs, entropy, right

    @staticmethod
    def backward(ctx: Any, d_loss: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        scaled = [None if d is None else d * d_loss.to(d.dtype) for d in ctx.saved_tensors]
        return *scaled, None, None, None, None, None


def _empty(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    count, work = hidden.shape[0], work_dtype(hidden.dtype)
    log_probs = hidden.new_empty(count, dtype=work)
    return log_probs, torch.empty_like(log_probs), torch.empty_like(log_probs, dtype=torch.bool)
