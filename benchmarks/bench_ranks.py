"""Bytes and FLOPs per rank of shared sequences: planned, and bytes counted where they are sent.

    python benchmarks/bench_ranks.py --tokens 32768 65536 --ranks 4 --density 0.08 --count

Planned: `plan/shard.py` and `plan/cost.py` for Llama-3-8B's draft, keys in bf16, their gradients
in fp32; supervision in 16 evenly placed blocks, or all at the end (`tail`).

--count also runs a training step of gloo ranks with the same plan and a draft of 16 channels,
fp32, its attention kernel replaced by one that computes nothing: what the ranks send does not
depend on values. The bytes counted must equal what is planned for that draft, or the run stops.
"""

from __future__ import annotations

import argparse
import datetime
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from problems import STEPS, append_row, draft_of, make_mask, make_problem, our_step

from specforge_trim.attention.kernel import Kernel
from specforge_trim.plan.cost import DraftDims, pack_cost, row_costs
from specforge_trim.plan.pack import TrimPack, build_trim_pack, dense_pack, restrict_pack
from specforge_trim.plan.shard import (
    SequenceSplit,
    bytes_sent,
    row_edges,
    shard_chunks,
    shard_pack,
)
from specforge_trim.ranks.layout import make_layout
from specforge_trim.ranks.world import World

LLAMA, COUNTED = draft_of("llama-3-8b").dims, draft_of("counting").dims


@dataclass(frozen=True)
class Arm:
    rows: str  # trimmed or dense
    dealt: str
    home: str  # gathered, ring or ulysses

    def split(self, rank: int, size: int) -> SequenceSplit:
        return SequenceSplit(
            rank, size, rows=self.dealt, gathered=self.home == "gathered",
            ulysses=size if self.home == "ulysses" else 1,
        )  # fmt: skip


ARMS = (
    Arm("trimmed", "dealt", "gathered"),
    Arm("trimmed", "owner", "gathered"),
    Arm("trimmed", "dealt", "ring"),
    Arm("trimmed", "dealt", "ulysses"),
    Arm("dense", "dealt", "gathered"),
    Arm("dense", "dealt", "ring"),
    Arm("dense", "dealt", "ulysses"),
)


def planned(
    pack: TrimPack, split: SequenceSplit, dims: DraftDims, *, chunk_rows: int, itemsize: int
) -> int:
    """Bytes that a rank sends; rows are dealt by Llama's costs."""
    edges = row_edges(pack, split, LLAMA)
    chunks = shard_chunks(pack, split, edges, chunk_rows=chunk_rows)
    return bytes_sent(shard_pack(pack, split, edges), split, chunks, dims, itemsize=itemsize)


def row_flops(pack: TrimPack, split: SequenceSplit) -> float:
    edges = row_edges(pack, split, LLAMA)
    own = restrict_pack(pack, edges[split.rank], edges[split.rank + 1])
    return float(row_costs(own, LLAMA).sum())


# ---------------------------------------------------------------------- counted


def _no_forward(q, k, v, *, causal, mask, scale):
    return torch.zeros_like(q), torch.zeros(q.shape[:2])


def _no_backward(do, q, k, v, o, lse, *, causal, mask, scale):
    return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)


NOTHING = Kernel("nothing", True, True, _no_forward, _no_backward)


