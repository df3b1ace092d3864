"""The evaluation: its counts, its equality check, and how it is shown.

Catches: rates averaged over prompts instead of counts divided once; an output that differs and
is reported equal; a near tie counted as a fault; nan in JSON; an untrained comparison that costs
passes of the target or counts otherwise than a live run; a prompt that is too long, found after
an hour of decoding.
"""

import json
import math

import pytest
import torch
from tiny import randomise, tiny_config
from tiny_draft import prompt_ids, random_draft
from transformers import LlamaForCausalLM

from specforge_trim.decode import prompts as decode
from specforge_trim.decode.prompts import Prompt, evaluate
from specforge_trim.decode.report import ArmReport, EvalReport, SetReport
from specforge_trim.decode.rounds import Decoded, Recording
from specforge_trim.verifier.hf import HFTarget


@pytest.fixture(scope="module")
def target():
    return HFTarget(randomise(LlamaForCausalLM(tiny_config())))


def arm(passes, tokens, tried, accepted):
    return ArmReport(passes, tokens, tried, accepted)


def report():
    long = SetReport(
        name="long",
        prompts=2,
        prompt_tokens=900,
        trained=arm(10, 15, (10, 4), (4, 1)),
        untrained=arm(14, 14, (14, 0), (0, 0)),
        equal=2,
        near_ties=1,
        different=(),
    )
    code = SetReport("code", 3, 90, arm(0, 0, (0, 0), (0, 0)), None, 2, 0, (1,))
    return EvalReport(2, 16, (long, code), training_accuracy=(0.5,))


def test_rates_are_counts_divided_once():
    long = report().sets[0]
    assert long.trained.acceptance_length == 1.5 and long.untrained.acceptance_length == 1.0
    assert long.trained.acceptance == (0.4, 0.25)
    assert math.isnan(long.untrained.acceptance[1])
    assert report().equal == 4 and report().prompts == 5
    joined = decode._arm(
        [Decoded((1, 2, 3), 1, (1, 1), (1, 0)), Decoded((1, 2), 1, (1, 0), (0, 0))]
    )
    assert joined == arm(2, 3, (2, 1), (1, 0))


def test_text_shows_every_number():
    lines = report().format().splitlines()
    assert max(map(len, lines)) <= 100
    assert lines[2].split() == ["long", "2", "10", "15", "1.50", "1.00"]
    assert lines[3].split() == ["code", "3", "0", "0", "nan"]
    assert lines[7].split() == ["long", "0.400", "of", "10", "0.250", "of", "4"]
    assert lines[8].split() == ["code", "-", "-"]
    assert lines[9].split() == ["training", "accuracy", "0.500", "-"]
    assert lines[-2] == "greedy output equals target: 4/5 (1 with a near tie)"
    assert lines[-1] == "  different in code: prompts [1]"


def test_json_holds_counts_and_rates_and_no_nan():
    text = json.dumps(report().to_dict(), allow_nan=False)
    found = json.loads(text)
    assert found["sets"][0]["trained"] == {
        "passes": 10,
        "tokens": 15,
        "tried": [10, 4],
        "accepted": [4, 1],
        "acceptance_length": 1.5,
        "acceptance": [0.4, 0.25],
    }
    assert found["sets"][0]["untrained"]["acceptance"] == [0.0, None]
    assert found["sets"][1]["trained"]["acceptance_length"] is None
    assert found["sets"][1]["untrained"] is None and found["sets"][1]["different"] == [1]
    assert found["equal"] == 4 and found["prompts"] == 5
    assert found["training_accuracy"] == [0.5] and found["training_acceptance"] is None


def test_untrained_counts_are_those_of_live_decoding(target):
    trained, untrained = random_draft(target, seed=1), random_draft(target, seed=2)
    sets = {"a": [prompt_ids(20, 1), prompt_ids(33, 2)], "b": [prompt_ids(9, 3)]}
    found = evaluate(
        target,
        trained,
        sets,
        untrained=untrained,
        depth=3,
        max_new_tokens=20,
        training_accuracy=[0.1] * 5,
        progress=False,
    )
    swapped = evaluate(target, untrained, sets, depth=3, max_new_tokens=20, progress=False)
    for mine, live in zip(found.sets, swapped.sets, strict=True):
        assert mine.untrained == live.trained
        assert live.untrained is None
    assert found.equal == found.prompts == 3
    assert [s.prompt_tokens for s in found.sets] == [53, 9]
    assert found.training_accuracy == (0.1,) * 5 and found.training_acceptance is None


