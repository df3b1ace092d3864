"""Numbers about prepared data: what training would run of each document, and what it would cost.

One job: PreparedData in, figures out. Showing them is inspect.py's and inspect_html.py's.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specforge_trim.data.prepared import PreparedData
from specforge_trim.data.tokenize import Document
from specforge_trim.plan.cost import DraftDims, PackCost, pack_cost
from specforge_trim.plan.guard import documents_in_budget
from specforge_trim.plan.pack import TrimPack, build_trim_pack, dense_pack
from specforge_trim.plan.rows import row_mask

FIRST_BUCKET = 256


@dataclass(frozen=True)
class DocumentStats:
    """One document's numbers.

    tokens; supervised share of tokens; density, the share of rows that steps >= 1 run (what the
    guard compares with its limit); refused, whether the guard gives it all rows; runs, stretches
    of consecutive rows that step 0 keeps; cost of the pack that training would use, None when the
    document has no row that can reach a loss.
    """

    tokens: int
    supervised: float
    density: float
    refused: bool
    runs: int
    cost: PackCost | None


@dataclass(frozen=True)
class Training:
    """What of a run decides the rows of a document: settings of the same names, and the draft.

    dims: the draft's sizes; max_density: the guard's limit.
    """

    ttt_length: int
    alignment: str
    chain: str
    dims: DraftDims
    max_density: float


def document_pack(document: Document, training: Training) -> TrimPack:
    """The trimmed pack of one document on its own."""
    rows = row_mask(document.loss_mask, alignment=training.alignment)
    return build_trim_pack(rows, ttt_length=training.ttt_length, chain=training.chain)


def last_steps(pack: TrimPack) -> Tensor:
    """int64 [T]: the last TTT step that runs each row, -1 for rows that none runs."""
    last = torch.full((pack.num_tokens,), -1)
    for i, step in enumerate(pack.steps):
        if not step.is_dead:
            last[step.rows] = i
    return last


def document_stats(document: Document, training: Training) -> DocumentStats:
    """What training would run of one document, and what it would cost."""
    pack = document_pack(document, training)
    refused = not bool(documents_in_budget(pack, training.max_density).all())
    density, live = pack.density, bool(pack.supervised.numel())
    rows = pack.steps[0].rows
    runs = 1 + int((rows.diff() != 1).sum()) if live else 0
    if refused:
        mask = row_mask(document.loss_mask, alignment=training.alignment)
        pack = dense_pack(mask, ttt_length=training.ttt_length, chain=training.chain)
    return DocumentStats(
        tokens=len(document.input_ids),
        supervised=float(document.loss_mask.float().mean()),
        density=density,
        refused=refused,
        runs=runs,
        cost=pack_cost(pack, training.dims) if live else None,
    )


def sampled_stats(
    data: PreparedData, training: Training, *, max_documents: int
) -> list[DocumentStats]:
    """Stats of at most max_documents documents, evenly spaced."""
    step = -(-len(data) // max_documents)
    return [document_stats(data[i], training) for i in range(0, len(data), step)]


def by_length(stats: Sequence[DocumentStats]) -> list[tuple[int, int, list[DocumentStats]]]:
    """(lowest, highest tokens, documents) of length buckets that double, empty ones left out."""
    buckets: dict[int, list[DocumentStats]] = {}
    for item in stats:
        low = 0
        while item.tokens >= max(FIRST_BUCKET, 2 * low):
            low = max(FIRST_BUCKET, 2 * low)
        buckets.setdefault(low, []).append(item)
    return [(low, max(FIRST_BUCKET, 2 * low) - 1, buckets[low]) for low in sorted(buckets)]


def total_cost(stats: Sequence[DocumentStats]) -> PackCost | None:
    """Cost of training on each document once; None when none has a row that reaches a loss."""
    costs = [item.cost for item in stats if item.cost is not None]
    return sum(costs[1:], costs[0]) if costs else None


def median_density(stats: Sequence[DocumentStats]) -> float:
    return statistics.median(item.density for item in stats)


def median_supervised(stats: Sequence[DocumentStats]) -> float:
    return statistics.median(item.supervised for item in stats)
