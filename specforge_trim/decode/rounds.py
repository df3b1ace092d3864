"""The rounds of speculative decoding: a chain is drafted, verified in one pass, and counted.

It knows no prompt and no model: a Proposer drafts, a Verifier says what the target would choose.
What a round is and what is counted stands in `decode/prompts.py`.

Letters: A aux layers, Dt target width, R tokens that came true.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from specforge_trim.verifier.cached import CachedTarget


@dataclass(frozen=True)
class Decoded:
    """One prompt's output and its counts.

    tokens: the answer, from the prompt pass's token to an end token (included) or the limit;
    passes: verification passes, emitted: tokens they gave (len(tokens) - 1);
    tried, accepted: per depth, how often a drafted token was reached and accepted.
    """

    tokens: tuple[int, ...]
    passes: int
    tried: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def emitted(self) -> int:
        return len(self.tokens) - 1


class Proposer(Protocol):
    """A draft as the decoding loop sees it."""

    def propose(self, depth: int) -> list[int]: ...

    def extend(self, aux_RA: Tensor, next_ids: Sequence[int]) -> None: ...


class Verifier(Protocol):
    """A target as the decoding loop sees it: `verify`, then `keep` the entries that were true."""

    def verify(self, ids: Sequence[int]) -> tuple[Sequence[int], Tensor]: ...

    def keep(self, count: int) -> None: ...


class LiveVerifier:
    """Verification by passes of the target, from where its cache stands."""

    def __init__(self, target: CachedTarget) -> None:
        self.target = target
        self._start = target.length

    def verify(self, ids: Sequence[int]) -> tuple[Sequence[int], Tensor]:
        self._start = self.target.length
        result = self.target.advance(ids, keep=len(ids))
        return result.choices, result.aux

    def keep(self, count: int) -> None:
        self.target.rewind(self._start + count)


@dataclass(frozen=True)
class Recording:
    """The target's own greedy answer.

    tokens as in Decoded; gaps[j]: the lead of tokens[j] over the second best; aux [len-1, A*Dt]:
    states of every token but the last, which was not run.
    """

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]
    aux: Tensor


class RecordedVerifier:
    """Verification from the target's recorded answer, with no pass of the target.

    Greedy verification reads the target's choices only up to the first rejected token, and up to
    there the recording has just those choices and states: counts are those of a live run.
    """

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self._at = 0

    def verify(self, ids: Sequence[int]) -> tuple[Sequence[int], Tensor]:
        end = self._at + len(ids)
        return self.recording.tokens[self._at + 1 : end + 1], self.recording.aux[self._at : end]

    def keep(self, count: int) -> None:
        self._at += count


def decode_rounds(
    verifier: Verifier,
    draft: Proposer,
    first_token: int,
    *,
    depth: int,
    max_new_tokens: int,
    eos_ids: Collection[int],
) -> Decoded:
    """Rounds of drafting and verification, from the token that the prompt's pass gave.

    Both sides stand at the end of the prompt: the verifier has run its tokens, the draft has
    their states and `first_token`.
    """
    tokens = [first_token]
    passes, tried, accepted = 0, [0] * depth, [0] * depth
    while tokens[-1] not in eos_ids and len(tokens) < max_new_tokens:
        proposed = draft.propose(depth)
        choices, aux = verifier.verify([tokens[-1], *proposed])
        agreed = 0
        while agreed < min(depth, len(choices)) and proposed[agreed] == choices[agreed]:
            agreed += 1
        emitted = list(choices[: agreed + 1])[: max_new_tokens - len(tokens)]
        end = next((i for i, token in enumerate(emitted) if token in eos_ids), None)
        if end is not None:
            emitted = emitted[: end + 1]
        assert emitted, "a verification pass emits at least one token"
        for i in range(min(depth, len(emitted))):
            tried[i] += 1
            accepted[i] += i < agreed
        passes += 1
        tokens += emitted
        verifier.keep(len(emitted))
        draft.extend(aux[: len(emitted)], emitted)
    return Decoded(tuple(tokens), passes, tuple(tried), tuple(accepted))


def record_greedy(
    target: CachedTarget,
    first_token: int,
    first_gap: float,
    *,
    max_new_tokens: int,
    eos_ids: Collection[int],
) -> Recording:
    """The target alone, a token a pass, from where its cache stands."""
    tokens, gaps, aux = [first_token], [first_gap], []
    while tokens[-1] not in eos_ids and len(tokens) < max_new_tokens:
        result = target.advance(tokens[-1:], keep=1)
        tokens += result.choices
        gaps += result.gaps
        aux.append(result.aux)
    return Recording(tuple(tokens), tuple(gaps), torch.cat(aux) if aux else torch.empty(0, 0))
