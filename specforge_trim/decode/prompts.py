"""Speculative decoding with a draft, greedy or sampled, and what it measures.

A round: the draft proposes a chain of `depth` tokens, the target reads them in one verification
pass, the longest prefix that equals the target's own greedy choices is accepted, and the target's
next choice after it comes free. The output is the target's own greedy output by construction, and
`evaluate` checks that it is.

    acceptance length         tokens emitted per verification pass: accepted ones plus the free
                              one. The token that the prompt's own pass gives is not counted;
                              tokens behind an end token or the length limit are not either
    acceptance at depth i     P(drafted token i accepted | those before it were)

Letters: A aux layers, Dt target width, n prompt tokens.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from specforge_trim.decode.report import ArmReport, EvalReport, SetReport
from specforge_trim.decode.rounds import (
    Decoded,
    LiveVerifier,
    Proposer,
    RecordedVerifier,
    Recording,
    Verifier,
    decode_rounds,
    record_greedy,
)
from specforge_trim.decode.sampled import SamplingDraft, SamplingVerifier, draw, probabilities
from specforge_trim.drafts.eagle3.model import Eagle3Draft
from specforge_trim.drafts.eagle3.proposer import CachedDraft
from specforge_trim.verifier.aux_layers import resolve_aux_layers
from specforge_trim.verifier.cached import CachedTarget
from specforge_trim.verifier.hf import HFTarget

NEAR_TIE = 1e-4  # top-two logits closer than this may swap between two orders of summation


class Prompt:
    """A prompt that the target has read once; every arm starts from the same cache and states."""

    def __init__(self, target: HFTarget, prompt_ids: Tensor, *, max_new_tokens: int) -> None:
        self.ids = torch.as_tensor(prompt_ids, dtype=torch.int64).flatten()
        check_prompt(target.config, self.ids, max_new_tokens)
        self.target = CachedTarget(target.model, target.aux_layers)
        result = self.target.advance(self.ids, keep=1)
        self.aux = result.aux
        self.first_token, self.first_gap = result.choices[0], result.gaps[0]
        self.first_logits = result.logits[0]
        self._limits: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "eos_ids": frozenset(target.eos_token_ids),
        }

    def greedy(self) -> Recording:
        """The target's own greedy answer."""
        self.target.rewind(len(self.ids))
        return record_greedy(self.target, self.first_token, self.first_gap, **self._limits)

    def speculate(
        self, draft: Eagle3Draft, *, depth: int, recording: Recording | None = None
    ) -> Decoded:
        """Decode with `draft`, verified by live passes, or by `recording` when one is given."""
        drafted = self._drafted(draft, self.first_token)
        return self.verified(drafted, depth=depth, recording=recording)

    def verified(
        self, drafted: Proposer, *, depth: int, recording: Recording | None = None
    ) -> Decoded:
        """The same with any draft that stands at the end of the prompt and has `first_token`."""
        verifier: Verifier
        if recording is None:
            self.target.rewind(len(self.ids))
            verifier = LiveVerifier(self.target)
        else:
            verifier = RecordedVerifier(recording)
        return decode_rounds(verifier, drafted, self.first_token, depth=depth, **self._limits)

    def sample(
        self, draft: Eagle3Draft, *, depth: int, temperature: float, generator: torch.Generator
    ) -> Decoded:
        """Decode with sampled drafts and sampled verification; every pass is live.

        The answer is one draw of the target's own distribution at this temperature.
        """
        self.target.rewind(len(self.ids))
        first = draw(probabilities(self.first_logits, temperature), generator)
        drafted = SamplingDraft(self._drafted(draft, first), temperature, generator)
        verifier = SamplingVerifier(self.target, drafted)
        return decode_rounds(verifier, drafted, first, depth=depth, **self._limits)

    def _drafted(self, draft: Eagle3Draft, first_token: int) -> CachedDraft:
        """A draft that stands at the end of the prompt."""
        cached = CachedDraft(draft)
        cached.extend(self.aux, torch.cat((self.ids[1:], torch.tensor([first_token]))))
        return cached


