"""Worlds of spawned gloo ranks that run a list of cases, and shards of a TTT case."""

from __future__ import annotations

import datetime
import os
import traceback
from dataclasses import replace
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ttt_case import make_batch

from specforge_trim.plan.pack import restrict_pack
from specforge_trim.plan.shard import row_edges, shard_chunks, shard_pack
from specforge_trim.ranks.world import World


def _enter(rank, size, main, folder, seconds, arguments):
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=seconds)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timeout
    )
    world = World(
        rank=rank,
        size=size,
        device=torch.device("cpu"),
        group=dist.group.WORLD,
        timeout=timeout,
    )
    try:
        main(world, *arguments)
    except BaseException:
        # The first failure is what matters: the other ranks only report that they lost this one.
        (folder / f"failed-{rank}").write_text(traceback.format_exc())
        os._exit(1)
    dist.barrier()
    dist.destroy_process_group()


def run_world(size, main, folder, *arguments, seconds=60):
    """Runs main(world, *arguments) on `size` ranks; raises with the ranks' tracebacks."""
    try:
        mp.spawn(_enter, args=(size, main, folder, seconds, arguments), nprocs=size)
    except mp.ProcessExitedException:
        reports = sorted(folder.glob("failed-*"), key=lambda p: p.stat().st_mtime)
        raise AssertionError("\n".join(p.read_text() for p in reports)) from None


def own_part(case, pack, split, *, chunk_rows=1024, dims=None, **make) -> SimpleNamespace:
    """This rank's batch of a shared sequence, with everything outside its shard made useless."""
    edges = row_edges(pack, split, dims)
    shard = shard_pack(pack, split, edges)
    local = restrict_pack(pack, edges[split.rank], edges[split.rank + 1])
    batch = make_batch(case, local, **make)
    batch.shard = shard
    batch.chunks = shard_chunks(pack, split, edges, chunk_rows=chunk_rows)
    whole, (lo, hi) = batch.aux, shard.tokens

    def aux(a, b):
        assert lo <= a <= b <= hi, f"rank {split.rank} reads features [{a}, {b}) of [{lo}, {hi})"
        return whole(a, b)

    batch.aux = aux
    first, last = shard.halo
    assert local.supervised.numel() == 0 or first <= int(local.supervised[0])
    assert local.supervised.numel() == 0 or int(local.supervised[-1]) + 1 < last
    vocab = case.model.config.vocab_size
    outside = torch.ones_like(batch.input_ids, dtype=torch.bool)
    outside[first:last] = False
    batch.input_ids = torch.where(outside, (batch.input_ids + 7) % vocab, batch.input_ids)
    return batch


def some_documents(case, part, parts):
    """Every parts-th document of a case, for one data parallel rank."""
    return replace(case, docs=case.docs[part::parts])
