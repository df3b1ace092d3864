"""The draft vocabulary: which target tokens a draft can propose, and the two maps that say so.

It counts, chooses and checks. It reads and writes no file: the maps live in the draft's buffers
and in its exported weights, so a map can never be older than the weights it belongs to.

Letters: V target vocabulary, Vd draft vocabulary.

    target ids kept    2  3  7          V = 8, Vd = 3
    draft id           0  1  2          ascending by target id
    d2t                2  2  5          OFFSETS: target id = draft id + d2t[draft id]
    t2d                0 0 1 1 0 0 0 1  bool, True where the target id is kept
"""

from collections.abc import Iterable
from typing import Protocol

import torch
from torch import Tensor


class SupervisedDocument(Protocol):
    """What is read of a document: token ids [L] and the loss mask [L] over the same positions."""

    @property
    def input_ids(self) -> Tensor: ...
    @property
    def loss_mask(self) -> Tensor: ...


def check_vocab_sizes(*, vocab_size: int, draft_vocab_size: int) -> None:
    """Raise ValueError unless both are integers and 1 <= draft_vocab_size <= vocab_size."""
    for key, size in (("vocab_size", vocab_size), ("draft_vocab_size", draft_vocab_size)):
        if isinstance(size, bool) or not isinstance(size, int):
            raise ValueError(f"{key} is {size!r}; expected a whole number")
        if size <= 0:
            raise ValueError(f"{key} is {size}; expected at least 1")
    if draft_vocab_size > vocab_size:
        raise ValueError(
            f"draft_vocab_size is {draft_vocab_size}; expected at most the target's "
            f"vocabulary, {vocab_size}"
        )


def count_supervised_tokens(documents: Iterable[SupervisedDocument], *, vocab_size: int) -> Tensor:
    """Count each token id over the supervised positions of `documents`.

    Returns int64 [V]. Raises ValueError for an id outside 0..V-1: it comes from another
    tokenizer than the target's.
    """
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for index, document in enumerate(documents):
        ids = torch.as_tensor(document.input_ids).to(torch.int64)
        kept = ids[torch.as_tensor(document.loss_mask).to(torch.bool)]
        if kept.numel() == 0:
            continue
        low, high = int(kept.min()), int(kept.max())
        if low < 0 or high >= vocab_size:
            raise ValueError(
                f"document {index} holds token id {low if low < 0 else high}; expected ids in "
                f"0..{vocab_size - 1}: prepare the data with the target's own tokenizer"
            )
        counts_V += torch.bincount(kept, minlength=vocab_size)
    return counts_V


def build_draft_vocab(
    source: Tensor | Iterable[SupervisedDocument], *, vocab_size: int, draft_vocab_size: int
) -> tuple[Tensor, Tensor]:
    """Choose the Vd most frequent supervised tokens; ties go to the smaller id.

    source: occurrence counts [V] over supervised tokens, or the documents to count.
    Data with fewer than Vd distinct supervised tokens fills up with unused ids, smallest first.

    Returns (d2t, t2d): d2t int64 [Vd] offsets, ascending by target id; t2d bool [V]. They are
    the identity (zeros, all True) when Vd == V, whatever the counts.
    Raises ValueError for sizes that are no vocabulary, for counts of another length, for negative
    counts, and when nothing is supervised: frequency then chooses ids 0..Vd-1, which no one means.
    """
    check_vocab_sizes(vocab_size=vocab_size, draft_vocab_size=draft_vocab_size)
    if draft_vocab_size == vocab_size:
        return identity_vocab(vocab_size)
    if isinstance(source, Tensor):
        counts_V = source
        if counts_V.shape != (vocab_size,):
            raise ValueError(
                f"token counts have shape {tuple(counts_V.shape)}; expected ({vocab_size},), "
                "one per id of the target's vocabulary"
            )
        if counts_V.is_floating_point() and not bool(torch.isfinite(counts_V).all()):
            raise ValueError("token counts are not finite; expected occurrence counts")
        if int((counts_V < 0).sum()):
            raise ValueError("token counts hold a negative entry; expected occurrence counts")
    else:
        counts_V = count_supervised_tokens(source, vocab_size=vocab_size)
    if not bool((counts_V > 0).any()):
        raise ValueError(
            "no supervised token to choose the draft vocabulary from; expected data with a "
            "non-zero loss mask"
        )
    by_count = torch.sort(counts_V.cpu(), descending=True, stable=True).indices
    kept = by_count[:draft_vocab_size].sort().values
    t2d_V = torch.zeros(vocab_size, dtype=torch.bool)
    t2d_V[kept] = True
    return kept - torch.arange(draft_vocab_size), t2d_V


def identity_vocab(vocab_size: int) -> tuple[Tensor, Tensor]:
    """Maps of a full vocabulary: d2t zeros int64 [V] (offsets, not ids), t2d all True bool [V]."""
    return torch.zeros(vocab_size, dtype=torch.int64), torch.ones(vocab_size, dtype=torch.bool)


def kept_ids(d2t: Tensor) -> Tensor:
    """Target ids of the draft vocabulary, int64 [Vd] ascending: arange(Vd) + d2t."""
    return torch.arange(d2t.numel(), dtype=torch.int64, device=d2t.device) + d2t


def coverage(counts_V: Tensor, t2d: Tensor) -> float:
    """Share of counted supervised tokens that the draft vocabulary holds, 0 when none counted."""
    total = float(counts_V.sum())
    return float(counts_V[t2d.to(counts_V.device)].sum()) / total if total else 0.0


def check_maps(d2t: Tensor, t2d: Tensor, *, vocab_size: int) -> None:
    """Raise ValueError unless d2t and t2d describe one vocabulary of a target of `vocab_size`.

    Checked: dtypes int64 and bool, t2d [V], and t2d.nonzero() == arange(Vd) + d2t, which implies
    that the kept ids ascend, are distinct and lie below V.
    """
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        raise ValueError(
            f"d2t is {d2t.dtype} and t2d {t2d.dtype}; expected torch.int64 and torch.bool"
        )
    if t2d.shape != (vocab_size,) or d2t.dim() != 1:
        raise ValueError(
            f"t2d has shape {tuple(t2d.shape)} and d2t {tuple(d2t.shape)}; expected "
            f"({vocab_size},) and (draft_vocab_size,)"
        )
    if not torch.equal(t2d.nonzero().flatten().cpu(), kept_ids(d2t).cpu()):
        raise ValueError(
            "d2t and t2d disagree; expected t2d.nonzero() == arange(draft_vocab_size) + d2t "
            "(d2t holds offsets, not ids)"
        )
