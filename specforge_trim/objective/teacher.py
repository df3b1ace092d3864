"""The teacher: the target's distribution over the draft vocabulary at supervised positions.

The full-vocabulary logits of a block of rows exist only while the block is reduced to what the
losses and metrics read. Letters: S supervised rows, Dt target width, V target vocabulary, Vd
draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# Full-vocabulary logits held at once, in elements: 32M fp32 values are 128 MB.
_BLOCK_ELEMENTS = 2**25


@dataclass(frozen=True)
class TeacherTable:
    """What the loss and the metrics read of the teacher, one entry per supervised row.

    probs: [S, Vd], softmax over the draft vocabulary of the target's logits, at least fp32.
    argmax: int64 [S], the full vocabulary's argmax, lowest id on ties.
    in_vocab: bool [S], whether argmax lies in the draft vocabulary.
    draft_mass: [S], full-vocabulary probability of the whole draft vocabulary;
        probs * draft_mass are full-vocabulary probabilities.
    """

    probs: Tensor
    argmax: Tensor
    in_vocab: Tensor
    draft_mass: Tensor


@dataclass(frozen=True)
class Teacher:
    """The target's head and the draft vocabulary.

    head: [V, Dt]. draft_to_target: int64 [Vd], ascending. t2d: bool [V].
    logit_post: the target's own operation on logits (scale, soft cap); None = none.
    """

    head: Tensor
    draft_to_target: Tensor
    t2d: Tensor
    logit_post: Callable[[Tensor], Tensor] | None = None

    def table(self, last_SD: Tensor) -> TeacherTable:
        """Reduce the target's final hidden states [S, Dt] (after its last norm) to a table."""
        count, vocab = last_SD.shape[0], self.head.shape[0]
        work = torch.float64 if last_SD.dtype == torch.float64 else torch.float32
        draft_vocab = self.draft_to_target.shape[0]
        probs = last_SD.new_empty(count, draft_vocab, dtype=work)
        argmax = self.draft_to_target.new_empty(count)
        draft_mass = last_SD.new_empty(count, dtype=work)
        block = max(16, _BLOCK_ELEMENTS // vocab)
        for a in range(0, count, block):
            rows = slice(a, min(a + block, count))
            logits = F.linear(last_SD[rows], self.head).to(work)
            if self.logit_post is not None:
                logits = self.logit_post(logits)
            argmax[rows] = logits.argmax(-1)
            full = logits.logsumexp(-1)
            kept = logits if draft_vocab == vocab else logits[:, self.draft_to_target]
            own = kept.logsumexp(-1)
            torch.exp(kept - own[:, None], out=probs[rows])
            draft_mass[rows] = (own - full).exp()
        return TeacherTable(probs, argmax, self.t2d[argmax], draft_mass)
