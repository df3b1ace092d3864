"""Row chunks and attention segments against the keys every row must see.

Catches: a key seen twice or never at a seam between prefix and local keys, groups that span
documents or chunks, and chunk-local maps that are off by a chunk's offset.
"""

import random
from collections import Counter

import pytest
import torch

from specforge_trim import build_trim_pack, dense_pack
from specforge_trim.plan.segments import as_slice, plan_chunks

BIG = 10**9
THRESHOLDS = [
    {"group_gap": 0},
    {},
    {"group_gap": BIG, "group_rows": BIG, "max_group": BIG},
    {"group_gap": 3, "max_group": 5},
    {"group_gap": BIG, "max_group": 1},
    {"group_gap": BIG, "group_rows": 3},
]


def random_packs(seed, count=25):
    rng = random.Random(seed)
    for _ in range(count):
        total = rng.randint(1, 70)
        share = rng.choice([0.02, 0.1, 0.4, 0.9])
        mask = [int(rng.random() < share) for _ in range(total)]
        if rng.random() < 0.3:
            start = rng.randrange(total)
            mask = [int(start <= t < start + total // 2) for t in range(total)]
        inner = sorted(rng.randint(0, total) for _ in range(rng.randint(0, 3)))
        yield rng.choice([build_trim_pack, build_trim_pack, dense_pack])(
            mask,
            rng.randint(1, 6),
            cu_seqlens=[0, *inner, total],
            chunk_len=rng.choice([None, rng.randint(1, total)]),
            chain=rng.choice(["shift", "run"]),
        )


def seen_keys(chunk_step):
    """Per query of a chunk step, how often each absolute context position is attended."""
    seen = [Counter() for _ in chunk_step.rows]
    for segment in chunk_step.segments:
        queries = range(segment.q0, segment.q1)
        mask = segment.mask
        if mask is None:
            assert segment.k_hi - segment.k_mid == len(queries)
            assert chunk_step.rows[segment.q0 : segment.q1].tolist() == list(
                range(segment.k_mid, segment.k_hi)
            )
        else:
            assert mask.dtype == torch.bool
            assert mask.shape == (len(queries), segment.k_hi - segment.k_mid)
        for n, query in enumerate(queries):
            seen[query].update(range(segment.k_lo, segment.k_mid))
            for k in range(segment.k_hi - segment.k_mid):
                if (k <= n) if mask is None else bool(mask[n, k]):
                    seen[query][segment.k_mid + k] += 1
    return seen


@pytest.mark.parametrize("options", THRESHOLDS)
@pytest.mark.parametrize("chunk_rows", [1, 7, BIG])
def test_every_row_sees_its_document_up_to_itself_once(options, chunk_rows):
    for pack in random_packs(seed=chunk_rows % 100):
        bounds = pack.cu_seqlens.tolist()
        for chunk in plan_chunks(pack, chunk_rows=chunk_rows, **options):
            for step in chunk.steps:
                for row, keys in zip(step.rows.tolist(), seen_keys(step), strict=True):
                    start = max(b for b in bounds if b <= row)
                    assert keys == Counter(range(start, row + 1))


@pytest.mark.parametrize("options", THRESHOLDS)
def test_segments_tile_the_rows_and_respect_the_cap(options):
    for pack in random_packs(seed=1):
        for chunk in plan_chunks(pack, chunk_rows=11, **options):
            for step in chunk.steps:
                edges = [0]
                for segment in step.segments:
                    assert segment.q0 == edges[-1] < segment.q1
                    assert segment.k_lo <= segment.k_mid < segment.k_hi
                    edges.append(segment.q1)
                    if segment.mask is not None:
                        assert segment.k_hi - segment.k_mid <= options.get("max_group", 2048)
                assert edges[-1] == step.rows.numel()


@pytest.mark.parametrize("chunk_rows", [1, 2, 7, BIG])
def test_local_maps_are_the_global_ones(chunk_rows):
    for pack in random_packs(seed=2, count=60):
        chunks = plan_chunks(pack, chunk_rows=chunk_rows)
        for chunk in chunks:
            check_local_maps(pack, chunk)
        for i, step in enumerate(pack.steps):
            parts = [chunk.steps[i] for chunk in chunks if len(chunk.steps) > i]
            joined = [row for part in parts for row in part.rows.tolist()]
            assert joined == ([] if step.is_dead else step.rows.tolist())
            slices = [part.loss_slice for part in parts]
            assert sum(b - a for a, b in slices) == step.num_loss_rows


def check_local_maps(pack, chunk):
    a, b = chunk.teacher_slice
    teachers = pack.supervised[a:b]
    for i, part in enumerate(chunk.steps):
        step = pack.steps[i]
        assert part.rows.numel() > 0
        assert chunk.lo <= int(part.rows.min()) and int(part.rows.max()) < chunk.hi
        assert torch.equal(part.rows, step.rows[slice(*part.row_slice)])
        assert torch.equal(part.rows[part.loss_index], step.loss_rows[slice(*part.loss_slice)])
        assert torch.equal(teachers[part.teacher_index], part.rows[part.loss_index] + i)
        if i == 0:
            assert part.carry_index is None
        else:
            assert torch.equal(chunk.steps[i - 1].rows[part.carry_index], part.rows)
        assert len(part.diagonal_index) == max(i - 1, 0)
        for j, index in enumerate(part.diagonal_index, start=1):
            assert torch.equal(chunk.steps[j].rows[index], part.rows)


def test_chunks_are_even_and_no_larger_than_asked():
    pack = dense_pack([1] * 25, 3)
    chunks = plan_chunks(pack, chunk_rows=10)
    assert [chunk.steps[0].rows.numel() for chunk in chunks] == [8, 8, 9]
    assert [(chunk.lo, chunk.hi) for chunk in chunks] == [(0, 8), (8, 16), (16, 25)]
    assert [chunk.teacher_slice for chunk in chunks] == [(0, 10), (8, 18), (16, 25)]


def test_teachers_of_a_chunk_end_with_its_last_document():
    pack = build_trim_pack([0, 1, 1, 1, 1, 1], 4, cu_seqlens=[0, 3, 6])
    chunks = plan_chunks(pack, chunk_rows=3)
    assert [(chunk.lo, chunk.hi) for chunk in chunks] == [(0, 3), (3, 6)]
    assert [chunk.teacher_slice for chunk in chunks] == [(0, 2), (2, 5)]


def test_one_run_is_one_causal_segment():
    mask = [0] * 100
    mask[60:90] = [1] * 30
    (chunk,) = plan_chunks(build_trim_pack(mask, 4))
    (segment,) = chunk.steps[1].segments  # rows 57 to 88
    assert (segment.q0, segment.q1) == (0, 32)
    assert (segment.k_lo, segment.k_mid, segment.k_hi) == (0, 57, 89)
    assert segment.mask is None


def test_short_runs_share_a_masked_group_and_long_runs_do_not():
    mask = [0] * 200
    for point in (10, 14, 64, 100):
        mask[point] = 1
    mask[20:60] = [1] * 40
    (chunk,) = plan_chunks(build_trim_pack(mask, 2), group_gap=8, max_group=50)
    first = [(s.q0, s.q1, s.k_lo, s.k_mid, s.k_hi) for s in chunk.steps[0].segments]
    # rows 9 10 | 13 14 in one group, 19..59 a run, 63 64 | 99 100 in one group
    assert first == [(0, 4, 0, 9, 15), (4, 45, 0, 19, 60), (45, 49, 0, 63, 101)]
    assert [s.mask is None for s in chunk.steps[0].segments] == [False, True, False]
    assert chunk.steps[0].segments[0].mask.int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 1, 1],
    ]


