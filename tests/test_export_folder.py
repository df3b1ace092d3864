"""The exported folder: its exact tensors, its exact config keys, and that it loads back.

Catches: a tensor name an engine skips without a word; embedding rows that were never written or
lost their dtype; maps kept outside the weights, or ids written as offsets; a training length
exported as the target's limit; rope given in one form only; aux ids in the wrong numbering; a
half-written folder; someone's files replaced.
"""

import dataclasses
import json
import logging
import resource

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from specforge_trim.drafts.eagle3.model import Eagle3Draft
from specforge_trim.drafts.eagle3.sizes import DraftConfig
from specforge_trim.drafts.eagle3.vocab import build_draft_vocab
from specforge_trim.drafts.eagle3.writing import (
    check_export,
    export_draft,
    load_draft,
    serving_tensors,
)

V, VD, D = 40, 12, 24

FLOATS = {
    "fc.weight": (24, 72),
    "midlayer.input_layernorm.weight": (24,),
    "midlayer.hidden_norm.weight": (24,),
    "midlayer.self_attn.q_proj.weight": (64, 48),
    "midlayer.self_attn.k_proj.weight": (32, 48),
    "midlayer.self_attn.v_proj.weight": (32, 48),
    "midlayer.self_attn.o_proj.weight": (24, 64),
    "midlayer.post_attention_layernorm.weight": (24,),
    "midlayer.mlp.gate_proj.weight": (56, 24),
    "midlayer.mlp.up_proj.weight": (56, 24),
    "midlayer.mlp.down_proj.weight": (24, 56),
    "norm.weight": (24,),
    "lm_head.weight": (12, 24),
    "embed_tokens.weight": (40, 24),
}
CONFIG_KEYS = {
    "architectures", "model_type", "hidden_size", "intermediate_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps",
    "attention_bias", "mlp_bias", "max_position_embeddings", "rope_theta", "rope_scaling",
    "rope_parameters", "vocab_size", "draft_vocab_size", "tie_word_embeddings", "bos_token_id",
    "eos_token_id", "pad_token_id", "torch_dtype", "dtype", "target_hidden_size", "fc_norm",
    "norm_before_residual", "eagle_config",
}  # fmt: skip


def draft_config(**changes):
    sizes = dict(
        hidden_size=D,
        intermediate_size=56,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,  # not hidden / heads
        vocab_size=V,
        draft_vocab_size=VD,
        target_hidden_size=D,
        max_position_embeddings=64,
        rms_norm_eps=3e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )
    return DraftConfig(**{**sizes, **changes})


def draft(**changes):
    torch.manual_seed(5)
    config = draft_config(**changes)
    model = Eagle3Draft(config)
    if config.draft_vocab_size < V:
        counts = torch.arange(V) % 7
        model.set_vocab(
            *build_draft_vocab(counts, vocab_size=V, draft_vocab_size=config.draft_vocab_size)
        )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 2.0)
    return model


def target_config(**changes):
    values = dict(
        hidden_size=D,
        intermediate_size=32,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=V,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=[2, 3],
        pad_token_id=0,
    )
    return LlamaConfig(**{**values, **changes})


def exported(tmp_path, model=None, **target):
    out = export_draft(model or draft(), tmp_path / "out", target_config=target_config(**target))
    return out, json.loads((out / "config.json").read_text())


