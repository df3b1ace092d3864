"""Draft config files that JSON allows and a draft cannot use: one ValueError naming the key.

Catches: a traceback from deep inside, or a wrong value taken for a right one ("yes" as true).
"""

import json

import pytest

from specforge_trim.drafts.eagle3.sizes import DraftConfig

GOOD = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "draft_vocab_size": 50,
    "max_position_embeddings": 64,
    "rope_theta": 1e4,
}


def test_head_dim_and_target_width_default_to_the_drafts():
    config = DraftConfig.from_dict(GOOD)
    assert (config.head_dim, config.target_hidden_size) == (8, 32)
    assert DraftConfig.from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    "key, value",
    [
        ("aux_layers", 3),
        ("aux_layers", ["2"]),
        ("eagle_config", 5),
        ("num_attention_heads", 0),
        ("num_attention_heads", "9"),
        ("rope_parameters", [1]),
        ("rope_scaling", "linear"),
        ("rope_theta", "abc"),
        ("rope_theta", -1.0),
        ("fc_norm", "yes"),
        ("rms_norm_eps", "x"),
        ("rms_norm_eps", 0),
        ("eos_token_id", "x"),
        ("eos_token_id", [1, True]),
        ("tie_word_embeddings", True),
        ("draft_vocab_size", 101),
        ("hiden_size", 32),
    ],
)
def test_bad_values_are_named(tmp_path, key, value):
    path = tmp_path / "draft.json"
    path.write_text(json.dumps({**GOOD, key: value}), encoding="utf-8")
    named = "aux layer ids" if key == "aux_layers" else key
    with pytest.raises(ValueError, match=named) as info:
        DraftConfig.from_json(path)
    assert str(path) in str(info.value)


def test_switching_qk_norm_on_in_a_written_config_says_what_else_changes():
    written = DraftConfig.from_dict(GOOD).to_dict()
    with pytest.raises(ValueError, match=r"expected architectures \['Eagle3Qwen3.*'qwen3'"):
        DraftConfig.from_dict({**written, "qk_norm": True})
    kind = {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}
    assert DraftConfig.from_dict({**written, **kind}).qk_norm is True


def test_missing_keys_and_foreign_encodings_are_named(tmp_path):
    path = tmp_path / "draft.json"
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="missing key.*hidden_size"):
        DraftConfig.from_json(path)
    path.write_bytes(json.dumps(GOOD).encode("utf-16"))
    with pytest.raises(ValueError, match="draft.json.*UTF-8"):
        DraftConfig.from_json(path)
