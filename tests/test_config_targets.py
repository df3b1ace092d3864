"""Draft configs made from targets, the derived files in the repository, the plan of a run.

Catches: a field of the target that leaks into the draft (sliding window, bias); the MLP of a
mixture of experts taken for one expert's; a config, a table or a recipe that is no longer what the
code makes; a recipe whose plan cannot be drawn; a plan that loads weights or writes files.
"""

import importlib.util
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tiny import save_tiny_target, tiny_config, write_conversations
from transformers import (
    CohereConfig,
    DeepseekV3Config,
    Gemma3Config,
    GptOssConfig,
    Llama4TextConfig,
    Mistral3Config,
    Qwen2Config,
    Qwen2VLConfig,
    Qwen3MoeConfig,
)

from specforge_trim.cli.dry_run import training_memory
from specforge_trim.cli.main import main, train_main
from specforge_trim.config.options import build
from specforge_trim.drafts.eagle3.for_target import draft_for_target
from specforge_trim.drafts.eagle3.model import Eagle3Draft
from specforge_trim.drafts.eagle3.settings import Config
from specforge_trim.drafts.eagle3.sizes import DraftConfig

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = sorted((ROOT / "configs").glob("*-eagle3.json"))
RECIPES = sorted((ROOT / "examples").glob("*.yaml"))


def generator():
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_derived_files_are_current():
    stale = [
        str(path.relative_to(ROOT))
        for path, text in generator().derived().items()
        if not path.is_file() or path.read_text(encoding="utf-8") != text
    ]
    assert stale == [], "run: python docs/generate.py"


def test_every_target_has_its_source_and_its_draft():
    for path in sorted((ROOT / "configs" / "targets").glob("*.json")):
        assert len(json.loads(path.read_text())["_source"]) > 10, path.name
        assert (ROOT / "configs" / f"{path.stem}-eagle3.json").is_file(), path.name
    assert len(CONFIGS) >= 17


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_config_builds_on_the_meta_device(path):
    config = DraftConfig.from_json(path)
    with torch.device("meta"):
        model = Eagle3Draft(config)
    assert model.fc.weight.device.type == "meta"
    d, i, h = config.hidden_size, config.intermediate_size, config.head_dim
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    by_hand = (
        3 * d * d + 2 * d * (heads + 2 * kv) * h + heads * h * d + 3 * d * i
        + config.draft_vocab_size * d + 4 * d  # the norms: input, hidden, post-attention, final
    )  # fmt: skip
    counted = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert counted == by_hand
    assert config.vllm_only == ()  # a layout that all engines share


@pytest.mark.parametrize(
    "name, width, heads",
    [
        ("qwen3-30b-a3b", 8 * 768, (32, 4, 128)),
        ("qwen3-235b-a22b", 8 * 1536, (64, 4, 128)),
        ("qwen3-coder-480b-a35b", 8 * 2560, (96, 8, 128)),
        ("gpt-oss-20b", 4 * 2880, (64, 8, 64)),
        ("deepseek-v3", 8 * 2048 + 2048, (56, 8, 128)),
        ("llama-4-scout-17b-16e", 8192 + 8192, (40, 8, 128)),
        ("qwen3-8b", 12288, (32, 8, 128)),
        ("gemma-3-27b", 21504, (32, 16, 128)),
    ],
)
def test_mlp_and_heads_of_known_targets(name, width, heads):
    config = DraftConfig.from_json(ROOT / "configs" / f"{name}-eagle3.json")
    assert config.intermediate_size == width
    found = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    assert found == heads


