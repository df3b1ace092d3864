"""Chunk sizes from a memory budget. Catches: a budget in the wrong unit, a term left out."""

import pytest

from specforge_trim.plan.cost import DraftDims
from specforge_trim.plan.memory import chunk_rows_for, row_bytes

# D 8, N H 4, Nkv H 2, I 16, Vd 10
DIMS = DraftDims(
    hidden=8, heads=2, kv_heads=1, head_dim=2, intermediate=16, draft_vocab=10, aux_width=24
)


def test_row_bytes_by_hand():
    # kept: 10*8 + 2*4 + 2*2 + 4*16 = 156; working: 6*8 + 4*16 = 112; loss end: 4*4*10 = 160
    assert row_bytes(DIMS, 1, itemsize=4) == 4 * (156 + 112) + 160
    assert row_bytes(DIMS, 7, itemsize=2) == 2 * (7 * 156 + 112) + 160


def test_rows_follow_the_budget():
    per_row = row_bytes(DIMS, 7, itemsize=4)
    assert chunk_rows_for(DIMS, 7, itemsize=4, budget=100 * per_row) == 100
    assert chunk_rows_for(DIMS, 7, itemsize=4, budget=101 * per_row - 1) == 100
    assert chunk_rows_for(DIMS, 7, itemsize=4, budget=10**12) == 8192


def test_too_small_a_budget_names_the_remedy():
    with pytest.raises(ValueError, match="row_memory_mb = 0.*raise row_memory_mb"):
        chunk_rows_for(DIMS, 7, itemsize=4, budget=1000)
