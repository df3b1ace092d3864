"""Peak memory per rank of one training step on a sequence that ranks share, and bytes counted.

    python benchmarks/bench_rank_memory.py --tokens 16384 --ranks 4 --density 0.08

Each arm in fresh processes, gloo on the CPU. A rank's figure is its peak RssAnon during the step
above its value after set-up (features, weights, gradients, plan and teacher are there by then, and
every pair of ranks is connected), sampled from outside every millisecond; the largest rank counts.

    classic    every row at every step in one graph, tokens split over ranks, ring attention
    trimmed, dense   ours, context keys gathered or split (`ring`, `ulysses`)
"""

from __future__ import annotations

import argparse
import datetime
import select
import subprocess
import sys
import tempfile
import time

import torch
import torch.distributed as dist
from bench_memory import anonymous
from problems import (
    SIZES,
    append_row,
    classic_step,
    make_mask,
    make_problem,
    our_step,
    packs,
)

from specforge_trim.plan.shard import SequenceSplit
from specforge_trim.ranks.gradients import ensure_gradients
from specforge_trim.ranks.layout import Layout, make_layout
from specforge_trim.ranks.world import World

ARMS = ("classic", "trimmed gathered", "trimmed ring", "dense gathered", "dense ring")
TIMEOUT = datetime.timedelta(minutes=5)


def child(args: argparse.Namespace) -> None:
    """Set up, say so, wait for the word, run one step."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{args.store}", rank=args.child, world_size=args.ranks,
        timeout=TIMEOUT,
    )  # fmt: skip
    world = World(
        rank=args.child, size=args.ranks, device=torch.device("cpu"), group=dist.group.WORLD,
        timeout=TIMEOUT,
    )  # fmt: skip
    problem = make_problem(args.size, make_mask(args.layout, args.tokens, args.density))
    ensure_gradients(problem.model)
    name, _, home = args.arms[0].partition(" ")
    layout = Layout()
    if name == "classic":
        step = classic_step(problem, rank=world.rank, size=world.size)
    else:
        degrees = {"ulysses": world.size} if home == "ulysses" else {"ring": world.size}
        layout = make_layout(world, **degrees, splits_context=home != "gathered")
        split = SequenceSplit(
            world.rank, world.size, gathered=home == "gathered", ulysses=degrees.get("ulysses", 1)
        )
        pack = packs(problem)["ours" if name == "trimmed" else "dense"]
        step = our_step(problem, pack, chunk_rows=args.chunk_rows, split=split, layout=layout)
    connect(world, layout)
    print("ready", flush=True)
    sys.stdin.readline()
    world.barrier()
    start = time.perf_counter()
    step()
    groups = (layout.sequence, layout.ulysses, layout.ring)
    sent = sum(group.bytes_sent for group in groups if group is not None)
    print(f"done {time.perf_counter() - start:.2f} {sent}", flush=True)
    sys.stdin.readline()  # no rank leaves while another is still at work


def connect(world: World, layout: Layout) -> None:
    """One small exchange with every rank of every group, which makes gloo connect them."""
    one = [1] * world.size
    dist.all_to_all_single(torch.empty(world.size), torch.ones(world.size), one, one)
    for group in (layout.sequence, layout.ulysses, layout.ring):
        if group is not None:
            ones = [1] * group.size
            group.all_to_all(torch.ones(group.size), ones, ones)
            group.reduce_scatter(group.all_gather(torch.ones(1)))
            group.sent.clear()


def watch(processes: list[subprocess.Popen]) -> list[tuple[int, float, int]]:
    """(peak bytes above set-up, seconds, bytes sent) of ranks that speak `child`'s protocol."""
    for process in processes:
        if process.stdout.readline().strip() != "ready":
            raise SystemExit("error: a measured rank failed")
    base = [anonymous(process.pid) for process in processes]
    peak = list(base)
    for process in processes:
        process.stdin.write("go\n")
        process.stdin.flush()
    waiting = {process.stdout: r for r, process in enumerate(processes)}
    found: dict[int, tuple[float, int]] = {}
    while waiting:
        for out in select.select(list(waiting), [], [], 0.001)[0]:
            rank, words = waiting.pop(out), out.readline().split()
            if not words:
                raise SystemExit("error: a measured rank failed")
            found[rank] = float(words[1]), int(words[2])
        for rank in waiting.values():
            peak[rank] = max(peak[rank], anonymous(processes[rank].pid))
    for process in processes:
        process.stdin.write("end\n")
        process.stdin.close()
    return [(peak[r] - base[r], *found[r]) for r in range(len(processes))]


def measure(args: argparse.Namespace, arm: str) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--arms", arm, "--store", f"{folder}/store"]
        for key in ("size", "layout", "tokens", "density", "ranks", "chunk_rows"):
            if getattr(args, key) is not None:
                command += [f"--{key.replace('_', '-')}", str(getattr(args, key))]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        processes = [
            subprocess.Popen([*command, "--child", str(rank)], **pipes)
            for rank in range(args.ranks)
        ]
        try:
            ranks = watch(processes)
        finally:
            for process in processes:
                process.kill()
    peaks, seconds, sent = zip(*ranks, strict=True)
    return {
        "arm": arm, "size": args.size, "layout": args.layout, "tokens": args.tokens,
        "density": args.density, "ranks": args.ranks, "chunk_rows": args.chunk_rows,
        "peak_bytes": max(peaks), "peaks": peaks, "seconds": max(seconds),
        "bytes_sent": None if arm == "classic" else max(sent),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="prototype")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--density", type=float, default=0.08)
    parser.add_argument("--layout", default="blocks")
    parser.add_argument("--chunk-rows", type=int, help="default: as the trainer chooses")
    parser.add_argument("--arms", nargs="+", default=ARMS)
    parser.add_argument("--out", help="append rows to this JSON lines file")
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child is not None:
        child(args)
        return
    for arm in args.arms:
        row = measure(args, arm)
        sent = f"{row['bytes_sent'] / 1e6:,.1f} MB sent" if arm != "classic" else "not counted"
        print(
            f"{args.tokens} tokens, {args.ranks} ranks, {args.density:.0%}  {arm:17s} "
            f"{row['peak_bytes'] / 1e6:8.0f} MB  {sent:>18s}  {row['seconds']:.1f} s",
            flush=True,
        )
        append_row(args.out, row)


if __name__ == "__main__":
    main()
