"""Training that continues a draft: its weights, vocabulary and sizes are the starting point.

Catches: imported weights overwritten by the target's rows, a vocabulary counted anew under them,
sizes of the target's shape instead of the draft's, a contradiction that goes unnoticed.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import save_tiny_target, tiny_config, write_conversations

from specforge_trim.cli.main import main, train_main
from specforge_trim.config.options import ConfigError, build
from specforge_trim.drafts.eagle3.for_target import draft_for_target
from specforge_trim.drafts.eagle3.model import Eagle3Draft
from specforge_trim.drafts.eagle3.settings import Config
from specforge_trim.drafts.eagle3.sizing import draft_config
from specforge_trim.drafts.eagle3.vocab import build_draft_vocab
from specforge_trim.drafts.eagle3.writing import export_draft, load_draft
from specforge_trim.train import results
from specforge_trim.verifier.head import load_embedding_and_head


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A target, and a draft for it in both layouts, trained by someone else."""
    folder = tmp_path_factory.mktemp("import")
    save_tiny_target(folder / "target")
    torch.manual_seed(7)
    config = draft_for_target(tiny_config(), draft_vocab_size=90)
    draft = Eagle3Draft(config)
    counts = (torch.arange(config.vocab_size) * 7) % 31
    draft.set_vocab(*build_draft_vocab(counts, vocab_size=272, draft_vocab_size=90))
    draft.load_target(load_embedding_and_head(folder / "target"))
    for layout in ("native", "speculators"):
        export_draft(draft, folder / layout, target_config=tiny_config(), layout=layout,
                     dtype=torch.float32)  # fmt: skip
    as_specforge_writes(folder / "native", folder / "specforge")
    return folder


def as_specforge_writes(ours, theirs):
    """Transformers' keys, the norm_output of SpecForge's own meaning, no embedding."""
    theirs.mkdir()
    raw = json.loads((ours / "config.json").read_text())
    for key in ("norm_before_residual", "torch_dtype", "eagle_config", "rope_theta"):
        del raw[key]
    raw |= {"transformers_version": "5.8.1", "use_cache": True, "initializer_range": 0.02,
            "pretraining_tp": 1, "norm_output": True}  # fmt: skip
    (theirs / "config.json").write_text(json.dumps(raw))
    tensors = load_file(ours / "model.safetensors")
    del tensors["embed_tokens.weight"]
    save_file(tensors, theirs / "model.safetensors", metadata={"format": "pt"})


def settings(place, **values):
    return build(Config, {"target": str(place / "target"), **values})


@pytest.mark.parametrize("layout", ["native", "speculators", "specforge"])
def test_sizes_are_the_drafts(place, layout):
    config = settings(place, init_from=str(place / layout))
    sizes = draft_config(config, tiny_config())
    assert sizes.draft_vocab_size == 90 and sizes.max_position_embeddings == 4096


def test_contradictions_are_named(place, tmp_path):
    native = str(place / "native")
    with pytest.raises(ConfigError, match="no such folder"):
        settings(place, init_from=str(tmp_path / "nowhere"))
    other = tiny_config()
    other.vocab_size = 300
    with pytest.raises(ConfigError, match="init_from.*vocab_size = 272.*has 300"):
        draft_config(settings(place, init_from=native), other)


def hardly_trained(place, tmp_path, layout):
    """One step at a rate of nearly 0 from the folder of that layout; the run's flags."""
    data = write_conversations(tmp_path / "chat.jsonl", 2)
    empty = tmp_path / "empty.yaml"
    empty.write_text("{}")
    common = ["--config", str(empty), "--target", str(place / "target"), "--train-data", str(data),
              "--cache-dir", str(tmp_path / "cache"), "--output-dir", str(tmp_path / "run"),
              "--init-from", str(place / layout)]  # fmt: skip
    assert train_main([*common, "--max-steps", "1", "--learning-rate", "1e-12",
                       "--num-workers", "0"]) == 0  # fmt: skip
    return common


def test_a_specforge_folder_goes_on_as_what_it_trained(place, tmp_path, capfd):
    common = hardly_trained(place, tmp_path, "specforge")
    assert "norm_output is not carried over" in capfd.readouterr().err
    assert main(["export", *common, "--export-dtype", "float32"]) == 0
    out = tmp_path / "run" / "export"
    found, given = (load_file(f / "model.safetensors") for f in (out, place / "native"))
    assert set(found) == set(given)  # the embedding came from the target
    for name, value in given.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)
    assert "norm_output" not in json.loads((out / "config.json").read_text())


def test_a_run_that_hardly_learns_exports_the_draft_it_was_given(place, tmp_path):
    common = hardly_trained(place, tmp_path, "speculators")
    flags = ["--export-dtype", "float32", "--layout", "speculators"]
    assert main(["export", *common, *flags, "--out", str(tmp_path / "a")]) == 0
    given = load_file(place / "speculators" / "model.safetensors")
    found = load_file(tmp_path / "a" / "model.safetensors")
    assert set(found) == set(given)
    for name, value in given.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-9)
    assert main(["export", *common, "--prune-vocab", "40", "--out", str(tmp_path / "b")]) == 0
    raw = json.loads((tmp_path / "b" / "config.json").read_text())
    assert raw["draft_vocab_size"] == 40 and raw["dtype"] == "bfloat16"
    kept = set(load_draft(tmp_path / "b").draft_to_target.tolist())
    assert kept < set(load_draft(place / "native").draft_to_target.tolist())
    card = (tmp_path / "a" / "README.md").read_text()
    assert "step: 1" in card and str(place / "target") in card


@pytest.mark.parametrize("layout", ["native", "speculators", "specforge"])
def test_a_folder_is_evaluated_with_the_targets_embedding(place, tmp_path, layout, monkeypatch):
    """SpecForge's has none of its own; rows of chance would only look like a bad draft."""
    drafts = []
    real = results.evaluate
    monkeypatch.setattr(results, "evaluate", lambda *a, **k: drafts.append(a[1]) or real(*a, **k))
    data = write_conversations(tmp_path / "held.jsonl", 1)
    empty = tmp_path / "empty.yaml"
    empty.write_text("{}")
    flags = ["--target", str(place / "target"), "--draft", str(place / layout), "--eval-data",
             str(data), "--output-dir", str(tmp_path / "run"), "--cache-dir", str(tmp_path / "c"),
             "--eval-max-new-tokens", "6", "--device", "cpu"]  # fmt: skip
    assert main(["evaluate", "--config", str(empty), *flags]) == 0
    (draft,) = drafts
    target = load_embedding_and_head(place / "target")
    assert torch.equal(draft.embed_tokens.weight, target.embed)
    assert load_draft(place / layout).lacks_embedding is (layout == "specforge")
