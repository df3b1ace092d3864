"""The decoding loop: what is emitted, what is counted, what the caches keep.

Catches: a rejected token that stays in a cache; tokens emitted behind an end token; counts that
include tokens no one sees; an output that is not the target's own; a recording that counts
differently from a live run.
"""

import pytest
import torch
from tiny import randomise, tiny_config
from tiny_draft import prompt_ids, random_draft
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaForCausalLM

from specforge_trim.decode.prompts import (
    Prompt,
    check_pair,
    first_difference,
    last_prompt,
    speculate,
)
from specforge_trim.decode.rounds import LiveVerifier, RecordedVerifier, Recording, decode_rounds
from specforge_trim.drafts.eagle3.proposer import CachedDraft
from specforge_trim.verifier.cached import CachedTarget
from specforge_trim.verifier.hf import HFTarget


@pytest.fixture(scope="module")
def target():
    return HFTarget(randomise(LlamaForCausalLM(tiny_config())))


@torch.no_grad()
def naive_greedy(model, ids, *, max_new_tokens, eos_ids=()):
    """The whole sequence through the model for every token: no cache, no chain."""
    ids, out = ids.tolist(), []
    while len(out) < max_new_tokens and (not out or out[-1] not in eos_ids):
        out.append(int(model(torch.tensor([ids + out])).logits[0, -1].argmax()))
    return out


class Script:
    """Proposes what a script says for each round, then 0s; remembers what it was told."""

    def __init__(self, rounds):
        self.rounds, self.told = list(rounds), []

    def propose(self, depth):
        tokens = self.rounds.pop(0) if self.rounds else []
        return (tokens + [0] * depth)[:depth]

    def extend(self, aux_RA, next_ids):
        assert len(aux_RA) == len(next_ids)
        self.told.append((aux_RA.flatten().tolist(), list(next_ids)))


class Continuation:
    """A target whose greedy answer is fixed; its state for the token at index j is [j]."""

    def __init__(self, answer):
        self.answer, self.at, self.kept = answer, 0, []

    def verify(self, ids):
        assert ids[0] == self.answer[self.at]
        true = self.answer[self.at + 1 :] + [999] * len(ids)
        choices = []
        for i in range(len(ids)):  # behind a wrong token the target says something else
            right = list(ids[1 : i + 1]) == true[:i]
            choices.append(true[i] if right else 777)
        return choices, torch.arange(self.at, self.at + len(ids))[:, None]

    def keep(self, count):
        self.kept.append(count)
        self.at += count


def run(answer, rounds, *, depth=3, max_new_tokens=100, eos_ids=()):
    script, verifier = Script(rounds), Continuation(answer)
    result = decode_rounds(
        verifier,
        script,
        answer[0],
        depth=depth,
        max_new_tokens=max_new_tokens,
        eos_ids=eos_ids,
    )
    return result, script, verifier


def test_accepted_prefix_and_the_free_token():
    answer = [5, 6, 7, 8, 9, 10, 11, 2]
    rounds = [[6, 7, 99], [99, 10, 11], [10, 11, 2]]
    result, script, verifier = run(answer, rounds, eos_ids={2})
    assert result.tokens == tuple(answer)
    assert result.passes == 3 and result.emitted == 7
    assert verifier.kept == [3, 1, 3]
    # round 1: two of three tried and accepted, third tried and rejected; round 2: first rejected;
    # round 3: all accepted, and the end token leaves no room for a free one.
    assert result.tried == (3, 2, 2) and result.accepted == (2, 2, 1)
    # the draft gets the true state of each verified position with the token after it
    assert script.told == [([0, 1, 2], [6, 7, 8]), ([3], [9]), ([4, 5, 6], [10, 11, 2])]


def test_end_token_inside_the_accepted_chain_stops_there():
    answer = [5, 6, 2, 8, 9]
    result, _, verifier = run(answer, [[6, 2, 8, 9]], depth=4, eos_ids={2})
    assert result.tokens == (5, 6, 2)
    assert result.passes == 1 and verifier.kept == [2]
    assert result.tried == (1, 1, 0, 0) and result.accepted == (1, 1, 0, 0)


def test_end_token_as_the_prompts_own_token_needs_no_pass():
    result, _, _ = run([2, 6], [], eos_ids={2})
    assert result.tokens == (2,) and result.passes == 0 and result.tried == (0, 0, 0)


def test_limit_cuts_the_last_round():
    result, _, _ = run([5, 6, 7, 8, 9], [[6, 7, 8]], max_new_tokens=3)
    assert result.tokens == (5, 6, 7)
    assert result.passes == 1 and result.tried == (1, 1, 0) and result.accepted == (1, 1, 0)


def test_a_useless_draft_gives_one_token_a_pass():
    result, _, _ = run([5, 6, 7, 8, 2], [], eos_ids={2})
    assert result.tokens == (5, 6, 7, 8, 2)
    assert result.emitted / result.passes == 1.0
    assert result.tried == (4, 0, 0) and result.accepted == (0, 0, 0)


def test_an_oracle_is_accepted_in_full():
    answer = list(range(10, 31))
    rounds = [answer[i + 1 : i + 4] for i in range(0, 20, 4)]
    result, _, _ = run(answer, rounds, max_new_tokens=21)
    assert result.passes == 5 and result.emitted == 20  # (depth + 1) tokens a pass
    assert result.tried == result.accepted == (5, 5, 5)