def test_isolated_points_are_batched():
    mask = [int(t % 50 == 49) for t in range(5000)]
    (chunk,) = plan_chunks(build_trim_pack(mask, 1), max_group=256)
    # Six points span 251 positions, a seventh would make 301.
    assert len(chunk.steps[0].segments) == 17
    (chunk,) = plan_chunks(build_trim_pack(mask, 1), group_gap=0)
    assert len(chunk.steps[0].segments) == 100
    # Ten points fill a group; the last runs of several rows may exceed it by their own length.
    (chunk,) = plan_chunks(build_trim_pack(mask, 1), group_rows=10)
    assert [s.q1 - s.q0 for s in chunk.steps[0].segments] == [10] * 10
    (chunk,) = plan_chunks(build_trim_pack(mask, 3), group_rows=10)
    assert {s.q1 - s.q0 for s in chunk.steps[0].segments} == {12}


def test_a_group_ends_with_its_document():
    (chunk,) = plan_chunks(build_trim_pack([1, 0, 1, 1, 0, 1], 1, cu_seqlens=[0, 3, 6]))
    first = [(s.q0, s.q1, s.k_lo, s.k_mid, s.k_hi) for s in chunk.steps[0].segments]
    assert first == [(0, 2, 0, 0, 3), (2, 4, 3, 3, 6)]


def test_dead_steps_are_dropped():
    assert plan_chunks(build_trim_pack([0, 0, 0], 3)) == ()
    assert plan_chunks(build_trim_pack([0, 0, 0, 0, 1], 3, chunk_len=2)) == ()
    (chunk,) = plan_chunks(build_trim_pack([1, 0, 0], 3))
    assert len(chunk.steps) == 1


def test_a_chunk_stops_where_its_rows_end():
    chunks = plan_chunks(build_trim_pack([1, 0, 0, 0, 0, 0, 1, 0], 3), chunk_rows=1)
    assert [len(chunk.steps) for chunk in chunks] == [1, 3, 2, 1]


def test_index_ranges_become_slices():
    assert as_slice(torch.tensor([3, 4, 5])) == slice(3, 6)
    assert as_slice(torch.tensor([7])) == slice(7, 8)
    assert as_slice(torch.tensor([3, 5])) is None
    assert as_slice(torch.zeros(0, dtype=torch.int64)) == slice(0, 0)


def test_chunk_moves_as_a_whole():
    mask = [0, 1, 0, 1, 0, 0, 1]
    (chunk,) = plan_chunks(build_trim_pack(mask, 3))
    (moved,) = (chunk.to("meta"),)
    last = moved.steps[2]
    tensors = [last.rows, last.carry_index, last.diagonal_index[0], last.loss_index]
    assert all(tensor.is_meta for tensor in [*tensors, last.teacher_index])
    assert moved.steps[0].segments[0].q1 == chunk.steps[0].segments[0].q1
    assert last.segments[0].mask is None or last.segments[0].mask.is_meta


@pytest.mark.parametrize(
    "options", [{"chunk_rows": 0}, {"group_gap": -1}, {"group_rows": 0}, {"max_group": 0}]
)
def test_bad_sizes_are_named(options):
    pack = build_trim_pack([0, 1], 2)
    (name,) = options
    with pytest.raises(ValueError, match=name):
        plan_chunks(pack, **options)
