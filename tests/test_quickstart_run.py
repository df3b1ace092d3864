"""The quickstart's own decisions; its phases are tested where they live.

Bugs caught: a smoke run that trains on everything, two runs of different length that share a
checkpoint folder, trim flags lost on the way to training, a rerun that decodes everything again or
one that shows an old evaluation for a new draft, a work share that is not that of all files, an
interrupt that ends in a traceback.
"""

import json
import os
import signal
import time
from types import SimpleNamespace

import pytest
import torch

from specforge_trim.cli import quickstart
from specforge_trim.cli.running import guarded
from specforge_trim.plan.cost import DraftDims
from specforge_trim.train import results
from specforge_trim.train import run as pipeline

DIMS = DraftDims(
    hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, draft_vocab=32, aux_width=24
)


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch):
    monkeypatch.chdir(quickstart.ROOT)


@pytest.fixture
def recipe_files(monkeypatch, tmp_path):
    """A recipe whose data files are two short ones of five lines, the longest first."""
    files = []
    for name in ("long.train.jsonl", "short.train.jsonl"):
        path = tmp_path / name
        path.write_text("".join(f'"{"x" * n}"\n' for n in (50, 4, 3, 2, 1)))
        files.append(str(path))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"data: {{train_data: {files}}}\nevaluate: {{eval_data: [{files[0]}]}}\n")
    monkeypatch.setattr(quickstart, "RECIPE", recipe)
    return files


def test_a_full_run_trims_and_uses_the_cache(recipe_files, tmp_path):
    flags = quickstart.run_flags(tmp_path / "cache", smoke=False, epochs=8)
    config = quickstart.recipe_config(flags)
    assert config.trim.trim_loss_positions and config.trim.trim_backbone_rows
    assert config.train.epochs == 8 and config.train.max_steps is None
    assert config.cache_dir == tmp_path / "cache"
    assert list(config.data.train_data) == recipe_files


def test_runs_of_different_length_have_their_own_folders(recipe_files, tmp_path):
    folders = {
        quickstart.recipe_config(quickstart.run_flags(tmp_path, smoke=s, epochs=e)).output_dir
        for s, e in ((False, None), (False, 8), (False, 2), (True, None))
    }
    assert len(folders) == 4 and all(folder.parent == tmp_path for folder in folders)


def test_a_smoke_run_is_three_steps_on_the_shortest_lines(recipe_files, tmp_path):
    flags = quickstart.run_flags(tmp_path / "cache", smoke=True, epochs=None)
    config = quickstart.recipe_config(flags)
    assert config.train.max_steps == 3 and config.evaluate.eval_prompts == 1
    assert config.trim.trim_loss_positions and config.trim.trim_backbone_rows
    for path in (*config.data.train_data, *config.evaluate.eval_data):
        with open(path) as file:
            assert file.read().split() == ['"x"', '"xx"', '"xxx"']


def test_work_and_density_are_those_of_all_files(tmp_path):
    config = quickstart.recipe_config([])

    def document(name, answer):
        mask = torch.zeros(100, dtype=torch.bool)
        mask[100 - answer :] = True
        return SimpleNamespace(
            source=f"some/{name}.train.jsonl:3", input_ids=torch.zeros(100), loss_mask=mask
        )

    lines = quickstart.data_lines(config, [document("a", 5), document("b", 100)], DIMS)
    assert [line.name for line in lines] == ["a", "b", "all"]
    a, b, everything = lines
    assert (everything.conversations, everything.tokens, everything.supervised) == (2, 200, 105)
    # Five answer tokens leave m = 1 at 94..97 (no token behind 99 to ask for), so R_i is
    # [94 - 6, 97 - i]: 9 rows at step 1 down to 4 at step 6 (by hand: 88..96 and 88..91).
    assert a.density == pytest.approx((9 + 8 + 7 + 6 + 5 + 4) / 600)
    assert a.kept_work < 0.5 and b.kept_work > 0.9
    assert a.kept_work < everything.kept_work < b.kept_work
    assert everything.density == pytest.approx((a.density + b.density) / 2)


def test_an_evaluation_is_reused_for_the_same_draft_only(monkeypatch, tmp_path, recipe_files):
    config = quickstart.recipe_config(["--output-dir", str(tmp_path / "run")])
    weights = config.output_dir / "export" / "model.safetensors"
    weights.parent.mkdir(parents=True)
    calls = []

    def decode(config, target, world):
        calls.append(1)
        (config.output_dir / "evaluation.json").write_text(json.dumps({"call": len(calls)}))
        return SimpleNamespace(format=lambda: "report")

    monkeypatch.setattr(results, "evaluate_drafts", decode)
    weights.write_bytes(b"one")
    assert quickstart.evaluate_once(config, None, None) == {"call": 1}
    assert quickstart.evaluate_once(config, None, None) == {"call": 1}
    weights.write_bytes(b"two")
    assert quickstart.evaluate_once(config, None, None) == {"call": 2}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_in_training_ends_with_one_line(monkeypatch, capfd, number):
    def train_draft(config, world):
        os.kill(os.getpid(), number)
        time.sleep(10)
        raise AssertionError("not interrupted")

    monkeypatch.setattr(pipeline, "train_draft", train_draft)
    # A shell starts background jobs with SIGINT ignored, so it is set here too.
    handlers = {signal.SIGTERM: quickstart._interrupt, signal.SIGINT: signal.default_int_handler}
    before = {n: signal.signal(n, handler) for n, handler in handlers.items()}
    try:
        code = guarded(lambda flags: quickstart.train(None, None, flags), ["--max-steps", "3"])
    finally:
        for n, handler in before.items():
            signal.signal(n, handler)
    out, err = capfd.readouterr()
    assert code == 130 and err == "interrupted; run the same command to go on\n"
    assert "python train_eagle3.py --config examples/quickstart.yaml --max-steps 3" in out
