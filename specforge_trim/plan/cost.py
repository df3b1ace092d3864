"""FLOPs of a pack: what it computes, what all rows cost, and the least that gives its losses.

A model of the draft's matrix products; norms, softmax and the frozen target are left out, and so
is recomputing the context stage for its backward (about 0.01 of the full cost).

Letters: T rows, K ttt_length, D draft hidden, N query heads, Nkv kv heads, H head_dim, I MLP
width, Vd draft vocabulary, A aux width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specforge_trim.plan.pack import TrimPack, context_lengths, minimal_rows, owned_per_document
from specforge_trim.plan.rows import check_integer

STAGES = ("context", "rows", "attention", "head")

_SIZES = (
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "intermediate",
    "draft_vocab",
    "aux_width",
    "layers",
)


@dataclass(frozen=True, kw_only=True)
class DraftDims:
    """Sizes of a draft model.

    hidden        D
    heads         N query heads
    kv_heads      Nkv
    head_dim      H
    intermediate  I
    draft_vocab   Vd
    aux_width     A, width of the concatenated target states (3 * target hidden for EAGLE-3)
    layers        decoder layers; those after the first read width D instead of 2D
    fc_norm       the aux states are normed before fc, so fc needs its input gradient
    """

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    draft_vocab: int
    aux_width: int
    layers: int = 1
    fc_norm: bool = False

    def __post_init__(self):
        for name in _SIZES:
            check_integer(getattr(self, name), name=name, low=1)


@dataclass(frozen=True)
class StageCost:
    """FLOPs, forward and backward: of the pack, of all rows, of the fewest rows."""

    kept: int
    full: int
    floor: int


@dataclass(frozen=True)
class PackCost:
    """FLOPs of one or more packs, forward and backward.

    kept            the rows of the pack
    full            every owned row at every step, logits at loss rows only
    floor           the fewest rows that give the pack's losses
    full_untrimmed  full, with logits at every row of every step
    by_stage        kept, full and floor of "context" (fc, and k and v of step 0), "rows" (the
                    other projections and the MLP), "attention" and "head"
    """

    kept: int
    full: int
    floor: int
    full_untrimmed: int
    by_stage: Mapping[str, StageCost]

    @property
    def fraction(self) -> float:
        """Share of the full work that the pack does: kept / full."""
        return self.kept / self.full

    def __add__(self, other: "PackCost") -> "PackCost":
        if not isinstance(other, PackCost):
            return NotImplemented
        by_stage = {}
        for name in STAGES:
            mine, theirs = self.by_stage[name], other.by_stage[name]
            by_stage[name] = StageCost(
                kept=mine.kept + theirs.kept,
                full=mine.full + theirs.full,
                floor=mine.floor + theirs.floor,
            )
        return PackCost(
            kept=self.kept + other.kept,
            full=self.full + other.full,
            floor=self.floor + other.floor,
            full_untrimmed=self.full_untrimmed + other.full_untrimmed,
            by_stage=by_stage,
        )


def pack_cost(pack: TrimPack, dims: DraftDims) -> PackCost:
    """FLOPs of a training step on `pack`. Forward, times 3 with the backward (fc: times 2, since
    its input needs no gradient without fc_norm):

        fc 2*A*D   q 2*in*N*H   k+v 4*in*Nkv*H   o 2*N*H*D   MLP 6*D*I   head 2*D*Vd
        attention 4*N*H*(position + 1 + i) at step i;  in = 2D, or D after the first layer

    fc, and k and v of step 0, cover every token up to the last kept row of each document. With
    several layers the lower ones run over all these tokens at step 0.
    """
    every = (torch.arange(pack.owned),) * pack.ttt_length
    empty = torch.zeros(0, dtype=torch.int64)
    kept = tuple(empty if step.is_dead else step.rows for step in pack.steps)
    loss_rows = sum(step.num_loss_rows for step in pack.steps)
    kept_flops = _flops(kept, loss_rows, pack.context_len, pack, dims)
    full_flops = _flops(every, loss_rows, owned_per_document(pack), pack, dims)
    least = minimal_rows(pack)
    floor_flops = _flops(least, loss_rows, context_lengths(least[0], pack.cu_seqlens), pack, dims)
    head_everywhere = _head_flops(dims) * pack.owned * pack.ttt_length
    return PackCost(
        kept=sum(kept_flops.values()),
        full=sum(full_flops.values()),
        floor=sum(floor_flops.values()),
        full_untrimmed=sum(full_flops.values()) - full_flops["head"] + head_everywhere,
        by_stage={
            name: StageCost(kept=kept_flops[name], full=full_flops[name], floor=floor_flops[name])
            for name in STAGES
        },
    )


def row_costs(pack: TrimPack, dims: DraftDims | None) -> Tensor:
    """FLOPs of the row stage for each row of R_0, forward and backward: float64 [R_0].

    Attention grows with a row's position; a row that lives for more steps costs more. Without
    dims every row and step counts 1.
    """
    first = pack.steps[0].rows
    costs = torch.zeros(first.numel(), dtype=torch.float64)
    if pack.steps[0].is_dead:
        return costs
    starts = pack.cu_seqlens[torch.searchsorted(pack.cu_seqlens, first, right=True) - 1]
    positions = (first - starts).to(torch.float64)
    for i, step in enumerate(pack.steps):
        if step.is_dead:
            break
        index = torch.searchsorted(first, step.rows)
        if dims is None:
            costs[index] += 1
            continue
        project, per_key = _row_flops(dims, later=i > 0)
        costs[index] += project + per_key * (positions[index] + 1 + i)
        costs[torch.searchsorted(first, step.loss_rows)] += _head_flops(dims)
    return costs


def _row_flops(dims: DraftDims, *, later: bool) -> tuple[int, int]:
    """FLOPs of a row's projections and MLPs at one step, and of its attention per key.

    Step 0 runs only the last layer's rows, whose k and v the context stage has made.
    """
    kv, rest = _projections(dims)
    per_key = 3 * 4 * dims.heads * dims.head_dim
    if later:
        return sum(kv) + sum(rest), per_key * dims.layers
    return rest[-1], per_key


def _projections(dims: DraftDims) -> tuple[list[int], list[int]]:
    """Per layer, forward and backward FLOPs of a row's k and v, and of q, o and the MLP."""
    width = dims.heads * dims.head_dim
    inputs = [2 * dims.hidden] + [dims.hidden] * (dims.layers - 1)
    kv = [3 * 4 * size * dims.kv_heads * dims.head_dim for size in inputs]
    rest = [
        3 * (2 * size * width + 2 * width * dims.hidden + 6 * dims.hidden * dims.intermediate)
        for size in inputs
    ]
    return kv, rest


