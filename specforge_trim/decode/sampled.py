"""Sampled speculative decoding: a sampled chain of drafts, and the rule that accepts it.

With p the target's and q the draft's distribution at a position, both at one temperature, and a
drafted token x drawn from q:

    accept x             with probability min(1, p(x) / q(x))
    else emit y          drawn from max(p - q, 0), scaled to 1, and drop the rest of the chain
    all accepted: emit   one more token, drawn from the target's distribution behind them

so that x or y is distributed as p, whatever q is:

    P(t) = q(t) min(1, p(t)/q(t)) + (1 - sum_x min(p(x), q(x))) max(p(t) - q(t), 0) / Z
         = min(p(t), q(t)) + max(p(t) - q(t), 0) = p(t),     Z = 1 - sum_x min(p(x), q(x))

The rejected token has p < q, so y never equals it: the tokens emitted are those drafted up to the
first that differs, and decode/prompts.py counts them as it counts greedy ones.

Letters: V target vocabulary, Vd draft vocabulary.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from specforge_trim.drafts.eagle3.proposer import CachedDraft
from specforge_trim.verifier.cached import CachedTarget


def probabilities(logits: Tensor, temperature: float) -> Tensor:
    """softmax(logits / temperature) over the last axis, in fp64 on the CPU.

    There one generator draws the same tokens wherever the models run.
    """
    assert temperature > 0, temperature
    return torch.softmax(logits.double().cpu() / temperature, dim=-1)


def draw(p_V: Tensor, generator: torch.Generator) -> int:
    """One index with probability proportional to p_V; generator on the CPU."""
    return int(torch.multinomial(p_V, 1, generator=generator))


def acceptance(p: float, q: float) -> float:
    """Probability that a drafted token is accepted: min(1, p / q), its p and q given, q > 0."""
    return min(1.0, p / q)


def residual(p_V: Tensor, q_V: Tensor) -> Tensor:
    """max(p - q, 0), what a token is drawn from instead of a rejected one; not scaled to 1.

    Its sum is the chance of a rejection: above 0 wherever one happens, except for rounding,
    after which p and q are equal and p itself is the answer.
    """
    left = (p_V - q_V).clamp_(min=0)
    return left if float(left.sum()) > 0 else p_V


def verify_chain(
    p: Tensor, q: Tensor, *, proposed: Sequence[int], generator: torch.Generator
) -> list[int]:
    """The tokens emitted for a chain: those accepted, and one more.

    p [n+1, V]: the target's distributions before each proposed token and behind the last;
    q [n, V]: what each of the n proposed tokens was drawn from.
    """
    assert len(p) == len(proposed) + 1 == len(q) + 1, (p.shape, q.shape, len(proposed))
    emitted: list[int] = []
    for i, token in enumerate(proposed):
        chance = acceptance(float(p[i, token]), float(q[i, token]))
        if float(torch.rand((), generator=generator, dtype=torch.float64)) >= chance:
            return [*emitted, draw(residual(p[i], q[i]), generator)]
        emitted.append(token)
    return [*emitted, draw(p[-1], generator)]


class SamplingDraft:
    """A draft that draws its chain, and remembers from what.

    chances: [depth, V], the distribution behind each token of the newest chain.
    """

    def __init__(self, draft: CachedDraft, temperature: float, generator: torch.Generator) -> None:
        self.draft, self.temperature, self.generator = draft, temperature, generator
        self.chances = torch.empty(0, 0)

    def propose(self, depth: int) -> list[int]:
        """`depth` target ids, each drawn and fed back to draft the next."""
        target_ids = self.draft.draft.draft_to_target.cpu()
        vocabulary = self.draft.draft.config.vocab_size
        tokens: list[int] = []
        rows: list[Tensor] = []
        for _ in range(depth):
            if tokens:
                self.draft.feed(tokens[-1])
            q_Vd = probabilities(self.draft.logits(), self.temperature)
            rows.append(q_Vd.new_zeros(vocabulary).index_copy_(0, target_ids, q_Vd))
            tokens.append(int(target_ids[draw(q_Vd, self.generator)]))
        self.chances = torch.stack(rows)
        return tokens

    def extend(self, aux_RA: Tensor, next_ids: Sequence[int]) -> None:
        self.draft.extend(aux_RA, next_ids)


class SamplingVerifier:
    """Live verification of a chain that `drafted` has sampled, by the target's distribution."""

    def __init__(self, target: CachedTarget, drafted: SamplingDraft) -> None:
        self.target, self.drafted = target, drafted
        self._start = target.length

    def verify(self, ids: Sequence[int]) -> tuple[Sequence[int], Tensor]:
        self._start = self.target.length
        result = self.target.advance(ids, keep=len(ids))
        p = probabilities(result.logits, self.drafted.temperature)
        choices = verify_chain(
            p, self.drafted.chances, proposed=ids[1:], generator=self.drafted.generator
        )
        return choices, result.aux

    def keep(self, count: int) -> None:
        self.target.rewind(self._start + count)
