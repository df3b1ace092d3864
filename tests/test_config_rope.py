"""Rotary positions from every way a configuration writes them.

Catches: theta lost (10000 without a word) in one of the types; a rope dictionary that is null,
empty or says "default"; a KeyError on per-layer dictionaries; scaling dropped between legacy and
current keys; yarn taken for another type; a share of rotated dimensions that is ignored.
"""

import json
import logging
import math

import pytest
import torch
from transformers import Gemma3TextConfig, LlamaConfig, Phi3Config, Qwen2VLConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding

from specforge_trim.drafts.eagle3.layers import Rotary, rotate
from specforge_trim.drafts.eagle3.rope import flat_rope, merged_rope, rope_frequencies
from specforge_trim.drafts.eagle3.sizes import DraftConfig

H, LIMIT = 16, 512
POSITIONS = torch.tensor([0, 1, 5, 63, 64, 300, 511])
SCALED = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 64},
    "longrope": {
        "short_factor": [1.0 + i / 10 for i in range(H // 2)],
        "long_factor": [2.0 + i for i in range(H // 2)],
        "original_max_position_embeddings": 64,
    },
}


def draft(**changes):
    values = dict(
        hidden_size=32,
        intermediate_size=48,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=H,
        vocab_size=100,
        draft_vocab_size=50,
        max_position_embeddings=LIMIT,
    )
    return DraftConfig.from_dict({**values, **changes})


def table(config):
    rotary = Rotary(
        config.rope_parameters,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
    )
    cos, sin = rotary.cos_sin(POSITIONS, torch.float32)
    return cos[:, 0], sin[:, 0]


def assert_table(config, embedding, **kwargs):
    """The draft's cos and sin against those of a target's own rotary module."""
    axes = POSITIONS.expand(3, 1, -1) if kwargs.pop("axes", False) else POSITIONS[None]
    cos, sin = embedding(torch.zeros(1, dtype=torch.float32), axes, **kwargs)
    half = cos.shape[-1] // 2
    for mine, theirs in zip(table(config), (cos, sin), strict=True):
        theirs = theirs.reshape(-1, len(POSITIONS), 2 * half)[0][:, :half]
        error = float((mine - theirs).abs().max())
        assert error < 2e-5, error  # fp32 angles up to 512 carry 3e-5 / 2 rounding


def target_llama(rope):
    return LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=H,
        max_position_embeddings=LIMIT,
        rope_parameters=rope,
    )


@pytest.mark.parametrize("kind", SCALED)
def test_the_tables_are_the_targets_whichever_keys_hold_them(kind):
    current = {"rope_type": kind, "rope_theta": 1e6, **SCALED[kind]}
    embedding = LlamaRotaryEmbedding(target_llama(dict(current)))
    assert_table(draft(rope_parameters=current), embedding)
    legacy = draft(rope_theta=1e6, rope_scaling={"type": kind, **SCALED[kind]})
    assert_table(legacy, embedding)
    newer_legacy = draft(rope_theta=1e6, rope_scaling={"rope_type": kind, **SCALED[kind]})
    assert newer_legacy == legacy
    # Theta reaches the table: another base, another table.
    other = draft(rope_theta=1e4, rope_scaling={"type": kind, **SCALED[kind]})
    assert float((table(other)[0] - table(legacy)[0]).abs().max()) > 0.1


@pytest.mark.parametrize(
    "keys",
    [
        {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_theta": 1e6, "rope_parameters": None},
        {"rope_theta": 1e6, "rope_scaling": {}, "rope_parameters": {}},
        {"rope_theta": 1e6, "rope_parameters": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        {"rope_parameters": {"rope_theta": 1e6}},
        {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}},
    ],
)
def test_plain_positions_however_they_are_written(keys):
    frequencies, scale = rope_frequencies(
        draft(**keys).rope_parameters, head_dim=H, max_position_embeddings=LIMIT
    )
    expected = [1e6 ** (-2 * j / H) for j in range(H // 2)]
    torch.testing.assert_close(frequencies, torch.tensor(expected, dtype=torch.float64))
    assert scale == 1.0 and frequencies.dtype == torch.float64


def test_linear_and_yarn_against_their_formulas():
    plain = [1e6 ** (-2 * j / H) for j in range(H // 2)]
    linear, _ = rope_frequencies(
        {"rope_type": "linear", "rope_theta": 1e6, "factor": 4.0},
        head_dim=H,
        max_position_embeddings=LIMIT,
    )
    torch.testing.assert_close(
        linear, torch.tensor(plain).double() / 4, rtol=1e-6, atol=0
    )  # fp32 arithmetic inside
    yarn, scale = rope_frequencies(
        {"rope_type": "yarn", "rope_theta": 1e6, **SCALED["yarn"]},
        head_dim=H,
        max_position_embeddings=LIMIT,
    )
    # Dimension j turns 64 * f_j / 2 pi times in the original window: more than 32 turns (none
    # here) stays, fewer than 1 is divided by the factor.
    assert float(yarn[-1]) == pytest.approx(plain[-1] / 8, rel=1e-6)
    assert float(yarn[0]) == pytest.approx(plain[0], rel=1e-6)
    assert scale == pytest.approx(0.1 * math.log(8.0) + 1.0)


def test_longrope_takes_the_factors_of_the_longest_sequence():
    rope = {"rope_type": "longrope", "rope_theta": 1e4, **SCALED["longrope"]}
    target = Phi3Config(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=LIMIT,
        original_max_position_embeddings=64,
        rope_parameters=dict(rope),
        pad_token_id=0,
    )
    assert_table(draft(rope_parameters=rope), Phi3RotaryEmbedding(target))
    short, _ = rope_frequencies(rope, head_dim=H, max_position_embeddings=64)
    expected = [1 / (1.0 + i / 10) * 1e4 ** (-2 * i / H) for i in range(H // 2)]
    torch.testing.assert_close(short, torch.tensor(expected).double(), rtol=1e-6, atol=0)


def test_of_per_layer_dictionaries_the_draft_takes_full_attention(caplog):
    target = Gemma3TextConfig(
        hidden_size=64,
        num_attention_heads=4,
        head_dim=H,
        num_hidden_layers=6,
        max_position_embeddings=LIMIT,
        rope_parameters={
            "full_attention": {"rope_type": "yarn", "rope_theta": 1e6, **SCALED["yarn"]},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    with caplog.at_level(logging.INFO, logger="specforge_trim"):
        config = draft(rope_parameters=dict(target.rope_parameters))
    assert "full_attention" in caplog.text
    assert config.rope_parameters["rope_type"] == "yarn"
    assert_table(config, Gemma3RotaryEmbedding(target), layer_type="full_attention")
    only = flat_rope({"sliding_attention": {"rope_theta": 5.0}})
    assert only == {"rope_type": "default", "rope_theta": 5.0}
    with pytest.raises(ValueError, match="none is full_attention"):
        flat_rope({"a": {"rope_theta": 5.0}, "b": {"rope_theta": 6.0}})


def test_multimodal_positions_of_text_are_plain_ones():
    target = Qwen2VLConfig(
        text_config=dict(
            hidden_size=64,
            num_attention_heads=4,
            num_hidden_layers=2,
            max_position_embeddings=LIMIT,
            rope_theta=1e6,
            rope_scaling={"type": "mrope", "mrope_section": [2, 3, 3]},
        )
    ).get_text_config()
    config = draft(rope_parameters=dict(target.rope_parameters))
    assert config.rope_parameters["rope_type"] == "default"
    assert_table(config, Qwen2VLRotaryEmbedding(target), axes=True)


def test_a_share_of_the_dimensions_is_rotated():
    config = draft(rope_theta=100.0, partial_rotary_factor=0.5)
    assert config.rope_parameters["partial_rotary_factor"] == 0.5
    assert config.to_dict()["partial_rotary_factor"] == 0.5
    assert DraftConfig.from_dict(config.to_dict()) == config
    cos, sin = table(config)
    assert cos.shape == (len(POSITIONS), H // 4)
    x = torch.randn(len(POSITIONS), 2, H)
    y = rotate(x, cos[:, None], sin[:, None])
    assert torch.equal(y[..., H // 2 :], x[..., H // 2 :])
    t, j = 3, 1  # position 63, second of four pairs (j, j + 4)
    angle = 63 * 100.0 ** (-2 * j / 8)
    a, b = float(x[t, 0, j]), float(x[t, 0, j + 4])
    assert float(y[t, 0, j]) == pytest.approx(a * math.cos(angle) - b * math.sin(angle), abs=1e-5)
    assert float(y[t, 0, j + 4]) == pytest.approx(
        b * math.cos(angle) + a * math.sin(angle), abs=1e-5
    )


@pytest.mark.parametrize(
    "rope, match",
    [
        ({"rope_type": "spiral"}, "rope_type='spiral' is not supported"),
        ({"rope_type": "proportional"}, "not supported"),
        ({"rope_type": "yarn", "rope_theta": "big"}, "rope_theta='big'"),
        ({"rope_theta": True}, "rope_theta=True"),
        ({"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
        ({"rope_theta": math.inf}, "rope_theta=inf"),
        ({"rope_type": ["yarn"]}, r"rope_type=\['yarn'\] is not supported"),
        ({"factor": 4.0, "rope_theta": 1e4}, "factor=4.0 without a rope_type"),
    ],
)
def test_what_is_no_rope_is_named(rope, match):
    with pytest.raises(ValueError, match=match):
        draft(rope_parameters=rope)


def test_scaling_without_its_numbers_is_an_error_and_not_plain_rope():
    with pytest.raises(ValueError, match="type llama3.*factor"):
        rope_frequencies({"rope_type": "llama3"}, head_dim=H, max_position_embeddings=LIMIT)
    with pytest.raises(ValueError, match="even number"):
        rope_frequencies(
            {"partial_rotary_factor": 0.3}, head_dim=10, max_position_embeddings=LIMIT
        )


@pytest.mark.parametrize(
    "rope, match",
    [
        (SCALED["yarn"] | {"rope_type": "yarn", "factor": 0}, "type yarn.*finite and positive"),
        (SCALED["yarn"] | {"rope_type": "yarn", "factor": -4.0}, "type yarn.*positive"),
        ({"rope_type": "linear", "factor": 0}, "type linear.*positive"),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 0},
            "type yarn.*division",
        ),
        # One factor would be spread over all pairs without a word.
        (
            SCALED["longrope"] | {"rope_type": "longrope", "short_factor": [1.0]},
            f"short_factor has 1 numbers; expected a list of {H // 2}",
        ),
        (
            SCALED["longrope"] | {"rope_type": "longrope", "long_factor": 2.0},
            "long_factor has 2.0; expected a list",
        ),
    ],
)
def test_numbers_that_make_no_positions_are_refused(rope, match):
    rope = {"rope_theta": 1e4, **rope}
    with pytest.raises(ValueError, match=match):
        rope_frequencies(rope, head_dim=H, max_position_embeddings=LIMIT)


def test_two_forms_that_contradict_each_other_are_refused():
    with pytest.raises(ValueError, match="contradicts"):
        merged_rope({"rope_theta": 1e4}, rope_scaling=None, rope_theta=1e6)
    with pytest.raises(ValueError, match="contradicts"):
        merged_rope({"rope_type": "default"}, rope_scaling=SCALED["yarn"] | {"type": "yarn"},
                    rope_theta=None)  # fmt: skip
    with pytest.raises(ValueError, match="partial_rotary_factor"):
        draft(partial_rotary_factor=0.5, rope_parameters={"partial_rotary_factor": 0.25})


@pytest.mark.parametrize("kind", SCALED)
def test_both_forms_survive_the_file(kind):
    rope = {"rope_type": kind, "rope_theta": 1e6, **SCALED[kind]}
    written = json.loads(json.dumps(draft(rope_parameters=rope).to_dict()))
    assert DraftConfig.from_dict(written).rope_parameters == rope
    old = {k: v for k, v in written.items() if k != "rope_parameters"}
    assert DraftConfig.from_dict(old).rope_parameters == rope
    new = {k: v for k, v in written.items() if k not in ("rope_theta", "rope_scaling")}
    assert DraftConfig.from_dict(new).rope_parameters == rope