def test_exact_tensors_shapes_and_dtypes(tmp_path):
    model = draft()
    out, _ = exported(tmp_path, model)
    assert {p.name for p in out.iterdir()} == {"model.safetensors", "config.json", "README.md"}
    # Readable by a server that runs as another user.
    assert (out / "model.safetensors").stat().st_mode & 0o044 == 0o044
    tensors = load_file(out / "model.safetensors")
    floats = {k: tuple(v.shape) for k, v in tensors.items() if v.dtype == torch.bfloat16}
    assert floats == FLOATS
    assert set(tensors) == set(FLOATS) | {"d2t", "t2d"}
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    # counts are id % 7: ids 6, 13, 20, 27, 34 (six), then 5, 12, 19, 26, 33 (five), then 4, 11.
    ids = [4, 5, 6, 11, 12, 13, 19, 20, 26, 27, 33, 34]
    assert (tensors["d2t"] + torch.arange(VD)).tolist() == ids
    assert tensors["t2d"].nonzero().flatten().tolist() == ids
    assert torch.equal(tensors["embed_tokens.weight"], model.embed_tokens.weight.bfloat16())
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_exact_config_keys_and_values(tmp_path):
    _, config = exported(tmp_path)
    assert set(config) == CONFIG_KEYS
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama" and config["num_hidden_layers"] == 1
    assert config["head_dim"] == 16 and config["rms_norm_eps"] == 3e-6
    assert config["rope_theta"] == 1e6 and config["rope_scaling"] is None
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (
        1,
        [2, 3],
        0,
    )
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert config["eagle_config"] == {"use_aux_hidden_state": True}
    assert config["tie_word_embeddings"] is False and config["norm_before_residual"] is False
    assert config["fc_norm"] is False
    assert "norm_output" not in config  # SpecForge takes a written false for "no norm at the head"


def test_several_layers_are_refused_and_said_before_training(tmp_path):
    assert (
        "neither exported nor evaluated"
        in draft_config(num_hidden_layers=2).notes(max_length=8)[0]
    )
    assert draft_config().notes(max_length=8) == ()
    assert draft_config(qk_norm=True).notes(max_length=8) == ("qk_norm is read by vLLM only",)
    with pytest.raises(ValueError, match="num_hidden_layers=2"):
        exported(tmp_path, draft(num_hidden_layers=2))


def test_full_vocabulary_has_no_maps(tmp_path):
    model = draft(draft_vocab_size=V)
    out, config = exported(tmp_path, model)
    tensors = load_file(out / "model.safetensors")
    assert set(tensors) == set(FLOATS) and tensors["lm_head.weight"].shape == (V, D)
    assert config["draft_vocab_size"] == config["vocab_size"] == V
    assert load_draft(out).draft_to_target.tolist() == list(range(V))


def test_eagle31_adds_three_norms_and_both_flags(tmp_path):
    model = draft(fc_norm=True, norm_output=True)
    out, config = exported(tmp_path, model)
    extra = {f"fc_norm.{i}.weight" for i in range(3)}
    assert set(load_file(out / "model.safetensors")) == set(FLOATS) | extra | {"d2t", "t2d"}
    assert config["fc_norm"] is True and config["norm_output"] is True


@pytest.mark.parametrize(
    "ids, top, eagle",
    [(None, None, None), ((2, 4, 5), None, None), ((1, 4, 8), [1, 4, 8], [0, 3, 7])],
)
def test_aux_ids_in_both_numberings_and_none_for_the_default(tmp_path, ids, top, eagle):
    out, config = exported(tmp_path, draft(aux_layers=ids))
    assert config.get("eagle_aux_hidden_state_layer_ids") == top
    assert config["eagle_config"].get("eagle_aux_hidden_state_layer_ids") == eagle
    assert load_draft(out).config.aux_layers == (tuple(top) if top else None)


def test_small_target_writes_the_ids_it_was_given(tmp_path):
    model = draft(aux_layers=(1, 2, 4))
    _, config = exported(tmp_path, model, num_hidden_layers=4)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    with pytest.raises(ValueError, match="aux"):
        export_draft(draft(), tmp_path / "o", target_config=target_config(num_hidden_layers=4))


