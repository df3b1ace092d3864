"""Acceptance length of a dense language model as a draft of the target, by greedy decoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from specforge_trim.decode import (
    NEAR_TIE,
    Decoded,
    LiveVerifier,
    Prompt,
    RecordedVerifier,
    Recording,
    decode_rounds,
    first_difference,
)
from specforge_trim.decode_report import ArmReport, EvalReport, SetReport
from specforge_trim.target.cached import CachedTarget
from specforge_trim.target.hf import HFTarget


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
) -> EvalReport:
    """Decode every prompt int64 [n] with `draft`, a transformers model in fp32 as the target is.

    Live passes of the target verify the draft; `untrained` drafts for the recorded answer.
    Raises ValueError for an empty prompt set, another vocabulary, and a model that is not fp32.
    """
    empty = [name for name, prompts in prompt_sets.items() if not len(prompts)]
    if empty or not prompt_sets:
        raise ValueError(f"no prompts to decode in {empty or 'prompt_sets'}; expected some")
    for one in (draft, untrained):
        if one is None:
            continue
        if one.config.vocab_size != target.vocab_size:
            raise ValueError(
                f"draft vocab_size is {one.config.vocab_size}; the target's is {target.vocab_size}"
            )
        if one.lm_head.weight.dtype != torch.float32 or target.dtype != torch.float32:
            raise ValueError(f"evaluation runs in float32; got {one.lm_head.weight.dtype}")
    reports = [
        _evaluate_set(name, prompts, target, draft, untrained, depth, max_new_tokens)
        for name, prompts in prompt_sets.items()
    ]
    return EvalReport(depth=depth, max_new_tokens=max_new_tokens, sets=tuple(reports))


def _evaluate_set(
    name: str,
    prompts: Sequence[Tensor],
    target: HFTarget,
    draft: Any,
    untrained: Any | None,
    depth: int,
    max_new_tokens: int,
) -> SetReport:
    trained, baseline, ties, different = [], [], 0, []
    for index, ids in enumerate(prompts):
        prompt = Prompt(target, ids, max_new_tokens=max_new_tokens)
        own = prompt.greedy()
        trained.append(_speculate(prompt, draft, target, depth, max_new_tokens))
        if untrained is not None:
            baseline.append(_speculate(prompt, untrained, target, depth, max_new_tokens, own))
        at = first_difference(trained[-1].tokens, own.tokens)
        if at is not None and at < len(own.gaps) and own.gaps[at] <= NEAR_TIE:
            ties += 1
        elif at is not None:
            different.append(index)
    return SetReport(
        name=name,
        prompts=len(prompts),
        prompt_tokens=sum(map(len, prompts)),
        trained=_arm(trained),
        untrained=_arm(baseline) if baseline else None,
        equal=len(prompts) - len(different),
        near_ties=ties,
        different=tuple(different),
    )


def _speculate(
    prompt: Prompt,
    model: Any,
    target: HFTarget,
    depth: int,
    max_new_tokens: int,
    recording: Recording | None = None,
) -> Decoded:
    if recording is None:
        prompt.target.rewind(len(prompt.ids))
    verifier = LiveVerifier(prompt.target) if recording is None else RecordedVerifier(recording)
    return decode_rounds(
        verifier,
        LmProposer(model, [*prompt.ids.tolist(), prompt.first_token]),
        prompt.first_token,
        depth=depth,
        max_new_tokens=max_new_tokens,
        eos_ids=frozenset(target.eos_token_ids),
    )


def _arm(decoded: Sequence[Decoded]) -> ArmReport:
    return ArmReport(
        passes=sum(d.passes for d in decoded),
        tokens=sum(d.emitted for d in decoded),
        tried=tuple(map(sum, zip(*(d.tried for d in decoded), strict=True))),
        accepted=tuple(map(sum, zip(*(d.accepted for d in decoded), strict=True))),
    )
