"""A small target, conversations and a recipe for train_draft_lm.py, and runs of that command."""

from pathlib import Path
from typing import Any

import yaml
from tiny import metric_rows, save_tiny_target, write_conversations

from specforge_trim.cli.lm import train_lm_main


def make_place(
    folder: Path, *, conversations: int = 6, held: int = 2, **changes: dict[str, Any]
) -> Path:
    """Writes `folder`; changes: settings by section, None = without that setting."""
    save_tiny_target(folder / "target", num_layers=3)
    write_conversations(folder / "train.jsonl", conversations)
    write_conversations(folder / "held.jsonl", held, seed=100)
    recipe: dict[str, dict[str, Any]] = {
        "model": {"target": f"{folder}/target", "draft_layers": 2, "target_dtype": "float32"},
        "data": {
            "train_data": [f"{folder}/train.jsonl"],
            "cache_dir": f"{folder}/cache",
            "tokens_per_batch": 400,
            "num_workers": 0,
        },
        "loss": {"label_weight": 0.0, "distill_weight": 1.0},
        "train": {"learning_rate": 3.0e-3, "epochs": 2, "device": "cpu", "save_every": 2},
        "evaluate": {
            "eval_data": [f"{folder}/held.jsonl"],
            "eval_depth": 2,
            "eval_max_new_tokens": 4,
        },
    }
    for section, values in changes.items():
        recipe[section] |= values
        recipe[section] = {k: v for k, v in recipe[section].items() if v is not None}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


def run(place: Path, name: str, *flags: str) -> tuple[Path, list[dict]]:
    """The output folder and its rows of metrics."""
    out = place / name
    code = train_lm_main(["--config", f"{place}/recipe.yaml", "--output-dir", str(out), *flags])
    assert code == 0
    return out, metric_rows(out)
