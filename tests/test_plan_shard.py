"""Who holds which tokens and computes which rows of a shared sequence.

Catches: rows lost or computed twice at a rank boundary, rows that are sent but not expected,
windows that lose keys or show them twice, dealt rows that leave ranks idle.
"""

import pytest
import torch

from specforge_trim.plan.cost import DraftDims, row_costs
from specforge_trim.plan.pack import build_trim_pack, dense_pack, restrict_pack
from specforge_trim.plan.segments import plan_chunks
from specforge_trim.plan.shard import (
    SequenceSplit,
    budget_votes,
    expected_answer,
    row_edges,
    shard_chunks,
    shard_pack,
    window_segments,
)

DIMS = DraftDims(
    hidden=512, heads=4, kv_heads=1, head_dim=128, intermediate=1792, draft_vocab=4000,
    aux_width=1536,
)  # fmt: skip


def tail_pack(tokens=4096, supervised=330, steps=7):
    mask = torch.zeros(tokens, dtype=torch.bool)
    mask[tokens - 1 - supervised : tokens - 1] = True
    return build_trim_pack(mask, steps)


@pytest.mark.parametrize("size", [2, 4])
def test_plan_dealt_rows_cost_the_same_on_every_rank(size):
    """Supervision on the last rank's tokens only: dealt within 1.1 of the mean, owner `size`."""
    pack = tail_pack()

    def largest(rows):
        edges = row_edges(pack, SequenceSplit(0, size, rows=rows), DIMS)
        parts = [
            row_costs(restrict_pack(pack, edges[r], edges[r + 1]), DIMS).sum() for r in range(size)
        ]
        return float(max(parts) / (sum(parts) / size))

    assert largest("dealt") <= 1.1
    assert largest("owner") == pytest.approx(size)


def test_plan_row_costs_by_hand():
    """K = 1, one row at position 2 of three tokens: q, o, MLP, head, and three keys."""
    dims = DraftDims(
        hidden=2, heads=1, kv_heads=1, head_dim=2, intermediate=3, draft_vocab=5, aux_width=6
    )
    pack = build_trim_pack([0, 0, 1], 1)
    forward = 2 * 4 * 2 + 2 * 2 * 2 + 6 * 2 * 3 + 2 * 2 * 5 + 4 * 2 * 3
    assert row_costs(pack, dims).tolist() == [3 * forward]
    assert row_costs(build_trim_pack([0, 0, 0], 1), dims).tolist() == [0.0]


@pytest.mark.parametrize("rows", ["dealt", "owner"])
def test_plan_shares_cover_every_row_once(rows):
    cu = [0, 13, 13, 40]
    mask = torch.zeros(40, dtype=torch.bool)
    mask[[3, 4, 11, 20, 21, 38]] = True
    pack = build_trim_pack(mask, 3, cu_seqlens=cu)
    size = 3
    splits = [SequenceSplit(r, size, rows=rows) for r in range(size)]
    edges = row_edges(pack, splits[0], None)
    shards = [shard_pack(pack, split, edges) for split in splits]
    assert torch.cat([s.token_rows for s in shards]).tolist() == pack.steps[0].rows.tolist()
    for i, step in enumerate(pack.steps):
        parts = [
            restrict_pack(pack, a, b).steps[i] for a, b in zip(edges, edges[1:], strict=False)
        ]
        alive = [p.rows for p in parts if not p.is_dead]
        assert torch.cat(alive).tolist() == step.rows.tolist()
    for r in range(size):
        for other in range(size):
            assert shards[r].send[other] == shards[other].receive[r]
        assert sum(shards[r].send) == shards[r].token_rows.numel()
    if rows == "owner":
        assert all(s.send[r] == s.token_rows.numel() for r, s in enumerate(shards))


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize("gap", [0, 32])
def test_plan_windows_show_every_key_once(dense, gap):
    """Each row sees each key of its document up to itself in exactly one window."""
    mask = torch.zeros(50, dtype=torch.bool)
    mask[[4, 5, 9, 21, 22, 23, 24, 25, 26, 40, 44]] = True
    build = dense_pack if dense else build_trim_pack
    pack = build(mask, 3, cu_seqlens=[0, 17, 50])
    for chunk in plan_chunks(pack, chunk_rows=9, group_gap=gap):
        for step in chunk.steps:
            seen = torch.zeros(step.rows.numel(), 50, dtype=torch.int64)
            for lo in range(0, 50, 7):
                for whole in step.segments:
                    for s in window_segments(whole, lo, lo + 7):
                        assert lo <= s.k_lo <= s.k_mid <= s.k_hi <= lo + 7
                        seen[s.q0 : s.q1, s.k_lo : s.k_mid] += 1
                        mask_ = s.mask
                        if mask_ is None and s.k_hi > s.k_mid:
                            assert s.q1 - s.q0 == s.k_hi - s.k_mid, "a causal block is square"
                            mask_ = torch.ones(s.q1 - s.q0, s.q1 - s.q0).tril()
                        if mask_ is not None:
                            assert bool(mask_.any(1).all()), "a row without a key"
                            seen[s.q0 : s.q1, s.k_mid : s.k_hi] += mask_.long()
            keys = torch.arange(50)
            start = torch.where(step.rows < 17, 0, 17)
            wanted = (keys >= start[:, None]) & (keys <= step.rows[:, None])
            assert torch.equal(seen, wanted.long())


def test_plan_collective_homes_run_equally_many_chunks_and_steps():
    """Rank 1 has no rows under `owner`; it runs as many chunks and steps, all of them empty."""
    mask = torch.zeros(24, dtype=torch.bool)
    mask[:6] = True
    pack = build_trim_pack(mask, 3)
    chunks = []
    for rank in range(2):
        split = SequenceSplit(rank, 2, rows="owner", gathered=False)
        edges = [0, 12, 24]
        chunks.append(shard_chunks(pack, split, edges, chunk_rows=2))
    assert [len(c.steps) for c in chunks[0]] == [3, 3, 3]
    assert [len(c.steps) for c in chunks[1]] == [3, 3, 3]
    assert sum(step.rows.numel() for c in chunks[1] for step in c.steps) == 0
    assert [w for c in chunks[1] for step in c.steps for w in step.windows] == [(), ()] * 9


def test_plan_votes_of_owner_rows_differ_and_their_minimum_is_the_answer():
    """Rank 0's half of the document is sparse, rank 1's is full: tau 0.5 splits them."""
    mask = torch.zeros(40, dtype=torch.bool)
    mask[5] = True
    mask[20:39] = True
    pack = build_trim_pack(mask, 3)
    owner = [SequenceSplit(r, 2, rows="owner") for r in range(2)]
    assert [budget_votes(pack, s, 0.5).tolist() for s in owner] == [[True], [False]]
    assert expected_answer(pack, owner[0], 0.5).tolist() == [False]
    assert expected_answer(pack, SequenceSplit(0, 2), 0.6).tolist() == [True]  # 22 + 20 of 80


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((2, 2), "rank=2"), ((0, 0), "size=0"), ((0, 3, "dealt", False, 2), "does not divide")],
)
def test_plan_impossible_splits_are_refused(arguments, words):
    with pytest.raises(ValueError, match=words):
        SequenceSplit(*arguments)