def speculate(
    target: HFTarget,
    draft: Eagle3Draft,
    prompt_ids: Tensor,
    *,
    depth: int = 5,
    max_new_tokens: int = 128,
) -> Decoded:
    """Greedy speculative decoding of one prompt [n] with a chain of `depth` drafted tokens.

    Raises ValueError when draft and target do not fit, or the prompt and `max_new_tokens` exceed
    the target's positions.
    """
    check_pair(target, draft)
    prompt = Prompt(target, prompt_ids, max_new_tokens=max_new_tokens)
    return prompt.speculate(draft, depth=depth)


def check_prompt(text_config: Any, ids: Tensor, max_new_tokens: int) -> None:
    """Raise ValueError unless a prompt [n] and its answer fit the target's positions.

    text_config: of the target, as transformers reads it.
    """
    limit = text_config.max_position_embeddings
    if not 0 < len(ids) <= limit - max_new_tokens:
        raise ValueError(
            f"a prompt of {len(ids)} tokens and max_new_tokens={max_new_tokens}; "
            f"expected at least one token, and both within the target's {limit} positions"
        )


def check_pair(target: HFTarget, draft: Eagle3Draft) -> None:
    """Raise ValueError unless the draft's sizes, aux layers and dtype are those of the target."""
    layers = resolve_aux_layers(target.num_layers, draft.config.aux_layers)
    weight = target.model.get_input_embeddings().weight
    for key, mine, theirs in (
        ("target_hidden_size", draft.config.target_hidden_size, target.hidden_size),
        ("vocab_size", draft.config.vocab_size, target.vocab_size),
        ("aux_layers", layers, target.aux_layers),
        ("dtype", draft.fc.weight.dtype, weight.dtype),
        ("device", draft.fc.weight.device, weight.device),
    ):
        if mine != theirs:
            raise ValueError(f"draft {key} is {mine}; the target's is {theirs}")


def last_prompt(input_ids: Tensor, loss_mask: Tensor) -> Tensor:
    """The tokens before a conversation's last answer, its generation prompt included.

    input_ids [L], loss_mask [L]. Raises ValueError when nothing is supervised or nothing
    comes before it.
    """
    mask = torch.as_tensor(loss_mask).to(torch.bool)
    starts = (mask & ~torch.cat((mask.new_zeros(1), mask[:-1]))).nonzero().flatten()
    if len(starts) == 0 or int(starts[-1]) == 0:
        raise ValueError("no answer to decode: expected supervised tokens after a prompt")
    return torch.as_tensor(input_ids)[: int(starts[-1])]


def evaluate(
    target: HFTarget,
    draft: Eagle3Draft,
    prompt_sets: Mapping[str, Iterable[Tensor]],
    *,
    untrained: Eagle3Draft | None = None,
    depth: int = 5,
    max_new_tokens: int = 128,
    training_accuracy: Sequence[float] | None = None,
    training_acceptance: Sequence[float] | None = None,
    progress: bool = True,
) -> EvalReport:
    """Decode every prompt with `draft`, and compare with the target's own greedy output.

    The target reads each prompt once; then it answers alone, and the draft's decoding is verified
    by live passes. `untrained` is the comparison: it drafts for the recorded answer, which gives
    the counts of a live run without the target's passes.

    Args:
        prompt_sets: name -> prompts, int64 [n] each.
        training_accuracy, training_acceptance: per TTT step, shown beside the measured values.

    Raises:
        ValueError: an empty prompt set, a prompt too long for the target, drafts that do not
            fit the target, or a target or draft that is not fp32 (the comparison needs it).
    """
    for one in (draft, *(() if untrained is None else (untrained,))):
        check_pair(target, one)
        if one.fc.weight.dtype != torch.float32:
            raise ValueError(f"evaluation runs in float32; got {one.fc.weight.dtype}")

    def decoding(with_draft: Eagle3Draft) -> Decoding:
        return lambda prompt, own: prompt.speculate(with_draft, depth=depth, recording=own)

    report = evaluate_with(
        target,
        prompt_sets,
        trained=decoding(draft),
        untrained=None if untrained is None else decoding(untrained),
        depth=depth,
        max_new_tokens=max_new_tokens,
        progress=progress,
    )
    return replace(
        report,
        training_accuracy=None if training_accuracy is None else tuple(training_accuracy),
        training_acceptance=None if training_acceptance is None else tuple(training_acceptance),
    )


