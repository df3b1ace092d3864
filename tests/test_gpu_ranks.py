"""The collectives of shared sequences in a world of one rank: NCCL on a GPU, gloo on the CPU.

Catches: a collective that the device's library does not know or that wants another layout, results
read before the stream has them, FSDP2 without a sum of its own. What crosses ranks is tested on
gloo; benchmarks/gpu_check.sh runs the GPU half.
"""

import dataclasses
import datetime

import pytest
import torch
import torch.distributed as dist
from ranks import own_part
from ttt_case import make_batch, make_case, make_pack

from specforge_trim.drafts.eagle3.step import StepSettings, ttt_step
from specforge_trim.loss.teacher import Teacher
from specforge_trim.plan.shard import SequenceSplit
from specforge_trim.ranks.gradients import FullySharded, Replicated
from specforge_trim.ranks.group import RankGroup
from specforge_trim.ranks.layout import ALONE, Layout
from specforge_trim.ranks.world import World

GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ],
)
MASK = [0] * 40 + [1] * 30 + [0] * 13 + [1, 0, 0, 0, 0, 1, 1, 0]


@pytest.fixture(params=["cpu", GPU])
def world(request, tmp_path):
    device, timeout = torch.device(request.param), datetime.timedelta(seconds=60)
    if device.type == "cuda":
        torch.cuda.set_device(0)
        device = torch.device("cuda", 0)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{tmp_path}/store",
        rank=0,
        world_size=1,
        timeout=timeout,
    )
    yield World(rank=0, size=1, device=device, group=dist.group.WORLD, timeout=timeout)
    dist.destroy_process_group()


def gradients(world, home, reducer):
    """Of a step in fp32; home None: without a shared sequence."""
    case = make_case([MASK, MASK[:50]], head_dim=64, width=64, heads=4, kv_heads=2, seed=1)
    case.model.float().to(world.device)
    head = case.head.float().to(world.device)
    pack, layout = make_pack(case), ALONE
    if home is None:
        batch = make_batch(case, pack, chunk_rows=20, dtype=torch.float32)
    else:
        group = RankGroup.of(world.group, name="sequence", timeout=world.timeout)
        layout = Layout(
            sequence=group,
            ulysses=group if home == "ulysses" else None,
            ring=group if home == "ring" else None,
            splits_context=home != "gathered",
        )
        split = SequenceSplit(0, 1, gathered=home == "gathered")
        batch = own_part(case, pack, split, chunk_rows=20, dtype=torch.float32)
        assert group.agree_min(torch.ones(2, dtype=torch.int32)).tolist() == [1, 1]
    reducer = reducer(case.model, world)
    reducer.begin()
    result = ttt_step(
        case.model,
        batch,
        teacher=Teacher(head, case.teacher.draft_to_target, case.teacher.t2d),
        denominators=torch.full((case.steps,), 10.0),
        settings=StepSettings(compute_dtype=torch.float32, context_chunk=30),
        layout=layout,
        after_rows=reducer.rows_done,
    )
    reducer.finish()
    grads = {n: p.grad for n, p in case.model.named_parameters() if p.requires_grad}
    whole = {n: g.full_tensor() if hasattr(g, "full_tensor") else g for n, g in grads.items()}
    return whole | {"sums": torch.stack(dataclasses.astuple(result)[:5])}


def test_gpu_ranks_of_one_equal_no_ranks(world):
    expected = gradients(world, None, Replicated)
    cases = [(home, Replicated) for home in ("gathered", "ulysses")]
    cases += [(None, FullySharded), ("gathered", FullySharded)]
    if world.device.type == "cuda":  # gloo does not send to itself
        cases += [("ring", Replicated)]
    for home, reducer in cases:
        for name, found in gradients(world, home, reducer).items():
            scale = max(1e-3, float(expected[name].abs().max()))
            error = float((found - expected[name]).abs().max()) / scale
            # fp32: sums over windows run in another order.
            assert error < 1e-5, f"{home}, {reducer.__name__}, {name}: {error:.1e}"
