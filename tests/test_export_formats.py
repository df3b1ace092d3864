"""Drafts in the layouts of others: speculators both ways, SpecForge and EAGLE folders in.

Catches: a name vLLM's loader does not know, or one it waits for in vain; a bit changed by a round
trip; SpecForge's norm_output taken for the fed-back norm; sizes that a nested config leaves to its
class's defaults; aux ids of one numbering read in the other; a pruned head whose rows and maps
name different tokens; switches that only vLLM reads exported without a word.
"""

import json
import logging

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export_folder import VD, D, V, draft, draft_config, target_config
from transformers import LlamaConfig

from specforge_trim.drafts.eagle3.card import update_acceptance
from specforge_trim.drafts.eagle3.prune import prune_vocab
from specforge_trim.drafts.eagle3.reading import read_draft_config
from specforge_trim.drafts.eagle3.writing import export_draft, load_draft

LAYER = "layers.0."
# What vLLM's EAGLE-3 model holds, stacked projections as it stacks them.
VLLM_PARAMETERS = {
    "draft_id_to_target_id", "lm_head.weight", "model.embed_tokens.weight", "model.fc.weight",
    "model.norm.weight", f"model.{LAYER}input_layernorm.weight",
    f"model.{LAYER}hidden_norm.weight", f"model.{LAYER}post_attention_layernorm.weight",
    f"model.{LAYER}self_attn.qkv_proj.weight", f"model.{LAYER}self_attn.o_proj.weight",
    f"model.{LAYER}mlp.gate_up_proj.weight", f"model.{LAYER}mlp.down_proj.weight",
}  # fmt: skip
SWITCHES = {
    "plain": ({}, set()),
    "3.1": (
        {"fc_norm": True, "norm_output": True},
        {f"model.fc_norm.{i}.weight" for i in range(3)},
    ),
    "speculators' defaults": (
        {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
        {"model.input_norm.weight"},
    ),
    "biases": (
        {"attention_bias": True},
        {f"model.{LAYER}self_attn.qkv_proj.bias", f"model.{LAYER}self_attn.o_proj.bias"},
    ),
    "q/k norm": (
        {"qk_norm": True},
        {f"model.{LAYER}self_attn.q_norm.weight", f"model.{LAYER}self_attn.k_norm.weight"},
    ),
}


def vllm_name(name):
    """A file's tensor name -> vLLM's parameter; None for what it passes over."""
    if "t2d" in name:
        return None
    if "d2t" in name:
        return name.replace("d2t", "draft_id_to_target_id")
    if "lm_head" not in name:
        name = "model." + name
    name = name.replace("midlayer.", "layers.0.")
    for part in ("q_proj", "k_proj", "v_proj"):
        name = name.replace(f".{part}.", ".qkv_proj.")
    for part in ("gate_proj", "up_proj"):
        name = name.replace(f".{part}.", ".gate_up_proj.")
    return name


def export(tmp_path, model, layout="native", **target):
    out = export_draft(
        model, tmp_path / layout, target_config=target_config(**target), layout=layout,
        target_name="some/target", dtype=torch.float32,
    )  # fmt: skip
    return out, json.loads((out / "config.json").read_text())


def same_draft(a, b):
    assert a.config == b.config
    for name, value in a.state_dict().items():
        other = b.state_dict()[name]
        assert value.dtype == other.dtype and torch.equal(value, other), name


@pytest.mark.parametrize("layout", ["native", "speculators"])
@pytest.mark.parametrize("switches, extra", SWITCHES.values(), ids=SWITCHES)
def test_vllm_knows_every_name_and_misses_none(tmp_path, layout, switches, extra):
    out, _ = export(tmp_path, draft(**switches), layout)
    names = {vllm_name(name) for name in load_file(out / "model.safetensors")} - {None}
    assert names == VLLM_PARAMETERS | extra


@pytest.mark.parametrize("switches", [s for s, _ in SWITCHES.values()], ids=SWITCHES)
def test_both_layouts_hold_the_same_draft_bit_for_bit(tmp_path, switches):
    model = draft(aux_layers=(1, 4, 8), **switches)
    native, _ = export(tmp_path, model)
    speculators, _ = export(tmp_path, model, "speculators")
    first = load_draft(native)
    assert torch.equal(first.fc.weight, model.fc.weight)
    same_draft(first, load_draft(speculators))
    # Out, in, out again: the same bytes.
    for layout, folder in (("native", native), ("speculators", speculators)):
        again, _ = export(tmp_path / "again", load_draft(folder), layout)
        for name in ("model.safetensors", "config.json"):
            assert (again / name).read_bytes() == (folder / name).read_bytes(), (layout, name)


def test_the_speculators_config_key_for_key(tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 2.0,
            "original_max_position_embeddings": 32}  # fmt: skip
    model = draft(aux_layers=(1, 4, 8), rope_parameters=rope)
    _, config = export(tmp_path, model, "speculators", architectures=["LlamaForCausalLM"])
    layer = config.pop("transformer_layer_config")
    assert config == {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "draft_vocab_size": VD,
        "target_hidden_size": D,
        "norm_before_residual": False,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "eagle_aux_hidden_state_layer_ids": [1, 4, 8],
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": 5,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
        },
    }
    assert layer["hidden_size"] == D and layer["head_dim"] == 16 and layer["vocab_size"] == V
    assert layer["model_type"] == "llama" and layer["max_position_embeddings"] == 64
    assert layer["rope_parameters"] == rope and layer["rope_theta"] == 1e6
    assert layer["rope_scaling"] == {k: v for k, v in rope.items() if k != "rope_theta"}