# How a prompt is decoded: verified by live passes, or by the recorded answer where one is given.
Decoding = Callable[[Prompt, Recording | None], Decoded]


def evaluate_with(
    target: HFTarget,
    prompt_sets: Mapping[str, Iterable[Tensor]],
    *,
    trained: Decoding,
    untrained: Decoding | None,
    depth: int,
    max_new_tokens: int,
    progress: bool = True,
) -> EvalReport:
    """`evaluate` for any kind of draft, given by how it decodes a prompt with `depth`.

    Raises ValueError for an empty prompt set, and for a prompt too long for the target before
    any is decoded.
    """
    if depth < 1 or max_new_tokens < 2:
        raise ValueError(
            f"depth={depth}, max_new_tokens={max_new_tokens}; expected at least 1 and 2"
        )
    sets = {name: list(prompts) for name, prompts in prompt_sets.items()}
    empty = [name for name, prompts in sets.items() if not prompts]
    if empty or not sets:
        raise ValueError(f"no prompts to decode in {empty or 'prompt_sets'}; expected some")
    for prompts in sets.values():
        for ids in prompts:
            check_prompt(target.config, ids, max_new_tokens)
    reports = []
    total = sum(map(len, sets.values()))
    with tqdm(total=total, desc="decoding", unit="prompt", disable=not progress) as bar:
        for name, prompts in sets.items():
            read = (Prompt(target, ids, max_new_tokens=max_new_tokens) for ids in prompts)
            reports.append(_evaluate_set(name, read, trained, untrained, bar))
    return EvalReport(depth=depth, max_new_tokens=max_new_tokens, sets=tuple(reports))


def _evaluate_set(
    name: str,
    prompts: Iterable[Prompt],
    trained: Decoding,
    untrained: Decoding | None,
    bar: tqdm,
) -> SetReport:
    """Every arm on the prompts of one set."""
    arms: tuple[list[Decoded], list[Decoded]] = ([], [])
    tokens, ties, different = 0, 0, []
    for index, prompt in enumerate(prompts):
        own = prompt.greedy()
        arms[0].append(trained(prompt, None))
        if untrained is not None:
            arms[1].append(untrained(prompt, own))
        at = first_difference(arms[0][-1].tokens, own.tokens)
        if at is not None and at < len(own.gaps) and own.gaps[at] <= NEAR_TIE:
            ties += 1
        elif at is not None:
            different.append(index)
        tokens += len(prompt.ids)
        bar.set_postfix_str(f"{name}, {len(own.tokens)} tokens", refresh=False)
        bar.update()
    return SetReport(
        name=name,
        prompts=len(arms[0]),
        prompt_tokens=tokens,
        trained=_arm(arms[0]),
        untrained=_arm(arms[1]) if arms[1] else None,
        equal=len(arms[0]) - len(different),
        near_ties=ties,
        different=tuple(different),
    )


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The first index at which two token sequences differ; the shorter length if one ends."""
    for i, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return i
    return None if len(a) == len(b) else min(len(a), len(b))


def _arm(decoded: Sequence[Decoded]) -> ArmReport:
    return ArmReport(
        passes=sum(d.passes for d in decoded),
        tokens=sum(d.emitted for d in decoded),
        tried=tuple(map(sum, zip(*(d.tried for d in decoded), strict=True))),
        accepted=tuple(map(sum, zip(*(d.accepted for d in decoded), strict=True))),
    )
