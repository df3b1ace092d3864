"""The configuration: file, flags, and what is refused.

Catches: a misspelt key that is ignored, a boolean that cannot be turned off, a value of the wrong
type that trains for hours, a flag that loses to the file, two settings that contradict each other.
"""

import dataclasses
import importlib.util

import pytest
import yaml

from specforge_trim.config import options
from specforge_trim.config.checks import check_draft
from specforge_trim.drafts.eagle3 import settings as cfg
from specforge_trim.drafts.eagle3.settings import (
    Config,
    ConfigError,
    check_world,
    load_config,
    sequence_degrees,
)


def load(*argv, default_file=None):
    return load_config(argv, prog="t", description="d", default_file=default_file)


@pytest.fixture
def recipe(tmp_path):
    def write(text):
        path = tmp_path / "recipe.yaml"
        path.write_text(text)
        return str(path)

    return write


def test_config_defaults_do_not_trim():
    config = load()
    assert config == Config()
    assert config.trim.trim_loss_positions is False
    assert config.trim.trim_backbone_rows is False


def test_config_flags_override_the_file(recipe):
    path = recipe("train: {learning_rate: 1e-3, seed: 5}\ntrim: {trim_loss_positions: true}\n")
    config = load("--config", path, "--seed", "7", "--no-trim-loss-positions")
    assert config.train.learning_rate == 1e-3
    assert config.train.seed == 7
    assert config.trim.trim_loss_positions is False


def test_config_default_file_is_read_without_config_flag(recipe):
    path = recipe("loss: {ttt_length: 3}\n")
    assert load(default_file=path).loss.ttt_length == 3
    assert load("--ttt-length", "4", default_file=path).loss.ttt_length == 4


def test_config_every_boolean_can_be_set_both_ways():
    booleans = [leaf for leaf in options.leaves_of(Config).values() if leaf.kind is bool]
    assert len(booleans) >= 5
    parser = cfg.config_parser("t", "d")
    for leaf in booleans:
        name = leaf.key.replace("_", "-")
        on = options.given_flags(parser.parse_args([f"--{name}"]), Config)
        off = options.given_flags(parser.parse_args([f"--no-{name}"]), Config)
        assert on == {leaf.key: True} and off == {leaf.key: False}


def test_config_every_setting_has_a_help_text():
    text = " ".join(cfg.config_parser("t", "d").format_help().split())
    for leaf in options.leaves_of(Config).values():
        assert len(leaf.meta["help"]) > 15, leaf.key
        assert options.flag_name(leaf.key) in text


def test_config_tuples_and_none():
    config = load("--aux-layers", "1", "3", "5", "--train-data", "a", "b", "--max-steps", "none")
    assert config.model.aux_layers == (1, 3, 5)
    assert config.data.train_data == ("a", "b")
    assert config.train.max_steps is None
    assert load("--aux-layers", "none").model.aux_layers is None


def test_config_is_frozen_and_goes_through_yaml_unchanged(recipe):
    config = load("--aux-layers", "1", "3", "5", "--trim-loss-positions", "--max-steps", "9")
    assert load("--config", recipe(yaml.safe_dump(config.to_dict()))) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.train.seed = 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train:\n  lerning_rate: 1\n", ["train.lerning_rate", "recipe.yaml", "'learning_rate'"]),
        ("trian:\n  seed: 1\n", ["'trian'", "recipe.yaml", "'train'"]),
        ("train:\n  ttt_length: 3\n", ["train.ttt_length", "section 'loss'"]),
        ("seed: 1\n", ["'seed'", "section 'train'"]),
        ("loss:\n  ttt_length: 4.0\n", ["ttt_length", "4.0", "integer"]),
        ("loss:\n  ttt_length: true\n", ["ttt_length", "True", "integer"]),
        ("train:\n  resume: 1\n", ["resume", "true or false"]),
        ("train:\n  seed: null\n", ["seed", "null", "integer"]),
        ("train:\n  seed: 1\n  seed: 2\n", ["seed", "twice"]),
        ("train: [1\n", ["recipe.yaml", "not valid YAML"]),
        ("just text\n", ["recipe.yaml", "sections"]),
    ],
)
def test_config_bad_files_name_key_and_file(recipe, text, words):
    with pytest.raises(ConfigError) as error:
        load("--config", recipe(text))
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--config", "no/such.yaml"], ["no/such.yaml", "no such file"]),
        (["--lerning-rate", "1"], ["--lerning-rate", "--learning-rate"]),
        (["--trim-backbone-rows"], ["trim_backbone_rows", "trim_loss_positions"]),
        (["--draft-vocab-size", "0"], ["draft_vocab_size", "0", "at least 1"]),
        (["--draft-vocab-size", "-1"], ["draft_vocab_size", "-1", "at least 1"]),
        (["--draft-vocab-size", "4.0"], ["--draft-vocab-size", "4.0", "integer"]),
        (["--learning-rate", "0"], ["learning_rate", "more than 0"]),
        (["--learning-rate", "nan"], ["learning_rate", "finite"]),
        (["--warmup-ratio", "1.5"], ["warmup_ratio", "at most 1"]),
        (["--attention-backend", "flash"], ["attention_backend", "sdpa"]),
        (["--local-attention", "sdpa"], ["local_attention", "attention_backend"]),
        (["--stop-grad-context-tokens"], ["stop_grad_context_tokens", "trim_loss_positions"]),
        (["--aux-layers", "3", "1"], ["aux_layers", "ascending"]),
        (["--aux-layers", "1", "1"], ["aux_layers", "distinct"]),
        (["--draft-config", "no.json"], ["no.json", "no such file"]),
        (["--seed"], ["--seed"]),
        (
            ["--trim-loss-positions=false"],
            ["--trim-loss-positions takes no value", "or --no-trim-loss-positions"],
        ),
        (["--trim-loss-positions", "false"], ["'false'", "write --name or --no-name"]),
        (["word"], ["unexpected 'word': it belongs to no flag (--help lists them)"]),
        (["--seed", str(10**26)], ["seed", "at most"]),
        (["--ttt-length", "1000000"], ["ttt_length", "at most 64"]),
        (["--epochs", "1000000000"], ["epochs", "at most 1000"]),
        (["--output-dir", ""], ["output_dir", "expected a folder"]),
        (["--output-dir", "/dev/null"], ["output_dir", "/dev/null", "expected a folder"]),
    ],
)
def test_config_wrong_flags_name_what_is_wrong(argv, words):
    with pytest.raises(ConfigError) as error:
        load(*argv)
    for word in words:
        assert word in str(error.value)
    assert "\n" not in str(error.value)


