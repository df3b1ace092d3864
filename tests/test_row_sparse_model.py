"""Whole models with a row-sparse backward against the dense reference.

Catches: a projection whose gradient misses kept rows or counts others, keys and values cut as well
(their gradient is of all rows), a norm that learns from kept rows only, a cut at some layers only,
attention across documents, rotation of kept queries at the wrong positions, a forward that differs
in its last bit, a fallback that is wrong or silent, a model that is accepted and computed wrongly.
"""

import copy
import logging

import pytest
import torch
from lm_case import FAMILIES, make_model, make_stream, reference_step
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from specforge_trim.drafts.lm.layers import (
    RowSparseSettings,
    disable_row_sparse,
    enable_row_sparse,
    hidden_states,
)
from specforge_trim.drafts.lm.rows import loss_rows, plan_rows
from specforge_trim.loss.labels import label_loss

ON = RowSparseSettings(stop_grad_context_tokens=True)
OFF = RowSparseSettings()
MASKS = {
    "spans": ["000000111000110", "0001", "110000000011111100"],
    "scattered": ["010010001010010010100101", "0010100"],
    "all": ["1111111", "11111"],
    "one document without": ["0000000", "000110"],
    "none": ["00000", "000"],
}


def run(model, stream, settings, *, enable=True, weight=0.1):
    """(loss, hidden, {name: gradient}) by the package."""
    if enable:
        enable_row_sparse(model, settings)
    plan = plan_rows(loss_rows([stream.mask], cu_seqlens=stream.cu), cu_seqlens=stream.cu)
    hidden = hidden_states(model, stream.ids, stream.positions, plan, settings=settings)
    loss, _ = label_loss(hidden, model.lm_head.weight, stream.labels, plan.keep, row_scale=weight)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return loss.detach(), hidden.detach(), grads


def assert_equal_gradients(found, expected, *, tolerance=1e-10):
    assert set(found) == set(expected)
    for name, want in expected.items():
        assert found[name] is not None, f"{name} has no gradient"
        gap = (found[name] - want).abs().max().item() / max(1e-3, want.abs().max().item())
        assert gap <= tolerance, f"{name}: gradients differ by {gap:.2e}"


@pytest.mark.parametrize("masks", MASKS, ids=lambda m: m.replace(" ", "-"))
@pytest.mark.parametrize("family", FAMILIES)
def test_every_gradient_equals_the_dense_reference(family, masks):
    stream = make_stream(MASKS[masks])
    loss, expected = reference_step(make_model(family), stream)
    found_loss, _, found = run(make_model(family), stream, ON)
    assert abs(found_loss - loss) <= 1e-12, (found_loss, loss)
    assert_equal_gradients(found, expected)
    if masks == "none":
        assert all(float(g.abs().max()) == 0 for g in found.values())


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_without_the_flag_the_gradient_is_the_models_own(family):
    stream = make_stream(MASKS["spans"])
    loss, expected = reference_step(make_model(family), stream, cut=False)
    found_loss, _, found = run(make_model(family), stream, OFF)
    assert abs(found_loss - loss) <= 1e-12
    assert_equal_gradients(found, expected)
    _, cut = reference_step(make_model(family), stream)
    gap = max(float((cut[n] - expected[n]).abs().max()) for n in cut)
    assert gap > 1e-3, "the cut changes nothing here, so nothing above could fail"


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_the_forward_is_bit_identical_with_and_without_the_flag(family, dtype):
    stream = make_stream(MASKS["spans"])
    loss, hidden, _ = run(make_model(family, dtype=dtype), stream, OFF)
    cut_loss, cut_hidden, _ = run(make_model(family, dtype=dtype), stream, ON)
    assert torch.equal(hidden, cut_hidden) and torch.equal(loss, cut_loss)


def test_one_document_has_the_bits_of_the_models_own_attention():
    stream = make_stream(["000111001100"])
    model = make_model("llama", dtype=torch.float32)
    model.set_attn_implementation("sdpa")
    own = model.model(input_ids=stream.ids[None]).last_hidden_state[0]
    _, hidden, _ = run(model, stream, ON)
    assert torch.equal(own, hidden), (own - hidden).abs().max()


