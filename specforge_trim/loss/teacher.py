"""The teacher: the target's distribution over the draft vocabulary at supervised positions.

The target's logits exist only as blocks of some rows by some of the vocabulary, each reduced at
once to what the losses and metrics read.  Letters: S supervised rows, Dt target width, V target
vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from specforge_trim.loss.products import product, work_dtype

# A block of logits: 512 rows by 8,192 tokens, 16 MB in fp32; one is held, and reduced in place.
_BLOCK_VOCAB = 8192
_BLOCK_ROWS = 512


@dataclass(frozen=True)
class TeacherTable:
    """What the loss and the metrics read of the teacher, one entry per supervised row.

    probs: [S, Vd], softmax over the draft vocabulary of the target's logits, at least fp32.
    choice: int64 [S], the draft id of the full vocabulary's argmax (lowest id on ties); -1 where
        the draft vocabulary lacks it.
    draft_mass: [S], full-vocabulary probability of the whole draft vocabulary;
        probs * draft_mass are full-vocabulary probabilities.
    log_probs: [S, Vd], the logarithm of probs, finite where they underflow; None unless asked for.
    """

    probs: Tensor
    choice: Tensor
    draft_mass: Tensor
    log_probs: Tensor | None = None

    @property
    def in_vocab(self) -> Tensor:
        """bool [S], whether the argmax lies in the draft vocabulary."""
        return self.choice >= 0


@dataclass(frozen=True)
class Teacher:
    """The target's head and the draft vocabulary.

    head: [V, Dt]. draft_to_target: int64 [Vd], ascending. t2d: bool [V].
    logit_post: the target's own elementwise operation on logits (scale, soft cap); None = none.
    """

    head: Tensor
    draft_to_target: Tensor
    t2d: Tensor
    logit_post: Callable[[Tensor], Tensor] | None = None
    # (first target id, end, first draft id, end) of each block of the vocabulary: the one question
    # to the device, asked here and not in a training step.
    _blocks: tuple[tuple[int, int, int, int], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        vocab = self.head.shape[0]
        edges = torch.tensor([*range(0, vocab, _BLOCK_VOCAB), vocab])
        kept = torch.searchsorted(self.draft_to_target.cpu(), edges).tolist()
        ids = edges.tolist()
        blocks = tuple(zip(ids[:-1], ids[1:], kept[:-1], kept[1:], strict=True))
        object.__setattr__(self, "_blocks", blocks)

    def table(self, last_SD: Tensor, *, log_probs: bool = False) -> TeacherTable:
        """Reduce the target's final hidden states [S, Dt] (after its last norm) to a table."""
        count, draft_vocab = last_SD.shape[0], self.draft_to_target.shape[0]
        work = work_dtype(last_SD.dtype)
        probs = last_SD.new_empty(count, draft_vocab, dtype=work)
        argmax = self.draft_to_target.new_empty(count)
        draft_mass = last_SD.new_empty(count, dtype=work)
        logs = torch.empty_like(probs) if log_probs else None
        space = last_SD.new_empty(min(count, _BLOCK_ROWS) * self._widest, dtype=work)
        for a in range(0, count, _BLOCK_ROWS):
            rows = slice(a, min(a + _BLOCK_ROWS, count))
            kept = probs[rows]
            argmax[rows], full = self._stream(last_SD[rows], kept, space)
            top = kept.amax(-1, keepdim=True)
            kept.sub_(top)
            if logs is not None:
                logs[rows] = kept
            own = kept.exp_().sum(-1, keepdim=True)
            kept.div_(own)
            if logs is not None:
                logs[rows] -= own.log()
            draft_mass[rows] = (top + own.log())[:, 0].sub_(full).exp_()
        choice = torch.searchsorted(self.draft_to_target, argmax)
        choice = torch.where(self.t2d[argmax], choice, -1)
        return TeacherTable(probs, choice, draft_mass, logs)

    @property
    def _widest(self) -> int:
        return max(hi - lo for lo, hi, *_ in self._blocks)

    def _stream(self, last_nD: Tensor, kept_nVd: Tensor, space: Tensor) -> tuple[Tensor, Tensor]:
        """Argmax and log-sum-exp [n] over the vocabulary.

        Writes the draft vocabulary's logits into kept_nVd. space: for n rows of a block.
        """
        count = last_nD.shape[0]
        top = torch.full_like(kept_nVd[:, 0], -torch.inf)
        total = torch.zeros_like(top)  # sum of exp(logit - top)
        argmax = torch.zeros(count, dtype=torch.int64, device=last_nD.device)
        for lo, hi, first, end in self._blocks:
            out = space[: count * (hi - lo)].view(count, hi - lo)
            logits = product(last_nD, self.head[lo:hi], out=out)
            if self.logit_post is not None:
                logits = self.logit_post(logits)
            if end > first:
                columns = self.draft_to_target[first:end] - lo
                whole = end - first == hi - lo
                kept_nVd[:, first:end] = logits if whole else logits.index_select(1, columns)
            best, where = logits.max(-1)
            # Strictly greater: of equal logits the earlier block, the lower id, stays.
            argmax = torch.where(best > top, where + lo, argmax)
            best = torch.maximum(top, best)
            total.mul_((top - best).exp_()).add_(logits.sub_(best[:, None]).exp_().sum(-1))
            top = best
        return argmax, total.log_().add_(top)