def test_the_targets_position_limit_is_exported(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        _, config = exported(tmp_path, max_position_embeddings=4096)
    assert config["max_position_embeddings"] == 4096
    assert "max_position_embeddings=64" in caplog.text and "4096" in caplog.text


def test_scaled_rope_is_written_in_both_forms(tmp_path):
    rope = {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    out, config = exported(tmp_path, draft(rope_parameters=rope))
    assert config["rope_parameters"] == rope and config["rope_theta"] == 5e5
    assert config["rope_scaling"] == {k: v for k, v in rope.items() if k != "rope_theta"}
    assert load_draft(out).config.rope_parameters == rope


def test_multimodal_rope_keys_are_not_exported(tmp_path):
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
    _, config = exported(tmp_path, draft(rope_parameters=rope))
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 1e6}
    assert "mrope" not in json.dumps(config)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_floats_follow_a_float16_target_and_are_bfloat16_otherwise(tmp_path, dtype):
    out, config = exported(tmp_path, dtype=dtype)
    wanted = "float16" if dtype == "float16" else "bfloat16"
    assert config["dtype"] == config["torch_dtype"] == wanted
    assert load_file(out / "model.safetensors")["norm.weight"].dtype == getattr(torch, wanted)


def test_reload_gives_the_same_tensors_config_and_leaves_the_model_alone(tmp_path):
    model = draft()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    torch.manual_seed(11)
    expected_draw = torch.rand(3)
    torch.manual_seed(11)
    out, _ = exported(tmp_path, model)
    again = load_draft(out, dtype=torch.float32)
    assert torch.equal(torch.rand(3), expected_draw)  # a run that exports continues unchanged
    for name, value in before.items():
        assert torch.equal(model.state_dict()[name], value)
        saved = value.bfloat16().float() if value.is_floating_point() else value
        assert torch.equal(again.state_dict()[name], saved), name
    assert not again.embed_tokens.weight.requires_grad
    filled = dataclasses.replace(model.config, bos_token_id=1, eos_token_id=[2, 3], pad_token_id=0)
    assert again.config == filled
    assert load_draft(out).fc.weight.dtype == torch.bfloat16


def test_provenance_is_kept_beside_the_weights(tmp_path):
    training = {"steps": 3, "commit": "abc", "metrics": [0.5]}
    out = export_draft(draft(), tmp_path / "o", target_config=target_config(), training=training)
    assert json.loads((out / "training.json").read_text()) == training


def test_a_second_export_replaces_the_first_as_a_whole(tmp_path):
    target = target_config()
    out = export_draft(draft(), tmp_path / "o", target_config=target, training={"steps": 1})
    (tmp_path / ".o.writing").mkdir()  # what a killed export leaves
    (tmp_path / ".o.writing" / "model.safetensors").write_bytes(b"half")
    model = draft()
    with torch.no_grad():
        model.norm.weight.fill_(3.0)
    assert export_draft(model, out, target_config=target) == out
    assert sorted(p.name for p in out.iterdir()) == [
        "README.md",
        "config.json",
        "model.safetensors",
    ]
    assert bool((load_draft(out).norm.weight == 3).all())
    assert [p.name for p in tmp_path.iterdir()] == ["o"]  # no temporary folder stays


def test_folders_with_other_files_are_refused(tmp_path):
    (tmp_path / "o").mkdir()
    (tmp_path / "o" / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="notes.txt"):
        export_draft(draft(), tmp_path / "o", target_config=target_config())
    assert (tmp_path / "o" / "notes.txt").read_text() == "mine"
    with pytest.raises(ValueError, match="is a file"):
        export_draft(draft(), tmp_path / "o" / "notes.txt", target_config=target_config())


def test_a_model_that_was_not_exported_here_is_never_replaced(tmp_path):
    """A target of one file, or another trainer's draft, has files of the names written here."""
    folder = tmp_path / "target"
    target_config().save_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"weights")
    (folder / "README.md").write_text("# Some model\n")
    with pytest.raises(ValueError, match="holds a model that was not exported here"):
        export_draft(draft(), folder, target_config=target_config())
    assert (folder / "model.safetensors").read_bytes() == b"weights"


def test_a_linked_folder_is_replaced_where_it_is(tmp_path):
    real, link = tmp_path / "disk" / "real", tmp_path / "run" / "export"
    real.mkdir(parents=True), link.parent.mkdir()
    link.symlink_to(real)
    for seed in (1, 2):
        model = draft()
        with torch.no_grad():
            model.norm.weight.fill_(seed)
        export_draft(model, link, target_config=target_config())
        assert link.is_symlink()
        assert load_draft(link).norm.weight.tolist() == [seed] * D
    assert [p.name for p in link.parent.iterdir()] == ["export"]
    assert [p.name for p in real.parent.iterdir()] == ["real"]


