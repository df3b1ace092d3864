"""Runs begun and drafts exported by an earlier version, which every later one must go on from.

    python tests/golden/before.py make        writes the folder before/ with the version at hand
    python tests/golden/before.py go-on DIR   finishes the runs of DIR, a copy of before/, and
                                              decodes with its exports

The folder holds, for each of the doors, a recipe, a killed run in mid-way and an export of a
finished one, the target and data of both, and in expected.json the rows of the rest of the run.
Make it again only when runs of earlier versions are given up on purpose.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}

import children

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
FOLDER = HERE / "before"
MIDDLE = 3
DOORS = {"eagle3": "train_eagle3.py", "lm": "train_draft_lm.py"}
SIZES = {
    "hidden_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "intermediate_size": 12,
    "max_position_embeddings": 512,
}
COMMON = """
data:
  train_data: [train.jsonl]
  cache_dir: cache
  tokens_per_batch: 200
  max_length: 512
  num_workers: 0
  prepare_processes: 1{more}
train:
  learning_rate: 1.0e-3
  epochs: 9
  max_steps: 6
  save_every: 3
  keep_checkpoints: 1
  weight_decay: 0.1
  device: cpu
evaluate: {{eval_data: [held.jsonl], eval_prompts: 1, eval_depth: 2, eval_max_new_tokens: 4}}
"""
RECIPES = {
    "eagle3": "model: {target: target, draft_vocab_size: 32, aux_layers: [1, 2, 3], "
    "target_dtype: float32}\nloss: {ttt_length: 2}\n"
    "trim: {trim_loss_positions: true, trim_backbone_rows: true}"
    + COMMON.format(more="\n  feature_dtype: float32"),
    "lm": "model: {target: target, draft_layers: 1, target_dtype: float32}\n"
    "loss: {label_weight: 0.5, distill_weight: 1.0}\n"
    "trim: {stop_grad_context_tokens: true}" + COMMON.format(more=""),
}


def train(kind: str, folder: Path, out: str, log: str, **how: object) -> None:
    arguments = ["--config", f"{kind}.yaml", "--output-dir", out]
    children.run(children.door(ROOT, DOORS[kind], arguments), folder, log, **how)


def rows(file: Path) -> list[dict]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def make() -> None:
    """Writes before/, in place of what is there."""
    children.warm(ROOT)
    import material
    import tokenizers
    import transformers

    place = Path(tempfile.mkdtemp(prefix="before-"))
    material.save_target(place / "target", layers=4, **SIZES)
    material.write_conversations(place / "train.jsonl", 6, seed=1, words=(4, 12))
    material.write_conversations(place / "held.jsonl", 1, seed=3, words=(4, 8))
    expected: dict = {
        "versions": {
            "tokenizers": tokenizers.__version__,
            "transformers": transformers.__version__,
        }
    }
    for kind, recipe in RECIPES.items():
        (place / f"{kind}.yaml").write_text(recipe)
        kill = children.killed_after(MIDDLE)
        train(kind, place, f"{kind}-begun", "killed", first=kill, dies=True)
        train(kind, place, f"{kind}-done", "straight")
        expected[kind] = [
            {k: v for k, v in row.items() if not k.startswith(("perf/", "time/"))}
            for row in rows(place / f"{kind}-done" / "metrics.jsonl")[MIDDLE:]
        ]
        if kind == "eagle3":
            arguments = ["export", "--config", "eagle3.yaml", "--output-dir", "eagle3-done"]
            children.run(children.console(ROOT, arguments), place, "export")
        for stale in (place / f"{kind}-begun" / "checkpoints").glob(".writing-*"):
            shutil.rmtree(stale)
        for file in (place / f"{kind}-done").iterdir():
            if file.is_dir() and file.name != "export":
                shutil.rmtree(file)
            elif file.is_file():
                file.unlink()
    for pattern in ("cache", "*.out", "*.err", "*/.lock"):
        for stale in place.glob(pattern):
            shutil.rmtree(stale) if stale.is_dir() else stale.unlink()
    (place / "expected.json").write_text(json.dumps(expected, indent=1) + "\n", encoding="utf-8")
    shutil.rmtree(FOLDER, ignore_errors=True)
    shutil.move(place, FOLDER)
    FOLDER.chmod(0o755)  # of a temporary folder it is the owner's alone


def go_on(folder: Path) -> None:
    """Finishes both runs and decodes with both exports; Failed where a command does."""
    children.warm(ROOT)
    for kind in DOORS:
        train(kind, folder, f"{kind}-begun", f"{kind}-resumed")
    evaluate = ["evaluate", "--config", "eagle3.yaml", "--output-dir", "eagle3-measured"]
    evaluate += ["--draft", "eagle3-done/export"]
    children.run(children.console(ROOT, evaluate), folder, "evaluate")
    again = ["--config", "lm.yaml", "--output-dir", "lm-done", "--evaluate-only"]
    children.run(children.door(ROOT, DOORS["lm"], again), folder, "evaluate-only")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("make", help="write before/ with the version at hand")
    finish = commands.add_parser("go-on", help="finish the runs of a copy of before/")
    finish.add_argument("folder", type=Path, metavar="DIR")
    arguments = parser.parse_args()
    sys.exit(make() if arguments.command == "make" else go_on(arguments.folder.resolve()))
