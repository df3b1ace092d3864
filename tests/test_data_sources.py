"""Bugs caught: a weight read as part of a file's name, a file whose name has an @ cut in two, a
weight that no epoch can keep, weights of the wrong file.
"""

import numpy as np
import pytest

from specforge_trim.data.sources import Source, document_weights, parse_source


def test_entries(tmp_path):
    odd = tmp_path / "a@2"
    odd.write_text("")
    assert parse_source("chats.jsonl") == Source("chats.jsonl", 1.0)
    assert parse_source("x/chats.jsonl@0.25") == Source("x/chats.jsonl", 0.25)
    assert parse_source(str(odd)) == Source(str(odd), 1.0)
    assert parse_source(f"{odd}@3") == Source(str(odd), 3.0)


@pytest.mark.parametrize("weight", ["0", "-1", "nan", "inf", "half", ""])
def test_weights_that_are_none(weight):
    with pytest.raises(ValueError, match=r"expected FILE or FILE@NUMBER"):
        parse_source(f"chats.jsonl@{weight}")


def test_documents_have_the_weight_of_their_file():
    sources = [Source("a", 1.0), Source("b", 0.5)]
    assert document_weights(sources, np.array([0, 0, 1])) == (1.0, 1.0, 0.5)
    assert document_weights([Source("a"), Source("b")], np.array([0, 1])) is None