@pytest.mark.parametrize(
    "target",
    [
        Qwen2Config(use_sliding_window=True, sliding_window=128, max_window_layers=4),
        CohereConfig(logit_scale=0.25, attention_bias=True),
        GptOssConfig(sliding_window=64),
        Gemma3Config(),
        Mistral3Config(),
        Qwen3MoeConfig(),
        DeepseekV3Config(),
        Llama4TextConfig(),
        Qwen2VLConfig(text_config={"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}),
    ],
    ids=lambda c: type(c).__name__,
)
def test_nothing_else_of_a_target_reaches_the_draft(target):
    written = draft_for_target(target, draft_vocab_size=64).to_dict()
    known = set(draft_for_target(tiny_config()).to_dict()) | {"partial_rotary_factor"}
    assert set(written) <= known
    assert written["attention_bias"] is False and written["hidden_act"] == "silu"
    assert "mrope" not in json.dumps(written)  # else vLLM takes the draft for a multimodal one
    assert DraftConfig.from_dict(written).vllm_only == ()


def test_a_rope_no_draft_can_have_and_a_missing_field_are_named():
    with pytest.raises(ValueError, match="rope_type='spiral'"):
        config = tiny_config()
        config.rope_parameters = {"rope_type": "spiral"}
        draft_for_target(config)
    bare = SimpleNamespace(hidden_size=32, num_attention_heads=4, intermediate_size=64)
    bare.vocab_size, bare.get_text_config = 100, lambda: bare
    with pytest.raises(ValueError, match="no max_position_embeddings"):
        draft_for_target(bare)


def test_make_config_command(tmp_path, capsys):
    folder = tmp_path / "target"
    tiny_config().save_pretrained(folder)
    out, empty, plain = (tmp_path / name for name in ("draft.json", "empty", "plain"))
    empty.mkdir(), plain.mkdir()
    (plain / "config.json").write_text("{}")
    assert main(["make-config", str(folder), "--draft-vocab-size", "64", "--out", str(out)]) == 0
    config = DraftConfig.from_json(out)
    assert (config.hidden_size, config.head_dim, config.draft_vocab_size) == (40, 16, 64)
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1e6}
    capsys.readouterr()
    assert main(["make-config", str(folder / "config.json")]) == 0
    assert json.loads(capsys.readouterr().out)["draft_vocab_size"] == 272
    for argv, match in (
        (["make-config", str(folder), "--out", str(out)], "exists"),
        (["make-config", str(folder), "--draft-vocab-size", "1000"], "draft_vocab_size"),
        (["make-config", str(out.with_name("none.json"))], "none.json': no such file or folder"),
        (["make-config", "/nope"], "'/nope': no such file or folder. Give a config.json"),
        (["make-config", str(empty)], "without config.json"),
        (["make-config", str(plain)], "Unrecognized model"),
    ):
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert match in error and error.count("\n") == 1, error


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_has_a_plan(path, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    argv = ["--dry-run", "--config", str(path), "--cache-dir", str(tmp_path / "c"),
            "--output-dir", str(tmp_path / "o")]  # fmt: skip
    assert train_main(argv) == 0
    plan = capsys.readouterr().out
    for text in ("parameters", "memory of training", "all, per rank", "trimming", "features on"):
        assert text in plan, text
    assert ("the whole target (online and decode_every)" in plan) == ("online" in path.stem)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_knows_prepared_data_and_loads_no_weights(tmp_path, capsys):
    folder = save_tiny_target(tmp_path / "target")
    data = write_conversations(tmp_path / "chat.jsonl", 6)
    common = ["--target", str(folder), "--cache-dir", str(tmp_path / "cache")]
    argv = ["--train-data", str(data), "--output-dir", str(tmp_path / "run"), *common]
    config = tmp_path / "empty.yaml"
    config.write_text("{}")
    assert train_main(["--dry-run", "--config", str(config), *argv]) == 0
    assert "kept work, steps: unknown" in capsys.readouterr().out
    assert main(["prepare", str(data), *common]) == 0
    (folder / "model.safetensors").unlink()
    capsys.readouterr()
    assert train_main(["--dry-run", "--config", str(config), *argv]) == 0
    plan = capsys.readouterr().out
    assert "data: 6 conversations" in plan and "kept work with both trim flags" in plan
    assert "steps: about 1" in plan and not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("recipe", "ranks"),
    [("llama-3.3-70b-long-context-64k", 4), ("qwen3-coder-480b-agent-128k", 8)],
)
def test_recipes_of_long_contexts_share_sequences(recipe, ranks, capsys, monkeypatch):
    """Planned without torchrun for the fewest ranks that can run them."""
    monkeypatch.chdir(ROOT)
    assert train_main(["--dry-run", "--config", f"examples/{recipe}.yaml"]) == 0
    out = capsys.readouterr().out
    assert f"{ranks} x cuda, usp: {ranks} share a sequence, keys gathered" in out
    assert "all, per rank" in out and "note:" not in out


def test_a_plan_says_when_documents_are_longer_than_the_drafts_positions(capsys, monkeypatch):
    """phi-4 ends at 16,384: every recipe's length fits, one token more is announced."""
    monkeypatch.chdir(ROOT)
    plan = ["--dry-run", "--config", "examples/phi-4-chat-single-gpu.yaml", "--max-length"]
    assert train_main([*plan, "16384"]) == 0
    assert "note:" not in capsys.readouterr().out
    assert train_main([*plan, "16385"]) == 0
    note = "note: max_length=16385 is beyond max_position_embeddings=16384"
    assert note in capsys.readouterr().out


def test_a_plan_refuses_a_split_that_the_draft_does_not_allow(capsys, monkeypatch):
    """phi-4's draft has 40 heads and 10 key/value heads."""
    monkeypatch.chdir(ROOT)
    plan = ["--dry-run", "--config", "examples/phi-4-chat-single-gpu.yaml"]
    plan += ["--attention-backend", "usp", "--sp-context", "ulysses", "--sp-ulysses"]
    assert train_main([*plan, "4"]) == 2
    remedy = "--sp-ulysses 2 --sp-ring 2"
    assert remedy in capsys.readouterr().err
    assert train_main([*plan, *remedy.split()[1:]]) == 0
    assert "4 share a sequence, keys ulysses" in capsys.readouterr().out


def test_memory_of_shared_keys_and_split_weights():
    """Draft of width 64 with 2 heads of 16: keys and values 64 numbers a token, 10 bytes each."""
    draft = DraftConfig(
        hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=64, draft_vocab_size=64, target_hidden_size=64,
        max_position_embeddings=64, rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )  # fmt: skip
    base = {"dtype": "bfloat16", "tokens_per_batch": 1000}
    usp = {"attention_backend": "usp", "local_attention": "sdpa"}

    def parts(ranks, **changes):
        config = build(Config, base | changes)
        found = training_memory(config, draft, device="cuda", world_size=ranks)
        return found["context keys, values, gradients"], found["weights, gradients, Adam (fp32)"]

    whole = 1000 * 64 * (2 + 4)
    assert parts(1)[0] == parts(4)[0] == whole
    assert parts(4, **usp)[0] == whole * 5 // 4
    assert parts(4, **usp, sp_context="ring")[0] == whole * 3 // 4
    assert parts(4, **usp, sp_context="ulysses")[0] == whole // 2
    for tied, dtype, split, held in (
        (False, "float32", False, 64 * 64 * 4), (True, "float32", False, 0),
        (True, "bfloat16", False, 64 * 64 * 2), (True, "float32", True, 64 * 64 * 4),
    ):  # fmt: skip
        config = build(Config, {"dtype": dtype, "fsdp": split})
        found = training_memory(config, draft, device="cuda", world_size=2, tied=tied)
        assert found["target's head"] == held, (tied, dtype, split)
    trained = parts(1)[1] // 16
    assert parts(4, fsdp=True)[1] == 12 * trained
