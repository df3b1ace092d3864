"""Peak memory of one training step, each arm in a fresh process.

    python benchmarks/bench_memory.py --tokens 4096 --density 1.0 --arms classic ours
    python benchmarks/bench_memory.py --tokens 262144 --density 0.01 --arms ours --on-disk

The figure is the process's peak RssAnon during the step above its value after set-up (weights,
gradients, ids, plan and teacher are there by then), sampled from outside every millisecond. With
--on-disk the features lie in a mapped file, as the feature store reads them.
"""

from __future__ import annotations

import argparse
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from problems import (
    SIZES,
    STEPS,
    append_row,
    classic_step,
    dense_pack,
    make_mask,
    make_problem,
    our_step,
    packs,
)


def child(args: argparse.Namespace) -> None:
    """Set up, say so, wait for the word, run one step."""
    from specforge_trim.ranks.gradients import ensure_gradients

    mask = make_mask(args.layout, args.tokens, args.density[0])
    aux = None
    if args.on_disk:
        width = 3 * SIZES[args.size]["hidden"]
        aux = torch.from_file(
            args.on_disk, shared=False, size=args.tokens * width, dtype=torch.bfloat16
        ).view(args.tokens, width)
    problem = make_problem(args.size, mask, aux=aux)
    ensure_gradients(problem.model)
    if args.arms[0] == "classic":
        step = classic_step(problem)
    else:
        pack = packs(problem)["ours"] if args.arms[0] == "ours" else dense_pack(mask, STEPS)
        step = our_step(problem, pack, chunk_rows=args.chunk_rows)
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    step()
    print(f"done {time.perf_counter() - start:.2f}", flush=True)


def anonymous(pid: int) -> int:
    """RssAnon of a process in bytes."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise OSError(f"process {pid} reports no RssAnon")


def peak_of(command: list[str], arm: str) -> tuple[int, float]:
    """Peak bytes above set-up, and seconds, of a process that speaks `child`'s protocol."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdin and process.stdout
    if process.stdout.readline().strip() != "ready":
        raise SystemExit(f"{arm}: the measured process failed")
    base = peak = anonymous(process.pid)
    process.stdin.write("go\n")
    while not select.select([process.stdout], [], [], 0.001)[0]:
        peak = max(peak, anonymous(process.pid))
    line = process.stdout.readline().split()
    if process.wait() or not line:
        raise SystemExit(f"{arm}: the measured process failed")
    return peak - base, float(line[1])


def measure(args: argparse.Namespace, arm: str, density: float, features: str | None) -> dict:
    command = [sys.executable, __file__, "--child", "--arms", arm, "--density", str(density)]
    command += ["--tokens", str(args.tokens), "--size", args.size, "--layout", args.layout]
    if args.chunk_rows:
        command += ["--chunk-rows", str(args.chunk_rows)]
    if features:
        command += ["--on-disk", features]
    peak, seconds = peak_of(command, arm)
    return {
        "arm": arm, "size": args.size, "layout": args.layout, "tokens": args.tokens,
        "density": density, "chunk_rows": args.chunk_rows, "peak_bytes": peak,
        "bytes_per_token": peak / args.tokens, "seconds": seconds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="prototype")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--density", type=float, nargs="+", default=[1.0])
    parser.add_argument("--layout", default="blocks")
    parser.add_argument("--chunk-rows", type=int, help="default: as the trainer chooses")
    parser.add_argument("--arms", nargs="+", default=["classic", "ours"])
    parser.add_argument("--on-disk", nargs="?", const="", help="features in a mapped file")
    parser.add_argument("--out", help="append rows to this JSON lines file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        features = None
        if args.on_disk is not None:
            features = str(Path(folder) / "aux.bin")
            block = torch.randn(1024, 3 * SIZES[args.size]["hidden"]).bfloat16()
            with open(features, "wb") as out:
                for _ in range(args.tokens // 1024):
                    out.write(block.view(torch.int16).numpy().tobytes())
        for density in args.density:
            for arm in args.arms:
                row = measure(args, arm, density, features)
                print(
                    f"{row['size']} {row['tokens']} tokens {density:.0%} {arm:8s} "
                    f"{row['peak_bytes'] / 1e6:8.0f} MB  {row['bytes_per_token'] / 1e3:6.2f} "
                    f"KB/token  {row['seconds']:.1f} s",
                    flush=True,
                )
                append_row(args.out, row)


if __name__ == "__main__":
    main()
