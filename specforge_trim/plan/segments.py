"""TrimPack to row chunks and attention segments: what one kernel call is given.

A row chunk runs all its steps forward and backward before the next one starts, so it bounds peak
memory. A segment is one group of queries with the context keys they see. Integers only; the
kernels are elsewhere. Segments of a chunk step cover the keys [document start, t] of every row t
exactly once.

Letters: R rows of a chunk step, K ttt_length.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from specforge_trim.plan.pack import Step, TrimPack
from specforge_trim.plan.rows import check_integer

CHUNK_ROWS = 1024
GROUP_GAP = 32
GROUP_ROWS = 64
MAX_GROUP = 2048


@dataclass(frozen=True, eq=False, slots=True)
class Segment:
    """Queries [q0, q1) of a chunk step and the context keys they attend to.

        keys       k_lo ........ k_mid ...... k_hi
        query q0   1 1 1 1 1 1 1 1 0 0 0 0 0        [k_lo, k_mid)  seen by every query
              .    1 1 1 1 1 1 1 1 1 0 0 0 0        [k_mid, k_hi)  seen up to the query's row
              q1-1 1 1 1 1 1 1 1 1 1 1 1 1 1

    k_lo, k_mid, k_hi are absolute positions. Without `masked_rows` the queries are the consecutive
    rows [k_mid, k_hi), a square causal block. With them (int64 [q1-q0], absolute positions) the
    rows have gaps and the local block needs `mask`.
    """

    q0: int
    q1: int
    k_lo: int
    k_mid: int
    k_hi: int
    masked_rows: Tensor | None = None

    @property
    def mask(self) -> Tensor | None:
        """bool [q1-q0, k_hi-k_mid], True = attend; None = square causal.

        Built on the device of the rows when read: stored masks would outweigh the plan.
        """
        if self.masked_rows is None:
            return None
        keys = torch.arange(self.k_mid, self.k_hi, device=self.masked_rows.device)
        return self.masked_rows[:, None] >= keys


@dataclass(frozen=True, eq=False, slots=True)
class ChunkStep:
    """A row chunk's part of one live TTT step; index maps are local to the chunk.

    row_slice       (a, b): rows == pack.steps[i].rows[a:b]
    rows            int64 [R], absolute positions
    loss_index      the rows that emit loss are rows[loss_index]
    teacher_index   their teachers inside the chunk's teacher_slice
    loss_slice      (a, b): these loss rows are pack.steps[i].loss_rows[a:b]
    carry_index     rows == previous chunk step's rows[carry_index]; None at step 0
    diagonal_index  entry j-1, for 1 <= j < i: rows == chunk step j's rows[diagonal_index[j-1]]
    segments        in ascending query order, together all R rows
    peers, windows  see plan/shard.py; empty unless ranks share a sequence without gathering it
    """

    row_slice: tuple[int, int]
    rows: Tensor
    loss_index: Tensor
    teacher_index: Tensor
    loss_slice: tuple[int, int]
    carry_index: Tensor | None
    diagonal_index: tuple[Tensor, ...]
    segments: tuple[Segment, ...]
    peers: tuple[int, ...] = ()
    windows: tuple[tuple[Segment, ...], ...] = ()


@dataclass(frozen=True, eq=False, slots=True)
class RowChunk:
    """Kept rows at positions [lo, hi) and everything their K steps need.

    teacher_slice  (a, b): pack.supervised[a:b] holds every teacher its loss rows read
    steps          the steps with rows in [lo, hi), a prefix of the pack's steps
    """

    lo: int
    hi: int
    teacher_slice: tuple[int, int]
    steps: tuple[ChunkStep, ...]

    def to(self, device, *, non_blocking: bool = False) -> "RowChunk":
        """The chunk with every tensor on `device`."""
        return _to(self, device, non_blocking)


def plan_chunks(
    pack: TrimPack,
    *,
    chunk_rows: int = CHUNK_ROWS,
    group_gap: int = GROUP_GAP,
    group_rows: int = GROUP_ROWS,
    max_group: int = MAX_GROUP,
) -> tuple[RowChunk, ...]:
    """Cut a pack into row chunks of near-equal size, and each chunk step into segments.

    Rows of a document that follow one another form a run. A run of at least group_gap rows is a
    segment of its own. Shorter neighbours share one until it has group_rows rows, since a call
    costs about as much for 1 row as for 64, or its local block would exceed max_group keys, half
    of which are masked work. A segment never spans documents; a chunk may.

    Args:
        pack: the row sets.
        chunk_rows: most rows of step 0 in a chunk; sets peak activation memory.
        group_gap: runs of fewer rows are grouped; 0 = every run on its own.
        group_rows: a group takes no further run once it has so many rows.
        max_group: most keys of a group's local block.

    Returns:
        Chunks in ascending order; () for a pack without rows.

    Raises:
        ValueError: a size below its least value (1, 0, 1, 1).
    """
    check_integer(chunk_rows, name="chunk_rows", low=1)
    check_integer(group_gap, name="group_gap", low=0)
    check_integer(group_rows, name="group_rows", low=1)
    check_integer(max_group, name="max_group", low=1)
    limits = _GroupLimits(group_gap, group_rows, max_group)
    first = pack.steps[0]
    if first.is_dead:
        return ()
    num_rows = first.rows.numel()
    num_chunks = -(-num_rows // chunk_rows)
    cuts = [num_rows * c // num_chunks for c in range(num_chunks + 1)]
    lows = [int(first.rows[cut]) for cut in cuts[:-1]]
    edges = torch.tensor([*lows, pack.owned])
    highs = [int(first.rows[cut - 1]) + 1 for cut in cuts[1:]]
    teachers = _teacher_slices(pack, lows, highs)
    splits = [_RowSplit.of(step, edges) for step in pack.steps if not step.is_dead]
    starts = torch.tensor([a for a, _ in teachers])
    parts = [_chunk_steps(i, pack, splits, starts, limits) for i in range(len(splits))]
    return tuple(
        RowChunk(
            lo=lows[c],
            hi=highs[c],
            teacher_slice=teachers[c],
            steps=tuple(step for step in (part[c] for part in parts) if step is not None),
        )
        for c in range(num_chunks)
    )


def as_slice(index: Tensor) -> slice | None:
    """The slice that selects what a sorted, duplicate-free CPU index map selects, if there is one.

    Reads the tensor: call it where the plan is made, not in the training step.
    """
    if index.numel() == 0:
        return slice(0, 0)
    first, last = int(index[0]), int(index[-1])
    return slice(first, last + 1) if last - first + 1 == index.numel() else None


@dataclass(frozen=True)
class _GroupLimits:
    """See plan_chunks: shortest run of its own, rows that fill a group, most keys of a group."""

    gap: int
    rows: int
    keys: int


@dataclass(frozen=True, eq=False)
class _RowSplit:
    """Where a step's rows and loss rows fall into chunks: int64 [chunks+1] and [chunks]."""

    row_edges: Tensor
    row_sizes: list[int]
    loss_edges: Tensor
    loss_sizes: list[int]

    @staticmethod
    def of(step: Step, edges: Tensor) -> "_RowSplit":
        row_edges = torch.searchsorted(step.rows, edges)
        loss_edges = torch.searchsorted(step.loss_rows, edges)
        return _RowSplit(
            row_edges=row_edges,
            row_sizes=row_edges.diff().tolist(),
            loss_edges=loss_edges,
            loss_sizes=loss_edges.diff().tolist(),
        )


