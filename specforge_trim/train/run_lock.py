"""One run at a time in an output folder: two would tear each other's metrics and checkpoints."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from specforge_trim.distributed import World

_WAIT = 10.0  # seconds that a killed run's last process may take to notice


@contextmanager
def only_run(folder: Path, world: World) -> Iterator[None]:
    """Holds `folder` for this run; reached by every rank, rank 0 holds it.

    Raises ValueError naming the folder and the process that has it.
    """
    held = world.together(lambda: hold(folder) if world.is_main else None)
    try:
        yield
    finally:
        if held is not None:
            held.close()


def hold(folder: Path, *, wait: float = _WAIT) -> TextIO:
    """The open lock file folder/.lock; closing it, or the end of the process, frees the folder.

    The lock is the process's own (fcntl.lockf): loader processes, which outlive a killed run for
    a moment, do not inherit it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = (folder / ".lock").open("a+", encoding="utf-8")
    deadline = time.monotonic() + wait
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):  # held; which of the two depends on the system
            if time.monotonic() < deadline:
                time.sleep(0.2)
                continue
            file.seek(0)
            holder = file.read().strip()
            file.close()
            raise ValueError(
                f"output_dir {folder} is in use by another run ({holder or 'just starting'}): "
                "wait for it, stop it, or choose another --output-dir"
            ) from None
    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
    file.flush()
    return file
