"""The three alignments of loss mask and rows, by hand.

Catches: a mask shifted once too often or not at all, a read across a document boundary, and a
supervised last row, for which no teacher exists.
"""

import pytest
import torch

from specforge_trim import row_mask

MASK = [1, 0, 0, 1, 1, 1, 0, 1, 1]


@pytest.mark.parametrize(
    "alignment, expected",
    [
        ("served", [0, 0, 1, 1, 0, 0, 1, 0, 0]),
        ("teacher", [0, 0, 1, 1, 1, 0, 1, 1, 0]),
        ("token", [1, 0, 0, 1, 1, 1, 0, 1, 0]),
    ],
)
@pytest.mark.parametrize("kind", [list, torch.tensor, lambda v: torch.tensor(v).bool()])
def test_alignments(kind, alignment, expected):
    rows = row_mask(kind(MASK), alignment)
    assert rows.dtype == torch.bool
    assert rows.int().tolist() == expected


def test_served_is_the_default():
    assert row_mask(MASK).int().tolist() == [0, 0, 1, 1, 0, 0, 1, 0, 0]


@pytest.mark.parametrize(
    "alignment, expected",
    [
        ("served", [0, 0, 0, 0, 1, 0, 0, 0, 0]),
        ("teacher", [0, 0, 1, 0, 1, 1, 0, 0, 0]),
        ("token", [0, 0, 0, 0, 1, 1, 0, 0, 0]),
    ],
)
def test_documents_do_not_read_each_other(alignment, expected):
    #       document 0  | document 1 | 2
    mask = [0, 0, 0, 1, 1, 1, 1, 1, 1]
    rows = row_mask(mask, alignment, cu_seqlens=[0, 4, 7, 8, 9])
    assert rows.int().tolist() == expected


@pytest.mark.parametrize("alignment", ["served", "teacher", "token"])
@pytest.mark.parametrize("length", [1, 2, 3])
def test_short_documents(alignment, length):
    rows = row_mask([1] * length, alignment).int().tolist()
    expected = {"served": [1, 0, 0], "teacher": [1, 1, 0], "token": [1, 1, 0]}[alignment]
    assert rows == expected[3 - length :]


def test_empty_documents_are_allowed():
    assert row_mask([1, 1, 1], "token", [0, 0, 2, 2, 3]).int().tolist() == [1, 0, 0]


def test_the_caller_keeps_its_mask():
    mask = torch.ones(4, dtype=torch.bool)
    row_mask(mask, "token")
    assert mask.all()


def test_bad_arguments_are_named():
    with pytest.raises(ValueError, match="alignment='serve': expected one of served"):
        row_mask([0, 1], "serve")
    with pytest.raises(ValueError, match="loss_mask is empty"):
        row_mask([])
    with pytest.raises(ValueError, match="loss_mask holds the value 3"):
        row_mask([0, 3])
    with pytest.raises(ValueError, match="cu_seqlens runs from 0 to 3"):
        row_mask([0, 1], cu_seqlens=[0, 3])