def _teacher_slices(pack: TrimPack, lows: list[int], highs: list[int]) -> list[tuple[int, int]]:
    """Per chunk, the supervised positions its rows can reach, up to its last document's end."""
    reach = torch.tensor(highs) + pack.ttt_length - 1
    last_row = torch.tensor(highs) - 1
    ends = pack.cu_seqlens[torch.searchsorted(pack.cu_seqlens, last_row, right=True)]
    a = torch.searchsorted(pack.supervised, torch.tensor(lows)).tolist()
    b = torch.searchsorted(pack.supervised, torch.minimum(reach, ends)).tolist()
    return list(zip(a, b, strict=True))


def _chunk_steps(
    i: int,
    pack: TrimPack,
    splits: Sequence[_RowSplit],
    teacher_starts: Tensor,
    limits: _GroupLimits,
) -> list[ChunkStep | None]:
    """Step i's part of every chunk; None where the chunk has no rows at this step.

    Maps are shifted to local ones for all chunks at once and cut into views afterwards.
    """
    step, split = pack.steps[i], splits[i]
    sizes, loss_sizes = split.row_sizes, split.loss_sizes

    def local(index: Tensor, starts: Tensor, counts: list[int]) -> tuple[Tensor, ...]:
        shift = torch.repeat_interleave(starts, torch.tensor(counts), output_size=index.numel())
        return (index - shift).split(counts)

    rows = step.rows.split(sizes)
    loss_index = local(step.loss_index, split.row_edges[:-1], loss_sizes)
    teacher_index = local(step.teacher_index, teacher_starts, loss_sizes)
    carry = None
    if step.carry_index is not None:
        carry = local(step.carry_index, splits[i - 1].row_edges[:-1], sizes)
    diagonal = [
        local(index, splits[j].row_edges[:-1], sizes)
        for j, index in enumerate(step.diagonal_index, start=1)
    ]
    segments = _segments(step.rows, split.row_edges, pack.cu_seqlens, limits)
    row_slices = list(pairwise(split.row_edges.tolist()))
    loss_slices = list(pairwise(split.loss_edges.tolist()))
    return [
        ChunkStep(
            row_slice=row_slices[c],
            rows=rows[c],
            loss_index=loss_index[c],
            teacher_index=teacher_index[c],
            loss_slice=loss_slices[c],
            carry_index=None if carry is None else carry[c],
            diagonal_index=tuple(index[c] for index in diagonal),
            segments=segments[c],
        )
        if sizes[c]
        else None
        for c in range(len(sizes))
    ]


