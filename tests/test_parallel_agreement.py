"""Ranks on opposite sides of the guard's budget come to one answer, or end.

Catches: a rank that acts on its own vote, a collective that waits for ever for a rank that has
gone elsewhere, a document that only some ranks train on, an error that one rank alone raises.
"""

import dataclasses
import datetime
import os

import pytest
import torch
from ranks import own_part, run_world
from test_train_batch import Fake
from ttt_case import make_batch, make_case, make_pack

from specforge_trim.data.document_features import BadFeatures
from specforge_trim.drafts.eagle3.batch import PlanSettings
from specforge_trim.drafts.eagle3.step import StepSettings, ttt_step
from specforge_trim.plan.guard import select_documents
from specforge_trim.plan.shard import SequenceSplit, budget_votes
from specforge_trim.ranks.layout import make_layout
from specforge_trim.ranks.world import PeerFailed, PeerLost
from specforge_trim.train.loader import BatchLoader
from specforge_trim.train.sampler import Schedule

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


class Damaged(Fake):
    """Documents of 20 tokens; this rank finds some damaged and some of another length."""

    def __init__(self, count, *, bad, foreign):
        super().__init__([20] * count)
        self.bad, self.foreign = bad, foreign

    def features(self, number):
        if number in self.bad:
            raise BadFeatures("damaged")
        found = super().features(number)
        return dataclasses.replace(found, length=19) if number in self.foreign else found


def loaders(world):
    """Two documents a step, owner rows, K = 3, budget 0.2.

    Of a document's last three tokens m holds 16 and 17: R_0 14 to 17, R_1 three and R_2 two rows.
    Rank 0 sees both, each in one rank's half: 5 rows of a budget of 0.2 * 2 * 20 = 8. Rank 1 sees
    the one that is whole, its own half of it alone: 5 rows of 4. So rank 0 would run two trimmed
    documents, rank 1 one with all rows.
    """
    schedule = Schedule(lengths=(20,) * 8, tokens_per_batch=40, seed=1, epochs=1)
    pairs = [schedule.micro_batch(step, rank=0, index=0) for step in range(4)]
    assert all(len(pair) == 2 for pair in pairs)
    bad = ({pairs[2][0]}, {pairs[1][1], pairs[2][1]})[world.rank]
    documents = Damaged(8, bad=bad, foreign={pairs[3][0]} if world.rank == 0 else set())
    settings = PlanSettings(
        ttt_length=3, trim_loss_positions=True, trim_backbone_rows=True, max_density=0.2,
        sequence=SequenceSplit(world.rank, 2, rows="owner"),
    )  # fmt: skip
    group = make_layout(world, ring=2).sequence
    loader = BatchLoader(documents, schedule, settings, rank=0, num_workers=0, group=group)
    steps = loader.steps(0)
    half = range(10 * world.rank, 10 * world.rank + 10)
    expected = (  # documents, which of them trimmed, this rank's R_0, left out
        (pairs[0], [True, True], [t + 20 * world.rank for t in (14, 15, 16, 17)], 0),
        (pairs[1][:1], [False], list(half), 1),
        ((), [], [], 2),
    )
    for numbers, trimmed, rows, left_out in expected:
        batches = next(steps)
        assert len(batches) == bool(numbers)
        assert [name for b in batches for name in b.doc_ids] == [f"doc{n}" for n in numbers]
        assert [bool(k) for b in batches for k in b.shard.kept] == trimmed
        assert [r for b in batches for r in b.pack.steps[0].rows.tolist()] == rows
        tokens = [1000 * n + t for n in numbers for t in range(20)]
        assert [t for b in batches for t in b.input_ids.tolist()] == tokens
        assert loader.take_skipped() == (left_out if world.rank == 0 else 0)
    own, words = (ValueError, "19 tokens") if world.rank == 0 else (PeerFailed, "another rank")
    with pytest.raises(own, match=words):
        next(steps)


def main(world, folder):
    loaders(world)
    for splits_context in (False, True):
        agreed(world, splits_context)
    as_each_votes(world, folder)


def test_parallel_opposite_votes_need_and_get_one_answer(tmp_path):
    """The loader's batches; gathered and ring with the agreement; then the ring without, which
    hangs until a timeout."""
    run_world(2, main, tmp_path, tmp_path)
    lost = [(tmp_path / f"lost-{rank}").read_text() for rank in range(2)]
    assert lost[0].startswith("rank 0: all_to_all in the sequence group of 2 ranks did not "), lost
    assert lost[1].startswith("rank 1: exchange with a neighbour in the ring group of 2 "), lost
    assert any("imed out" in message for message in lost), lost
