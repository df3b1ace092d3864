"""Context attention by an explicit mask from absolute positions: the specification.

Any row set works, at the price of a [rows x context] score matrix per block of rows. It reads
the rows and their documents only, never the segments that the fast path is cut into.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specforge_trim.attention.context_kv import gradient_buffers
from specforge_trim.plan.segments import ChunkStep

_BLOCK_ROWS = 128


class ReferenceKV:
    """Row t attends to the context keys s with doc_start(t) <= s <= t."""

    def __init__(self, k0: Tensor, v0: Tensor, *, doc_start: Tensor) -> None:
        """k0, v0 [T, M, H]; doc_start int64 [T], first position of each token's document."""
        self.k0, self.v0, self.doc_start = k0, v0, doc_start
        self.dk, self.dv = gradient_buffers(k0, v0)
        self.scale = k0.shape[-1] ** -0.5

    def _probabilities(self, q: Tensor, rows: Tensor, lse: Tensor | None) -> tuple[Tensor, Tensor]:
        """Grouped softmax weights [M, G, R, T] against `lse` [R, N] (None: their own)."""
        work, heads = self.dk.dtype, self.k0.shape[1]
        grouped = q.unflatten(1, (heads, -1)).to(work)
        scores = torch.einsum("rmgh,tmh->mgrt", grouped, self.k0.to(work)) * self.scale
        keys = torch.arange(self.k0.shape[0], device=q.device)
        first, last = self.doc_start[rows], rows
        seen = (keys >= first[:, None]) & (keys <= last[:, None])
        scores = scores.masked_fill(~seen, float("-inf"))
        if lse is None:
            total = scores.logsumexp(-1)
        else:
            total = lse.unflatten(1, (heads, -1)).permute(1, 2, 0)
        return (scores - total[..., None]).exp(), total

    def forward(self, q: Tensor, step: ChunkStep) -> tuple[Tensor, Tensor]:
        o = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=self.dk.dtype, device=q.device)
        for a in range(0, q.shape[0], _BLOCK_ROWS):
            block = slice(a, a + _BLOCK_ROWS)
            p, total = self._probabilities(q[block], step.rows[block], None)
            out = torch.einsum("mgrt,tmh->rmgh", p, self.v0.to(p.dtype))
            o[block] = out.flatten(1, 2).to(q.dtype)
            lse[block] = total.permute(2, 0, 1).flatten(1)
        return o, lse

    def backward(self, do: Tensor, q: Tensor, o: Tensor, lse: Tensor, step: ChunkStep) -> Tensor:
        dq = torch.empty_like(q)
        work, groups = self.dk.dtype, (self.k0.shape[1], -1)
        for a in range(0, q.shape[0], _BLOCK_ROWS):
            block = slice(a, a + _BLOCK_ROWS)
            p, _ = self._probabilities(q[block], step.rows[block], lse[block])
            do_g = do[block].unflatten(1, groups).to(work)
            delta = (do_g * o[block].unflatten(1, groups).to(work)).sum(-1).permute(1, 2, 0)
            dp = torch.einsum("rmgh,tmh->mgrt", do_g, self.v0.to(work))
            ds = p * (dp - delta[..., None]) * self.scale
            self.dv += torch.einsum("mgrt,rmgh->tmh", p, do_g)
            q_g = q[block].unflatten(1, groups).to(work)
            self.dk += torch.einsum("mgrt,rmgh->tmh", ds, q_g)
            dq[block] = torch.einsum("mgrt,tmh->rmgh", ds, self.k0.to(work)).flatten(1, 2)
        return dq

    def finish(self) -> tuple[Tensor, Tensor]:
        return self.dk, self.dv
