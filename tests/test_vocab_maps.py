"""The draft vocabulary and its maps.

Catches: an identity written as 0..N-1 instead of zero offsets; ids out of order or repeated when
the data has too few distinct tokens; a size that trains for hours on nonsense; the first N ids
used because nothing was counted; maps that disagree with each other.
"""

from types import SimpleNamespace

import pytest
import torch
from tiny import tiny_config

from specforge_trim.drafts.eagle3.for_target import draft_for_target
from specforge_trim.drafts.eagle3.model import Eagle3Draft
from specforge_trim.drafts.eagle3.vocab import (
    build_draft_vocab,
    check_maps,
    count_supervised_tokens,
    coverage,
    identity_vocab,
    kept_ids,
)


def document(ids, mask):
    return SimpleNamespace(input_ids=torch.tensor(ids), loss_mask=torch.tensor(mask))


def test_most_frequent_ids_ascending_as_offsets():
    counts = torch.tensor([0, 1, 9, 4, 0, 1, 0, 7])
    d2t, t2d = build_draft_vocab(counts, vocab_size=8, draft_vocab_size=3)
    assert d2t.tolist() == [2, 2, 5] and d2t.dtype == torch.int64
    assert t2d.tolist() == [False, False, True, True, False, False, False, True]
    assert kept_ids(d2t).tolist() == [2, 3, 7]


def test_ties_go_to_the_smaller_id():
    counts = torch.tensor([1, 5, 1, 1, 5])
    d2t, _ = build_draft_vocab(counts, vocab_size=5, draft_vocab_size=3)
    assert kept_ids(d2t).tolist() == [0, 1, 4]


def test_ties_by_id_hold_in_a_large_vocabulary():
    counts = torch.zeros(50_000, dtype=torch.int64)
    counts[1::2] = 3
    d2t, _ = build_draft_vocab(counts, vocab_size=50_000, draft_vocab_size=1000)
    assert kept_ids(d2t).tolist() == list(range(1, 2000, 2))


def test_too_few_distinct_tokens_are_padded_with_unused_ids():
    counts = torch.zeros(100, dtype=torch.int64)
    counts[40:60] = 2
    d2t, t2d = build_draft_vocab(counts, vocab_size=100, draft_vocab_size=64)
    assert kept_ids(d2t).tolist() == list(range(0, 64))  # 40..59 counted, 0..39 and 60..63 pad
    assert int(t2d.sum()) == 64


def test_only_supervised_tokens_count():
    docs = [
        document([1, 1, 1, 2, 3], [0, 0, 0, 1, 1]),
        document([3, 4, 1], [1, 0, 0]),
        document([5, 5], [0, 0]),
    ]
    assert count_supervised_tokens(docs, vocab_size=6).tolist() == [0, 0, 1, 2, 0, 0]
    d2t, t2d = build_draft_vocab(iter(docs), vocab_size=6, draft_vocab_size=2)
    assert kept_ids(d2t).tolist() == [2, 3]
    assert coverage(torch.tensor([6, 0, 1, 1, 0, 0]), t2d) == 0.25


@pytest.mark.parametrize("size", [32, 48])
def test_the_size_asked_for_is_the_size_built(size):
    d2t, t2d = build_draft_vocab(torch.arange(64), vocab_size=64, draft_vocab_size=size)
    assert d2t.numel() == size == int(t2d.sum())


@pytest.mark.parametrize("size", [0, -1, 4.0, True, 9, "4"])
def test_impossible_sizes_are_refused(size):
    with pytest.raises(ValueError, match="draft_vocab_size"):
        build_draft_vocab(torch.ones(8), vocab_size=8, draft_vocab_size=size)


def test_full_vocabulary_is_zero_offsets_and_needs_no_counts():
    d2t, t2d = build_draft_vocab([], vocab_size=5, draft_vocab_size=5)
    assert d2t.tolist() == [0] * 5 and bool(t2d.all()) and t2d.dtype == torch.bool
    assert kept_ids(d2t).tolist() == [0, 1, 2, 3, 4]


def test_a_draft_vocabulary_of_one():
    d2t, t2d = build_draft_vocab(torch.tensor([1, 3, 2]), vocab_size=3, draft_vocab_size=1)
    assert d2t.tolist() == [1] and t2d.tolist() == [False, True, False]


def test_nothing_supervised_is_refused_instead_of_keeping_the_first_ids():
    with pytest.raises(ValueError, match="no supervised token"):
        build_draft_vocab([document([1, 2], [0, 0])], vocab_size=8, draft_vocab_size=4)


@pytest.mark.parametrize("counts", [torch.ones(7), torch.ones(9), torch.ones(2, 4)])
def test_counts_of_another_vocabulary_are_refused(counts):
    with pytest.raises(ValueError, match="shape"):
        build_draft_vocab(counts, vocab_size=8, draft_vocab_size=4)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_counts_that_are_no_counts_are_refused(bad):
    with pytest.raises(ValueError, match="counts"):
        build_draft_vocab(torch.tensor([1.0, bad, 1.0]), vocab_size=3, draft_vocab_size=2)


@pytest.mark.parametrize("token", [8, -1])
def test_ids_of_another_tokenizer_are_refused(token):
    with pytest.raises(ValueError, match=f"token id {token}"):
        count_supervised_tokens([document([1, token], [1, 1])], vocab_size=8)


def test_maps_are_checked_against_each_other():
    d2t, t2d = build_draft_vocab(torch.tensor([0, 1, 9, 4]), vocab_size=4, draft_vocab_size=2)
    check_maps(d2t, t2d, vocab_size=4)
    check_maps(*identity_vocab(4), vocab_size=4)
    with pytest.raises(ValueError, match="offsets, not ids"):
        check_maps(kept_ids(d2t), t2d, vocab_size=4)
    with pytest.raises(ValueError, match="disagree"):
        check_maps(d2t, torch.zeros(4, dtype=torch.bool), vocab_size=4)
    with pytest.raises(ValueError, match="shape"):
        check_maps(d2t, t2d, vocab_size=5)
    with pytest.raises(ValueError, match="int64"):
        check_maps(d2t.float(), t2d, vocab_size=4)


def test_a_draft_whose_vocabulary_was_never_said_is_refused():
    """Its ids would otherwise be taken for the first ids of the target, with healthy metrics."""
    draft = Eagle3Draft(draft_for_target(tiny_config(), draft_vocab_size=3))
    with pytest.raises(ValueError, match="no vocabulary map: call set_vocab"):
        draft.draft_to_target  # noqa: B018
    kept = torch.tensor([5, 6, 200])
    t2d = torch.zeros(272, dtype=torch.bool)
    t2d[kept] = True
    with pytest.raises(ValueError, match="different draft vocabularies"):
        draft.set_vocab(torch.zeros(3, dtype=torch.int64), t2d)
    draft.set_vocab(kept - torch.arange(3), t2d)
    assert draft.draft_to_target.tolist() == [5, 6, 200]
    fresh = Eagle3Draft(draft.config)
    fresh.load_state_dict(draft.state_dict())  # maps that come with weights count
    assert fresh.draft_to_target.tolist() == [5, 6, 200]
    full = Eagle3Draft(draft_for_target(tiny_config(), draft_vocab_size=272))
    assert full.draft_to_target.tolist() == list(range(272))
