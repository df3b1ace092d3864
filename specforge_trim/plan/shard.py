"""Which rank holds which context tokens and computes which kept rows of a shared sequence.

    context tokens   by position, [r*block, (r+1)*block) on rank r
    kept rows        contiguous slices of R_0: dealt by equal cost, or each rank its own tokens'

            tokens   0 1 2 3 | 4 5 6 7 | 8 9 10 11        supervision on the last rank only:
            R_0                          8 9 10 11        owner:  - | - | 8 9 10 11
                                                          dealt:  8 | 9 | 10 11    (by cost)

Every rank plans from the same row sets, so that all of them know what each sends and receives.
Integers only; communicates nothing.

Letters: T tokens, P ranks that share the sequence = U (Ulysses) x W (ring), K ttt_length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from specforge_trim.plan.cost import DraftDims, row_costs
from specforge_trim.plan.guard import documents_in_budget
from specforge_trim.plan.pack import TrimPack, restrict_pack
from specforge_trim.plan.rows import check_integer
from specforge_trim.plan.segments import CHUNK_ROWS, ChunkStep, RowChunk, Segment, plan_chunks

ROWS = ("dealt", "owner")


@dataclass(frozen=True)
class SequenceSplit:
    """How a sequence is shared.

    rank, size: this rank among the P ranks. rows: "dealt" or "owner". gathered: every rank holds
    all context keys while the rows run; otherwise they stay split over U heads x W windows.
    """

    rank: int
    size: int
    rows: str = "dealt"
    gathered: bool = True
    ulysses: int = 1

    def __post_init__(self) -> None:
        check_integer(self.size, name="size", low=1)
        check_integer(self.rank, name="rank", low=0, high=self.size - 1)
        check_integer(self.ulysses, name="ulysses", low=1, high=self.size)
        if self.rows not in ROWS:
            raise ValueError(f"rows={self.rows!r}: expected one of {', '.join(ROWS)}")
        if self.size % self.ulysses:
            raise ValueError(f"ulysses={self.ulysses} does not divide the {self.size} ranks")

    @property
    def ring(self) -> int:
        return self.size // self.ulysses

    @property
    def neighbours(self) -> range:
        """The ranks of this rank's Ulysses group."""
        first = self.rank - self.rank % self.ulysses
        return range(first, first + self.ulysses)


@dataclass(frozen=True, eq=False)
class Shard:
    """One rank's share of a batch, besides its rows.

    block        context tokens per rank; rank r holds positions [r*block, (r+1)*block)
    tokens       (lo, hi): this rank's, cut at the stream's end; may be empty
    context_len  int64 [docs] of all ranks' rows together
    token_rows   int64, the rows of all ranks' R_0 among this rank's tokens
    rows         (lo, hi): positions that hold this rank's rows
    send         entry r: rows of token_rows that rank r computes
    receive      entry r: this rank's rows whose tokens rank r holds
    halo         (lo, hi): positions of the ids and teachers read for this rank's tokens and rows
    votes, kept  bool [docs]: documents that keep their trimmed rows by this rank's vote, and in
                 the plan at hand; the ranks agree on one answer before the plan is used
    """

    block: int
    tokens: tuple[int, int]
    context_len: Tensor
    token_rows: Tensor
    rows: tuple[int, int]
    send: tuple[int, ...]
    receive: tuple[int, ...]
    halo: tuple[int, int]
    votes: Tensor
    kept: Tensor

    @property
    def is_empty(self) -> bool:
        """No rank has a row: there is nothing to compute or to exchange anywhere."""
        return not bool(self.context_len.any())


def budget_votes(pack: TrimPack, split: SequenceSplit, max_density: float) -> Tensor:
    """bool [docs]: this rank's vote on which documents keep their trimmed rows.

    Dealt rows are the same share of a document everywhere, so each rank judges the whole
    document; owner rows are judged where they are. The agreed answer is the ranks' minimum.
    """
    if split.rows == "dealt":
        return documents_in_budget(pack, max_density)
    edges = _even_edges(pack.owned, split.size)
    return documents_in_budget(
        pack, max_density, positions=(edges[split.rank], edges[split.rank + 1])
    )


def row_edges(pack: TrimPack, split: SequenceSplit, dims: DraftDims | None) -> list[int]:
    """P+1 positions: rank r computes the rows at [edges[r], edges[r+1])."""
    if split.rows == "owner":
        block = token_block(pack, split.size)
        inner = [min(r * block, pack.owned) for r in range(1, split.size)]
        return [0, *inner, pack.owned]
    first, costs = pack.steps[0].rows, row_costs(pack, dims)
    # A row belongs to the rank in whose equal part of the total cost its middle lies.
    middle = costs.cumsum(0) - costs / 2
    shares = torch.arange(1, split.size, dtype=torch.float64) * (costs.sum() / split.size)
    cuts = torch.searchsorted(middle, shares).tolist()
    inner = [int(first[c]) if c < first.numel() else pack.owned for c in cuts]
    return [0, *inner, pack.owned]


