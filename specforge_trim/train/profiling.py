"""A torch profiler trace of a few steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

logger = logging.getLogger(__name__)
WARM_UP = 2  # steps before those of the trace: the first ones allocate and compile


class Profiler(Protocol):
    """Told of every step's end."""

    def step(self) -> None: ...


class _Nothing:
    def step(self) -> None:
        """Nothing is traced."""


@contextmanager
def profiled(steps: int, folder: Path, *, rank: int) -> Iterator[Profiler]:
    """Writes folder/rank-R.json.gz, a trace of `steps` steps behind WARM_UP; 0 = nothing.

    A run that ends before leaves a shorter trace.
    """
    if not steps:
        yield _Nothing()
        return
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    path = folder / f"rank-{rank}.json.gz"

    def write(profiler: torch.profiler.profile) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        logger.info("profile of %d steps: %s", steps, path)

    schedule = torch.profiler.schedule(wait=0, warmup=WARM_UP, active=steps, repeat=1)
    with torch.profiler.profile(
        activities=activities, schedule=schedule, on_trace_ready=write, record_shapes=True
    ) as profiler:
        yield profiler
