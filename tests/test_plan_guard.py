"""The choice between trimmed and full rows, alone and over two ranks.

Catches: a document refused at exactly its budget, one refusal that costs every document its
trimming, and ranks that come to different answers or wait for each other for ever.
"""

import logging
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from specforge_trim import build_trim_pack, choose_pack
from specforge_trim.plan.guard import choose_pack_alone, documents_in_budget

# Document 0: rows 3 4 5 | 3 4 | 3 of 10; document 1: rows 10..15 | 10..14 | 10..13 of 6.
MASK = [0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1]
BOUNDS = [0, 10, 16]


def rows(pack):
    return [step.rows.tolist() for step in pack.steps]


def example():
    return build_trim_pack(MASK, 3, cu_seqlens=BOUNDS)


def test_a_dense_document_gets_all_rows_and_the_other_stays_trimmed():
    pack = choose_pack(example(), 0.5)
    assert rows(pack) == [
        [3, 4, 5, 10, 11, 12, 13, 14, 15],
        [3, 4, 10, 11, 12, 13, 14, 15],
        [3, 10, 11, 12, 13, 14, 15],
    ]
    assert [step.loss_rows.tolist() for step in pack.steps] == [
        [5, 10, 11, 12, 13, 14, 15],
        [4, 10, 11, 12, 13, 14],
        [3, 10, 11, 12, 13],
    ]
    assert pack.steps[1].carry_index.tolist() == [0, 1, 3, 4, 5, 6, 7, 8]
    assert pack.context_len.tolist() == [6, 6]
    assert pack.density == 15 / 32


@pytest.mark.parametrize(
    "max_density, keeps",
    [
        (0.0, [False, False]),
        (3 / 20, [True, False]),
        (0.1499, [False, False]),
        (9 / 12, [True, True]),
        (0.7499, [True, False]),
        (1.0, [True, True]),
        (5, [True, True]),
        (float("inf"), [True, True]),
    ],
)
def test_budget_is_inclusive(max_density, keeps):
    assert documents_in_budget(example(), max_density).tolist() == keeps


@pytest.mark.parametrize("kept, total", [(1, 3), (7, 10), (3, 49), (35, 100), (29, 100)])
def test_a_document_at_its_own_density_keeps_its_rows(kept, total):
    pack = build_trim_pack([1] * (kept + 1) + [0] * (total - kept - 1), 2)
    assert documents_in_budget(pack, pack.density).tolist() == [True]
    assert documents_in_budget(pack, kept / total).tolist() == [True]
    assert documents_in_budget(pack, pack.density * (1 - 1e-9)).tolist() == [False]


def test_nothing_refused_returns_the_pack_and_logs_nothing(caplog):
    pack = example()
    with caplog.at_level(logging.INFO):
        assert choose_pack(pack, 0.9) is pack
    assert not caplog.records


def test_a_refusal_logs_one_line_with_its_numbers(caplog):
    with caplog.at_level(logging.INFO):
        choose_pack(example(), 0.5)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    message = record.getMessage()
    assert "1 of 2 documents" in message
    assert "kept rows 9, budget 6" in message
    assert "max_density 0.5" in message


def test_one_step_and_empty_documents_always_fit():
    assert documents_in_budget(build_trim_pack([1, 1], 1), 0.0).tolist() == [True]
    pack = build_trim_pack([0, 0, 1, 1], 2, cu_seqlens=[0, 0, 2, 4])
    assert documents_in_budget(pack, 0.0).tolist() == [True, True, False]


def test_documents_in_the_overlap_tail_always_fit():
    pack = build_trim_pack([1, 0, 1, 1], 2, cu_seqlens=[0, 2, 4], chunk_len=2)
    assert documents_in_budget(pack, 0.0).tolist() == [True, True]


@pytest.mark.parametrize("value", [-0.1, float("nan"), "0.35", None, True])
def test_bad_budget_is_named(value):
    with pytest.raises(ValueError, match="max_density"):
        choose_pack(example(), value)


def _rank(rank, store, results):
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    # Rank 0: document 0 is sparse, document 1 dense. Rank 1: all sparse, document 2 not held.
    sparse, dense = [0, 0, 0, 1, 0, 0, 0, 0], [1] * 8
    if rank == 0:
        pack = build_trim_pack(sparse + dense + sparse, 2, cu_seqlens=[0, 8, 16, 24])
    else:
        pack = build_trim_pack(sparse + sparse, 2, cu_seqlens=[0, 8, 16, 16])
    results.put(
        (
            rank,
            rows(choose_pack(pack, 0.35, dist.group.WORLD)),
            rows(choose_pack(pack, 0.35)),
            rows(choose_pack_alone(pack, 0.35)),
            choose_pack(build_trim_pack([0] * 4, 2), 0.35).steps[0].is_dead,
        )
    )
    dist.barrier()
    dist.destroy_process_group()


def test_two_ranks_come_to_one_answer(tmp_path):
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    ranks = [
        context.Process(target=_rank, args=(rank, tmp_path / "store", results))
        for rank in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(timeout=120)
    hung = [process for process in ranks if process.is_alive()]
    for process in hung:
        process.kill()
    assert not hung
    assert [process.exitcode for process in ranks] == [0, 0]
    answers = {rank: answer for rank, *answer in (results.get() for _ in range(2))}
    every = list(range(8, 16))
    agreed = {
        0: [[2, 3, *every, 18, 19], [2, *every, 18]],
        1: [[2, 3, *every], [2, *every]],
    }
    for rank, (given_group, default_group, alone, empty_is_dead) in answers.items():
        assert given_group == default_group == agreed[rank]
        # Alone, rank 1 keeps every document trimmed.
        assert alone == (agreed[0] if rank == 0 else [[2, 3, 10, 11], [2, 10]])
        assert empty_is_dead