def test_config_fa_without_its_package_is_refused(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="fa.*flash-attn.*not installed"):
        load("--attention-backend", "fa")


def test_config_usp_with_one_rank_is_refused():
    for flags, ranks in (
        ([], 2),
        (["--sp-ulysses", "4"], 4),
        (["--sp-context", "ulysses", "--sp-ring", "4"], 8),
        (["--sp-context", "ring", "--sp-ulysses", "2", "--sp-ring", "3", "--fsdp"], 6),
    ):
        with pytest.raises(ConfigError, match=f"one: start.* --nproc_per_node {ranks} or"):
            check_world(load("--attention-backend", "usp", *flags), 1)


@pytest.mark.parametrize(
    ("context", "other", "flags"),
    [
        ("ulysses", "ring", ["--sp-ring", "4"]),
        ("ulysses", "ring", ["--sp-ulysses", "1", "--sp-ring", "2"]),
        ("ring", "ulysses", ["--sp-ulysses", "4"]),
    ],
)
def test_config_a_split_that_quietly_is_the_other_one_is_refused(context, other, flags):
    config = load("--attention-backend", "usp", "--sp-context", context, *flags)
    with pytest.raises(ConfigError, match=f"{context}.* 4 ranks split none.*context {other},"):
        check_world(config, 4)
    check_world(load("--attention-backend", "usp", *flags), 4)  # gathered splits neither


@pytest.mark.parametrize(
    ("argv", "world", "degrees"),
    [
        ([], 4, (4, 1)),
        (["--sp-context", "ring"], 4, (1, 4)),
        (["--sp-context", "ring", "--sp-ulysses", "2"], 4, (2, 2)),
        (["--sp-context", "ulysses", "--sp-ring", "2"], 8, (4, 2)),
        (["--sp-ulysses", "2"], 8, (2, 1)),  # four data parallel groups of two
    ],
)
def test_config_degrees_of_a_shared_sequence(argv, world, degrees):
    config = load("--attention-backend", "usp", *argv)
    check_world(config, world)
    assert sequence_degrees(config, world) == degrees


def test_config_shared_sequences_that_cannot_be_are_refused():
    """Catches: a setting without effect, a world that cannot be cut, heads that do not split."""
    with pytest.raises(ConfigError, match="sp_ring = 2 has no effect.*--attention-backend usp"):
        load("--sp-ring", "2")
    usp = ("--attention-backend", "usp")
    with pytest.raises(ConfigError, match="ring.*local_attention is 'reference'.*sdpa"):
        load(*usp, "--local-attention", "reference", "--sp-context", "ring")
    with pytest.raises(ConfigError, match="sp_ulysses = 3 times .* 4 ranks.* of 3 ranks"):
        check_world(load(*usp, "--sp-ulysses", "3"), 4)
    with pytest.raises(ConfigError, match="shares nothing"):
        check_world(load(*usp, "--sp-ulysses", "1"), 4)
    split = load(*usp, "--sp-context", "ulysses")
    for kv_heads, remedy in (
        (2, "ulysses --sp-ulysses 2 --sp-ring 2"),
        (1, "ring --sp-ulysses 1 --sp-ring 4"),
    ):
        words = f"sp_ulysses = 4.*8 heads and {kv_heads} .* --sp-context {remedy}, or .*gathered"
        with pytest.raises(ConfigError, match=words):
            check_draft(split, 4, heads=8, kv_heads=kv_heads, layers=1)
        repaired = load(*usp, "--sp-context", *remedy.split())
        check_world(repaired, 4)
        check_draft(repaired, 4, heads=8, kv_heads=kv_heads, layers=1)
    with pytest.raises(ConfigError, match="one layer.*gathered"):
        check_draft(split, 2, heads=8, kv_heads=2, layers=2)
    check_draft(split, 2, heads=8, kv_heads=2, layers=1)
    check_draft(load(*usp), 4, heads=8, kv_heads=2, layers=2)


def test_config_guard_threshold_depends_on_the_backend():
    assert load("--attention-backend", "reference").max_density == 0.35
    assert load("--attention-backend", "sdpa").max_density == 1.0
    assert load("--trim-backbone-rows-max-density", "0.5").max_density == 0.5
