"""Collectives of one group of ranks, with a name for what went wrong and a count of what was sent.

Knows nothing of attention or plans. Every method is collective: all ranks of the group call it,
in the same order, whatever their data.

Letters: P ranks of the group, n entries of this rank.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from specforge_trim.ranks.world import PeerLost, lost_reason

# torch renames these two; the old names warn where the new ones exist.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class RankGroup:
    """This process among the ranks of one group.

    group: the process group. rank, size: inside it. timeout: how long an operation waits for
    another rank. name: for messages. sent: bytes this rank has sent to others, by operation; adds
    up until cleared.
    """

    group: dist.ProcessGroup
    rank: int
    size: int
    timeout: datetime.timedelta
    name: str = "sequence"
    sent: dict[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, group: dist.ProcessGroup, *, name: str, timeout: datetime.timedelta) -> RankGroup:
        return cls(group, dist.get_rank(group), dist.get_world_size(group), timeout, name)

    @property
    def bytes_sent(self) -> int:
        return sum(self.sent.values())

    def agree_min(self, votes: Tensor) -> Tensor:
        """Elementwise minimum over ranks of an int32 CPU tensor (1 = yes: all agree)."""
        assert votes.dtype == torch.int32 and votes.device.type == "cpu", votes
        self._count("all_reduce", 2 * (self.size - 1) * _bytes(votes) // self.size)
        with self.named("agreement"):
            dist.all_reduce(votes, op=dist.ReduceOp.MIN, group=self.group)
        return votes

    def start_sum(self, x: Tensor) -> dist.Work:
        """Starts the sum over ranks of x, in place; `wait` for the result."""
        self._count("all_reduce", 2 * (self.size - 1) * _bytes(x) // self.size)
        with self.named("sum"):
            return dist.all_reduce(x, group=self.group, async_op=True)

    def wait(self, work: dist.Work, what: str = "sum", *, on_cpu: bool = True) -> None:
        """Waits for an operation; on a device, only makes the current stream wait for it."""
        with self.named(what):
            work.wait(self.timeout) if on_cpu else work.wait()

    def all_gather(self, x: Tensor) -> Tensor:
        """[n, ...] of every rank, n the same on all, end to end: [P * n, ...]."""
        out = x.new_empty(self.size * x.shape[0], *x.shape[1:])
        self._count("all_gather", (self.size - 1) * _bytes(x))
        with self.named("all_gather"):
            work = _all_gather(out, x.contiguous(), group=self.group, async_op=True)
        self.wait(work, "all_gather", on_cpu=not x.is_cuda)
        return out

    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Rank r's [n, ...] of the sum over ranks of x [P * n, ...]."""
        out = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        self._count("reduce_scatter", (self.size - 1) * _bytes(out))
        with self.named("reduce_scatter"):
            work = _reduce_scatter(out, x.contiguous(), group=self.group, async_op=True)
        self.wait(work, "reduce_scatter", on_cpu=not x.is_cuda)
        return out

    def all_to_all(self, x: Tensor, send: Sequence[int], receive: Sequence[int]) -> Tensor:
        """Entries of x in order of the rank they go to -> those received, in order of sender.

        send[r], receive[r]: how many entries go to and come from rank r; any may be 0.
        """
        assert sum(send) == x.shape[0], (send, x.shape)
        out = x.new_empty(sum(receive), *x.shape[1:])
        entry = _bytes(x) // max(x.shape[0], 1)
        self._count("all_to_all", (x.shape[0] - send[self.rank]) * entry)
        with self.named("all_to_all"):
            work = dist.all_to_all_single(
                out, x.contiguous(), list(receive), list(send), group=self.group, async_op=True
            )
        self.wait(work, "all_to_all", on_cpu=not x.is_cuda)
        return out

    def shift(self, x: Tensor, *, tag: int = 0) -> Callable[[], Tensor]:
        """Starts sending x to the next rank; call the result for what the previous rank sent.

        x has the same shape on all ranks and must not change before. tag: tells two shifts that
        are under way at once apart.
        """
        x, out = x.contiguous(), torch.empty_like(x)
        self._count("shift", _bytes(x))
        after, before = (
            dist.get_global_rank(self.group, (self.rank + step) % self.size) for step in (1, -1)
        )
        with self.named("send to the next rank"):
            requests = dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, x, after, self.group, tag),
                    dist.P2POp(dist.irecv, out, before, self.group, tag),
                ]
            )

        def wait() -> Tensor:
            for request in requests:
                self.wait(request, "exchange with a neighbour", on_cpu=not x.is_cuda)
            return out

        return wait

    def _count(self, operation: str, count: int) -> None:
        self.sent[operation] = self.sent.get(operation, 0) + count

    @contextmanager
    def named(self, what: str) -> Iterator[None]:
        """Turns an error of a collective inside into PeerLost with this rank and its group."""
        try:
            yield
        except RuntimeError as error:
            raise PeerLost(
                f"rank {dist.get_rank()}: {what} in the {self.name} group of {self.size} ranks "
                f"did not complete: {lost_reason(error)}"
            ) from error


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
