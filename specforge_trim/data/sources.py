"""Data files with weights: what an entry of train_data says.

chats.jsonl         every conversation once an epoch
code.parquet@0.25   a quarter of them an epoch, after four epochs all of them
small.jsonl.gz@3    every conversation three times an epoch
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np


@dataclass(frozen=True)
class Source:
    """A data file and how often an epoch passes over it."""

    path: str
    weight: float = 1.0


def parse_source(entry: str) -> Source:
    """The Source an entry names. A file whose own name has an @ is taken as it is.

    Raises ValueError for a weight that is not a number above 0.
    """
    path, at, text = entry.rpartition("@")
    if not at or Path(entry).exists():
        return Source(entry)
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    if not 0 < weight < math.inf:
        raise ValueError(
            f"train_data entry {entry!r}: no such file, and {text!r} is no weight; "
            "expected FILE or FILE@NUMBER with a number above 0"
        )
    return Source(path, weight)


def document_weights(
    sources: Sequence[Source], file_numbers: np.ndarray
) -> tuple[float, ...] | None:
    """Each document's weight, from the number of its file; None when every weight is 1."""
    if all(source.weight == 1 for source in sources):
        return None
    return tuple(np.array([source.weight for source in sources])[file_numbers].tolist())
