"""Bugs caught: ranks with more batches or far more tokens than others; documents lost or doubled;
weights of a source that are not kept; an order that a resumed run does not find again.
"""

import random
from collections import Counter

import pytest

from specforge_trim.train.sampler import Schedule, pack_steps


def schedule(lengths, **kwargs):
    settings = {"tokens_per_batch": 4096, "seed": 1, "epochs": 1, **kwargs}
    return Schedule(lengths=tuple(lengths), **settings)


def batches_of(plan, rank, epoch=None):
    return [
        plan.micro_batch(step, rank=rank, index=index)
        for step in range(plan.total_steps)
        for index in range(plan.accumulate)
        if epoch is None or plan.epoch_of(step) == epoch
    ]


@pytest.mark.parametrize(("low", "high"), [(20, 800), (20, 4096), (1500, 2500), (100, 9000)])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_1000_random_lengths_on_4_ranks(low, high, accumulate):
    """Equal batch counts, tokens within 3 % of each other, every step about level."""
    rng = random.Random(low + high)
    lengths = [rng.randint(low, high) for _ in range(1000)]
    plan = schedule(lengths, world_size=4, accumulate=accumulate)
    ranks = [batches_of(plan, rank) for rank in range(4)]
    assert sorted(n for batches in ranks for batch in batches for n in batch) == list(range(1000))
    idle = sum(not batch for batches in ranks for batch in batches)
    assert idle == 0 or high > 4096 and idle < 4 * accumulate, "ranks without documents"
    for batch in (b for batches in ranks for b in batches):
        assert len(batch) == 1 or sum(lengths[n] for n in batch) <= 4096
    tokens = [sum(lengths[n] for batch in batches for n in batch) for batches in ranks]
    assert max(tokens) / min(tokens) < 1.03, tokens


def test_a_step_is_level_when_documents_are_short():
    rng = random.Random(0)
    lengths = [rng.randint(10, 400) for _ in range(2000)]
    for step in range(schedule(lengths, world_size=4).total_steps):
        plan = schedule(lengths, world_size=4)
        sums = [sum(lengths[n] for n in plan.micro_batch(step, rank=r, index=0)) for r in range(4)]
        assert max(sums) - min(sums) <= 60, (step, sums)


def test_one_batch_a_step_takes_documents_in_their_order():
    """Written out: 6 + 5 > 10 closes the first batch, 30 is alone, 2 + 8 fills one exactly."""
    batches = pack_steps([3, 0, 4, 1, 2, 5], [5, 2, 8, 6, 30, 1], tokens_per_batch=10, per_step=1)
    assert batches == [[3], [0], [4], [1, 2], [5]]


def test_two_batches_a_step_longest_first():
    """Room for 20: 7, 6, 4, 3 fit exactly. 7 | 6, then 4 joins 6, 3 joins 7."""
    batches = pack_steps([0, 1, 2, 3], [3, 7, 4, 6], tokens_per_batch=10, per_step=2)
    assert batches == [[0, 1], [2, 3]]  # 10 and 10


def test_the_rest_of_an_epoch_is_shared_with_the_step_before():
    """As above plus a 9, which alone would leave a rank idle: 9 | 7 | 6 | 4 + 3 over two steps.

    9 and 6 are one step, 7 and 7 the other; the sums of both places are 16 and 13.
    """
    batches = pack_steps([0, 1, 2, 3, 4], [3, 7, 4, 6, 9], tokens_per_batch=10, per_step=2)
    assert batches == [[4], [3], [0, 2], [1]]


def test_the_place_in_an_epoch_is_the_step_number():
    """A run that stops at step s and one that never stopped read the same from s on."""
    lengths = [3 + i % 50 for i in range(300)]
    whole = schedule(lengths, tokens_per_batch=128, epochs=3, world_size=2)
    again = schedule(lengths, tokens_per_batch=128, epochs=3, world_size=2)
    shorter = schedule(lengths, tokens_per_batch=128, epochs=3, world_size=2, max_steps=70)
    middle = whole.total_steps // 2
    assert whole.epoch_of(middle) == 1 and 0 < middle < whole.total_steps
    for rank in (0, 1):
        assert batches_of(whole, rank)[middle:] == batches_of(again, rank)[middle:]
        assert batches_of(whole, rank)[:70] == batches_of(shorter, rank)


def test_weights_of_sources():
    """100 documents once, 40 at 2.5, 60 at 0.25: an epoch holds 100 + 100 + 15."""
    weights = [1.0] * 100 + [2.5] * 40 + [0.25] * 60
    plan = schedule([10] * 200, tokens_per_batch=50, epochs=4, weights=tuple(weights))
    totals = Counter()
    for epoch in range(4):
        count = Counter(n for batch in batches_of(plan, 0, epoch) for n in batch)
        assert all(count[n] == 1 for n in range(100))
        assert sorted(count[n] for n in range(100, 140)) == [2] * 20 + [3] * 20
        assert sorted(count[n] for n in range(140, 200)) == [0] * 45 + [1] * 15
        totals += count
    # Four epochs at a quarter: every document has had exactly one turn.
    assert all(totals[n] == 1 for n in range(140, 200))
    assert all(totals[n] == 10 for n in range(100, 140))


def test_weights_of_one_change_nothing():
    lengths = [3 + i % 50 for i in range(300)]
    assert batches_of(schedule(lengths), 0) == batches_of(
        schedule(lengths, weights=(1.0,) * 300), 0
    )
