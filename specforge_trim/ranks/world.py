"""Ranks: start-up, agreement, and the sum of gradients.

Nothing here is global: `start()` returns a frozen `World` that is passed to whoever needs it.  A
single process without torchrun is a World of size 1 whose collectives do nothing.  Control
messages travel as CPU tensors (gloo), so that asking for agreement never waits for the device.
"""

from __future__ import annotations

import datetime
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from specforge_trim.config.options import ConfigError

T = TypeVar("T")


class PeerFailed(RuntimeError):
    """Another rank could not do its part and has reported why; this one ends quietly."""


class PeerLost(RuntimeError):
    """Another rank, or the launcher of this one, is gone."""


class Stopped(RuntimeError):
    """A signal asked this run to stop, and its state is saved."""

    def __init__(self, signal: int, message: str) -> None:
        super().__init__(message)
        self.signal = signal


def lost_reason(error: RuntimeError) -> str:
    """The first line of what a failed collective says, without the place in the library's source;
    the rest is the library's own stack."""
    first = (str(error).strip() or "no reason given").splitlines()[0]
    return re.sub(r"^\[\S+:\d+\] ", "", first)


@dataclass(frozen=True, kw_only=True)
class World:
    """This process among its peers."""

    rank: int
    size: int
    device: torch.device
    group: dist.ProcessGroup | None = None  # None: a single process without collectives
    launcher: int | None = None  # process id of the torchrun that started this rank
    timeout: datetime.timedelta = datetime.timedelta(minutes=30)  # of every collective

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def see_launcher(self) -> None:
        """Raises PeerLost when torchrun is gone: nobody would end this rank.

        A worker that trained on would do so beside the run that the user starts next.
        """
        if self.launcher is not None and os.getppid() != self.launcher:
            raise PeerLost(
                f"torchrun (process {self.launcher}), which started this one, is gone, so "
                "training stops; the same command continues from the newest checkpoint"
            )

    def barrier(self) -> None:
        """Waits for every rank; fails after the timeout given to `start`."""
        self.agree_min(torch.ones(1, dtype=torch.int32))

    def agree_min(self, values: Tensor) -> Tensor:
        """Elementwise minimum over ranks of an int32 CPU tensor (1 = yes: all agree)."""
        assert values.dtype == torch.int32 and values.device.type == "cpu", values
        return self._all_reduce(values, dist.ReduceOp.MIN)

    def sum(self, values: Tensor) -> Tensor:
        """Elementwise sum over ranks, in place; any device, one dtype and shape on all ranks."""
        return self._all_reduce(values, dist.ReduceOp.SUM)

    def _all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> Tensor:
        if self.group is not None:
            self._exchange(lambda: dist.all_reduce(values, op=op, group=self.group))
        return values

    def _exchange(self, call: Callable[[], object]) -> None:
        try:
            call()
        except RuntimeError as error:
            raise PeerLost(
                f"rank {self.rank}: contact with another rank was lost: {lost_reason(error)}"
            ) from error

    def together(self, work: Callable[[], T]) -> T:
        """Runs `work` on every rank; raises where it failed first, PeerFailed on the others.

        A failure anywhere ends every rank, and only the lowest rank that failed says why.
        """
        return self.voted(work, lambda: 0)[0]

    def voted(self, work: Callable[[], T], vote: Callable[[], int]) -> tuple[T, int]:
        """The same, with the highest vote of all ranks; a vote is cast after the work."""
        error: Exception | None = None
        try:
            result = work()
        except Exception as caught:  # reported to the peers, then raised again below
            error = caught
        # Reached by every rank, failed or not: otherwise the others would wait for this one.
        # A rank that only heard of a failure stands behind those that can say why.
        mine = 2 * self.size
        if error is not None:
            mine = self.rank + (self.size if isinstance(error, PeerFailed) else 0)
        answer = self.agree_min(torch.tensor([mine, -vote()], dtype=torch.int32)).tolist()
        if answer[0] == 2 * self.size:
            return result, -answer[1]
        if error is not None and answer[0] == mine:
            raise error
        raise PeerFailed(f"rank {answer[0] % self.size} could not go on")

    def share(self, value: T) -> T:
        """Rank 0's value (any object that pickles) on every rank."""
        if self.group is None:
            return value
        box = [value]
        self._exchange(lambda: dist.broadcast_object_list(box, group_src=0, group=self.group))
        return box[0]

    def gather(self, value: T) -> list[T]:
        """Every rank's value, in their order, on every rank."""
        if self.group is None:
            return [value]
        values: list[T] = [value] * self.size
        self._exchange(lambda: dist.all_gather_object(values, value, group=self.group))
        return values

    def first(self, work: Callable[[], T]) -> T:
        """Runs `work` on rank 0, then on the others, which find its results on disk."""
        mine = self.together(lambda: work() if self.is_main else None)
        others = self.together(lambda: None if self.is_main else work())
        return mine if self.is_main else others  # type: ignore[return-value]


def start(*, device: str = "auto", timeout_minutes: float = 30.0) -> World:
    """Joins the ranks that torchrun started, or makes a World of one process.

    Args:
        device: "cpu", "cuda", or "auto" = cuda where there is one.
        timeout_minutes: how long a collective waits for a rank before it fails.
    Raises:
        ConfigError: cuda was asked for and is not there, or fewer devices than local ranks.
    """
    rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    launcher = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda":
        if not torch.cuda.is_available():
            raise ConfigError("device = 'cuda', but torch sees no CUDA device; use --device cpu")
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", local_rank + 1))
        if local_ranks > torch.cuda.device_count():
            raise ConfigError(
                f"device = 'cuda': {local_ranks} ranks on this machine need a device each, there "
                f"are {torch.cuda.device_count()}; lower --nproc_per_node"
            )
        torch.cuda.set_device(local_rank)
        place = torch.device("cuda", local_rank)
    else:
        place = torch.device("cpu")
    if "RANK" not in os.environ or size == 1:
        return World(rank=0, size=1, device=place, launcher=launcher)
    timeout = datetime.timedelta(minutes=timeout_minutes)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        timeout=timeout,
        device_id=place if device == "cuda" else None,
    )
    return World(
        rank=rank,
        size=size,
        device=place,
        group=dist.group.WORLD,
        launcher=launcher,
        timeout=timeout,
    )


def stop(world: World) -> None:
    """Leaves the group; without effect for a single process."""
    if world.group is not None and dist.is_initialized():
        dist.destroy_process_group()


@torch.no_grad()
def sum_gradients(parameters: Iterable[torch.nn.Parameter], world: World) -> None:
    """Replaces every trainable parameter's gradient by its sum over ranks, in fp32 or wider.

    One flat all_reduce.  A parameter without gradient counts as zeros, so that a rank without a
    supervised row sends the same bytes as the others; afterwards every gradient exists.
    """
    trainable = [p for p in parameters if p.requires_grad]
    for p in trainable:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    if world.group is None or not trainable:
        return
    wide = torch.float64 if any(p.dtype == torch.float64 for p in trainable) else torch.float32
    flat = torch.cat([p.grad.flatten().to(wide) for p in trainable])  # type: ignore[union-attr]
    world.sum(flat)
    parts = flat.split([p.numel() for p in trainable])
    for p, part in zip(trainable, parts, strict=True):
        assert p.grad is not None
        p.grad.copy_(part.view_as(p))
