"""Ranks on opposite sides of the guard's budget come to one answer."""

import dataclasses

import pytest
import torch
from ranks import own_part, run_world
from ttt_case import make_batch, make_case, make_pack

from specforge_trim.parallel.layout import make_layout
from specforge_trim.plan.guard import select_documents
from specforge_trim.plan.shard import SequenceSplit, budget_votes
from specforge_trim.train.stages import StepSettings, ttt_step

# Rank 0 holds tokens 0 to 19 with 4 rows, rank 1 holds 20 to 39 with 15: three chunks of 6. With
# all rows it would be 20 and four chunks.
MASK = [int(t == 5 or t >= 27) for t in range(40)]
TAU = 0.5


def step(case, batch, layout=None):
    case.model.zero_grad(set_to_none=True)
    result = ttt_step(
        case.model,
        batch,
        teacher=case.teacher,
        denominators=torch.full((4,), 40.0),
        settings=StepSettings(compute_dtype=torch.float64),
        **({} if layout is None else {"layout": layout}),
    )
    return torch.stack(dataclasses.astuple(result)[:5])


def main(world, agree, splits_context):
    case = make_case([MASK], seed=2)
    layout = make_layout(world, ring=2, splits_context=splits_context)
    split = SequenceSplit(world.rank, 2, rows="owner", gathered=not splits_context)
    trimmed = make_pack(case)
    votes = budget_votes(trimmed, split, TAU)
    assert votes.tolist() == [world.rank == 0]
    if agree:
        votes = layout.sequence.agree_min(votes.int()).bool()
    pack = select_documents(trimmed, votes, TAU)
    sums = world.sum(step(case, own_part(case, pack, split, chunk_rows=6), layout))
    whole = step(case, make_batch(case, make_pack(case)))
    assert torch.allclose(sums, whole, rtol=1e-10)
    assert pack.density == 1.0


@pytest.mark.parametrize("splits_context", [False, True], ids=["gathered", "ring"])
def test_parallel_opposite_votes_give_one_answer(splits_context, tmp_path):
    run_world(2, main, tmp_path, True, splits_context)
