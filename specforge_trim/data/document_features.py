"""Target features of one document: what a training batch reads, wherever the features lie.

Letters: A aux layers, Dt target hidden, n positions whose last hidden state is kept.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class BadFeatures(ValueError):
    """Features of one document that cannot be trained on: cut off, not finite, of another one.

    Training leaves the document out, names and counts it.
    """


class DocumentFeatures(Protocol):
    """Features of one document."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def last_positions(self) -> Tensor:
        """int64 [n], ascending."""

    def aux(self, lo: int = 0, hi: int | None = None) -> Tensor:
        """Aux states of tokens [lo, hi): [hi-lo, A*Dt]."""

    def last(self) -> Tensor:
        """Last hidden states at `last_positions`, after the final norm: [n, Dt]."""

    def check(self) -> None:
        """Read what is to be read ahead; raise BadFeatures unless it is whole and finite."""


@dataclass(frozen=True)
class MemoryDocument:
    """Features held in memory: what a target just computed."""

    aux_states: Tensor  # [num_tokens, A*Dt]
    last_states: Tensor  # [n, Dt]
    last_positions: Tensor  # int64 [n]

    @property
    def num_tokens(self) -> int:
        return len(self.aux_states)

    def aux(self, lo: int = 0, hi: int | None = None) -> Tensor:
        return self.aux_states[lo:hi]

    def last(self) -> Tensor:
        return self.last_states

    def check(self) -> None:
        check_finite(self)


def check_finite(features: DocumentFeatures, *, rows: int = 4096) -> None:
    """Raise BadFeatures naming the first token whose aux state is not finite, or saying that a
    last hidden state is not. Reads `rows` tokens at a time: a document may be larger than memory.
    """
    for lo in range(0, features.num_tokens, rows):
        finite = torch.isfinite(features.aux(lo, lo + rows)).all(-1)
        if not bool(finite.all()):
            token = lo + int(finite.int().argmin())
            raise BadFeatures(f"the aux state of token {token} is not finite")
    if not bool(torch.isfinite(features.last()).all()):
        raise BadFeatures("a last hidden state is not finite")


def teacher_positions(loss_mask: Tensor) -> Tensor:
    """Positions p whose last hidden state some loss alignment reads: mask[p] or mask[p-1].

    loss_mask bool [L] -> int64 [n]. A teacher stands at row + 1, and a row counts by its own
    token's mask or by the next one's.
    """
    needed = loss_mask.bool().clone()
    needed[1:] |= loss_mask.bool()[:-1]
    return needed.nonzero().flatten()
