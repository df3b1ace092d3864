"""Training commands as forked children of one process that has imported everything.

Starting Python and torch takes seconds; a fork takes milliseconds. The parent must not have run a
backward pass (autograd's threads do not survive a fork), so `warm` starts a fresh process for it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import tiny


def warm(main: Callable[..., None], *arguments: object, report: Path, seconds: float) -> None:
    """Runs main(*arguments), importable by name, in a fresh process; raises with its traceback."""
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=_warm, args=(main, arguments, report))
    process.start()
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"no end after {seconds} s")
    if process.exitcode != 0:
        raise AssertionError(report.read_text() if report.exists() else process.exitcode)


def _warm(main: Callable[..., None], arguments: tuple, report: Path) -> None:
    import torch

    torch.set_num_threads(1)
    import torch._dynamo  # noqa: F401, the optimizer's first step would import it in every child

    from specforge_trim.cli.main import quiet_transformers
    from specforge_trim.train import run as pipeline  # noqa: F401

    quiet_transformers()
    try:
        main(*arguments)
    except BaseException:
        report.write_text(traceback.format_exc())
        os._exit(1)


class Child:
    """A training command in a process group of its own."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid, self.log = pid, log
        self._code: int | None = None

    @property
    def text(self) -> str:
        """What it wrote on stdout and stderr, the progress bar apart."""
        lines = self.log.read_text(errors="replace").replace("\r", "\n").splitlines()
        return "\n".join(line for line in lines if line.strip() and "step/s" not in line)

    def send(self, number: int, *, group: bool = False) -> None:
        if group:
            os.killpg(self.pid, number)
        else:
            os.kill(self.pid, number)

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
        return self._code

    def wait(self, seconds: float = 60.0) -> int:
        self.until(lambda: self.poll() is not None, seconds)
        assert self._code is not None
        return self._code

    def until(self, reached: Callable[[], object], seconds: float = 60.0) -> None:
        """Waits until the child has got somewhere; kills it when that takes too long."""
        deadline = time.monotonic() + seconds
        while not reached():
            if time.monotonic() > deadline:
                os.killpg(self.pid, signal.SIGKILL)
                raise AssertionError(f"not reached in {seconds} s:\n{self.text}")
            time.sleep(0.002)

    def workers(self) -> list[int]:
        """Process ids of its loader processes."""
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text()
        return [int(pid) for pid in children.split()]


def start(
    place: Path,
    name: str,
    *flags: str,
    hook: Callable[[], None] | None = None,
    rank: int = 0,
    ranks: int = 1,
    port: int = 0,
    ignore: tuple[int, ...] = (),
) -> Child:
    """Trains the recipe of `tiny.training_place` into place/name.

    hook: called in the child first; ignore: signals that the child is started with ignored.
    """
    log = place / f"{name}.{rank}.log"
    log.unlink(missing_ok=True)
    log.touch()
    pid = os.fork()
    if pid:
        return Child(pid, log)
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with its parent
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number in ignore:
            signal.signal(number, signal.SIG_IGN)
        if ranks > 1:
            os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        if hook is not None:
            hook()
        from specforge_trim.cli.main import train_main

        out = ("--output-dir", str(place / name))
        code = train_main(["--config", str(place / "recipe.yaml"), *out, *flags])
    except BaseException:
        traceback.print_exc()
        code = 70  # of no command: a traceback is a fault
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def start_ranks(place: Path, name: str, *flags: str, ranks: int = 2, **more) -> list[Child]:
    """The same on several ranks, without torchrun."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return [
        start(place, name, *flags, rank=rank, ranks=ranks, port=port, **more)
        for rank in range(ranks)
    ]


def rows(out: Path) -> list[dict]:
    """Metrics so far; [] before the first."""
    return tiny.metric_rows(out) if (out / "metrics.jsonl").exists() else []


def taken(out: Path, steps: int) -> Callable[[], bool]:
    """Whether a run has logged this many steps."""
    path = out / "metrics.jsonl"
    return lambda: path.exists() and path.read_bytes().count(b"\n") >= steps