def _segments(
    rows: Tensor, row_edges: Tensor, bounds: Tensor, limits: _GroupLimits
) -> list[tuple[Segment, ...]]:
    """Segments of one step, a tuple for every chunk. Loops over segments, never over rows."""
    rows_np, edges = rows.numpy(), row_edges.numpy()
    breaks = np.flatnonzero(rows_np[1:] != rows_np[:-1] + 1) + 1
    doc_edges = np.searchsorted(rows_np, bounds.numpy())
    begin = np.unique(np.concatenate([[0], breaks, doc_edges, edges]))
    begin = begin[begin < len(rows_np)]  # each run's first index into rows
    end = np.append(begin[1:], len(rows_np))
    heads = _group_heads(rows_np, begin, end, doc_edges, edges, limits)
    q0, runs = begin[heads], np.diff(np.append(heads, len(begin)))
    q1 = np.append(q0[1:], len(rows_np))
    k_mid, k_hi = rows_np[q0], rows_np[q1 - 1] + 1
    k_lo = bounds.numpy()[np.searchsorted(bounds.numpy(), k_mid, side="right") - 1]
    chunk = np.searchsorted(edges, q0, side="right") - 1
    shift = edges[chunk]
    query_rows = rows.split((q1 - q0).tolist())
    columns = (q0 - shift, q1 - shift, k_lo, k_mid, k_hi)
    flat = [
        Segment(a, b, lo, mid, hi, seen if count > 1 else None)
        for a, b, lo, mid, hi, seen, count in zip(
            *(column.tolist() for column in columns), query_rows, runs.tolist(), strict=True
        )
    ]
    cuts = np.searchsorted(q0, edges).tolist()
    return [tuple(flat[a:b]) for a, b in pairwise(cuts)]


def _group_heads(rows, begin, end, doc_edges, chunk_edges, limits: _GroupLimits):
    """Index of the first run of every group, for runs [begin, end) of `rows` indices.

    A group grows over short runs until it is full, its key span would exceed the limit, or a
    document, a chunk or a long run ends it.
    """
    num_runs = len(begin)
    long = end - begin >= limits.gap
    if long.all():
        return np.arange(num_runs)
    opens = long | np.isin(begin, doc_edges) | np.isin(begin, chunk_edges)
    opens[1:] |= long[:-1]
    region = np.cumsum(opens)
    limit = np.searchsorted(region, region, side="right")
    first, last = rows[begin], rows[end - 1] + 1
    after = np.minimum(limit, np.searchsorted(last, first + limits.keys, side="right"))
    after = np.minimum(after, np.searchsorted(end, begin + limits.rows) + 1)
    after = np.maximum(after, np.arange(1, num_runs + 1)).tolist()
    heads, run = [], 0
    while run < num_runs:
        heads.append(run)
        run = after[run]
    return np.array(heads)


def _to(value, device, non_blocking: bool):
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=non_blocking)
    if isinstance(value, tuple):
        return tuple(_to(entry, device, non_blocking) for entry in value)
    if isinstance(value, RowChunk | ChunkStep | Segment):
        moved = {f.name: _to(getattr(value, f.name), device, non_blocking) for f in fields(value)}
        return replace(value, **moved)
    return value