def token_block(pack: TrimPack, size: int) -> int:
    """Context tokens per rank: the stream up to the last token that a row attends to."""
    live = pack.context_len > 0
    ends = (pack.cu_seqlens[:-1] + pack.context_len)[live]
    return max(1, -(-int(ends.max() if ends.numel() else 0) // size))


def expected_answer(pack: TrimPack, split: SequenceSplit, max_density: float) -> Tensor:
    """bool [docs]: the minimum of all ranks' votes, as far as this rank can tell: all plan from
    the same documents. The agreement makes it certain."""
    ranks = range(split.size if split.rows == "owner" else 1)
    votes = [budget_votes(pack, replace(split, rank=rank), max_density) for rank in ranks]
    return torch.stack(votes).all(0)


def shard_pack(
    pack: TrimPack,
    split: SequenceSplit,
    edges: Sequence[int],
    *,
    votes: Tensor | None = None,
    kept: Tensor | None = None,
) -> Shard:
    """This rank's share of `pack`; edges: the result of row_edges.

    votes, kept: see Shard; None = all documents keep their rows.
    """
    all_keep = torch.ones(pack.num_docs, dtype=torch.bool)
    block, total = token_block(pack, split.size), pack.owned
    lo, hi = (min(r * block, total) for r in (split.rank, split.rank + 1))
    first = pack.steps[0].rows[: pack.steps[0].num_rows]
    by_token = torch.searchsorted(
        first, torch.tensor([min(r * block, total) for r in range(split.size + 1)])
    ).tolist()
    by_row = torch.searchsorted(first, torch.tensor(edges)).tolist()
    a, b = by_token[split.rank : split.rank + 2]
    c, d = by_row[split.rank : split.rank + 2]
    reach = int(first[d - 1]) + pack.ttt_length + 1 if d > c else lo
    return Shard(
        block=block,
        tokens=(lo, hi),
        context_len=pack.context_len,
        token_rows=first[a:b],
        rows=(edges[split.rank], edges[split.rank + 1]),
        send=tuple(_overlap((a, b), part) for part in pairwise(by_row)),
        receive=tuple(_overlap((c, d), part) for part in pairwise(by_token)),
        halo=(
            min(lo, int(first[c]) if d > c else lo),
            min(max(hi + 1 if hi > lo else lo, reach), total),
        ),
        votes=all_keep if votes is None else votes,
        kept=all_keep if kept is None else kept,
    )


def shard_chunks(
    pack: TrimPack,
    split: SequenceSplit,
    edges: Sequence[int],
    *,
    chunk_rows: int = CHUNK_ROWS,
) -> tuple[RowChunk, ...]:
    """This rank's row chunks.

    Where the context keys stay split, every row chunk and step is collective. Then all ranks get
    equally many chunks, each of all live steps, empty where a rank has no rows; and each chunk
    step names

        peers     rows of each rank of the Ulysses group at that step, in order
        windows   entry w: segments of these ranks' rows, end to end, with the keys in window w of
                  the ring, [w*U*block, (w+1)*U*block)
    """
    own = restrict_pack(pack, edges[split.rank], edges[split.rank + 1])
    if split.gathered:
        return plan_chunks(own, chunk_rows=chunk_rows)
    check_integer(chunk_rows, name="chunk_rows", low=1)
    first = pack.steps[0].rows[: pack.steps[0].num_rows]
    counts = torch.searchsorted(first, torch.tensor(edges)).diff().tolist()
    num_chunks = -(-max(counts) // chunk_rows)
    num_steps = sum(not step.is_dead for step in pack.steps)
    plans = {}
    for rank in split.neighbours:
        part = own if rank == split.rank else restrict_pack(pack, edges[rank], edges[rank + 1])
        even = -(-counts[rank] // max(num_chunks, 1)) if counts[rank] else 1
        plans[rank] = _padded(plan_chunks(part, chunk_rows=even), num_chunks, num_steps)
    width = split.ulysses * token_block(pack, split.size)
    return tuple(
        replace(
            plans[split.rank][c],
            steps=tuple(
                _shared_step([plans[r][c].steps[i] for r in plans], step, split.ring, width)
                for i, step in enumerate(plans[split.rank][c].steps)
            ),
        )
        for c in range(num_chunks)
    )


def bytes_sent(
    shard: Shard,
    split: SequenceSplit,
    chunks: Sequence[RowChunk],
    dims: DraftDims,
    *,
    itemsize: int,
    grad_itemsize: int = 4,
) -> int:
    """Bytes this rank sends to others for one batch of a one-layer draft, weights aside.

        gathered  (P-1) * block * 2 M H * (item + grad), once
        ring      per chunk and step, of the block's 2 M H: 2 (W-1) times keys and values (forward
                  and backward) and W times their gradients
        Ulysses   once, (U-1)/U of the block's keys, values and gradients; per chunk and step,
                  (U-1)/U of own queries, then of merged o, its gradient and queries again, with
                  lse; and for each of the others' rows, 1/U of o, lse and dq
        all       D * item per row computed elsewhere, there and back

    itemsize: bytes of an activation. grad_itemsize: of a key's gradient and of lse.
    """
    rows = sum(shard.send) + sum(shard.receive)
    rows -= shard.send[split.rank] + shard.receive[split.rank]
    exchange = rows * dims.hidden * itemsize
    window = shard.block * 2 * dims.kv_heads * dims.head_dim
    if split.gathered:
        return (split.size - 1) * window * (itemsize + grad_itemsize) + exchange
    others, turns = split.ulysses - 1, split.ring - 1
    total = exchange + others * (window // split.ulysses) * (itemsize + grad_itemsize)
    heads = dims.heads // split.ulysses
    for step in (step for chunk in chunks for step in chunk.steps):
        if turns:
            total += window * (2 * turns * itemsize + split.ring * grad_itemsize)
        if others:
            own = step.peers[split.rank - split.neighbours.start]
            theirs = sum(step.peers) - own
            sent = others * own * (4 * dims.head_dim * itemsize + grad_itemsize)
            sent += theirs * (2 * dims.head_dim * itemsize + grad_itemsize)
            total += heads * sent
    return total


def _even_edges(total: int, size: int) -> list[int]:
    return [total * r // size for r in range(size + 1)]


def _overlap(a: tuple[int, int], b: tuple[int, int]) -> int:
    return max(0, min(a[1], b[1]) - max(a[0], b[0]))


_NONE = torch.zeros(0, dtype=torch.int64)


def _empty_step(index: int, rows: int, losses: int) -> ChunkStep:
    return ChunkStep(
        row_slice=(rows, rows),
        rows=_NONE,
        loss_index=_NONE,
        teacher_index=_NONE,
        loss_slice=(losses, losses),
        carry_index=None if index == 0 else _NONE,
        diagonal_index=(_NONE,) * max(index - 1, 0),
        segments=(),
    )


def _padded(chunks: tuple[RowChunk, ...], num_chunks: int, num_steps: int) -> list[RowChunk]:
    """The chunks with empty steps, then empty chunks, up to the agreed numbers."""
    full = [
        replace(
            chunk,
            steps=chunk.steps
            + tuple(_empty_step(i, 0, 0) for i in range(len(chunk.steps), num_steps)),
        )
        for chunk in chunks
    ]
    empty = RowChunk(0, 0, (0, 0), tuple(_empty_step(i, 0, 0) for i in range(num_steps)))
    return full + [empty] * (num_chunks - len(full))


def _shared_step(
    parts: Sequence[ChunkStep], own: ChunkStep, num_windows: int, width: int
) -> ChunkStep:
    """`own` with the row counts and windowed segments of the Ulysses ranks' parts."""
    peers = tuple(part.rows.numel() for part in parts)
    starts = [0, *accumulate(peers)]
    shared = [
        replace(segment, q0=segment.q0 + start, q1=segment.q1 + start)
        for part, start in zip(parts, starts, strict=False)
        for segment in part.segments
    ]
    windows = tuple(
        tuple(cut for s in shared for cut in window_segments(s, w * width, (w + 1) * width))
        for w in range(num_windows)
    )
    return replace(own, peers=peers, windows=windows)


def window_segments(segment: Segment, lo: int, hi: int) -> Iterator[Segment]:
    """The part of a segment whose keys lie at [lo, hi), as at most two segments.

    A run is cut at both edges of the window, so that its causal block stays square:

        keys       k_lo ... lo ... k_mid ... hi ... k_hi
        rows < hi             1 1 1 1 1 1 0         one segment, causal from k_mid (or lo) on
        rows >= hi            1 1 1 1 1 1 1         one segment without causal keys
    """
    first, last = max(segment.k_lo, lo), min(segment.k_hi, hi)
    if first >= last:
        return
    own = max(segment.k_mid, lo)  # the local block's keys in the window begin here
    if last <= segment.k_mid:
        yield replace(segment, k_lo=first, k_mid=last, k_hi=last, masked_rows=None)
        return
    rows = segment.masked_rows
    if rows is not None:
        skip = int(torch.searchsorted(rows, own))  # rows before the window's first local key
        if skip < rows.numel():
            yield Segment(segment.q0 + skip, segment.q1, first, own, last, rows[skip:])
        return
    start, end = (segment.q0 + edge - segment.k_mid for edge in (own, last))
    yield Segment(start, end, first, own, last)
    if end < segment.q1:
        yield Segment(end, segment.q1, first, last, last)