def count(args: argparse.Namespace, mask: torch.Tensor) -> dict[Arm, int]:
    """The most bytes that a rank sent, of ranks that ran a step of each arm."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_count_rank, (args, mask, folder), nprocs=args.ranks)
        ranks = [json.loads(Path(folder, str(r)).read_text()) for r in range(args.ranks)]
    found = {}
    for arm, *pairs in zip(ARMS, *ranks, strict=True):
        for rank, (sent, expected) in enumerate(pairs):
            if sent != expected:
                raise SystemExit(f"error: {arm}, rank {rank}: {sent} bytes sent, not {expected}")
        found[arm] = max(sent for sent, _ in pairs)
    return found


def _count_rank(rank: int, args: argparse.Namespace, mask: torch.Tensor, folder: str) -> None:
    torch.set_num_threads(1)
    timeout, size = datetime.timedelta(minutes=3), args.ranks
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timeout
    )
    world = World(
        rank=rank, size=size, device=torch.device("cpu"), group=dist.group.WORLD, timeout=timeout
    )
    pairs = [_count_arm(world, args, mask, arm) for arm in ARMS]
    Path(folder, str(rank)).write_text(json.dumps(pairs))
    dist.barrier()
    dist.destroy_process_group()


def _count_arm(
    world: World, args: argparse.Namespace, mask: torch.Tensor, arm: Arm
) -> tuple[int, int]:
    """Bytes sent and planned, of this rank."""
    degrees = {"ulysses": world.size} if arm.home == "ulysses" else {"ring": world.size}
    layout = make_layout(world, **degrees, splits_context=arm.home != "gathered")
    pack, split = build(arm.rows, mask), arm.split(world.rank, world.size)
    step = our_step(
        make_problem("counting", mask), pack, chunk_rows=args.chunk_rows, split=split,
        layout=layout, dims=LLAMA,
    )  # fmt: skip
    with mock.patch("specforge_trim.drafts.eagle3.step.select_kernel", lambda *_, **__: NOTHING):
        step()
    groups = (layout.sequence, layout.ulysses, layout.ring)
    sent = sum(group.bytes_sent for group in groups if group is not None)
    return sent, planned(pack, split, COUNTED, chunk_rows=args.chunk_rows, itemsize=4)


def build(rows: str, mask: torch.Tensor) -> TrimPack:
    return (build_trim_pack if rows == "trimmed" else dense_pack)(mask, STEPS)


# ---------------------------------------------------------------------- rows of the report


def bench(
    args: argparse.Namespace, layout: str, mask: torch.Tensor, arm: Arm, counted: int | None
) -> dict:
    pack = build(arm.rows, mask)
    splits = [arm.split(rank, args.ranks) for rank in range(args.ranks)]
    sent = [planned(pack, s, LLAMA, chunk_rows=args.chunk_rows, itemsize=2) for s in splits]
    flops = [row_flops(pack, s) for s in splits]
    context = pack_cost(pack, LLAMA).by_stage["context"].kept / args.ranks
    return {
        "tokens": mask.numel(), "layout": layout, "rows": arm.rows, "dealt": arm.dealt,
        "context": arm.home, "ranks": args.ranks, "density": args.density,
        "bytes_sent_max": max(sent), "flops_max": max(flops) + context,
        "row_flops_max_over_mean": max(flops) / (sum(flops) / args.ranks),
        "counted_bytes": counted,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 32768, 65536])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--density", type=float, default=0.08)
    parser.add_argument("--chunk-rows", type=int, default=1024)
    parser.add_argument("--layouts", nargs="+", default=["blocks", "tail"])
    parser.add_argument("--count", action="store_true", help="also run ranks and count")
    parser.add_argument("--out", help="append rows to this JSON lines file")
    args = parser.parse_args()
    for tokens in args.tokens:
        for layout in args.layouts:
            mask = make_mask(layout, tokens, args.density)
            found = count(args, mask) if args.count else {}
            for arm in ARMS:
                counted = found.get(arm)
                row = bench(args, layout, mask, arm, counted)
                print(
                    f"{tokens} tokens {layout:6s} {arm.rows:7s} {arm.dealt:5s} {arm.home:8s} "
                    f"{row['bytes_sent_max'] / 1e9:8.3f} GB sent  "
                    f"{row['flops_max'] / 1e12:8.1f} TFLOP  "
                    f"largest row stage / mean {row['row_flops_max_over_mean']:.2f}"
                    + ("" if counted is None else f"  counted = planned: {counted:,} bytes"),
                    flush=True,
                )
                append_row(args.out, row)


if __name__ == "__main__":
    main()
