"""Three arms of the training command on the long-prompt set: equal losses, time and memory.

    python benchmarks/bench_arms.py --cache-dir .quickstart --out arms.jsonl

Each arm is `torchrun --nproc_per_node 1 train_eagle3.py` from the same weights over the same
batches: no trimming, loss end only, both flags. The command checks that every step's loss agrees
to 1e-5 relative and exits 1 when it does not. Time is that of the steps, the first one (warm-up)
left out; memory is the peak of the training process's anonymous pages (not mapped features).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ARMS = {
    "no trimming": ("--no-trim-loss-positions", "--no-trim-backbone-rows"),
    "loss only": ("--trim-loss-positions", "--no-trim-backbone-rows"),
    "both": ("--trim-loss-positions", "--trim-backbone-rows"),
}


def run(arm: str, args: argparse.Namespace, folder: Path) -> list[dict]:
    """The metric rows of one arm's run in a folder of its own."""
    output = folder / arm.replace(" ", "-")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "1", "train_eagle3.py", "--config", args.config]
    command += [*ARMS[arm], "--train-data", *args.train_data, "--cache-dir", args.cache_dir]
    command += ["--tokens-per-batch", str(args.tokens_per_batch), "--epochs", "8"]
    command += ["--max-steps", str(args.steps), "--save-every", "0", "--output-dir", str(output)]
    if subprocess.run(command, cwd=ROOT).returncode:
        raise SystemExit(f"error: the arm '{arm}' failed")
    lines = (output / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def worst_difference(rows: list[dict], reference: list[dict]) -> float:
    """Largest relative difference of any TTT step's loss at any optimizer step."""
    worst = 0.0
    for mine, other in zip(rows, reference, strict=True):
        for key in (k for k in other if k.startswith("loss/") and other[k]):
            worst = max(worst, abs(mine[key] / other[key] - 1))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--config", default="examples/quickstart.yaml")
    parser.add_argument(
        "--train-data", nargs="+", default=["examples/data/long_prompt.train.jsonl"]
    )
    parser.add_argument("--cache-dir", default=".quickstart")
    parser.add_argument("--tokens-per-batch", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--out", help="append rows to this JSON lines file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = {arm: run(arm, args, Path(folder)) for arm in ARMS}
    seconds = {arm: sum(r["time/step_seconds"] for r in rows[arm][1:]) for arm in ARMS}
    print("\narm           s/step  vs loss only  kept FLOPs  peak MB  worst loss difference")
    failed = False
    for arm in ARMS:
        worst = worst_difference(rows[arm], rows["no trimming"])
        failed |= worst > 1e-5
        row = {
            "arm": arm,
            "seconds_per_step": seconds[arm] / (args.steps - 1),
            "relative_to_loss_only": seconds[arm] / seconds["loss only"],
            "kept_flops": statistics.mean(r["perf/kept_flops_fraction"] for r in rows[arm]),
            "peak_mb": max(r["perf/peak_memory_mb"] for r in rows[arm]),
            "worst_loss_difference": worst,
        }
        print(
            f"{arm:12s} {row['seconds_per_step']:7.2f} {row['relative_to_loss_only']:13.2f} "
            f"{row['kept_flops']:11.1%} {row['peak_mb']:8.0f}  {worst:.1e}"
        )
        if args.out:
            with open(args.out, "a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")
    if failed:
        raise SystemExit("error: losses differ by more than 1e-5 relative")


if __name__ == "__main__":
    main()