def own_answer(tokens, gaps):
    return lambda self: Recording(tuple(tokens), tuple(gaps), torch.empty(0, 0))


@pytest.mark.parametrize("gap, equal, ties, different", [(0.9e-4, 1, 1, ()), (1.1e-4, 0, 0, (0,))])
def test_a_difference_is_forgiven_only_at_a_near_tie(
    target, monkeypatch, gap, equal, ties, different
):
    draft, ids = random_draft(target), prompt_ids(12)
    tokens = list(Prompt(target, ids, max_new_tokens=8).greedy().tokens)
    assert len(tokens) == 8
    tokens[3] = (tokens[3] + 1) % 250
    gaps = [1.0, 1.0, 1.0, gap, 0.0, 1.0, 1.0, 1.0]  # only the first difference is judged
    monkeypatch.setattr(Prompt, "greedy", own_answer(tokens, gaps))
    found = evaluate(target, draft, {"x": [ids]}, max_new_tokens=8, progress=False).sets[0]
    assert (found.equal, found.near_ties, found.different) == (equal, ties, different)


def test_an_answer_that_ends_early_is_a_difference(target, monkeypatch):
    draft, ids = random_draft(target), prompt_ids(12)
    tokens = Prompt(target, ids, max_new_tokens=8).greedy().tokens[:5]
    monkeypatch.setattr(Prompt, "greedy", own_answer(tokens, [0.0] * 5))
    found = evaluate(target, draft, {"x": [ids]}, max_new_tokens=8, progress=False).sets[0]
    assert found.different == (0,)


def test_gaps_are_the_lead_of_each_chosen_token(target):
    ids = prompt_ids(15, 4)
    own = Prompt(target, ids, max_new_tokens=6).greedy()
    whole = torch.cat((ids, torch.tensor(own.tokens)))
    logits = target.model(whole[None]).logits[0, len(ids) - 1 : -1]
    best = logits.topk(2, -1)
    assert best.indices[:, 0].tolist() == list(own.tokens)
    gaps = best.values[:, 0] - best.values[:, 1]
    torch.testing.assert_close(torch.tensor(own.gaps), gaps, atol=1e-4, rtol=1e-4)


def test_a_prompt_too_long_is_refused_before_any_is_decoded(target, monkeypatch):
    monkeypatch.setattr(Prompt, "greedy", lambda self: pytest.fail("a prompt was decoded"))
    limit = target.config.max_position_embeddings
    sets = {"x": [prompt_ids(9), torch.full((limit - 7,), 5)]}
    with pytest.raises(ValueError, match=f"prompt of {limit - 7} tokens and max_new_tokens=8"):
        evaluate(target, random_draft(target), sets, max_new_tokens=8, progress=False)


def test_what_cannot_be_evaluated_is_refused(target):
    draft, ids = random_draft(target), prompt_ids(9)

    def refused(match, sets, draft=draft, **settings):
        with pytest.raises(ValueError, match=match):
            evaluate(target, draft, sets, progress=False, **settings)

    refused("no prompts", {})
    refused("no prompts to decode in .'empty'", {"x": [ids], "empty": []})
    refused("depth=0", {"x": [ids]}, depth=0)
    config = tiny_config()
    config.vocab_size = 280
    other = random_draft(HFTarget(LlamaForCausalLM(config)))
    refused("vocab_size is 280; the target's is 272", {"x": [ids]}, untrained=other)
    half = HFTarget(randomise(LlamaForCausalLM(tiny_config())).bfloat16())
    with pytest.raises(ValueError, match="float32"):
        evaluate(half, random_draft(target).bfloat16(), {"x": [ids]}, progress=False)
