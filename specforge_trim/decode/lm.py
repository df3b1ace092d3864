"""Acceptance length of a dense language model as a draft of the target, by greedy decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specforge_trim.decode.prompts import Decoding, Prompt, evaluate_with
from specforge_trim.decode.report import EvalReport
from specforge_trim.decode.rounds import Decoded, Recording
from specforge_trim.verifier.cached import CachedTarget
from specforge_trim.verifier.hf import HFTarget


class LmProposer:
    """A dense model as a draft: proposes its own greedy continuation of what came true."""

    def __init__(self, model: Any, first_ids: Sequence[int]) -> None:
        """first_ids: tokens before those that `extend` will tell of; at least one."""
        # The states of a layer are not needed; the cache's interface gives those of one.
        self._cache = CachedTarget(model, (1,))
        self._true = 0  # tokens in the cache that came true
        self._next = list(first_ids)  # true, not run yet

    def propose(self, depth: int) -> list[int]:
        run = self._cache.advance(self._next, keep=1)
        self._true, self._next = self._true + len(self._next), []
        drafted = list(run.choices)
        while len(drafted) < depth:
            drafted += self._cache.advance(drafted[-1:], keep=1).choices
        return drafted

    def extend(self, aux_RA: Tensor, next_ids: Sequence[int]) -> None:
        if self._cache.length > self._true:
            self._cache.rewind(self._true)
        self._next += [int(token) for token in next_ids]


def evaluate_lm(
    target: HFTarget,
    draft: Any,
    prompt_sets: Mapping[str, Sequence[Tensor]],
    *,
    untrained: Any | None = None,
    depth: int = 5,
    max_new_tokens: int = 128,
    progress: bool = True,
) -> EvalReport:
    """Decode every prompt int64 [n] with `draft`, a transformers model in fp32 as the target is.

    Live passes of the target verify the draft; `untrained` drafts for the recorded answer.
    Raises ValueError for an empty prompt set, a prompt too long for the target, another
    vocabulary, and a model that is not fp32.
    """
    for one in (draft, untrained):
        if one is None:
            continue
        if one.config.vocab_size != target.vocab_size:
            raise ValueError(
                f"draft vocab_size is {one.config.vocab_size}; the target's is {target.vocab_size}"
            )
        if one.lm_head.weight.dtype != torch.float32 or target.dtype != torch.float32:
            raise ValueError(f"evaluation runs in float32; got {one.lm_head.weight.dtype}")

    def decoding(model: Any) -> Decoding:
        def decode(prompt: Prompt, own: Recording | None) -> Decoded:
            drafted = LmProposer(model, [*prompt.ids.tolist(), prompt.first_token])
            return prompt.verified(drafted, depth=depth, recording=own)

        return decode

    return evaluate_with(
        target,
        prompt_sets,
        trained=decoding(draft),
        untrained=None if untrained is None else decoding(untrained),
        depth=depth,
        max_new_tokens=max_new_tokens,
        progress=progress,
    )