def test_recorded_counts_equal_live_counts():
    answer = [5, 6, 7, 8, 9, 10, 11, 2]
    rounds = [[6, 7, 99], [99, 10, 11], [10, 11, 2]]
    live, script, _ = run(answer, list(rounds), eos_ids={2})
    aux = torch.arange(7)[:, None]
    recorder = Script(rounds)
    recorded = decode_rounds(
        RecordedVerifier(Recording(tuple(answer), (1.0,) * 8, aux)),
        recorder,
        5,
        depth=3,
        max_new_tokens=100,
        eos_ids={2},
    )
    assert recorded == live and recorder.told == script.told


def test_oracle_against_a_real_target(target):
    ids = prompt_ids()
    answer = naive_greedy(target.model, ids, max_new_tokens=24)
    prompt = Prompt(target, ids, max_new_tokens=24)
    verifier = LiveVerifier(prompt.target)
    oracle = Script([answer[i + 1 : i + 6] for i in range(0, 24, 6)])
    result = decode_rounds(
        verifier, oracle, prompt.first_token, depth=5, max_new_tokens=24, eos_ids=()
    )
    assert list(result.tokens) == answer
    assert result.passes == 4 and result.accepted == result.tried


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("depth", [1, 3, 5])
def test_output_is_the_targets_own_for_a_random_draft(target, depth, full):
    draft = random_draft(target, draft_vocab_size=target.vocab_size if full else 100)
    for seed in range(3):
        ids = prompt_ids(20 + 7 * seed, seed)
        expected = naive_greedy(target.model, ids, max_new_tokens=16, eos_ids=target.eos_token_ids)
        result = speculate(target, draft, ids, depth=depth, max_new_tokens=16)
        assert list(result.tokens) == expected
        assert result.emitted >= result.passes > 0
        assert all(a <= t for a, t in zip(result.accepted, result.tried, strict=True))


def test_states_after_rejections_are_those_of_a_fresh_run(target):
    ids = prompt_ids()
    cached = CachedTarget(target.model, target.aux_layers)
    cached.advance(ids[:10], keep=1)
    cached.advance([7, 8, 9], keep=1)
    cached.rewind(10)
    cached.advance(ids[10:30], keep=1)
    cached.rewind(25)
    result = cached.advance(ids[25:], keep=15)
    fresh = target.features(ids)
    logits = target.model(ids[None]).logits[0, 25:]
    torch.testing.assert_close(result.aux, fresh.aux[25:], atol=1e-4, rtol=1e-4)
    assert list(result.choices) == logits.argmax(-1).tolist()
    best = logits.topk(2, -1).values
    torch.testing.assert_close(
        torch.tensor(result.gaps), best[:, 0] - best[:, 1], atol=1e-4, rtol=1e-4
    )


def test_rejected_tokens_leave_sliding_layers_too():
    """A sliding-window cache that has dropped old entries cannot be cut back."""
    config = Gemma3TextConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=6,
        layer_types=["sliding_attention", "full_attention"] * 4,
        eos_token_id=1,
    )
    gemma = HFTarget(randomise(Gemma3ForCausalLM(config)))
    draft = random_draft(gemma, draft_vocab_size=30)
    ids = prompt_ids(30) % 60 + 2
    expected = naive_greedy(gemma.model, ids, max_new_tokens=20, eos_ids=gemma.eos_token_ids)
    assert list(speculate(gemma, draft, ids, max_new_tokens=20).tokens) == expected


def test_the_drafts_cache_after_rejections_is_that_of_a_fresh_one(target):
    draft = random_draft(target)
    aux = torch.randn(400, 3 * target.hidden_size, generator=torch.Generator().manual_seed(1))
    ids = prompt_ids(400, 5)
    used = CachedDraft(draft)
    used.extend(aux[:250], ids[:250])
    for start, end in ((250, 251), (251, 257), (257, 300), (300, 400)):
        used.propose(5)
        used.extend(aux[start:end], ids[start:end])
    fresh = CachedDraft(draft)
    fresh.extend(aux, ids)
    torch.testing.assert_close(used.logits(), fresh.logits(), atol=1e-5, rtol=1e-5)
    assert used.propose(5) == fresh.propose(5)


def test_proposals_are_target_ids_of_the_draft_vocabulary(target):
    draft = random_draft(target, draft_vocab_size=5)
    cached = CachedDraft(draft)
    cached.extend(torch.randn(8, 3 * target.hidden_size), prompt_ids(8))
    assert set(cached.propose(20)) <= set(draft.t2d.nonzero().flatten().tolist())


def test_pairs_that_do_not_fit_are_refused(target):
    check_pair(target, random_draft(target))
    check_pair(target, random_draft(target, aux_layers=(2, 4, 5)))
    with pytest.raises(ValueError, match="aux_layers"):
        speculate(target, random_draft(target, aux_layers=(1, 4, 5)), prompt_ids())
    with pytest.raises(ValueError, match="dtype"):
        speculate(target, random_draft(target).bfloat16(), prompt_ids())
    with pytest.raises(ValueError, match="4096 positions"):
        speculate(target, random_draft(target), prompt_ids(4000), max_new_tokens=128)
    with pytest.raises(ValueError, match="at least one token"):
        speculate(target, random_draft(target), prompt_ids(0))


def test_first_difference():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2
    assert first_difference([], [4]) == 0


def test_the_prompt_is_what_stands_before_the_last_answer():
    ids = torch.arange(10)
    mask = torch.tensor([0, 0, 1, 1, 0, 0, 0, 1, 1, 0])
    assert last_prompt(ids, mask).tolist() == [0, 1, 2, 3, 4, 5, 6]
    for mask in (torch.zeros(10), torch.ones(10)):
        with pytest.raises(ValueError, match="no answer to decode"):
            last_prompt(ids, mask)
