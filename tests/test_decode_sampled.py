"""Sampled verification: what is emitted has the target's distribution, whatever the draft says.

Catches: a rejected token replaced by a draw from p instead of max(p - q, 0), a residual that is
not scaled, an acceptance that compares the wrong way round, a draft vocabulary laid on the wrong
target tokens, a temperature that only one side has, a chain that goes on behind a rejection, a
bonus token drawn before the last one is accepted.
"""

import itertools
import math

import pytest
import torch
from tiny import randomise, tiny_config
from tiny_draft import prompt_ids, random_draft
from transformers import LlamaForCausalLM

from specforge_trim.decode import sampled as sampled_decode
from specforge_trim.decode.prompts import Prompt
from specforge_trim.decode.sampled import acceptance, probabilities, residual, verify_chain
from specforge_trim.verifier.hf import HFTarget

# Chi-square quantiles at 1 - 1e-6: a sound rule fails once in a million such tests, and the seeds
# are fixed.
LIMIT = 76.9  # of 24 degrees of freedom
DRAWS = 20000


def chi_square(counts, expected):
    return sum((c - e) ** 2 / e for c, e in zip(counts, expected, strict=True))


def pairs():
    """Distributions over five tokens: alike, disjoint in part, and tokens the draft cannot say."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(6):
        p, q = torch.rand(2, 5, generator=generator, dtype=torch.float64) ** 2
        q[torch.randint(5, (1,), generator=generator)] = 0
        yield p / p.sum(), q / q.sum()
    same = torch.tensor([0.5, 0.25, 0.125, 0.0625, 0.0625]).double()
    yield same, same.clone()
    yield same, torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0]).double()


def test_accept_and_residual_add_up_to_the_targets_distribution():
    """Every draw of a chain of one, with its probability: no sampling, no tolerance but fp64."""
    for p, q in pairs():
        emitted = torch.zeros(5).double()
        for x in range(5):
            if q[x] == 0:
                continue
            accepted = acceptance(float(p[x]), float(q[x]))
            emitted[x] += q[x] * accepted
            if accepted < 1:
                left = residual(p, q)
                emitted += q[x] * (1 - accepted) * left / left.sum()
        assert float((emitted - p).abs().max()) < 1e-15


def replaced_by_p(p, q):
    """The mistake: draw again from the whole target instead of what is left of it."""
    return p


@pytest.mark.parametrize("rule", [residual, replaced_by_p])
def test_two_tokens_in_a_row_have_the_targets_joint_distribution(monkeypatch, rule):
    """Chains of two over five tokens; p and q of the second depend on the first."""
    monkeypatch.setattr(sampled_decode, "residual", rule)
    generator = torch.Generator().manual_seed(3)
    some = list(pairs())
    first_p, first_q = some[0]
    counts = dict.fromkeys(itertools.product(range(5), repeat=2), 0)
    for _ in range(DRAWS):
        a = int(torch.multinomial(first_q, 1, generator=generator))
        b = int(torch.multinomial(some[1 + a][1], 1, generator=generator))
        p = torch.stack([first_p, some[1 + a][0], some[6][0]])
        q = torch.stack([first_q, some[1 + a][1]])
        emitted = verify_chain(p, q, proposed=[a, b], generator=generator)
        if len(emitted) == 1:  # the chain was dropped: the target says the next one alone
            emitted.append(int(torch.multinomial(some[1 + emitted[0]][0], 1, generator=generator)))
        counts[tuple(emitted[:2])] += 1
    expected = [DRAWS * float(first_p[a] * some[1 + a][0][b]) for a, b in counts]
    assert min(expected) > 5  # where chi-square holds
    found = chi_square(counts.values(), expected)
    # 25 outcomes, 24 degrees of freedom; the mistake shows by hundreds.
    assert (found < LIMIT) == (rule is residual), f"chi-square {found:.0f}"


def test_a_rejected_token_is_never_emitted_in_its_place():
    generator = torch.Generator().manual_seed(1)
    for p, q in pairs():
        for _ in range(50):
            token = int(torch.multinomial(q, 1, generator=generator))
            p2, q1 = torch.stack([p, p]), q[None]
            emitted = verify_chain(p2, q1, proposed=[token], generator=generator)
            assert len(emitted) == (2 if emitted[0] == token else 1)


def test_equal_distributions_accept_everything():
    """min(1, p/q) = 1 at every token: acceptance per step is sum_v min(p, q), here 1."""
    generator = torch.Generator().manual_seed(2)
    p = torch.softmax(torch.randn(4, 5, generator=generator).double(), -1)
    for _ in range(100):
        proposed = [int(torch.multinomial(row, 1, generator=generator)) for row in p[:3]]
        emitted = verify_chain(p, p[:3], proposed=proposed, generator=generator)
        assert emitted[:3] == proposed and len(emitted) == 4


# ---------------------------------------------------------------------- with models


@pytest.fixture(scope="module")
def target():
    """The vocabulary is the tiny one; a low temperature leaves a handful of likely tokens."""
    return HFTarget(randomise(LlamaForCausalLM(tiny_config(num_layers=8))))


@torch.no_grad()
def exact_second(target, ids, first, temperature):
    """P(second answer token | first), from one plain pass of the target."""
    logits = target.model(torch.tensor([[*ids.tolist(), first]])).logits[0, -1]
    return probabilities(logits, temperature)


@torch.no_grad()
def test_decoding_draws_from_the_target_whatever_the_draft(target):
    """First two tokens of sampled answers against the target's exact joint distribution."""
    draft, ids, temperature, draws = random_draft(target), prompt_ids(20), 3.0, 300
    generator = torch.Generator().manual_seed(5)
    prompt = Prompt(target, ids, max_new_tokens=3)
    first = probabilities(target.model(ids[None]).logits[0, -1], temperature)
    likely = first.topk(3).indices.tolist()
    found, accepted, tried = {}, 0, 0
    for _ in range(draws):
        result = prompt.sample(draft, depth=2, temperature=temperature, generator=generator)
        pair = result.tokens[:2]
        found[pair] = found.get(pair, 0) + 1
        accepted, tried = accepted + result.accepted[0], tried + result.tried[0]
    expected = {}
    for a in likely:
        second = exact_second(target, ids, a, temperature)
        for b in second.topk(3).indices.tolist():
            expected[a, b] = draws * float(first[a] * second[b])
    expected = {k: v for k, v in expected.items() if v > 5}
    rest = draws - sum(expected.values())
    counts = [found.get(pair, 0) for pair in expected]
    values = [*expected.values()] + ([rest] if rest > 5 else [])
    counts += [draws - sum(counts)] if rest > 5 else []
    freedom = len(values) - 1
    # Wilson and Hilferty's approximation of the chi-square quantile at 1 - 1e-6 (z = 4.75).
    limit = freedom * (1 - 2 / (9 * freedom) + 4.75 * math.sqrt(2 / (9 * freedom))) ** 3
    assert freedom >= 2 and chi_square(counts, values) < limit, (counts, values)
    assert 0 < tried and accepted < tried  # rejections took place


def test_the_same_seed_draws_the_same_answer(target):
    draft, prompt = random_draft(target), Prompt(target, prompt_ids(15), max_new_tokens=12)

    def answer(seed):
        generator = torch.Generator().manual_seed(seed)
        return prompt.sample(draft, depth=3, temperature=1.0, generator=generator)

    assert answer(1) == answer(1) and answer(1) != answer(2)
    before = torch.get_rng_state()
    answer(3)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_temperature_near_zero_gives_the_greedy_answer(target):
    draft, prompt = random_draft(target), Prompt(target, prompt_ids(15), max_new_tokens=12)
    generator = torch.Generator().manual_seed(0)
    sampled = prompt.sample(draft, depth=3, temperature=1e-4, generator=generator)
    assert sampled == prompt.speculate(draft, depth=3)