def test_more_than_three_layers_are_counted_where_each_engine_looks(tmp_path):
    ids = (1, 2, 4, 6, 8)
    model = draft(aux_layers=ids, num_aux_layers=5)
    out, native = export(tmp_path, model)
    assert load_file(out / "model.safetensors")["fc.weight"].shape == (D, 5 * D)
    # vLLM and SGLang count the ids of eagle_config, and vLLM captures the ones at the top.
    assert native["eagle_aux_hidden_state_layer_ids"] == list(ids)
    assert native["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3, 5, 7]
    out, other = export(tmp_path, model, "speculators")
    assert other["eagle_aux_hidden_state_layer_ids"] == list(ids)
    assert other["transformer_layer_config"]["num_aux_hidden_states"] == 5
    same_draft(load_draft(tmp_path / "native"), load_draft(out))


def test_a_qk_norm_draft_is_marked_for_vllm_in_both_layouts(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        _, native = export(tmp_path, draft(qk_norm=True))
    assert "qk_norm is read by vLLM only" in caplog.text
    assert native["architectures"] == ["Eagle3Qwen3ForCausalLM"]
    assert native["model_type"] == "qwen3"
    out, speculators = export(tmp_path, draft(qk_norm=True), "speculators")
    assert speculators["transformer_layer_config"]["model_type"] == "qwen3"
    card = (out / "README.md").read_text()
    assert "vllm serve some/target" in card and "sglang.launch_server" not in card
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        export(tmp_path, draft())
    assert "vLLM only" not in caplog.text


# ---------------------------------------------------------------- folders of others


def rewrite(folder, *, tensors=None, config=None, drop=()):
    """Change the files of an exported folder into what another trainer would have written."""
    if tensors is not None:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    raw = {**json.loads((folder / "config.json").read_text()), **(config or {})}
    raw = {key: value for key, value in raw.items() if key not in drop}
    (folder / "config.json").write_text(json.dumps(raw))


SPECFORGE_KEYS = {  # of its configs and of transformers' save_pretrained
    "transformers_version": "4.57.1", "use_cache": True, "initializer_range": 0.02,
    "attention_dropout": 0.0, "pretraining_tp": 1, "sliding_window": None, "norm_output": True,
    "target_model_type": "llama",
}  # fmt: skip
OWN_KEYS = ("fc_norm", "norm_before_residual", "rope_parameters", "dtype", "target_hidden_size",
            "eagle_config")  # fmt: skip


def test_a_specforge_folder_continues_without_its_norm_output(tmp_path, caplog):
    model = draft()
    out, _ = export(tmp_path, model)
    tensors = load_file(out / "model.safetensors")
    tensors = {k: v for k, v in tensors.items() if not k.startswith("embed_tokens")}
    rewrite(out, tensors=tensors, config=SPECFORGE_KEYS, drop=OWN_KEYS)
    with caplog.at_level(logging.INFO):
        again = load_draft(out)
    assert again.config.norm_output is False and again.config.fc_norm is False
    assert "norm_output is not carried over" in caplog.text
    assert "initializer_range" in caplog.text  # what is ignored is said
    assert again.config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    for name, value in tensors.items():
        assert torch.equal(again.state_dict()[name], value), name
    # A draft trained as EAGLE-3.1 says so in a config of its own.
    asked = draft_config(norm_output=True)
    assert load_draft(out, config=asked).config.norm_output is True


def test_a_specforge_folder_without_a_norm_at_its_head_is_told(tmp_path, caplog):
    out, _ = export(tmp_path, draft())
    rewrite(out, config=SPECFORGE_KEYS | {"norm_output": False}, drop=OWN_KEYS)
    with caplog.at_level(logging.WARNING):
        assert load_draft(out).config.norm_output is False
    assert "norm_output false: a draft that SpecForge 0.2 trained so" in caplog.text


def test_specforge_ids_count_from_the_first_layers_output(tmp_path):
    out, _ = export(tmp_path, draft())
    ids = {"eagle_config": {"use_aux_hidden_state": True,
                            "eagle_aux_hidden_state_layer_ids": [0, 3, 6]}}  # fmt: skip
    rewrite(out, config=SPECFORGE_KEYS | ids, drop=set(OWN_KEYS) - {"eagle_config"})
    assert read_draft_config(out).aux_layers == (1, 4, 7)


def test_an_eagle_folder_with_pickled_weights_and_a_bare_config(tmp_path):
    model = draft()
    out, config = export(tmp_path, model)
    tensors = load_file(out / "model.safetensors")
    del tensors["embed_tokens.weight"], tensors["t2d"]
    tensors["d2t"] = tensors["d2t"].to(torch.int32)
    (out / "model.safetensors").unlink()
    torch.save(tensors, out / "pytorch_model.bin")
    keep = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
            "num_key_value_heads", "head_dim", "rms_norm_eps", "vocab_size", "draft_vocab_size",
            "rope_theta", "hidden_act", "torch_dtype", "bos_token_id", "eos_token_id",
            "pad_token_id")  # fmt: skip
    rewrite(out, config={"architectures": ["LlamaForCausalLM"], "transformers_version": "4.46"},
            drop=set(config) - set(keep) - {"architectures"})  # fmt: skip
    again = load_draft(out)
    assert torch.equal(again.d2t, model.d2t) and torch.equal(again.t2d, model.t2d)
    assert torch.equal(again.lm_head.weight, model.lm_head.weight)


def test_a_speculators_folder_whose_nested_config_leaves_defaults_out(tmp_path):
    model = draft(norm_before_residual=True)
    out, config = export(tmp_path, model, "speculators")
    layer = config["transformer_layer_config"]
    for key in ("attention_bias", "mlp_bias", "tie_word_embeddings", "hidden_act", "rope_scaling"):
        del layer[key]
    tensors = load_file(out / "model.safetensors")
    tensors["verifier_norm.weight"] = torch.ones(D)
    rewrite(out, tensors=tensors, config={
        "transformer_layer_config": layer, "speculators_version": "0.9.0",
        "transformers_version": "5.0", "has_no_defaults_at_init": False,
    })  # fmt: skip
    again = load_draft(out)
    assert again.config.norm_before_residual is True and again.config.head_dim == 16
    assert again.config.rms_norm_eps == 3e-6 and again.config.rope_parameters["rope_theta"] == 1e6
    assert torch.equal(again.midlayer.mlp.up_proj.weight, model.midlayer.mlp.up_proj.weight)
    rewrite(out, drop=("norm_before_residual",))
    with pytest.raises(ValueError, match="norm_before_residual is missing and readers disagree"):
        load_draft(out)


def test_what_cannot_be_imported_is_named(tmp_path):
    out, _ = export(tmp_path, draft())
    good = load_file(out / "model.safetensors")

    def refused(match, *, drop=(), **changes):
        rewrite(out, drop=drop, **changes)
        with pytest.raises(ValueError, match=match) as info:
            load_draft(out)
        assert str(out) in str(info.value)
        rewrite(out, tensors=good, config=SPECFORGE_KEYS)

    refused(
        "rope_type='spiral'",
        config=SPECFORGE_KEYS | {"rope_parameters": None, "rope_scaling": {"type": "spiral"}},
    )
    rewrite(out, config={"rope_scaling": None})
    refused("hidden_act='gelu'", config={"hidden_act": "gelu"})
    rewrite(out, config={"hidden_act": "silu"})
    refused("architectures=", config={"architectures": ["MedusaModel"]})
    rewrite(out, config={"architectures": ["LlamaForCausalLMEagle3"]})
    refused("unknown tensors.*extra", tensors=good | {"extra.weight": torch.ones(2)})
    refused("no meaning", tensors={k: v for k, v in good.items() if k not in ("d2t", "t2d")})
    refused(
        "both midlayer.hidden_norm", tensors=good | {"layers.0.hidden_norm.weight": torch.ones(D)}
    )
    refused("expected 'eagle3'", config={"speculators_model_type": "dflash"})


def test_a_draft_in_shards_is_read_and_what_it_lacks_is_named(tmp_path):
    out, _ = export(tmp_path, draft())
    good = load_file(out / "model.safetensors")
    (out / "model.safetensors").rename(out / "a.safetensors")
    index = out / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(good, "a.safetensors")}))
    assert torch.equal(load_draft(out).d2t, good["d2t"])
    index.write_text(json.dumps({"weight_map": {"norm.weight": "b.safetensors"}}))
    with pytest.raises(ValueError, match="b.safetensors, which .* names, is missing"):
        load_draft(out)
    index.write_text("{}")
    with pytest.raises(ValueError, match="index.json: no weight_map"):
        load_draft(out)


