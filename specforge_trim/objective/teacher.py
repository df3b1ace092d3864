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

from .products import product, work_dtype

# A block of logits: 512 rows by 8,192 tokens, 16 MB in fp32, and two of them are held at once.
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
        for a in range(0, count, _BLOCK_ROWS):
            rows = slice(a, min(a + _BLOCK_ROWS, count))
            kept = probs[rows]
            argmax[rows], full, own = self._stream(last_SD[rows], kept)
            kept.sub_(own[:, None])
            if logs is not None:
                logs[rows] = kept
            kept.exp_()
            draft_mass[rows] = (own - full).exp()
        choice = torch.searchsorted(self.draft_to_target, argmax)
        choice = torch.where(self.t2d[argmax], choice, -1)
        return TeacherTable(probs, choice, draft_mass, logs)

    def _stream(self, last_nD: Tensor, kept_nVd: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Argmax and log-sum-exp [n] over the vocabulary, and log-sum-exp over the draft's.

        Writes the draft vocabulary's logits into kept_nVd.
        """
        count, work = last_nD.shape[0], kept_nVd.dtype
        top = torch.full((count,), -torch.inf, dtype=work, device=last_nD.device)
        full, own = top.clone(), top.clone()
        argmax = torch.zeros(count, dtype=torch.int64, device=last_nD.device)
        for lo, hi, first, end in self._blocks:
            logits = product(last_nD, self.head[lo:hi])
            if self.logit_post is not None:
                logits = self.logit_post(logits)
            best, where = logits.max(-1)
            # Strictly greater: of equal logits the earlier block, the lower id, stays.
            argmax = torch.where(best > top, where + lo, argmax)
            top = torch.maximum(top, best)
            if end > first:
                columns = self.draft_to_target[first:end] - lo
                part = logits if end - first == hi - lo else logits.index_select(1, columns)
                kept_nVd[:, first:end] = part
                own = torch.logaddexp(own, part.logsumexp(-1))
            full = torch.logaddexp(full, logits.logsumexp(-1))
        return argmax, full, own
