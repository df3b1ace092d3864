"""Row mask to TrimPack: the rows every TTT step computes, and how the steps' rows map together.

Integers only, on the CPU, vectorised; the work is K passes over T positions. Does not decide
whether trimming pays (guard.py) and does not cut rows into kernel calls (segments.py).

Letters: T positions of the mask, K ttt_length, S supervised positions, R_i rows of step i.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from specforge_trim.plan.rows import check_boundaries, check_integer, check_mask

CHAINS = ("shift", "run")


@dataclass(frozen=True, eq=False)
class Step:
    """Rows of one TTT step. All tensors are int64, sorted and on the CPU.

    rows            R_i, stream positions. A dead step holds one padding row instead.
    loss_rows       the rows that emit loss at this step
    loss_index      loss_rows == rows[loss_index]
    teacher_index   pack.supervised[teacher_index] == loss_rows + i
    carry_index     rows == previous step's rows[carry_index]; None at step 0
    diagonal_index  entry j-1, for 1 <= j < i: rows == step j's rows[diagonal_index[j-1]]
    is_dead         R_i is empty: nothing of this step can reach a loss
    """

    rows: Tensor
    loss_rows: Tensor
    loss_index: Tensor
    teacher_index: Tensor
    carry_index: Tensor | None
    diagonal_index: tuple[Tensor, ...]
    is_dead: bool

    @property
    def num_rows(self) -> int:
        """|R_i|: 0 for a dead step, whose padding row is not counted."""
        return 0 if self.is_dead else self.rows.numel()

    @property
    def num_loss_rows(self) -> int:
        """Rows that emit loss; may be 0 on a live step whose rows a later step needs."""
        return self.loss_rows.numel()


@dataclass(frozen=True, eq=False)
class TrimPack:
    """What a batch computes: row sets of steps 0..K-1 over a packed stream.

    ttt_length   K
    num_tokens   rows this rank owns: positions [0, num_tokens) may be rows
    supervised   int64 [S], positions whose teacher some loss row reads, sorted
    steps        K Steps
    context_len  int64 [docs], from each document's start: 1 + last row any kept row attends to,
                 0 for a document without kept rows
    density      sum_{i>=1} |R_i| / ((K-1) * num_tokens); 0 for K = 1
    cu_seqlens   int64 [docs+1], boundaries over the mask's positions, overlap tail included
    chain        "shift" or "run"
    """

    ttt_length: int
    num_tokens: int
    supervised: Tensor
    steps: tuple[Step, ...]
    context_len: Tensor
    density: float
    cu_seqlens: Tensor
    chain: str

    @property
    def owned(self) -> int:
        """Rows this rank owns (num_tokens)."""
        return self.num_tokens

    @property
    def num_docs(self) -> int:
        """Documents of the stream, those without rows included."""
        return self.cu_seqlens.numel() - 1

    def to(self, device, *, non_blocking: bool = False) -> "TrimPack":
        """The pack with every tensor on `device`."""
        return _to(self, device, non_blocking)


def build_trim_pack(
    m, ttt_length: int, *, cu_seqlens=None, chunk_len: int | None = None, chain: str = "shift"
) -> TrimPack:
    """The fewest rows per step that give every loss.

        shift   row t emits loss at step i iff m[t+i] = 1, t+i in t's document
        run     ... iff m[t], ..., m[t+i] are all 1
        R_i     rows that emit loss at step i or later, since hidden states chain

        m = 1 at {2, 3, 7}, T = 10, K = 3, shift:
            R_0 = 0 1 2 3 5 6 7    R_1 = 0 1 2 5 6    R_2 = 0 1 5
            loss rows 2 3 7        1 2 6              0 1 5

    Args:
        m: [T] row mask (bool or 0/1 integers; tensor, array or sequence), taken verbatim.
        ttt_length: K >= 1.
        cu_seqlens: [docs+1] boundaries over all T positions; None = one document.
        chunk_len: rows owned when m carries an overlap tail: positions >= chunk_len may
            supervise earlier rows at later steps but are never rows. None = T.
        chain: "shift" or "run".

    Raises:
        ValueError: an argument outside these ranges.
    """
    mask, num_steps, bounds, owned = _check(m, ttt_length, cu_seqlens, chunk_len, chain)
    emits = _emitting_rows(mask, num_steps, bounds, owned, chain)
    return _assemble(emits, _needed_rows(emits), bounds=bounds, owned=owned, chain=chain)


def dense_pack(
    m, ttt_length: int, *, cu_seqlens=None, chunk_len: int | None = None, chain: str = "shift"
) -> TrimPack:
    """Every owned row at every step, with the loss rows of build_trim_pack.

    Arguments and errors are those of build_trim_pack. No step is dead.
    """
    mask, num_steps, bounds, owned = _check(m, ttt_length, cu_seqlens, chunk_len, chain)
    emits = _emitting_rows(mask, num_steps, bounds, owned, chain)
    every = [torch.ones(owned, dtype=torch.bool)] * num_steps
    return _assemble(emits, every, bounds=bounds, owned=owned, chain=chain)


def select_pack(pack: TrimPack, keep_trimmed) -> TrimPack:
    """`pack` with all owned rows in the documents that do not keep their trimmed rows.

    keep_trimmed: bool [docs]. Loss rows and teachers do not change. Returns `pack` itself when
    every document keeps its rows.
    """
    keep = torch.as_tensor(keep_trimmed, dtype=torch.bool)
    if keep.shape != (pack.num_docs,):
        raise ValueError(
            f"keep_trimmed has shape {tuple(keep.shape)}: expected one entry for each of the "
            f"{pack.num_docs} documents"
        )
    if bool(keep.all()):
        return pack
    refused = torch.repeat_interleave(~keep, pack.cu_seqlens.diff())[: pack.owned]
    empty = torch.zeros(pack.owned, dtype=torch.bool)
    emits = [empty.index_fill(0, step.loss_rows, True) for step in pack.steps]
    needed = [
        refused if step.is_dead else refused.index_fill(0, step.rows, True) for step in pack.steps
    ]
    return _assemble(emits, needed, bounds=pack.cu_seqlens, owned=pack.owned, chain=pack.chain)


def restrict_pack(pack: TrimPack, lo: int, hi: int) -> TrimPack:
    """The part of `pack` whose rows lie at positions [lo, hi): one rank's share.

    Rows are independent of each other, so the parts' losses and gradients add up to the whole's.
    Positions and documents stay those of the whole stream; `supervised` holds the teachers that
    the part's rows read, which may lie up to K-1 positions past hi.
    """
    inside = torch.zeros(pack.owned, dtype=torch.bool)
    inside[lo:hi] = True
    empty = torch.zeros(pack.owned, dtype=torch.bool)
    emits = [empty.index_fill(0, step.loss_rows, True) & inside for step in pack.steps]
    needed = [
        empty if step.is_dead else empty.index_fill(0, step.rows, True) & inside
        for step in pack.steps
    ]
    return _assemble(emits, needed, bounds=pack.cu_seqlens, owned=pack.owned, chain=pack.chain)


def minimal_rows(pack: TrimPack) -> tuple[Tensor, ...]:
    """K int64 tensors: the fewest rows per step for the loss rows of a pack, dense or trimmed.

    Equal to steps[i].rows of a trimmed pack, but empty for a dead step.
    """
    empty = torch.zeros(pack.owned, dtype=torch.bool)
    emits = [empty.index_fill(0, step.loss_rows, True) for step in pack.steps]
    return tuple(_positions(need) for need in _needed_rows(emits))


def context_lengths(rows: Tensor, cu_seqlens: Tensor) -> Tensor:
    """int64 [docs]: 1 + the last of `rows` in each document, from its start; 0 without rows."""
    edges = torch.searchsorted(rows, cu_seqlens)
    if rows.numel() == 0:
        return torch.zeros(cu_seqlens.numel() - 1, dtype=torch.int64)
    last = rows[(edges[1:] - 1).clamp(min=0)]
    return torch.where(edges.diff() > 0, last + 1 - cu_seqlens[:-1], 0)


def rows_per_document(pack: TrimPack) -> Tensor:
    """int64 [K, docs]: |R_i| inside each document, padding rows not counted."""
    counts = torch.zeros(pack.ttt_length, pack.num_docs, dtype=torch.int64)
    for i, step in enumerate(pack.steps):
        if not step.is_dead:
            counts[i] = torch.searchsorted(step.rows, pack.cu_seqlens).diff()
    return counts


def owned_per_document(pack: TrimPack) -> Tensor:
    """int64 [docs]: owned rows of each document; 0 for one that lies in the overlap tail."""
    return pack.cu_seqlens.clamp(max=pack.owned).diff()


def _to(value, device, non_blocking: bool):
    """A frozen dataclass of tensors, tuples and plain values, its tensors on `device`."""
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=non_blocking)
    if isinstance(value, tuple):
        return tuple(_to(entry, device, non_blocking) for entry in value)
    if isinstance(value, Step | TrimPack):
        moved = {f.name: _to(getattr(value, f.name), device, non_blocking) for f in fields(value)}
        return replace(value, **moved)
    return value


def _check(m, ttt_length, cu_seqlens, chunk_len, chain) -> tuple[Tensor, int, Tensor, int]:
    mask = check_mask(m, name="m")
    num_steps = check_integer(ttt_length, name="ttt_length", low=1)
    bounds = check_boundaries(cu_seqlens, mask.numel())
    owned = mask.numel()
    if chunk_len is not None:
        owned = check_integer(chunk_len, name="chunk_len", low=1, high=mask.numel())
    if chain not in CHAINS:
        raise ValueError(f"chain={chain!r}: expected one of {', '.join(CHAINS)}")
    return mask, num_steps, bounds, owned


def _emitting_rows(mask: Tensor, num_steps: int, bounds: Tensor, owned: int, chain: str):
    """K bool tensors [owned]: the rows that emit loss at each step."""
    total = mask.numel()
    ends = torch.repeat_interleave(bounds[1:], bounds.diff())[:owned]
    room = ends - torch.arange(owned)  # rows t + i < end of t's document iff i < room[t]
    emits: list[Tensor] = []
    for i in range(num_steps):
        emit = torch.zeros(owned, dtype=torch.bool)
        inside = min(owned, total - i)
        if inside > 0:
            emit[:inside] = mask[i : i + inside]
            emit &= room > i
        if chain == "run" and i > 0:
            emit &= emits[-1]
        emits.append(emit)
    return emits


def _needed_rows(emits: Sequence[Tensor]) -> list[Tensor]:
    """K bool tensors [owned]: the rows that emit loss at step i or later."""
    needed = [emits[-1]]
    for emit in reversed(emits[:-1]):
        needed.append(needed[-1] | emit)
    return needed[::-1]


def _assemble(
    emits: Sequence[Tensor], needed: Sequence[Tensor], *, bounds: Tensor, owned: int, chain: str
) -> TrimPack:
    """Index maps of nested row sets. Row sets are bool [owned], needed[i] covers emits[i:]."""
    reachable = torch.zeros(int(bounds[-1]), dtype=torch.bool)
    for i, emit in enumerate(emits):
        inside = min(owned, reachable.numel() - i)
        if inside > 0:
            reachable[i : i + inside] |= emit[:inside]
    rank = reachable.cumsum(0) - 1
    steps: list[Step] = []
    for i, (emit, need) in enumerate(zip(emits, needed, strict=True)):
        steps.append(_step(i, emit, need, rank, steps[-1] if steps else None))
    kept = sum(step.num_rows for step in steps[1:])
    slots = (len(steps) - 1) * owned
    return TrimPack(
        ttt_length=len(steps),
        num_tokens=owned,
        supervised=_positions(reachable),
        steps=tuple(steps),
        context_len=context_lengths(_positions(needed[0]), bounds),
        density=kept / slots if slots else 0.0,
        cu_seqlens=bounds,
        chain=chain,
    )


def _step(i: int, emit: Tensor, need: Tensor, rank: Tensor, previous: Step | None) -> Step:
    if previous is None:
        carry = None
        rows = _positions(need)
    else:
        carry = _positions(need[previous.rows])
        rows = previous.rows[carry]
    is_dead = rows.numel() == 0
    if is_dead:
        first = torch.zeros(1, dtype=torch.int64)
        rows = first if previous is None else previous.rows[:1]
        carry = None if previous is None else first
        loss_index = torch.zeros(0, dtype=torch.int64)
    else:
        loss_index = _positions(emit[rows])
    loss_rows = rows[loss_index]
    diagonal: tuple[Tensor, ...] = ()
    if i >= 2:
        assert previous is not None and carry is not None, i
        diagonal = (*(index[carry] for index in previous.diagonal_index), carry)
    return Step(
        rows=rows,
        loss_rows=loss_rows,
        loss_index=loss_index,
        teacher_index=rank[loss_rows + i],
        carry_index=carry,
        diagonal_index=diagonal,
        is_dead=is_dead,
    )


def _positions(flags: Tensor) -> Tensor:
    return flags.nonzero().squeeze(1)
