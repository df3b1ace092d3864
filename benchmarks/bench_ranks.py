"""Bytes and FLOPs per rank of shared sequences, from the plans that the ranks compute from.

    python benchmarks/bench_ranks.py --tokens 32768 65536 --ranks 4 --density 0.08

Nothing is run: bytes are what `plan/shard.py` says is sent, which the tests hold against what
gloo ranks count; FLOPs are `plan/cost.py`'s. Sizes are Llama-3-8B's draft, keys in bf16, their
gradients in fp32; supervision in 16 evenly placed blocks, or all at the end (`tail`).
"""

from __future__ import annotations

import argparse

from problems import SIZES, STEPS, append_row, make_mask

from specforge_trim.plan.cost import DraftDims, pack_cost, row_costs
from specforge_trim.plan.pack import TrimPack, build_trim_pack, dense_pack, restrict_pack
from specforge_trim.plan.shard import (
    SequenceSplit,
    bytes_sent,
    row_edges,
    shard_chunks,
    shard_pack,
)

SIZE = SIZES["llama-3-8b"]
DIMS = DraftDims(
    hidden=SIZE["hidden"],
    heads=SIZE["heads"],
    kv_heads=SIZE["kv_heads"],
    head_dim=SIZE["head_dim"],
    intermediate=SIZE["mlp"],
    draft_vocab=SIZE["draft_vocab"],
    aux_width=3 * SIZE["hidden"],
)


def per_rank(pack: TrimPack, split: SequenceSplit, *, chunk_rows: int) -> tuple[int, float]:
    """(bytes sent, row-stage FLOPs) of one rank."""
    edges = row_edges(pack, split, DIMS)
    chunks = shard_chunks(pack, split, edges, chunk_rows=chunk_rows)
    sent = bytes_sent(
        shard_pack(pack, split, edges), split, chunks,
        kv_width=DIMS.kv_heads * DIMS.head_dim, hidden=DIMS.hidden, itemsize=2,
    )  # fmt: skip
    own = restrict_pack(pack, edges[split.rank], edges[split.rank + 1])
    return sent, float(row_costs(own, DIMS).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[16384, 32768, 65536])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--density", type=float, default=0.08)
    parser.add_argument("--chunk-rows", type=int, default=1024)
    parser.add_argument("--layouts", nargs="+", default=["blocks", "tail"])
    parser.add_argument("--out", help="append rows to this JSON lines file")
    args = parser.parse_args()
    for tokens in args.tokens:
        for layout in args.layouts:
            mask = make_mask(layout, tokens, args.density)
            packs = {"trimmed": build_trim_pack(mask, STEPS), "dense": dense_pack(mask, STEPS)}
            arms = (
                ("trimmed", "dealt", True),
                ("trimmed", "owner", True),
                ("trimmed", "dealt", False),
                ("dense", "dealt", True),
                ("dense", "dealt", False),
            )
            for name, rows, gathered in arms:
                found = [
                    per_rank(
                        packs[name],
                        SequenceSplit(rank, args.ranks, rows=rows, gathered=gathered),
                        chunk_rows=args.chunk_rows,
                    )
                    for rank in range(args.ranks)
                ]
                sent, flops = zip(*found, strict=True)
                context = pack_cost(packs[name], DIMS).by_stage["context"].kept / args.ranks
                row = {
                    "tokens": tokens, "layout": layout, "rows": name, "dealt": rows,
                    "context": "gathered" if gathered else "ring", "ranks": args.ranks,
                    "density": args.density, "bytes_sent_max": max(sent),
                    "flops_max": max(flops) + context,
                    "row_flops_max_over_mean": max(flops) / (sum(flops) / args.ranks),
                }  # fmt: skip
                print(
                    f"{tokens} tokens {layout:6s} {name:7s} {rows:5s} {row['context']:8s} "
                    f"{max(sent) / 1e9:8.3f} GB sent  {row['flops_max'] / 1e12:8.1f} TFLOP "
                    f"largest row stage / mean {row['row_flops_max_over_mean']:.2f}",
                    flush=True,
                )
                append_row(args.out, row)


if __name__ == "__main__":
    main()