def _flops(
    rows: Sequence[Tensor], loss_rows: int, context_len: Tensor, pack: TrimPack, dims: DraftDims
) -> dict[str, int]:
    """Forward and backward FLOPs of row sets, by stage."""
    tokens = int(context_len.sum())
    fc = 2 * dims.aux_width * dims.hidden * (3 if dims.fc_norm else 2)
    kv, rest = _projections(dims)
    later = sum(step.numel() for step in rows[1:])
    keys = [_keys(step, i, pack) for i, step in enumerate(rows)]
    lower_keys = int((context_len * (context_len + 1) // 2).sum())
    return {
        "context": tokens * (fc + sum(kv)),
        "rows": rows[0].numel() * rest[-1]
        + tokens * sum(rest[:-1])
        + later * (sum(kv) + sum(rest)),
        "attention": 3
        * 4
        * (dims.heads * dims.head_dim)
        * (keys[0] + (dims.layers - 1) * lower_keys + dims.layers * sum(keys[1:])),
        "head": loss_rows * _head_flops(dims),
    }


def _head_flops(dims: DraftDims) -> int:
    return 3 * 2 * dims.hidden * dims.draft_vocab


def _keys(rows: Tensor, step: int, pack: TrimPack) -> int:
    """Keys that the rows of a step attend to: sum of position + 1 + step."""
    counts = torch.searchsorted(rows, pack.cu_seqlens).diff()
    positions = rows.sum() - (counts * pack.cu_seqlens[:-1]).sum()
    return int(positions) + rows.numel() * (1 + step)
