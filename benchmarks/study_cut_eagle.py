"""The quickstart's EAGLE draft with and without stop_grad_context_tokens: one arm of the study.

The quickstart's recipe with both trim flags, on the data and features that `make quickstart` left
in its cache; measured on all held-out conversations every 40 steps, and at the end by decoding
all held-out prompts as study_alignment.py does: greedily, 64 tokens, verified by the target's own
answer, which gives the counts of live decoding. Run by study_row_sparse.py.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from study_alignment import measure, recordings

from specforge_trim.cli.plot import read_run
from specforge_trim.drafts.eagle3.settings import Config, load_config
from specforge_trim.ranks.world import start
from specforge_trim.train import checkpoint, results
from specforge_trim.train import run as pipeline

HERE = Path(__file__).resolve().parent
RECIPE = HERE.parent / "examples" / "quickstart.yaml"
ROWS = HERE / "results" / "cut_eagle_study.jsonl"
KEPT = ("loss", "accuracy", "acceptance", "acceptance_length")


def arm_config(args: argparse.Namespace) -> Config:
    """The recipe, the arm's settings, and a folder of its own."""
    run = args.cache_dir / "study-cut-eagle" / f"run-{args.seed}-{args.arm}"
    flags = ["--config", str(RECIPE), "--cache-dir", str(args.cache_dir), "--seed", str(args.seed)]
    flags += ["--output-dir", str(run), "--trim-loss-positions", "--trim-backbone-rows"]
    flags += ["--device", "cpu", "--num-workers", "0", "--no-resume", "--save-every", "0"]
    flags += ["--eval-every", "40"]
    flags += ["--stop-grad-context-tokens"] if args.arm == "on" else []
    # Smaller chunks: the same gradients, summed in another order.
    flags += ["--chunk-rows", "64"] if args.arm == "again" else []
    flags += [] if args.max_steps is None else ["--max-steps", str(args.max_steps)]
    return load_config(flags, prog="study_row_sparse", description="one arm")


def train(args: argparse.Namespace) -> Config:
    config = arm_config(args)
    pipeline.train_draft(config, start(device="cpu"))
    return config


def order(config: Config) -> str:
    """Digest of the documents of all steps, in training order."""
    found = checkpoint.newest(config.output_dir / "checkpoints")
    assert found is not None
    return str(found.meta["progress"]["order"])


def kept(key: str) -> bool:
    """Whether a value of metrics.jsonl is held-out loss, accuracy or acceptance."""
    return key.split("/")[:2] in (["eval", n] for n in KEPT)


def answers(config: Config) -> dict[str, list[Any]]:
    """The target's greedy answers to all held-out prompts; made once."""
    world = start(device="cpu")
    return recordings(config, pipeline.open_target(config, world), world)


def measured(config: Config) -> dict[str, Any]:
    """held_out: every measurement while training; sets: [tokens, passes] of greedy decoding."""
    target = pipeline.open_target(config, start(device="cpu"))
    draft = results.load_trained(config, target)[0].eval()
    eos = target.text_config.eos_token_id
    eos = set(eos) if isinstance(eos, list) else {eos}
    found = {
        name: measure(draft, recorded, config.evaluate.eval_depth, eos)
        for name, recorded in answers(config).items()
    }
    sets = {n: [a + b for a, b in zip(m["even"], m["odd"], strict=True)] for n, m in found.items()}
    held_out = [
        {"step": row["step"], **{k.removeprefix("eval/"): row[k] for k in row if kept(k)}}
        for row in read_run(config.output_dir)
        if "eval/loss" in row
    ]
    return {"sets": sets, "held_out": held_out}
