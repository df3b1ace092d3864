"""A draft and a target of one tokenizer whose tables have other sizes, and pairs that do not fit.

Catches: a common pair refused (Qwen2.5-0.5B has fewer rows than Qwen2.5-7B), an export whose size
serving engines refuse, ids that mean other tokens trained on without a word, new rows that are
random or likelier than the old ones, tied tables torn apart, a bigger draft's spare rows kept.
"""

import json

import pytest
import torch
from lm_run import make_place, run
from tiny import (
    CHATML,
    VOCAB_SIZE,
    randomise,
    tiny_config,
    tiny_tokenizer,
)
from tokenizers import AddedToken, Tokenizer
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from specforge_trim.cli.lm import train_lm_main
from specforge_trim.drafts.lm.vocabulary import check_vocabulary, fit_vocabulary

TOKENS = 262  # of the tokenizer; ids from there on are padding


def save_draft(folder, rows, *, tied=True, seed=5, tokenizer=None):
    config = tiny_config(tied=tied, num_layers=2)
    config.vocab_size = rows
    randomise(LlamaForCausalLM(config), seed=seed).save_pretrained(folder)
    (tokenizer or tiny_tokenizer()).save_pretrained(folder)
    return folder


def changed_tokenizer(change):
    """tiny_tokenizer with another outline, as JSON."""
    base = tiny_tokenizer()
    outline = json.loads(base.backend_tokenizer.to_str())
    change(outline)
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(outline)),
        bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|endoftext|>",
    )  # fmt: skip
    made.chat_template = CHATML
    return made


def swap_two_letters(outline):
    vocab = outline["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(
        tmp_path_factory.mktemp("vocabulary"),
        conversations=3,
        held=1,
        model={"draft_layers": None},
        loss={"label_weight": 0.5},
        train={"save_every": None},
    )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("rows", [TOKENS, 264, 300])
def test_a_draft_of_another_size_is_trained_and_exported_in_the_targets(place, rows, tied):
    name = f"{rows}-{tied}"
    draft = save_draft(place / f"draft-{name}", rows, tied=tied)
    out, log = run(place, f"run-{name}", "--draft", str(draft))
    assert log[-1]["distill_loss"] < log[0]["distill_loss"]
    exported = AutoModelForCausalLM.from_pretrained(out / "export", dtype=torch.float32)
    assert exported.config.vocab_size == VOCAB_SIZE  # what vLLM compares
    embedding, head = exported.model.embed_tokens.weight, exported.lm_head.weight
    assert embedding.shape == head.shape == (VOCAB_SIZE, 40)
    assert (embedding is head) == tied
    report = json.loads((out / "evaluation.json").read_text())
    assert report["sets"][0]["equal"] == 1
    weights, config = (out / "export" / f for f in ("model.safetensors", "config.json"))
    assert weights.stat().st_mode == config.stat().st_mode  # a server may run as another user
    tokenizer = AutoTokenizer.from_pretrained(out / "export")  # the target's
    assert len(tokenizer) == TOKENS and tokenizer.chat_template == CHATML


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_new_rows_are_the_mean_of_those_that_no_token_uses(tmp_path, tied):
    draft = save_draft(tmp_path / "draft", 265, tied=tied)
    model = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    old = [w.detach().clone() for w in (model.model.embed_tokens.weight, model.lm_head.weight)]
    ids = torch.tensor([[5, 17, 200]])
    before = model(ids).logits
    fit_vocabulary(model, 280, draft)
    after = model(ids).logits
    # Not bit for bit: a product of another width may sum in another order.
    torch.testing.assert_close(after[..., :265], before, rtol=1e-5, atol=1e-5)
    for weight, was in zip((model.model.embed_tokens.weight, model.lm_head.weight), old,
                           strict=True):  # fmt: skip
        assert torch.equal(weight[:265], was)
        for row in range(265, 280):
            torch.testing.assert_close(weight[row], (was[262] + was[263] + was[264]) / 3)
    assert (model.model.embed_tokens.weight is model.lm_head.weight) == tied
    fit_vocabulary(model, 263, draft)
    torch.testing.assert_close(model(ids).logits, before[..., :263], rtol=1e-5, atol=1e-5)
    assert model.config.vocab_size == 263


def test_without_a_spare_row_new_ones_are_the_mean_of_all(tmp_path):
    draft = save_draft(tmp_path / "draft", TOKENS, tied=False)
    model = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    mean = model.lm_head.weight.detach().sum(0) / TOKENS
    fit_vocabulary(model, 264, draft)
    torch.testing.assert_close(model.lm_head.weight[263], mean)


def test_ids_that_mean_other_tokens_are_refused_before_anything_is_made(place, capsys):
    other = save_draft(
        place / "swapped", VOCAB_SIZE, tokenizer=changed_tokenizer(swap_two_letters)
    )
    out = place / "refused"
    code = train_lm_main(
        ["--config", f"{place}/recipe.yaml", "--output-dir", str(out), "--draft", str(other)]
    )
    assert code == 2
    error = capsys.readouterr().err
    assert "another tokenizer than the target: 2 ids mean other tokens" in error
    assert "'b' in the draft, 'a' in the target" in error
    assert not out.exists()


def test_added_tokens_that_differ_are_a_warning(tmp_path, caplog):
    target = tmp_path / "target"
    tiny_tokenizer().save_pretrained(target)
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([AddedToken("<think>", special=False)])
    draft = tmp_path / "draft"
    tokenizer.save_pretrained(draft)
    check_vocabulary(draft, target, draft_rows=270, target_rows=272)
    assert len(caplog.records) == 1
    said = "1 special or added tokens are not the target's, such as 262: '<think>' in the draft"
    assert said in caplog.text and "none in the target" in caplog.text
    caplog.clear()
    check_vocabulary(target, target, draft_rows=272, target_rows=272)
    assert caplog.records == []


def test_a_draft_without_a_tokenizer_needs_the_targets_size(tmp_path, caplog):
    target, draft = tmp_path / "target", tmp_path / "draft"
    tiny_tokenizer().save_pretrained(target)
    draft.mkdir()
    tiny_config(num_layers=2).save_pretrained(draft)
    check_vocabulary(draft, target, draft_rows=272, target_rows=272)
    assert "has no tokenizer" in caplog.text
    with pytest.raises(ValueError, match="264 vocabulary rows, the target 272, and no tokenizer"):
        check_vocabulary(draft, target, draft_rows=264, target_rows=272)
