"""Row sets and index maps of the planner against tables written by hand.

Catches: forwarding the supervised rows themselves at every step, an off-by-one in the shift, rows
that cross a document, a live step without loss rows taken for a dead one, and padding rows that
leak into density or context length.
"""

import pytest
import torch

from specforge_trim import build_trim_pack, dense_pack


def mask_at(length, *positions):
    mask = torch.zeros(length, dtype=torch.bool)
    mask[list(positions)] = True
    return mask


def rows(pack):
    return [step.rows.tolist() for step in pack.steps]


def loss_rows(pack):
    return [step.loss_rows.tolist() for step in pack.steps]


def loss_index(pack):
    return [step.loss_index.tolist() for step in pack.steps]


def teacher_index(pack):
    return [step.teacher_index.tolist() for step in pack.steps]


def carry(pack):
    return [None if s.carry_index is None else s.carry_index.tolist() for s in pack.steps]


def diagonal(pack):
    return [[index.tolist() for index in step.diagonal_index] for step in pack.steps]


def dead(pack):
    return [step.is_dead for step in pack.steps]


def test_ten_tokens_three_steps():
    pack = build_trim_pack(mask_at(10, 2, 3, 7), 3)
    assert pack.ttt_length == 3
    assert pack.num_tokens == pack.owned == 10
    assert pack.supervised.tolist() == [2, 3, 7]
    assert rows(pack) == [[0, 1, 2, 3, 5, 6, 7], [0, 1, 2, 5, 6], [0, 1, 5]]
    assert loss_rows(pack) == [[2, 3, 7], [1, 2, 6], [0, 1, 5]]
    assert loss_index(pack) == [[2, 3, 6], [1, 2, 4], [0, 1, 2]]
    assert teacher_index(pack) == [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert carry(pack) == [None, [0, 1, 2, 4, 5], [0, 1, 3]]
    assert diagonal(pack) == [[], [], [[0, 1, 3]]]
    assert [step.num_loss_rows for step in pack.steps] == [3, 3, 3]
    assert dead(pack) == [False, False, False]
    assert pack.context_len.tolist() == [8]
    assert pack.density == 8 / 20


def test_four_steps_have_two_diagonals():
    pack = build_trim_pack(mask_at(9, 3, 6), 4)
    assert rows(pack) == [[0, 1, 2, 3, 4, 5, 6], [0, 1, 2, 3, 4, 5], [0, 1, 3, 4], [0, 3]]
    assert loss_rows(pack) == [[3, 6], [2, 5], [1, 4], [0, 3]]
    assert teacher_index(pack) == [[0, 1]] * 4
    assert carry(pack) == [None, [0, 1, 2, 3, 4, 5], [0, 1, 3, 4], [0, 2]]
    assert diagonal(pack) == [[], [], [[0, 1, 3, 4]], [[0, 3], [0, 2]]]


def test_dense_pack_of_the_ten_tokens():
    pack = dense_pack(mask_at(10, 2, 3, 7), 3)
    every = list(range(10))
    assert rows(pack) == [every] * 3
    assert loss_rows(pack) == loss_index(pack) == [[2, 3, 7], [1, 2, 6], [0, 1, 5]]
    assert teacher_index(pack) == [[0, 1, 2]] * 3
    assert carry(pack) == [None, every, every]
    assert diagonal(pack) == [[], [], [every]]
    assert pack.supervised.tolist() == [2, 3, 7]
    assert pack.context_len.tolist() == [10]
    assert pack.density == 1.0


def test_run_chain_keeps_its_loss_rows_only():
    pack = build_trim_pack(mask_at(10, 2, 3, 4, 7), 4, chain="run")
    assert rows(pack) == [[2, 3, 4, 7], [2, 3], [2], [2]]
    assert loss_rows(pack) == [[2, 3, 4, 7], [2, 3], [2], []]
    assert teacher_index(pack) == [[0, 1, 2, 3], [1, 2], [2], []]
    assert carry(pack) == [None, [0, 1], [0], [0]]
    assert dead(pack) == [False, False, False, True]
    assert pack.density == 3 / 30


def test_overlap_tail_with_live_steps_without_loss_rows():
    pack = build_trim_pack(mask_at(11, 9), 4, chunk_len=8)
    assert pack.num_tokens == 8
    assert pack.supervised.tolist() == [9]
    assert rows(pack) == [[6, 7], [6, 7], [6, 7], [6]]
    assert loss_rows(pack) == [[], [], [7], [6]]
    assert loss_index(pack) == [[], [], [1], [0]]
    assert teacher_index(pack) == [[], [], [0], [0]]
    assert carry(pack) == [None, [0, 1], [0, 1], [0]]
    assert diagonal(pack) == [[], [], [[0, 1]], [[0], [0]]]
    assert [step.num_loss_rows for step in pack.steps] == [0, 0, 1, 1]
    assert dead(pack) == [False] * 4
    assert pack.context_len.tolist() == [8]
    assert pack.density == 5 / 24


def test_overlap_tail_shorter_than_the_reach():
    pack = build_trim_pack(mask_at(9, 7, 8), 4, chunk_len=8)
    assert rows(pack) == [[4, 5, 6, 7], [4, 5, 6, 7], [4, 5, 6], [4, 5]]
    assert loss_rows(pack) == [[7], [6, 7], [5, 6], [4, 5]]
    assert pack.supervised.tolist() == [7, 8]
    assert teacher_index(pack) == [[0], [0, 1], [0, 1], [0, 1]]


def test_overlap_tail_past_the_reach_changes_nothing():
    short = build_trim_pack(mask_at(11, 3, 9), 4, chunk_len=8)
    long = build_trim_pack(mask_at(20, 3, 9, 11, 15), 4, chunk_len=8)
    assert rows(short) == rows(long) == [[0, 1, 2, 3, 6, 7], [0, 1, 2, 6, 7], [0, 1, 6, 7], [0, 6]]
    assert loss_rows(short) == loss_rows(long) == [[3], [2], [1, 7], [0, 6]]
    assert short.supervised.tolist() == long.supervised.tolist() == [3, 9]


def test_overlap_tail_of_another_document_reaches_no_row():
    pack = build_trim_pack(mask_at(11, 8), 4, cu_seqlens=[0, 8, 11], chunk_len=8)
    assert dead(pack) == [True] * 4
    assert pack.context_len.tolist() == [0, 0]
    inside = build_trim_pack(mask_at(11, 8), 4, cu_seqlens=[0, 7, 11], chunk_len=8)
    assert rows(inside) == [[7], [7], [7], [7]]
    assert loss_rows(inside) == [[], [7], [], []]
    assert dead(inside) == [False, False, True, True]
    assert inside.context_len.tolist() == [0, 1]


def test_run_chain_through_the_tail():
    pack = build_trim_pack(mask_at(10, 6, 7, 8), 3, chunk_len=8, chain="run")
    assert rows(pack) == [[6, 7], [6, 7], [6]]
    assert loss_rows(pack) == [[6, 7], [6, 7], [6]]
    assert pack.supervised.tolist() == [6, 7, 8]
    assert teacher_index(pack) == [[0, 1], [1, 2], [2]]


def test_dead_steps_hold_the_first_row_of_the_step_before():
    pack = build_trim_pack(mask_at(8, 5), 4, cu_seqlens=[0, 4, 8])
    assert rows(pack) == [[4, 5], [4], [4], [4]]
    assert loss_rows(pack) == [[5], [4], [], []]
    assert carry(pack) == [None, [0], [0], [0]]
    assert diagonal(pack) == [[], [], [[0]], [[0], [0]]]
    assert dead(pack) == [False, False, True, True]
    assert [step.num_loss_rows for step in pack.steps] == [1, 1, 0, 0]
    assert pack.density == 1 / 24
    assert pack.context_len.tolist() == [0, 2]


def test_dead_step_after_several_rows():
    pack = build_trim_pack(mask_at(8, 2, 5), 3, chain="run")
    assert rows(pack) == [[2, 5], [2], [2]]
    assert carry(pack) == [None, [0], [0]]
    assert diagonal(pack) == [[], [], [[0]]]
    assert dead(pack) == [False, True, True]
    assert pack.density == 0.0
    assert pack.context_len.tolist() == [6]


def test_no_supervision():
    pack = build_trim_pack([0, 0, 0, 0, 0], 3)
    assert rows(pack) == [[0], [0], [0]]
    assert carry(pack) == [None, [0], [0]]
    assert diagonal(pack) == [[], [], [[0]]]
    assert loss_rows(pack) == loss_index(pack) == teacher_index(pack) == [[], [], []]
    assert dead(pack) == [True] * 3
    assert pack.supervised.tolist() == []
    assert pack.context_len.tolist() == [0]
    assert pack.density == 0.0
    full = dense_pack([0, 0, 0, 0, 0], 3)
    assert rows(full) == [[0, 1, 2, 3, 4]] * 3
    assert dead(full) == [False] * 3
    assert full.context_len.tolist() == [5]


def test_supervision_out_of_reach():
    pack = build_trim_pack(mask_at(14, 11, 12), 4, chunk_len=8)
    assert dead(pack) == [True] * 4
    assert pack.supervised.tolist() == []
    assert rows(pack) == [[0]] * 4
    just_inside = build_trim_pack(mask_at(14, 10, 12), 4, chunk_len=8)
    assert just_inside.supervised.tolist() == [10]
    assert rows(just_inside) == [[7]] * 4
    assert loss_rows(just_inside) == [[], [], [], [7]]


def test_all_ones():
    pack = build_trim_pack([1] * 6, 3)
    assert rows(pack) == loss_rows(pack) == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4], [0, 1, 2, 3]]
    assert teacher_index(pack) == [[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [2, 3, 4, 5]]
    assert carry(pack) == [None, [0, 1, 2, 3, 4], [0, 1, 2, 3]]
    assert pack.density == 9 / 12


def test_isolated_points():
    pack = build_trim_pack(mask_at(40, 10, 30), 3)
    assert rows(pack) == [[8, 9, 10, 28, 29, 30], [8, 9, 28, 29], [8, 28]]
    assert loss_rows(pack) == [[10, 30], [9, 29], [8, 28]]
    assert carry(pack) == [None, [0, 1, 3, 4], [0, 2]]
    assert diagonal(pack) == [[], [], [[0, 2]]]
    assert pack.context_len.tolist() == [31]


def test_first_and_last_row():
    pack = build_trim_pack(mask_at(6, 0), 3)
    assert rows(pack) == [[0], [0], [0]]
    assert dead(pack) == [False, True, True]
    pack = build_trim_pack(mask_at(6, 5), 3)
    assert rows(pack) == [[3, 4, 5], [3, 4], [3]]


def test_two_documents_whose_rows_must_not_cross():
    pack = build_trim_pack(mask_at(10, 1, 4, 6), 3, cu_seqlens=[0, 5, 10])
    assert rows(pack) == [[0, 1, 2, 3, 4, 5, 6], [0, 2, 3, 5], [2]]
    assert loss_rows(pack) == [[1, 4, 6], [0, 3, 5], [2]]
    assert teacher_index(pack) == [[0, 1, 2], [0, 1, 2], [1]]
    assert carry(pack) == [None, [0, 2, 3, 5], [1]]
    assert pack.context_len.tolist() == [5, 2]
    assert pack.cu_seqlens.tolist() == [0, 5, 10]
    joined = build_trim_pack(mask_at(10, 1, 4, 6), 3)
    assert rows(joined)[2] == [2, 4]


def test_run_chain_ends_with_its_document():
    pack = build_trim_pack(mask_at(8, 2, 3, 4, 5), 3, cu_seqlens=[0, 4, 8], chain="run")
    assert rows(pack) == [[2, 3, 4, 5], [2, 4], [2]]
    assert dead(pack) == [False, False, True]


def test_one_step():
    pack = build_trim_pack(mask_at(6, 2, 4), 1)
    assert rows(pack) == loss_rows(pack) == [[2, 4]]
    assert pack.density == 0.0


def test_more_steps_than_tokens():
    pack = build_trim_pack([1, 1], 4)
    assert rows(pack) == [[0, 1], [0], [0], [0]]
    assert dead(pack) == [False, False, True, True]


def test_chunk_len_none_is_all_tokens():
    mask = mask_at(12, 2, 6, 7, 11)
    whole, given = build_trim_pack(mask, 4), build_trim_pack(mask, 4, chunk_len=12)
    assert rows(whole) == rows(given)
    assert loss_rows(whole) == loss_rows(given)
    assert whole.num_tokens == given.num_tokens == 12
    assert whole.density == given.density


@pytest.mark.parametrize("width, kept", [(10, 1164), (40, 4044), (128, 12492), (204, 19788)])
def test_published_row_counts_of_sixteen_blocks(width, kept):
    mask = torch.zeros(8192, dtype=torch.bool)
    for block in range(16):
        mask[512 * block : 512 * block + width] = True
    pack = build_trim_pack(mask, ttt_length=7)
    assert sum(step.rows.numel() for step in pack.steps[1:]) == kept
    assert pack.density == kept / (6 * 8192)


def test_published_row_count_of_all_rows():
    mask = torch.ones(8192, dtype=torch.bool)
    mask[-1] = False
    pack = build_trim_pack(mask, ttt_length=7)
    assert sum(step.rows.numel() for step in pack.steps[1:]) == 49125


@pytest.mark.parametrize("kind", [list, tuple, torch.tensor, lambda v: torch.tensor(v).bool()])
def test_mask_kinds_give_one_plan(kind):
    pack = build_trim_pack(kind([0, 0, 1, 1, 0, 0, 0, 1, 0, 0]), 3)
    assert rows(pack) == [[0, 1, 2, 3, 5, 6, 7], [0, 1, 2, 5, 6], [0, 1, 5]]
    assert all(step.rows.dtype == torch.int64 for step in pack.steps)
    assert pack.supervised.dtype == pack.context_len.dtype == torch.int64