def test_what_a_killed_export_left_goes_with_the_next(tmp_path):
    out = export_draft(draft(), tmp_path / "e", target_config=target_config())
    out.rename(tmp_path / ".e.old")  # killed between the two renames
    (tmp_path / ".e.writing").mkdir()
    export_draft(draft(), tmp_path / "e", target_config=target_config())
    assert [p.name for p in tmp_path.iterdir()] == ["e"]


def test_a_failed_write_leaves_the_earlier_export_and_no_rubbish(tmp_path):
    target = target_config()
    out = export_draft(draft(), tmp_path / "o", target_config=target)
    kept = (out / "model.safetensors").read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))  # a real write that fails midway
    try:
        with pytest.raises(OSError, match="model.safetensors cannot be written: .*File too large"):
            export_draft(draft(), out, target_config=target)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (out / "model.safetensors").read_bytes() == kept
    assert [p.name for p in tmp_path.iterdir()] == ["o"]


def test_what_cannot_be_served_is_refused(tmp_path):
    def refused(match, model=None, **target):
        with pytest.raises(ValueError, match=match):
            export_draft(model or draft(), tmp_path / "o", target_config=target_config(**target))
        assert list(tmp_path.iterdir()) == []

    refused("vocab_size is 40; the target's vocab_size is 48", vocab_size=48)
    refused("target_hidden_size is 24; the target's hidden_size is 32", hidden_size=32)
    refused("disagree", Eagle3Draft(draft_config()))  # a vocabulary that was never set
    broken = draft()
    with torch.no_grad():
        broken.fc.weight[0, 0] = float("nan")
    refused("fc.weight", broken)


def test_the_load_check_sees_a_changed_tensor_and_a_changed_key(tmp_path):
    model = draft()
    out, config = exported(tmp_path, model)
    tensors = serving_tensors(model, dtype=torch.bfloat16)
    check_export(out, tensors, model.config)
    (out / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    with pytest.raises(ValueError, match="logits"):
        check_export(out, tensors, model.config)
    wrong_rope = {"rope_theta": 100.0, "rope_parameters": None}
    (out / "config.json").write_text(json.dumps(config | wrong_rope))
    with pytest.raises(ValueError, match="logits"):
        check_export(out, tensors, model.config)
    (out / "config.json").write_text(json.dumps(config))
    changed = tensors | {"norm.weight": tensors["norm.weight"] * 2}
    save_file(changed, out / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match="norm.weight"):
        check_export(out, tensors, model.config)


def test_loading_names_what_is_wrong(tmp_path):
    out, _ = exported(tmp_path)
    good = load_file(out / "model.safetensors")

    def refused(match, tensors):
        save_file(tensors, out / "model.safetensors")
        with pytest.raises(ValueError, match=match):
            load_draft(out)

    refused("unknown tensors.*model.norm", good | {"model.norm.weight": torch.ones(D)})
    refused("missing tensors.*d2t", {k: v for k, v in good.items() if k != "d2t"})
    refused(
        r"fc.weight has shape \[24, 48\]", good | {"fc.weight": good["fc.weight"][:, :48].clone()}
    )
    refused("vocabular", good | {"d2t": good["d2t"] + torch.arange(VD)})  # ids, not offsets
    content = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="no complete safetensors"):
        load_draft(out)
    with pytest.raises(ValueError, match="model.safetensors is missing"):
        load_draft(tmp_path / "nowhere")


def test_an_export_without_embedding_takes_the_targets(tmp_path):
    out, _ = exported(tmp_path)
    tensors = load_file(out / "model.safetensors")
    del tensors["embed_tokens.weight"]
    save_file(tensors, out / "model.safetensors")
    assert load_draft(out).lm_head.weight.shape == (VD, D)
