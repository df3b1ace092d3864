"""Gradients over ranks: one sum per optimizer step, none in between.

    Replicated     every rank holds all weights. Two buckets: row-only weights as soon as the last
                   row chunk is done, while the context backward still runs; then the rest
    FullySharded   FSDP2: weights, gradients and optimizer state are split over ranks; whole
                   weights exist while a step's micro-batches run

Each is begun before the micro-batches of a step and finished after them, on every rank, also on
one without a micro-batch. The sums are over all ranks, data and sequence parallel alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from specforge_trim.ranks.group import RankGroup
from specforge_trim.ranks.world import World


class Reducer(Protocol):
    """The weights' gradients over ranks."""

    def begin(self) -> None:
        """Before the first micro-batch: whole weights, each with a gradient."""
        ...

    def rows_done(self) -> None:
        """After the last row chunk of the last micro-batch, or instead of one."""
        ...

    def finish(self) -> None:
        """After the last micro-batch; then every gradient is the sum over ranks."""
        ...

    def whole(self) -> AbstractContextManager[None]:
        """Whole weights outside of a step; gradients made there reach no rank. Collective."""
        ...


def make_reducer(
    model: nn.Module, world: World, *, early: Sequence[Tensor] = (), fsdp: bool
) -> Reducer:
    """The reducer of a run. With fsdp the model's weights are split here, before the optimizer
    is built on them.

    early: trainable weights whose gradients are complete first.
    """
    return FullySharded(model, world) if fsdp else Replicated(model, world, early=early)


def ensure_gradients(model: torch.nn.Module) -> None:
    """Give every trainable parameter a gradient of zero where it has none.

    A batch without supervised rows then still takes part in every reduction.
    """
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


class Replicated:
    """Every rank holds all weights and sums all gradients."""

    def __init__(self, model: nn.Module, world: World, *, early: Sequence[Tensor] = ()) -> None:
        self._model = model
        self._group: RankGroup | None = None
        if world.group is not None:
            self._group = RankGroup.of(world.group, name="world", timeout=world.timeout)
        names = {id(p) for p in early}
        late = [p for p in model.parameters() if p.requires_grad and id(p) not in names]
        self._early = _Bucket(early) if early else None
        self._late = _Bucket(late)

    def begin(self) -> None:
        ensure_gradients(self._model)

    def rows_done(self) -> None:
        if self._group is not None and self._early is not None:
            self._early.start(self._group)

    def finish(self) -> None:
        if self._group is not None:
            self._late.start(self._group)
            if self._early is not None:
                self._early.wait(self._group)
            self._late.wait(self._group)

    def whole(self) -> AbstractContextManager[None]:
        return nullcontext()


class _Bucket:
    """Some gradients in one all_reduce, in fp32 or wider."""

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self._parameters = parameters
        self._flat: Tensor | None = None
        self._work: dist.Work | None = None

    @torch.no_grad()
    def start(self, group: RankGroup) -> None:
        assert self._flat is None, "a bucket is reduced once per step"
        double = any(p.dtype == torch.float64 for p in self._parameters)
        wide = torch.float64 if double else torch.float32
        gradients = [p.grad for p in self._parameters]
        self._flat = torch.cat([g.flatten().to(wide) for g in gradients if g is not None])
        self._work = group.start_sum(self._flat)

    @torch.no_grad()
    def wait(self, group: RankGroup) -> None:
        assert self._flat is not None and self._work is not None, "rows_done was not called"
        group.wait(self._work, on_cpu=not self._flat.is_cuda)
        parts = self._flat.split([p.numel() for p in self._parameters])
        for p, part in zip(self._parameters, parts, strict=True):
            assert p.grad is not None
            p.grad.copy_(part.view_as(p))
        self._flat, self._work = None, None


class _Tied(nn.Module):
    """The draft inside a module whose forward is a zero that hangs on every trainable weight."""

    def __init__(self, draft: nn.Module) -> None:
        super().__init__()
        self.draft = draft

    def forward(self) -> Tensor:
        zeros = [p.flatten()[0] * 0 for p in self.draft.parameters() if p.requires_grad]
        return torch.stack(zeros).sum()


class FullySharded:
    """FSDP2 around a step whose micro-batches it does not see.

    The weights are made whole once. Row chunks and context chunks add to plain gradients of plain
    weights, without hooks. Then one backward of `_Tied` runs with synchronisation on: it adds
    zero, and FSDP2 reduce-scatters what is there. All ranks issue the same collectives whatever
    their chunks were.
    """

    def __init__(self, model: nn.Module, world: World) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(world.device.type, (world.size,))
        self._model = model
        self._root: Any = fully_shard(_Tied(model), mesh=mesh, reshard_after_forward=False)
        self._root.set_gradient_divide_factor(1.0)  # a sum over ranks, not their mean
        # Without this a factor becomes an operation of NCCL's own, which gloo refuses.
        self._root.set_force_sum_reduction_for_comms(True)
        assert world.group is not None
        self._group = RankGroup.of(world.group, name="world", timeout=world.timeout)

    def begin(self) -> None:
        with self._group.named("gathering the weights"):
            self._root.unshard()
        ensure_gradients(self._model)

    def rows_done(self) -> None:
        """Nothing: the one reduction comes after the context backward."""

    def finish(self) -> None:
        with self._group.named("sum of gradients"):
            self._root().backward()

    @contextmanager
    def whole(self) -> Iterator[None]:
        with self._group.named("gathering the weights"):
            self._root.unshard()
        try:
            yield
        finally:
            for parameter in self._model.parameters():
                parameter.grad = None  # of the whole weight; its shard keeps its own
            self._root.reshard()