@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_context_only_tokens_get_exactly_no_embedding_gradient(family):
    stream = make_stream(MASKS["spans"])
    _, _, grads = run(make_model(family), stream, ON)
    rows = grads["model.embed_tokens.weight"]
    read = set(stream.ids[stream.kept()].tolist())
    context_only = sorted(set(stream.ids.tolist()) - read)
    assert len(context_only) > 5
    assert torch.equal(rows[context_only], torch.zeros_like(rows[context_only]))
    assert all(float(rows[i].abs().max()) > 0 for i in read)
    _, _, full = run(make_model(family), stream, OFF)
    assert float(full["model.embed_tokens.weight"][context_only].abs().max()) > 1e-4


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_activation_checkpointing_recomputes_and_gives_the_same(family, reentrant):
    stream = make_stream(MASKS["spans"])
    _, expected = reference_step(make_model(family), stream)
    for first in ("checkpoint", "enable"):
        model = make_model(family)
        calls = []
        norm = model.model.layers[1].input_layernorm
        norm.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        if first == "enable":
            enable_row_sparse(model, ON)
        model.activation_checkpointing_enable({"use_reentrant": reentrant})
        if reentrant:
            model.enable_input_require_grads()
        _, _, found = run(model, stream, ON, enable=first == "checkpoint")
        assert len(calls) == 2, "the layer runs once forward and once again for its backward"
        assert_equal_gradients(found, expected)


