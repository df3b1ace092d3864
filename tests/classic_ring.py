"""The classic unroll where ranks share a sequence: ring attention over blocks of tokens.

Each rank holds T/P tokens and runs every row of them at every step in one graph; step-0 keys and
values travel round the ring at every step, forward and backward, and their gradients with them.

Letters: T tokens, P ranks, n tokens of a rank, N heads, M key/value heads, H head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from classic import _bnth, flash, flash_backward


@dataclass(frozen=True)
class RingContext:
    """Step-0 keys of which each rank holds a block of n tokens; n is the same on all ranks.

    bounds: (start, end) of each document; scale: 1 / sqrt(H).
    """

    bounds: list[tuple[int, int]]
    scale: float
    rank: int
    size: int

    def _shift(self, x):
        """x of the previous rank; every rank calls it."""
        if self.size == 1:
            return x
        out = torch.empty_like(x)
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        requests = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, x, after), dist.P2POp(dist.irecv, out, before)]
        )
        for request in requests:
            request.wait()
        return out

    def _turns(self, n):
        """(block held at this turn, its pieces): own queries [a, b), keys [c, d), causal."""
        lo = self.rank * n
        for turn in range(self.size):
            block = (self.rank - turn) % self.size
            first, pieces = block * n, []
            for start, end in self.bounds:
                a, b = max(start, lo), min(end, lo + n)
                c, d = max(start, first), min(end, first + n)
                if block <= self.rank and a < b and c < d:
                    rows, keys = slice(a - lo, b - lo), slice(c - first, d - first)
                    pieces.append((rows, keys, block == self.rank))
            yield turn, pieces

    def forward(self, q, k0, v0):
        wide = torch.float64 if q.dtype == torch.float64 else torch.float32
        o = torch.zeros(q.shape, dtype=wide)
        lse = torch.full(q.shape[:2], float("-inf"), dtype=wide)
        kv = torch.stack((k0, v0))
        for turn, pieces in self._turns(q.shape[0]):
            for rows, keys, causal in pieces:
                own, own_lse = flash(
                    _bnth(q[rows]), _bnth(kv[0, keys]), _bnth(kv[1, keys]), 0.0, causal,
                    scale=self.scale,
                )  # fmt: skip
                own, own_lse = own[0].transpose(0, 1), own_lse[0].transpose(0, 1)
                total = torch.logaddexp(lse[rows], own_lse)
                o[rows] *= (lse[rows] - total).exp()[..., None]
                o[rows] += own * (own_lse - total).exp()[..., None]
                lse[rows] = total
            if turn < self.size - 1:
                kv = self._shift(kv)
        return o.to(q.dtype), lse

    def backward(self, do, q, k0, v0, o, lse):
        dq, kv = torch.zeros_like(q), torch.stack((k0, v0))
        d_kv = torch.zeros_like(kv)
        for turn, pieces in self._turns(q.shape[0]):
            for rows, keys, causal in pieces:
                grads = flash_backward(
                    _bnth(do[rows]), _bnth(q[rows]), _bnth(kv[0, keys]), _bnth(kv[1, keys]),
                    _bnth(o[rows]), lse[rows].transpose(0, 1)[None], 0.0, causal,
                    scale=self.scale,
                )  # fmt: skip
                for part, grad in zip(
                    (dq[rows], d_kv[0, keys], d_kv[1, keys]), grads, strict=True
                ):
                    part += grad[0].transpose(0, 1)
            if turn < self.size - 1:
                kv = self._shift(kv)
            d_kv = self._shift(d_kv)  # home after a whole turn
        return dq, d_kv[0], d_kv[1]


def own_rows(rows, lo, hi):
    """loss_rows of all tokens -> ([(rows counted from lo, their teacher)], teachers kept).

    The teachers kept are places in S, ascending; a row's teacher counts within them.
    """
    inside = [((t >= lo) & (t < hi)).nonzero().flatten() for t, _ in rows]
    kept = torch.cat([s[i] for (_, s), i in zip(rows, inside, strict=True)]).unique()
    return [
        (t[i] - lo, torch.searchsorted(kept, s[i])) for (t, s), i in zip(rows, inside, strict=True)
    ], kept