# ---------------------------------------------------------------- positions, vocabulary, card


def test_a_limit_that_changes_the_positions_is_refused(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8,
            "long_factor": [4.0] * 8, "original_max_position_embeddings": 64}  # fmt: skip
    with pytest.raises(ValueError, match="max_position_embeddings=64.*4096.*longrope"):
        export(tmp_path, draft(rope_parameters=rope), max_position_embeddings=4096)


def test_pruning_keeps_the_frequent_tokens_and_their_logits(tmp_path):
    model = draft()  # proposes 4 5 6 11 12 13 19 20 26 27 33 34
    counts = torch.zeros(V, dtype=torch.int64)
    counts[[34, 5, 12, 0, 7]] = torch.tensor([9, 8, 7, 100, 100])  # 0 and 7 are not the draft's
    pruned = prune_vocab(model, counts, size=5)
    assert pruned.draft_to_target.tolist() == [4, 5, 6, 12, 34]  # ties: the smaller id
    hidden = torch.randn(3, D)
    columns = [0, 1, 2, 4, 11]
    expected = model.logits(hidden)[:, columns]
    torch.testing.assert_close(pruned.logits(hidden), expected, rtol=0, atol=1e-6)
    out, config = export(tmp_path, pruned)
    assert config["draft_vocab_size"] == 5
    assert load_file(out / "model.safetensors")["lm_head.weight"].shape == (5, D)
    for size in (0, VD, True):
        with pytest.raises(ValueError, match="prune_vocab"):
            prune_vocab(model, counts, size=size)