class LowRank(nn.Module):
    """y = W x + B A x, as an adapter does; W frozen."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        base.weight.requires_grad_(False)
        gen = torch.Generator().manual_seed(7)
        self.a = nn.Parameter(torch.randn(3, base.in_features, generator=gen).double() * 0.3)
        self.b = nn.Parameter(torch.randn(base.out_features, 3, generator=gen).double() * 0.3)

    def forward(self, x):
        return self.base(x) + x @ self.a.T @ self.b.T


class Quantised(nn.Linear):
    """A linear whose weight is rounded when it is read, with a straight-through gradient."""

    def forward(self, x):
        rounded = self.weight + (torch.round(self.weight * 8) / 8 - self.weight).detach()
        return nn.functional.linear(x, rounded, self.bias)


def replace_linears(model, kind):
    for layer in model.model.layers:
        for parent, name in ((layer.self_attn, "q_proj"), (layer.mlp, "down_proj")):
            old = getattr(parent, name)
            if kind == "lora":
                setattr(parent, name, LowRank(old))
            else:
                new = Quantised(old.in_features, old.out_features, old.bias is not None).double()
                new.load_state_dict(old.state_dict())
                setattr(parent, name, new)
    return model


@pytest.mark.parametrize("kind", ["lora", "quantised"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_other_linears_fall_back_to_the_dense_backward_with_a_warning(family, kind, caplog):
    stream = make_stream(MASKS["spans"])
    _, expected = reference_step(replace_linears(make_model(family), kind), stream)
    with caplog.at_level(logging.WARNING, logger="specforge_trim"):
        model = replace_linears(make_model(family), kind)
        _, _, found = run(model, stream, ON)
    name = "LowRank" if kind == "lora" else "Quantised"
    assert len(caplog.records) == 1
    name = f"test_row_sparse_model.{name}"
    assert f"down_proj ({name}), q_proj ({name})" in caplog.text, caplog.text
    for key, parameter in model.named_parameters():
        if not parameter.requires_grad:
            assert found.pop(key) is None
            expected.pop(key)
    assert_equal_gradients(found, expected)


def test_linears_replaced_after_enabling_are_warned_of_once(caplog):
    stream = make_stream(MASKS["spans"])
    _, expected = reference_step(replace_linears(make_model("llama"), "lora"), stream)
    model = make_model("llama")
    enable_row_sparse(model, ON)
    run(model, stream, ON, enable=False)
    assert caplog.records == []  # nor do plain ones give a warning
    model.zero_grad(set_to_none=True)
    replace_linears(model, "lora")
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        _, _, found = run(model, stream, ON, enable=False)
    assert len(caplog.records) == 1
    assert "down_proj (test_row_sparse_model.LowRank), q_proj" in caplog.text
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert_equal_gradients({n: found[n] for n in trained}, {n: expected[n] for n in trained})


def moe():
    config = Qwen3MoeConfig(
        vocab_size=20, hidden_size=16, intermediate_size=16, moe_intermediate_size=8,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, num_experts=2,
        num_experts_per_tok=1,
    )  # fmt: skip
    return Qwen3MoeForCausalLM(config)


def vision():
    text = {
        "model_type": "llama", "vocab_size": 20, "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    }  # fmt: skip
    sight = {
        "model_type": "clip_vision_model", "hidden_size": 16, "intermediate_size": 16,
        "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8, "patch_size": 4,
    }  # fmt: skip
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=sight, text_config=text))


def other():
    config = Gemma2Config(
        vocab_size=20, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    return Gemma2ForCausalLM(config)


@pytest.mark.parametrize("settings", [ON, OFF], ids=["on", "off"])
@pytest.mark.parametrize("make", [moe, vision, other])
def test_other_backbones_raise_and_name_what_is_expected(make, settings):
    with pytest.raises(ValueError, match="is not supported: expected one of Qwen3ForCausalLM"):
        enable_row_sparse(make(), settings)


def test_a_model_with_another_config_than_its_layers_attends_by_the_plan():
    stream = make_stream(MASKS["spans"])
    model = make_model("llama")
    model.config = model.model.config = copy.deepcopy(model.config)
    _, expected = reference_step(make_model("llama"), stream, cut=False)
    _, _, found = run(model, stream, OFF)
    assert_equal_gradients(found, expected)


def test_the_flag_needs_head_skipping():
    with pytest.raises(ValueError, match="needs skip_masked_lm_head_tokens"):
        RowSparseSettings(skip_masked_lm_head_tokens=False, stop_grad_context_tokens=True)


@pytest.mark.parametrize("settings", [ON, OFF], ids=["cut", "whole"])
def test_a_sliding_window_shorter_than_a_document_raises(settings):
    stream = make_stream(["0001110000011"])
    message = "document of 13 tokens exceeds the sliding window of 8"
    with pytest.raises(ValueError, match=message):
        run(make_model("mistral", sliding_window=8), stream, settings)
    run(make_model("mistral", sliding_window=13), stream, settings)
    windowed = {"use_sliding_window": True, "sliding_window": 8}
    for family in ("qwen2", "qwen3"):
        for whole_layers in (0, 2):  # layers below max_window_layers have no window
            model = make_model(family, max_window_layers=whole_layers, **windowed)
            with pytest.raises(ValueError, match=message):
                run(model, stream, settings)
        run(make_model(family, max_window_layers=3, **windowed), stream, settings)
        run(make_model(family, use_sliding_window=False, sliding_window=8), stream, settings)
        mixed = make_model(family, max_window_layers=0, **windowed)
        mixed.model.layers[1].self_attn.sliding_window = 40
        with pytest.raises(ValueError, match=message):
            run(mixed, stream, settings)


def test_attention_dropout_raises():
    with pytest.raises(ValueError, match="attention_dropout = 0.1"):
        enable_row_sparse(make_model("llama", attention_dropout=0.1), ON)


@pytest.mark.parametrize("enabled, asked", [(None, ON), (None, OFF), (OFF, ON), (ON, OFF)])
def test_settings_that_the_model_was_not_set_up_with_raise(enabled, asked):
    stream, model = make_stream(["000111001100"]), make_model("qwen3")
    plan = plan_rows(stream.kept(), cu_seqlens=stream.cu)
    if enabled is not None:
        enable_row_sparse(model, enabled)
    with pytest.raises(ValueError, match="enable_row_sparse with the same settings"):
        hidden_states(model, stream.ids, stream.positions, plan, settings=asked)
    enable_row_sparse(model, asked)
    hidden_states(model, stream.ids, stream.positions, plan, settings=asked)


def test_a_model_gets_its_own_layers_back():
    stream = make_stream(["000111001100"])
    model = make_model("qwen3", dtype=torch.float32)
    kinds = [type(layer) for layer in model.model.layers]
    model.set_attn_implementation("sdpa")
    own = model(input_ids=stream.ids[None]).logits
    enable_row_sparse(model, ON)
    with pytest.raises(ValueError, match="disable_row_sparse"):
        enable_row_sparse(other_model := make_model("llama"), OFF)
        other_model(input_ids=stream.ids[None])
    disable_row_sparse(model)
    assert [type(layer) for layer in model.model.layers] == kinds
    assert torch.equal(model(input_ids=stream.ids[None]).logits, own)
