"""Step time of the trimmed step against the classic unroll, side by side in one run.

    python benchmarks/bench_step.py --tokens 8192 --rounds 5 --out step.jsonl
    python benchmarks/bench_step.py --tokens 32768 --arms ours      # longer than classic can go

Every round runs each arm once, in turn, so that a drifting machine drifts for all. Ratios are
per round to the classic arm of the same round; the A/A row is the classic arm against itself and
shows the noise. Floor = FLOPs that must be done / FLOPs of the classic arm (plan/cost.py).
The rates say how fast an arm does its FLOPs, as a share of the machine's matmul rate in this run.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from problems import (
    SIZES,
    append_row,
    classic_step,
    costs,
    make_mask,
    make_problem,
    our_step,
    packs,
    seconds,
)

ARMS = ["classic", "ours", "step 0 full", "classic again"]


def matmul_rate() -> float:
    """FLOP/s of a square fp32 matrix product, best of a few."""
    a, b = torch.randn(2048, 1024), torch.randn(1024, 1024)
    best = 0.0
    for _ in range(6):
        start = time.perf_counter()
        for _ in range(4):
            a @ b
        best = max(best, 4 * 2 * 2048 * 1024 * 1024 / (time.perf_counter() - start))
    return best


def bench(size: str, layout: str, tokens: int, density: float, rounds: int, arms: set[str]):
    """One row of the table: medians and spread of per-round ratios."""
    problem = make_problem(size, make_mask(layout, tokens, density))
    plan = packs(problem)
    cost = costs(problem, plan["ours"])
    steps = {"ours": our_step(problem, plan["ours"])}
    if "classic" in arms:
        steps = {"classic": classic_step(problem)} | steps
    if "step 0 full" in arms and density < 1:
        steps["step 0 full"] = our_step(problem, plan["step 0 full"])
    if {"classic", "classic again"} <= arms:
        steps["classic again"] = steps["classic"]
    losses = {name: step() for name, step in steps.items()}  # the warm-up
    for name, loss in losses.items():
        torch.testing.assert_close(loss, losses[next(iter(steps))], rtol=1e-4, atol=0, msg=name)
    times: dict[str, list[float]] = {name: [] for name in steps}
    rate = []
    for _ in range(rounds):
        rate.append(matmul_rate())
        for name, step in steps.items():
            times[name].append(seconds(step))
    matmul, median = statistics.median(rate), {n: statistics.median(t) for n, t in times.items()}
    row = {
        "size": size, "layout": layout, "tokens": tokens, "density": density, "rounds": rounds,
        "floor": cost.floor / cost.full, "matmul_gflops": matmul / 1e9,
        "ours_seconds": median["ours"], "ours_rate_of_matmul": cost.kept / median["ours"] / matmul,
    }  # fmt: skip
    if "classic" not in steps:
        return row
    row["classic_seconds"] = median["classic"]
    row["classic_rate_of_matmul"] = cost.full / median["classic"] / matmul
    for name in steps:
        if name != "classic":
            ratios = [a / b for a, b in zip(times[name], times["classic"], strict=True)]
            row[name] = statistics.median(ratios)
            row[name + " spread"] = (min(ratios), max(ratios))
    return row


def show(row) -> str:
    text = f"{row['size']:9s} {row['layout']:6s} {row['tokens']:6d} {row['density']:5.0%}  "
    labels = {"ours": "ours", "step 0 full": "step-0-full", "classic again": "A/A"}
    for name, label in labels.items():
        if name in row:
            low, high = row[name + " spread"]
            text += f"{label} {row[name]:.3f} ({low:.3f}-{high:.3f})  "
    text += f"floor {row['floor']:.3f}  ours {row['ours_seconds']:.2f} s, "
    text += f"{row['ours_rate_of_matmul']:.0%} of matmul  "
    if "classic_seconds" in row:
        text += f"classic {row['classic_seconds']:.1f} s, {row['classic_rate_of_matmul']:.0%}"
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="prototype")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192])
    parser.add_argument("--density", type=float, nargs="+", default=[0.02, 0.08, 0.25, 0.40, 1.0])
    parser.add_argument("--layout", nargs="+", default=["blocks"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS, help="`ours` always runs")
    parser.add_argument("--out", help="append rows to this JSON lines file")
    args = parser.parse_args()
    for tokens in args.tokens:
        for layout in args.layout:
            for density in args.density:
                row = bench(args.size, layout, tokens, density, args.rounds, set(args.arms))
                print(show(row), flush=True)
                append_row(args.out, row)


if __name__ == "__main__":
    main()