def test_the_card_says_how_to_serve_and_takes_the_measured_acceptance(tmp_path):
    out = export_draft(
        draft(), tmp_path / "o", target_config=target_config(), target_name="org/target",
        training={"step": 12, "commit": "abc", "identity": {"data": "f00d", "ttt_length": 7}},
    )  # fmt: skip
    card = (out / "README.md").read_text()
    for text in (
        "vllm serve org/target",
        '"method": "eagle3"',
        "--speculative-algorithm EAGLE3",
        "trtllm-serve org/target",
        "step: 12",
        "commit: abc",
        "data: f00d",
        "Not measured yet",
    ):
        assert text in card, text
    report = {
        "depth": 5,
        "sets": [{"name": "long", "prompts": 8, "equal": 8,
                  "trained": {"acceptance_length": 1.534}}],
    }  # fmt: skip
    assert update_acceptance(out, report)
    card = (out / "README.md").read_text()
    assert "| long | 8 | 1.53 | 8/8 |" in card and "Not measured" not in card
    assert "vllm serve org/target" in card
    assert load_draft(out).config.vocab_size == V  # still an export
    assert not update_acceptance(tmp_path, report)
    # TensorRT-LLM does not read the ids of config.json.
    assert "eagle3_layers_to_capture" not in card
    out, _ = export(tmp_path / "ids", draft(aux_layers=(1, 4, 8)))
    assert "eagle3_layers_to_capture: [0, 3, 7]" in (out / "README.md").read_text()


def test_an_unknown_layout_is_named(tmp_path):
    with pytest.raises(ValueError, match="layout='onnx'"):
        export_draft(draft(), tmp_path / "o", target_config=LlamaConfig(), layout="onnx")
