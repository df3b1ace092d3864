"""The planner against a loop over its definition, on random masks.

Catches: rows that are not minimal or not nested, maps that name the wrong row, shards that do not
add up to the whole, and bad arguments that plan something instead of being refused.
"""

import itertools
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specforge_trim import build_trim_pack, dense_pack
from specforge_trim.plan.pack import minimal_rows, select_pack


def definition(mask, num_steps, bounds, owned, chain):
    """Loss rows and R_i of every step, row by row, as ttt defines them; sets of positions."""
    starts = [max(b for b in bounds if b <= t) for t in range(len(mask))]
    loss = []
    for i in range(num_steps):
        emitting = set()
        for t in range(owned):
            read = range(t, t + i + 1)
            if read[-1] >= len(mask) or starts[read[-1]] != starts[t]:
                continue
            if mask[t + i] if chain == "shift" else all(mask[s] for s in read):
                emitting.add(t)
        loss.append(emitting)
    if chain == "run":
        return loss, loss
    supervised = [s for s, flag in enumerate(mask) if flag]
    needed = [
        {s - j for s in supervised for j in range(i, num_steps) if starts[s] <= s - j < owned}
        for i in range(num_steps)
    ]
    return loss, needed


def check_against_definition(mask, num_steps, bounds, owned, chain):
    pack = build_trim_pack(mask, num_steps, cu_seqlens=bounds, chunk_len=owned, chain=chain)
    dense = dense_pack(mask, num_steps, cu_seqlens=bounds, chunk_len=owned, chain=chain)
    loss, needed = definition(mask, num_steps, bounds, owned, chain)
    case = (mask, num_steps, bounds, owned, chain)
    reachable = sorted({t + i for i, emitting in enumerate(loss) for t in emitting})
    assert pack.supervised.tolist() == dense.supervised.tolist() == reachable, case
    previous = [0]
    for i, step in enumerate(pack.steps):
        assert step.is_dead == (not needed[i]), case
        assert step.rows.tolist() == (sorted(needed[i]) or previous[:1]), case
        previous = step.rows.tolist()
        assert dense.steps[i].rows.tolist() == list(range(owned)), case
    for planned in (pack, dense):
        check_maps(planned, loss, case)
    lengths = []
    for start, end in itertools.pairwise(bounds):
        inside = [t for t in needed[0] if start <= t < end]
        lengths.append(max(inside) + 1 - start if inside else 0)
    assert pack.context_len.tolist() == lengths, case
    slots = (num_steps - 1) * owned
    kept = sum(len(rows) for rows in needed[1:])
    assert pack.density == (kept / slots if slots else 0.0), case


def check_maps(pack, loss, case):
    for i, step in enumerate(pack.steps):
        rows = step.rows.tolist()
        assert [rows[p] for p in step.loss_index.tolist()] == step.loss_rows.tolist(), case
        assert step.loss_rows.tolist() == sorted(loss[i]), case
        assert step.num_loss_rows == len(loss[i]), case
        teachers = [pack.supervised.tolist()[p] for p in step.teacher_index.tolist()]
        assert teachers == [t + i for t in sorted(loss[i])], case
        if i == 0:
            assert step.carry_index is None, case
        else:
            before = pack.steps[i - 1].rows.tolist()
            assert [before[p] for p in step.carry_index.tolist()] == rows, case
        assert len(step.diagonal_index) == max(i - 1, 0), case
        for j, index in enumerate(step.diagonal_index, start=1):
            earlier = pack.steps[j].rows.tolist()
            assert [earlier[p] for p in index.tolist()] == rows, case


@st.composite
def layouts(draw):
    """mask, ttt_length, boundaries (empty documents too), owned rows, chain."""
    total = draw(st.integers(1, 24))
    mask = draw(st.lists(st.integers(0, 1), min_size=total, max_size=total))
    inner = draw(st.lists(st.integers(0, total), max_size=4))
    owned = draw(st.one_of(st.just(total), st.integers(1, total)))
    return (
        mask,
        draw(st.integers(1, 8)),
        [0, *sorted(inner), total],
        owned,
        draw(st.sampled_from(["shift", "run"])),
    )


@settings(max_examples=300, deadline=None)
@given(layouts())
def test_plan_equals_its_definition(layout):
    check_against_definition(*layout)


def random_layout(rng):
    total = rng.randint(1, 20)
    share = rng.choice([0.05, 0.2, 0.5, 0.9])
    mask = [int(rng.random() < share) for _ in range(total)]
    inner = sorted(rng.randint(0, total) for _ in range(rng.randint(0, 2)))
    owned = total if rng.random() < 0.6 else rng.randint(1, total)
    return mask, rng.randint(1, 7), [0, *inner, total], owned, rng.choice(["shift", "run"])


@pytest.mark.parametrize("seed", range(10))
def test_a_thousand_random_masks_per_seed(seed):
    rng = random.Random(seed)
    for _ in range(1000):
        check_against_definition(*random_layout(rng))


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_row_sets_are_sorted_unique_and_nested(layout):
    mask, num_steps, bounds, owned, chain = layout
    pack = build_trim_pack(mask, num_steps, cu_seqlens=bounds, chunk_len=owned, chain=chain)
    outer = set(range(owned))
    for step in pack.steps:
        rows = step.rows.tolist()
        assert rows == sorted(set(rows))
        assert set(rows) <= outer
        outer = set(rows)


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_dropping_any_row_loses_a_loss(layout):
    mask, num_steps, bounds, owned, chain = layout
    pack = build_trim_pack(mask, num_steps, cu_seqlens=bounds, chunk_len=owned, chain=chain)
    for i, step in enumerate(pack.steps):
        if step.is_dead:
            continue
        later = {t for after in pack.steps[i:] for t in after.loss_rows.tolist()}
        assert set(step.rows.tolist()) <= later


