"""Trimmed or dense rows, decided per document and agreed over a process group.

Trimming saves work while few rows are kept. Where a backend's break-even density is known, a
document above it gets all its rows. Measures nothing itself.
"""

import logging
import math

import torch
import torch.distributed as dist
from torch import Tensor

from specforge_trim.plan.pack import TrimPack, owned_per_document, rows_per_document, select_pack

logger = logging.getLogger(__name__)

# Rounding slack of the budget: tau may be a quotient of the very integers it is compared with.
_SLACK = 1e-12


def choose_pack(pack: TrimPack, max_density: float = 0.35, group=None) -> TrimPack:
    """The pack with all rows in every document that is over its budget on some rank.

    A document keeps its trimmed rows iff on EVERY rank of the group

        sum_{i>=1} |R_i in it|  <=  max_density * (K-1) * rows owned in it

    The agreement is one all_reduce MIN of int32 [docs]. Every rank reaches it whatever its data,
    so all ranks of the group must call this with the same documents in the same order (a rank
    without tokens of a document names it with an empty range).

    Args:
        pack: the trimmed pack of this rank.
        max_density: budget as a share of all rows, >= 0; 1.0 or more never refuses.
        group: process group that must agree; None = the default group when torch.distributed is
            initialised, else this process alone. Ranks that train on different documents have
            nothing to agree on: use choose_pack_alone.

    Returns:
        `pack` itself when every document keeps its rows. A refusal logs one INFO line.

    Raises:
        ValueError: max_density is negative or not a number.
    """
    fits = documents_in_budget(pack, max_density)
    if group is not None or (dist.is_available() and dist.is_initialized()):
        # Outside any data-dependent branch: a rank that skipped it would leave the others waiting.
        fits = _agree(fits, group)
    return _select(pack, fits, max_density)


def choose_pack_alone(pack: TrimPack, max_density: float = 0.35) -> TrimPack:
    """choose_pack without communication: for data-parallel ranks and loader workers."""
    return _select(pack, documents_in_budget(pack, max_density), max_density)


def documents_in_budget(
    pack: TrimPack, max_density: float, *, positions: tuple[int, int] | None = None
) -> Tensor:
    """bool [docs]: the documents whose kept rows of steps 1..K-1 fit the budget on this rank.

    positions: [lo, hi) of the rows that this rank owns; None = all of the pack's.
    """
    tau = _check_density(max_density)
    if positions is None:
        kept = rows_per_document(pack)[1:].sum(0)
        return kept <= _budget(pack, tau) * (1 + _SLACK)
    lo, hi = positions
    bounds = pack.cu_seqlens.clamp(lo, hi)
    kept = torch.zeros(pack.num_docs, dtype=torch.int64)
    for step in pack.steps[1:]:
        if not step.is_dead:
            kept += torch.searchsorted(step.rows, bounds).diff()
    budget = tau * (pack.ttt_length - 1) * bounds.diff().to(torch.float64)
    return kept <= budget * (1 + _SLACK)


def select_documents(pack: TrimPack, fits: Tensor, max_density: float) -> TrimPack:
    """`pack` with all rows in the documents that do not fit; a refusal logs one INFO line.

    fits: bool [docs], agreed over the ranks that share the documents.
    """
    return _select(pack, fits, max_density)


def _budget(pack: TrimPack, tau: float) -> Tensor:
    return tau * (pack.ttt_length - 1) * owned_per_document(pack).to(torch.float64)


def _check_density(max_density) -> float:
    number = isinstance(max_density, int | float) and not isinstance(max_density, bool)
    if not number or math.isnan(max_density) or max_density < 0:
        raise ValueError(f"max_density={max_density!r}: expected a number >= 0")
    # A finite stand-in: infinity times an empty document is not a number.
    return min(float(max_density), 1e6)


def _agree(fits: Tensor, group) -> Tensor:
    on_cuda = dist.get_backend(group) == "nccl"
    votes = fits.to(torch.device("cuda") if on_cuda else torch.device("cpu"), torch.int32)
    dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=group)
    return votes.cpu().bool()


def _select(pack: TrimPack, fits: Tensor, max_density: float) -> TrimPack:
    refused = ~fits
    if bool(refused.any()):
        logger.info(
            "trimming refused for %d of %d documents: kept rows %d, budget %d "
            "(max_density %g of %d rows in steps 1 to %d)",
            int(refused.sum()),
            pack.num_docs,
            int(rows_per_document(pack)[1:, refused].sum()),
            int(_budget(pack, _check_density(max_density))[refused].sum()),
            max_density,
            int(owned_per_document(pack)[refused].sum()) * (pack.ttt_length - 1),
            pack.ttt_length - 1,
        )
    return select_pack(pack, fits)
