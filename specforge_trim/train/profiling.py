"""A torch profiler trace of a few steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Protocol

import torch

from specforge_trim.config.training import PROFILE_WARM_UP
from specforge_trim.ranks.world import World

logger = logging.getLogger(__name__)


class Profiler(Protocol):
    """Told of every step's end."""

    def step(self) -> None: ...


class _Nothing:
    def step(self) -> None:
        """Nothing is traced."""


def profiled(
    steps: int, folder: Path, *, world: World, done: int, total: int
) -> AbstractContextManager[Profiler]:
    """Writes folder/rank-R.json.gz, a trace of `steps` steps behind PROFILE_WARM_UP; 0 = nothing.

    done, total: steps of the run taken before, and in all. A run that goes on with fewer left than
    are asked for traces those, and says so. Every rank calls this; it raises ValueError for a run
    that is too short as a whole.
    """
    traced = world.together(lambda: _traced(steps, done=done, total=total)) if steps else 0
    if not traced:
        return nullcontext(_Nothing())
    return _tracing(traced, folder / f"rank-{world.rank}.json.gz")


def _traced(steps: int, *, done: int, total: int) -> int:
    """How many of the steps asked for are traced before the run ends."""
    if total < steps + PROFILE_WARM_UP:
        raise ValueError(
            f"profile = {steps} traces {steps} steps after {PROFILE_WARM_UP} to warm up, and this "
            f"run has {total} in all: lower --profile, or raise --max-steps or --epochs"
        )
    left = max(0, total - done - PROFILE_WARM_UP)
    if left < steps:
        logger.warning(
            "profile = %d: this run has %d steps left, so %d are traced", steps, total - done, left
        )
    return min(steps, left)


@contextmanager
def _tracing(steps: int, path: Path) -> Iterator[Profiler]:
    """A run that is stopped before leaves a shorter trace, or none."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)

    def write(profiler: torch.profiler.profile) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        logger.info("profile of %d steps: %s", profiler.step_num - PROFILE_WARM_UP, path)

    schedule = torch.profiler.schedule(wait=0, warmup=PROFILE_WARM_UP, active=steps, repeat=1)
    with torch.profiler.profile(
        activities=activities, schedule=schedule, on_trace_ready=write, record_shapes=True
    ) as profiler:
        yield profiler
