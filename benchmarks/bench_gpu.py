"""Step time and peak memory on one GPU: classic unroll, dense pack, trimmed pack.

    python benchmarks/bench_gpu.py --out gpu.jsonl

Llama-3-8B dimensions, bf16 with fp32 masters. `guard on` is the trimmed pack after the guard at
max_density 0.35, which gives a denser document all its rows back. Times are medians of
interleaved rounds with the device synchronised; memory is max_memory_allocated above what lay
there before the step.
"""

from __future__ import annotations

import argparse
import itertools
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
)

from specforge_trim.plan.guard import choose_pack_alone


def seconds(step) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    step()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def peak_bytes(step) -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def bench(args: argparse.Namespace, tokens: int, density: float) -> dict:
    mask = make_mask("blocks", tokens, density)
    problem = make_problem(
        args.size, mask, device="cuda", dtype=torch.bfloat16, backend=args.backend
    )
    plan = packs(problem)
    cost = costs(problem, plan["ours"])
    guarded = choose_pack_alone(plan["ours"], max_density=0.35)
    steps = {
        "classic": classic_step(problem),
        "dense": our_step(problem, plan["dense"], chunk_rows=args.chunk_rows),
        "ours": our_step(problem, plan["ours"], chunk_rows=args.chunk_rows),
        "guard on": our_step(problem, guarded, chunk_rows=args.chunk_rows),
    }
    peaks = {name: peak_bytes(step) for name, step in steps.items()}  # the warm-up
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(args.rounds):
        for name, step in steps.items():
            times[name].append(seconds(step))
    row = {"size": args.size, "tokens": tokens, "density": density, "backend": args.backend}
    row["device"] = torch.cuda.get_device_name()
    row["floor"] = cost.floor / cost.full
    for name in steps:
        ratios = [a / b for a, b in zip(times[name], times["classic"], strict=True)]
        row[name] = {
            "seconds": statistics.median(times[name]),
            "relative": statistics.median(ratios),
            "spread": (min(ratios), max(ratios)),
            "peak_mb": peaks[name] / 1e6,
        }
    return row


def memory_of_ours(args: argparse.Namespace, tokens: int, density: float) -> dict:
    """Peak of the trimmed step alone, for contexts that no classic step could hold."""
    mask = make_mask("blocks", tokens, density)
    problem = make_problem(
        args.size, mask, device=args.device, dtype=torch.bfloat16, backend=args.backend
    )
    step = our_step(problem, packs(problem)["ours"], chunk_rows=args.chunk_rows)
    peak = peak_bytes(step) if args.device == "cuda" else None
    if peak is None:
        step()
    return {
        "size": args.size, "tokens": tokens, "density": density, "arm": "ours",
        "peak_mb": None if peak is None else peak / 1e6,
        "bytes_per_token": None if peak is None else peak / tokens,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="llama-3-8b")
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 16384])
    parser.add_argument("--density", type=float, nargs="+", default=[0.02, 0.08, 0.25, 0.40, 1.0])
    parser.add_argument("--backend", choices=("sdpa", "fa"), default="sdpa")
    parser.add_argument("--chunk-rows", type=int, help="default: as the trainer chooses")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory-only", action="store_true", help="peak of the trimmed step only")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda",
        help="cpu: runs the step of --memory-only to try the script, measures nothing",
    )  # fmt: skip
    parser.add_argument("--out", help="append rows to this JSON lines file")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("error: no CUDA device; this benchmark was not run")
    if args.device == "cpu" and not args.memory_only:
        raise SystemExit("error: --device cpu goes with --memory-only")
    if args.memory_only:
        for tokens, density in itertools.product(args.tokens, args.density):
            row = memory_of_ours(args, tokens, density)
            print(row, flush=True)
            append_row(args.out, row)
        return
    for tokens in args.tokens:
        for density in args.density:
            row = bench(args, tokens, density)
            text = "  ".join(
                f"{name} {row[name]['relative']:.3f} ({row[name]['peak_mb']:.0f} MB)"
                for name in ("ours", "guard on", "dense", "classic")
            )
            print(
                f"{tokens:6d} {density:5.0%}  floor {row['floor']:.3f}  {text}  "
                f"classic {row['classic']['seconds'] * 1e3:.0f} ms",
                flush=True,
            )
            append_row(args.out, row)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
