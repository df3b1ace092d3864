"""Ranks on opposite sides of the guard's budget come to one answer, or end.

Catches: a rank that acts on its own vote, a collective that waits for ever for a rank that has
gone elsewhere.
"""

import dataclasses
import datetime
import os

import torch
from ranks import own_part, run_world
from ttt_case import make_batch, make_case, make_pack

from specforge_trim.distributed import PeerLost
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


def opposite(world, splits_context):
    """The case, this rank's layout, split and trimmed pack, and its vote."""
    case = make_case([MASK], seed=2)
    layout = make_layout(world, ring=2, splits_context=splits_context)
    split = SequenceSplit(world.rank, 2, rows="owner", gathered=not splits_context)
    trimmed = make_pack(case)
    votes = budget_votes(trimmed, split, TAU)
    assert votes.tolist() == [world.rank == 0]
    return case, layout, split, trimmed, votes


def agreed(world, splits_context):
    case, layout, split, trimmed, votes = opposite(world, splits_context)
    votes = layout.sequence.agree_min(votes.int()).bool()
    pack = select_documents(trimmed, votes, TAU)
    sums = world.sum(step(case, own_part(case, pack, split, chunk_rows=6), layout))
    whole = step(case, make_batch(case, make_pack(case)))
    assert torch.allclose(sums, whole, rtol=1e-10)
    assert pack.density == 1.0


def as_each_votes(world, folder):
    """Ring: rank 0 is through after three chunks and goes on to an all-to-all, rank 1 into the
    exchange of a fourth. Neither can be answered."""
    world = dataclasses.replace(world, timeout=datetime.timedelta(seconds=1.5))
    case, layout, split, trimmed, votes = opposite(world, True)
    batch = own_part(case, select_documents(trimmed, votes, TAU), split, chunk_rows=6)
    try:
        step(case, batch, layout)
    except PeerLost as error:
        (folder / f"lost-{world.rank}").write_text(str(error))
        os._exit(0)  # no barrier at the end: the ranks are not where they would meet
    raise AssertionError("went on")


def main(world, folder):
    for splits_context in (False, True):
        agreed(world, splits_context)
    as_each_votes(world, folder)


def test_parallel_opposite_votes_need_and_get_one_answer(tmp_path):
    """Gathered and ring with the agreement; then the ring without, which hangs until a timeout."""
    run_world(2, main, tmp_path, tmp_path)
    lost = [(tmp_path / f"lost-{rank}").read_text() for rank in range(2)]
    assert lost[0].startswith("rank 0: all_to_all in the sequence group of 2 ranks did not "), lost
    assert lost[1].startswith("rank 1: exchange with a neighbour in the ring group of 2 "), lost
    assert any("imed out" in message for message in lost), lost
