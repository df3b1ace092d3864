"""This process's peak memory: the device allocator's on CUDA, anonymous pages on a CPU.

Features are read from mapped files, whose pages count as resident although the kernel drops them
when it likes; anonymous pages are what the computation needs.  Linux keeps no peak of them, so a
thread looks every few milliseconds.
"""

from __future__ import annotations

import os
import resource
import threading
from pathlib import Path

import torch

_SECONDS = 0.02
_STATM = Path("/proc/self/statm")  # pages: total, resident, of which backed by files or shared


class PeakMemory:
    """Bytes at the highest point; on a CPU, inside a `with` block of this object."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._watches = device.type == "cpu" and _STATM.exists()
        self._peak = 0
        self._done = threading.Event()

    def __enter__(self) -> PeakMemory:
        if self._watches:
            threading.Thread(target=self._watch, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()

    def _watch(self) -> None:
        while not self._done.wait(_SECONDS):
            self._peak = max(self._peak, anonymous_bytes())

    def read(self) -> int:
        """CUDA: max_memory_allocated.  CPU: peak RssAnon, or peak resident size without /proc."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        if not self._watches:
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS
        self._peak = max(self._peak, anonymous_bytes())
        return self._peak


def anonymous_bytes() -> int:
    """RssAnon of this process now."""
    _, resident, shared = map(int, _STATM.read_bytes().split()[:3])
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")
