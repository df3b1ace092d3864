"""Loader processes: what they do about signals, and how their death is told."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Generator
from typing import Any

from torch.utils.data import DataLoader

_GRACE = 60  # seconds that a loader process lives on after SIGTERM


def start_worker(worker: int) -> None:
    """Ties a loader process to its parent; worker_init_fn of a DataLoader.

    Ctrl-C, and the SIGTERM of many schedulers, reach the whole process group while the parent
    still finishes a step and may ask for one more batch. A process whose parent was killed would
    wait forever to hand over a batch that no one reads, and hold the parent's files.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.alarm(_GRACE))
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def surviving(loader: DataLoader) -> Generator[Any, None, None]:
    """The loader's items. Close it to end the loader processes.

    Raises ChildProcessError for a loader process that died. torch raises for it from within
    whatever the main thread does at that moment, be it a save; with its signal handler set aside,
    the next fetch does.
    """
    items = iter(loader)
    before = signal.getsignal(signal.SIGCHLD)
    ours = loader.num_workers and threading.current_thread() is threading.main_thread()
    if ours:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        yield from items
    except RuntimeError as error:
        if not str(error).startswith("DataLoader worker (pid"):
            raise
        raise ChildProcessError(
            f"a loader process was killed or crashed ({str(error).splitlines()[0]}); out of "
            "memory is the usual cause: lower --num-workers (0 = in the main process). The same "
            "command continues from the newest checkpoint"
        ) from error
    finally:
        del items  # ends the loader processes, also where a traceback holds this frame
        if ours:
            signal.signal(signal.SIGCHLD, before)
