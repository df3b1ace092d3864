"""The FLOP model against the published table and a row-by-row sum.

Catches: a stage left out or counted for the wrong rows, and a kept share that inspection tools
would report wrongly.
"""

import random

import pytest
import torch

from specforge_trim import build_trim_pack, dense_pack
from specforge_trim.plan.cost import STAGES, DraftDims, pack_cost

LLAMA_8B = DraftDims(
    hidden=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    intermediate=14336,
    draft_vocab=32000,
    aux_width=3 * 4096,
)
TINY = {
    "hidden": 10,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 6,
    "intermediate": 14,
    "draft_vocab": 17,
    "aux_width": 21,
}


def blocks(width):
    mask = torch.zeros(8192, dtype=torch.bool)
    for start in range(0, 8192, 512):
        mask[start : start + width] = True
    mask[-1] = False
    return mask


@pytest.mark.parametrize(
    "width, floor, step_0_full",
    [(10, 0.06, 0.19), (41, 0.14, 0.25), (128, 0.35, 0.44), (205, 0.51, 0.57), (512, 1.0, 1.0)],
)
def test_table_of_llama_8b_sizes(width, floor, step_0_full):
    pack = build_trim_pack(blocks(width), 7)
    cost = pack_cost(pack, LLAMA_8B)
    assert cost.kept == cost.floor
    assert cost.fraction == pytest.approx(floor, abs=0.006)
    first_step = sum(
        row_flops(LLAMA_8B, position, 0) - row_flops(LLAMA_8B, position, 0, kv_only=True)
        for position in range(8192)
        if position not in set(pack.steps[0].rows.tolist())
    )
    context = sum(
        row_flops(LLAMA_8B, position, 0, kv_only=True)
        for position in range(int(pack.context_len[0]), 8192)
    )
    assert (cost.kept + first_step + context) / cost.full == pytest.approx(step_0_full, abs=0.006)


def row_flops(dims, position, step, *, kv_only=False):
    """Forward and backward of one row of a one-layer draft, without its head."""
    d, n, h, kv = dims.hidden, dims.heads, dims.head_dim, dims.kv_heads
    total = 3 * (2 * 2 * (2 * d) * kv * h)
    if step == 0:
        total += 2 * (2 * dims.aux_width * d)
    if not kv_only:
        total += 3 * (2 * (2 * d) * n * h + 2 * n * h * d + 6 * d * dims.intermediate)
        total += 3 * 4 * n * h * (position + 1 + step)
    return total


def by_rows(mask, num_steps, bounds, dims, *, full):
    """The same sum, one row of one step at a time, from the definition of the row sets."""
    total = 0
    head = 3 * 2 * dims.hidden * dims.draft_vocab
    for start, end in zip(bounds[:-1], bounds[1:], strict=True):
        reach = {
            i: {s - j for s in range(start, end) if mask[s] for j in range(i, num_steps)}
            for i in range(num_steps)
        }
        for i in range(num_steps):
            for t in range(start, end):
                if t + i < end and mask[t + i]:
                    total += head
                if full or t in reach[i]:
                    total += row_flops(dims, t - start, i)
                elif i == 0 and any(r >= t for r in reach[0]):
                    total += row_flops(dims, t - start, i, kv_only=True)
    return total


@pytest.mark.parametrize("seed", range(8))
def test_equals_a_sum_over_rows(seed):
    rng = random.Random(seed)
    mask = [int(rng.random() < 0.15) for _ in range(40)]
    bounds = [0, *sorted(rng.randint(0, 40) for _ in range(2)), 40]
    num_steps = rng.randint(1, 5)
    dims = DraftDims(**TINY)
    trimmed = pack_cost(build_trim_pack(mask, num_steps, cu_seqlens=bounds), dims)
    dense = pack_cost(dense_pack(mask, num_steps, cu_seqlens=bounds), dims)
    least = by_rows(mask, num_steps, bounds, dims, full=False)
    most = by_rows(mask, num_steps, bounds, dims, full=True)
    assert (trimmed.kept, trimmed.floor, trimmed.full) == (least, least, most)
    assert (dense.kept, dense.floor, dense.full) == (most, least, most)
    heads = 3 * 2 * dims.hidden * dims.draft_vocab
    assert trimmed.full_untrimmed == most + heads * (
        40 * num_steps
        - sum(
            mask[t + i]
            for start, end in zip(bounds[:-1], bounds[1:], strict=True)
            for i in range(num_steps)
            for t in range(start, end - i)
        )
    )


def test_stages_add_up_and_costs_add():
    dims = DraftDims(**TINY)
    one = pack_cost(build_trim_pack([0, 0, 1, 0, 1, 0], 3), dims)
    two = pack_cost(build_trim_pack([0, 1, 1, 1], 3), dims)
    both = one + two
    for name in ("kept", "full", "floor"):
        assert sum(getattr(one.by_stage[s], name) for s in STAGES) == getattr(one, name)
        assert getattr(both, name) == getattr(one, name) + getattr(two, name)
    assert both.full_untrimmed == one.full_untrimmed + two.full_untrimmed
    assert both.by_stage["head"].kept == one.by_stage["head"].kept + two.by_stage["head"].kept


def test_no_supervision_costs_nothing():
    cost = pack_cost(build_trim_pack([0] * 5, 3), DraftDims(**TINY))
    assert cost.kept == cost.floor == 0 < cost.full
    assert cost.fraction == 0.0


def test_second_layer_by_hand():
    # m = 1 at 1: rows {0, 1} and {0}, context {0, 1}. D 10, N*H 24, Nkv*H 12, I 14.
    pack = build_trim_pack([0, 1, 0], 2)
    cost = pack_cost(pack, DraftDims(**TINY, layers=2, fc_norm=True))
    mlp_and_out = 2 * 24 * 10 + 6 * 10 * 14
    lower = 2 * 20 * 24 + mlp_and_out
    upper = 2 * 10 * 24 + mlp_and_out
    kv = 4 * 20 * 12 + 4 * 10 * 12
    assert cost.by_stage["context"].kept == 2 * 3 * (2 * 21 * 10 + kv)
    assert cost.by_stage["rows"].kept == 3 * (3 * lower + 3 * upper + kv)
    assert cost.by_stage["attention"].kept == 3 * 4 * 24 * 2 * ((1 + 2) + 2)
    assert cost.by_stage["head"].kept == 2 * 3 * 2 * 10 * 17


def test_lower_layers_run_over_the_whole_context_at_step_0():
    # m = 1 at 2, one step: row {2}, context {0, 1, 2}.
    cost = pack_cost(build_trim_pack([0, 0, 1], 1), DraftDims(**TINY, layers=2))
    mlp_and_out = 2 * 24 * 10 + 6 * 10 * 14
    lower, upper = 2 * 20 * 24 + mlp_and_out, 2 * 10 * 24 + mlp_and_out
    assert cost.by_stage["rows"].kept == 3 * (3 * lower + upper)
    assert cost.by_stage["attention"].kept == 3 * 4 * 24 * ((1 + 2 + 3) + 3)


def test_bad_sizes_are_named():
    with pytest.raises(ValueError, match="kv_heads=0"):
        DraftDims(**{**TINY, "kv_heads": 0})
