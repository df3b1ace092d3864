"""One run at a time in an output folder: two would tear each other's metrics and checkpoints."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from specforge_trim.ranks.world import World

_WAIT = 10.0  # seconds that a killed run's last process may take to notice
_LOCK = ".lock"


@contextmanager
def only_run(folder: Path, world: World) -> Iterator[None]:
    """Holds `folder` for this run; reached by every rank, rank 0 holds it.

    A run that ends without having written anything leaves nothing, nor the folders it made.
    Raises ValueError naming the folder and the process that has it, OSError where nothing can be
    written.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    held = world.together(lambda: hold(folder) if world.is_main else None)
    try:
        yield
    finally:
        if held is not None:
            release(held, folder, made)


def hold(folder: Path, *, wait: float = _WAIT) -> TextIO:
    """The open lock file folder/.lock; closing it, or the end of the process, frees the folder.

    The lock is the process's own (fcntl.lockf): loader processes, which outlive a killed run for
    a moment, do not inherit it.
    """
    deadline = time.monotonic() + wait
    while True:
        file = _open(folder)
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_current(file, folder / _LOCK):
                break
            file.close()  # the run before has just ended and removed it
        except (BlockingIOError, PermissionError):  # held; which of the two depends on the system
            file.seek(0)
            holder = file.read().strip()
            file.close()
            if time.monotonic() >= deadline:
                raise ValueError(
                    f"output_dir {folder} is in use by another run ({holder or 'just starting'}): "
                    "wait for it, stop it, or choose another --output-dir"
                ) from None
            time.sleep(0.2)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {os.uname().nodename}\n")
    file.flush()
    return file


def _open(folder: Path) -> TextIO:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / _LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise OSError(
            f"output_dir = {str(folder)!r} cannot be written ({error.strerror}): choose another "
            "--output-dir"
        ) from error


def _is_current(file: TextIO, path: Path) -> bool:
    """Whether the open file is still the one at this path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def release(file: TextIO, folder: Path, made: Sequence[Path] = ()) -> None:
    """Frees the folder and removes the lock file; of the folders `made` those that are empty."""
    with suppress(OSError):  # such as a disk that has become read-only
        (folder / _LOCK).unlink(missing_ok=True)
        for path in made:
            path.rmdir()
    file.close()
