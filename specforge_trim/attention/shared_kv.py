"""Homes of context keys that several ranks share: gathered on every rank, or split over ranks.

    GatheredOverRanks   K0/V0 all-gathered once per batch, their gradients reduce-scattered once;
                        the row stage communicates nothing
    SplitKV             U x W ranks hold M/U heads of the tokens in one of W windows. Per chunk and
                        step, queries swap rows for heads inside the Ulysses group (all-to-all) and
                        meet the windows one after another (ring). U = 1 is a plain ring, W = 1
                        plain Ulysses

Each rank puts in the keys of its own `block` of tokens and gets their gradients back. The rows'
own later keys never come here.

Letters: P ranks, U Ulysses ranks, W windows of the ring, n tokens of a rank (`block`), R rows,
N heads, M key/value heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import repeat

import torch
from torch import Tensor

from specforge_trim.attention.context_kv import ContextKV, SegmentAttention, gradient_buffers
from specforge_trim.attention.kernel import Kernel
from specforge_trim.plan.segments import ChunkStep
from specforge_trim.ranks.group import RankGroup


class GatheredOverRanks:
    """Every rank holds all context keys; see the module."""

    def __init__(
        self,
        k0: Tensor,
        v0: Tensor,
        *,
        group: RankGroup,
        make_local: Callable[[Tensor, Tensor], ContextKV],
    ) -> None:
        """k0, v0 [n, M, H], n the same on all ranks; make_local makes a home of all of them."""
        self.group = group
        self.local = make_local(group.all_gather(k0), group.all_gather(v0))

    def forward(self, q: Tensor, step: ChunkStep) -> tuple[Tensor, Tensor]:
        return self.local.forward(q, step)

    def backward(self, do: Tensor, q: Tensor, o: Tensor, lse: Tensor, step: ChunkStep) -> Tensor:
        return self.local.backward(do, q, o, lse, step)

    def finish(self) -> tuple[Tensor, Tensor]:
        dk, dv = self.local.finish()
        return self.group.reduce_scatter(dk), self.group.reduce_scatter(dv)


class SplitKV:
    """Context keys stay split over heads and positions; forward and backward are collective."""

    def __init__(
        self,
        k0: Tensor,
        v0: Tensor,
        *,
        ulysses: RankGroup | None,
        ring: RankGroup | None,
        kernel: Kernel,
        max_keys: int | None = None,
    ) -> None:
        """k0, v0 [n, M, H], n the same on all ranks; None = a dimension of one rank."""
        self.ulysses, self.ring = ulysses, ring
        self.tokens = [k0.shape[0]] * (1 if ulysses is None else ulysses.size)
        self.kv = torch.stack([self._to_heads(x, self.tokens) for x in (k0, v0)])
        self.d_kv, _ = gradient_buffers(self.kv, self.kv[:0])
        self.attention = SegmentAttention(kernel, k0.shape[-1] ** -0.5, max_keys)

    # --- Ulysses: rows for heads ----------------------------------------------------------

    def _to_heads(self, x: Tensor, rows: list[int]) -> Tensor:
        """This rank's rows of all heads -> all ranks' rows of this rank's heads.

        rows: of each rank. (R, N, H) -> (U, R, N/U, H) -> all-to-all -> (sum R, N/U, H)
        """
        if self.ulysses is None:
            return x
        size, (own, heads, width) = self.ulysses.size, x.shape
        by_rank = x.view(own, size, heads // size, width).transpose(0, 1)
        by_rank = by_rank.reshape(size * own, heads // size, width)
        return self.ulysses.all_to_all(by_rank, [own] * size, rows)

    def _to_rows(self, x: Tensor, rows: list[int]) -> Tensor:
        """The way back: (sum R, N/U, H) -> all-to-all -> (U, R, N/U, H) -> (R, N, H)."""
        if self.ulysses is None:
            return x
        size = self.ulysses.size
        own = rows[self.ulysses.rank]
        back = self.ulysses.all_to_all(x, rows, [own] * size)
        return back.unflatten(0, (size, own)).transpose(0, 1).flatten(1, 2)

    # --- ring: windows pass by ------------------------------------------------------------

    def _windows(self) -> Iterator[tuple[int, Tensor]]:
        """(window, its keys and values [2, U*n, M/U, H]), this rank's own first."""
        if self.ring is None:
            yield 0, self.kv
            return
        kv = self.kv
        for turn in range(self.ring.size):
            is_last = turn == self.ring.size - 1
            arriving = None if is_last else self.ring.shift(kv)  # while this window is attended
            yield (self.ring.rank - turn) % self.ring.size, kv
            if arriving is not None:
                kv = arriving()

    def forward(self, q: Tensor, step: ChunkStep) -> tuple[Tensor, Tensor]:
        peers = list(step.peers)
        work = self.d_kv.dtype
        q = self._to_heads(q, peers)
        # Sums over windows run in at least fp32, whatever q is.
        o = torch.zeros(q.shape, dtype=work, device=q.device)
        lse = torch.full(q.shape[:2], float("-inf"), dtype=work, device=q.device)
        for window, (k, v) in self._windows():
            origin = window * k.shape[0]
            for rows, own, own_lse in self.attention.forward(
                q, k, v, step.windows[window], origin=origin
            ):
                total = torch.logaddexp(lse[rows], own_lse)
                o[rows] *= (lse[rows] - total).exp_()[..., None]
                o[rows] += own.to(work) * (own_lse - total).exp_()[..., None]
                lse[rows] = total
        return (
            self._to_rows(o.to(q.dtype), peers),
            self._to_rows(lse[..., None], peers)[..., 0],
        )

    def backward(self, do: Tensor, q: Tensor, o: Tensor, lse: Tensor, step: ChunkStep) -> Tensor:
        peers, width = list(step.peers), q.shape[-1]
        do, q, o = self._to_heads(torch.cat((do, q, o), dim=-1), peers).split(width, dim=-1)
        do, q, o = do.contiguous(), q.contiguous(), o.contiguous()
        lse = self._to_heads(lse[..., None], peers)[..., 0]
        dq = torch.zeros(q.shape, dtype=self.d_kv.dtype, device=q.device)
        # A window's gradients of this call travel with it and arrive home after a full turn.
        d_kv = self.d_kv if self.ring is None else torch.zeros_like(self.d_kv)
        for window, (k, v) in self._windows():
            dk, dv = d_kv
            for rows, own in self.attention.backward(
                do, q, k, v, o, lse, step.windows[window],
                dk=dk, dv=dv, origin=window * k.shape[0],
            ):  # fmt: skip
                dq[rows] += own
            if self.ring is not None:
                d_kv = self.ring.shift(d_kv, tag=1)()
        if self.ring is not None:
            self.d_kv += d_kv
        return self._to_rows(dq.to(q.dtype), peers)

    def finish(self) -> tuple[Tensor, Tensor]:
        dk, dv = map(self._to_rows, self.d_kv, repeat(self.tokens))
        return dk, dv