@settings(max_examples=200, deadline=None)
@given(layouts(), st.integers(1, 9))
def test_shards_with_a_tail_concatenate_to_the_whole(layout, length):
    mask, num_steps, bounds, _, chain = layout
    whole = build_trim_pack(mask, num_steps, cu_seqlens=bounds, chain=chain)
    rows = [[] for _ in range(num_steps)]
    losses = [[] for _ in range(num_steps)]
    for lo in range(0, len(mask), length):
        part = mask[lo : lo + length + num_steps - 1]
        shard = build_trim_pack(
            part,
            num_steps,
            cu_seqlens=[min(max(b - lo, 0), len(part)) for b in bounds],
            chunk_len=min(length, len(mask) - lo),
            chain=chain,
        )
        for i, step in enumerate(shard.steps):
            losses[i] += [lo + t for t in step.loss_rows.tolist()]
            rows[i] += [] if step.is_dead else [lo + t for t in step.rows.tolist()]
    assert losses == [step.loss_rows.tolist() for step in whole.steps]
    assert rows == [[] if step.is_dead else step.rows.tolist() for step in whole.steps]


@settings(max_examples=150, deadline=None)
@given(layouts(), st.data())
def test_mixed_pack_has_trimmed_and_full_documents(layout, data):
    mask, num_steps, bounds, owned, chain = layout
    pack = build_trim_pack(mask, num_steps, cu_seqlens=bounds, chunk_len=owned, chain=chain)
    docs = len(bounds) - 1
    keep = data.draw(st.lists(st.booleans(), min_size=docs, max_size=docs))
    mixed = select_pack(pack, torch.tensor(keep))
    loss, needed = definition(mask, num_steps, bounds, owned, chain)
    previous = [0]
    for i, step in enumerate(mixed.steps):
        want = set(needed[i])
        for stays, (start, end) in zip(keep, itertools.pairwise(bounds), strict=True):
            if not stays:
                want |= set(range(start, min(end, owned)))
        assert step.rows.tolist() == (sorted(want) or previous[:1])
        assert step.is_dead == (not want)
        previous = step.rows.tolist()
    check_maps(mixed, loss, layout)
    for rows, expected in zip(minimal_rows(mixed), needed, strict=True):
        assert rows.tolist() == sorted(expected)


def test_the_caller_keeps_its_mask():
    mask = torch.tensor([0, 1, 1, 0, 1], dtype=torch.bool)
    before = mask.clone()
    build_trim_pack(mask, 3)
    dense_pack(mask, 3)
    assert torch.equal(mask, before)


def test_pack_moves_as_a_whole():
    pack = build_trim_pack([0, 0, 1, 0, 1], 3).to("meta")
    tensors = [pack.supervised, pack.context_len, pack.cu_seqlens, pack.steps[1].carry_index]
    tensors += [pack.steps[2].rows, pack.steps[2].diagonal_index[0], pack.steps[0].loss_index]
    assert all(tensor.is_meta for tensor in tensors)
    assert pack.steps[0].carry_index is None


@pytest.mark.parametrize("build", [build_trim_pack, dense_pack])
@pytest.mark.parametrize(
    "mask, options, message",
    [
        ([], {}, "m is empty"),
        ([[0, 1]], {}, r"m has shape \(1, 2\)"),
        ([0.0, 1.0], {}, "m has dtype torch.float32"),
        ([0, 2], {}, "m holds the value 2"),
        ([0, -100], {}, "m holds the value -100"),
        (["a"], {}, "m: expected a 1-D mask"),
        (None, {}, "m: expected a 1-D mask"),
        ([0, 1], {"ttt_length": 0}, "ttt_length=0: expected an integer >= 1"),
        ([0, 1], {"ttt_length": 2.0}, "ttt_length=2.0"),
        ([0, 1], {"ttt_length": True}, "ttt_length=True"),
        ([0, 1], {"chunk_len": 0}, "chunk_len=0: expected an integer from 1 to 2"),
        ([0, 1], {"chunk_len": 3}, "chunk_len=3: expected an integer from 1 to 2"),
        ([0, 1], {"chain": "walk"}, "chain='walk': expected one of shift, run"),
        ([0, 1], {"cu_seqlens": [0, 1]}, "runs from 0 to 1: expected 0 to 2"),
        ([0, 1], {"cu_seqlens": [1, 2]}, "runs from 1 to 2"),
        ([0, 1], {"cu_seqlens": [0]}, "cu_seqlens has shape"),
        ([0, 1], {"cu_seqlens": [0, 2, 1, 2]}, "cu_seqlens decreases"),
        ([0, 1], {"cu_seqlens": [0.0, 2.0]}, "cu_seqlens has dtype"),
        ([0, 1], {"cu_seqlens": "ab"}, "cu_seqlens: expected"),
    ],
)
def test_bad_arguments_are_named(build, mask, options, message):
    with pytest.raises(ValueError, match=message):
        build(mask, **{"ttt_length": 3, **options})
