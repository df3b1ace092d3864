"""Real speculative decoding while training: prompts shared over ranks, counts summed.

The draft decodes as a copy in the target's number format, so that nothing of the training model is
touched. What comes out is not compared with the target's own answers (`specforge-trim evaluate`
does that, in fp32): only its counts are kept.
"""

import copy
from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from specforge_trim.decode.prompts import Prompt, check_pair, check_prompt
from specforge_trim.decode.rounds import Decoded
from specforge_trim.drafts.eagle3.model import Eagle3Draft
from specforge_trim.drafts.eagle3.proposer import CachedDraft
from specforge_trim.drafts.eagle3.settings import Config
from specforge_trim.ranks.world import World
from specforge_trim.verifier.hf import HFTarget


class PromptDecoder:
    """Decodes every prompt greedily and, with a temperature above 0, once more by sampling."""

    def __init__(
        self,
        config: Config,
        target: HFTarget,
        prompts: Mapping[str, Sequence[Tensor]],
        *,
        draft: Eagle3Draft,
        world: World,
    ) -> None:
        """prompts: set -> ids int64 [n] of each.

        Raises ValueError when draft and target do not fit or a prompt is too long.
        """
        self._settings, self._seed = config.evaluate, config.train.seed
        self._target, self._world = target, world
        self._sets = tuple(prompts)
        self._prompts = [
            (number, ids) for number, name in enumerate(prompts) for ids in prompts[name]
        ]
        for _, ids in self._prompts:
            check_prompt(target.config, ids, self._settings.eval_max_new_tokens)
        CachedDraft(draft)
        check_pair(target, self._copy(draft))

    def __call__(self, draft: Eagle3Draft) -> dict[str, float | None]:
        """decode/[set/][sampled_]acceptance_length, and acceptance per depth over all sets.

        Every rank decodes its share; they meet after each prompt, so that none waits longer for
        another than for one prompt. Each prompt has a seed of its own: the draws are the same at
        every step and for any number of ranks.
        """
        own = self._copy(draft)
        size, depth = self._world.size, self._settings.eval_depth
        # Per set, greedy and sampled: tokens, passes, tried and accepted at each depth.
        counts = torch.zeros(len(self._sets), 2, 2 + 2 * depth, dtype=torch.float64)
        for first in range(0, len(self._prompts), size):
            number = first + self._world.rank
            decoded = self._world.together(partial(self._decode, own, number))
            for mode, one in enumerate(decoded):
                counts[self._prompts[number][0], mode] += _counted(one)
        self._world.sum(counts)
        return self._named(counts)

    def _decode(self, draft: Eagle3Draft, number: int) -> list[Decoded]:
        """One prompt, greedily and by sampling; nothing behind the last one."""
        if number >= len(self._prompts):
            return []
        settings = self._settings
        ids = self._prompts[number][1]
        prompt = Prompt(self._target, ids, max_new_tokens=settings.eval_max_new_tokens)
        decoded = [prompt.speculate(draft, depth=settings.eval_depth)]
        if settings.eval_temperature > 0:
            generator = torch.Generator().manual_seed(self._seed + number)
            decoded.append(
                prompt.sample(
                    draft,
                    depth=settings.eval_depth,
                    temperature=settings.eval_temperature,
                    generator=generator,
                )
            )
        return decoded

    def _copy(self, draft: Eagle3Draft) -> Eagle3Draft:
        weight = self._target.model.get_input_embeddings().weight
        return copy.deepcopy(draft).requires_grad_(False).to(weight.device, weight.dtype).eval()

    def _named(self, counts: Tensor) -> dict[str, float | None]:
        values: dict[str, float | None] = {}
        depth = self._settings.eval_depth
        modes = ("", "sampled_") if self._settings.eval_temperature > 0 else ("",)
        for mode, prefix in enumerate(modes):
            whole = counts[:, mode].sum(0).tolist()
            values[f"decode/{prefix}acceptance_length"] = _ratio(whole[0], whole[1])
            for i in range(depth):
                tried, accepted = whole[2 + i], whole[2 + depth + i]
                values[f"decode/{prefix}acceptance/{i}"] = _ratio(accepted, tried)
            for number, name in enumerate(self._sets):
                tokens, passes = counts[number, mode, :2].tolist()
                values[f"decode/{name}/{prefix}acceptance_length"] = _ratio(tokens, passes)
        return values


def _counted(decoded: Decoded) -> Tensor:
    numbers = (decoded.emitted, decoded.passes, *decoded.tried, *decoded.accepted)
    return torch.tensor(numbers, dtype=torch.float64)


def _ratio(top: float, bottom: float) -> float | None:
    return top / bottom if bottom else None
