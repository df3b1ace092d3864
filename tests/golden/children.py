"""Starts the doors and commands as forked children of a process that has imported everything.

The package is reached only through train_eagle3.py, train_draft_lm.py and the console command that
setup.py names, so that its modules may move. Starting Python and torch takes seconds, a fork takes
milliseconds; the parent must not have run a backward pass, whose threads do not survive a fork.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pkgutil
import re
import runpy
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

PATIENCE = 150.0  # seconds that a child may take
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


class Failed(Exception):
    """A child ended otherwise than it should; the message holds the end of its log."""


def warm(root: Path) -> None:
    """Imports what children need; the package is that of `root`."""
    sys.path.insert(0, str(root))
    os.environ["PYTHONPATH"] = str(root)
    import torch

    torch.set_num_threads(1)
    import torch._dynamo
    import torch.distributed.checkpoint
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401
    import transformers
    import transformers.models.auto.modeling_auto
    import transformers.models.llama.modeling_llama  # noqa: F401

    transformers.utils.logging.disable_progress_bar()
    package = importlib.import_module("specforge_trim")
    assert Path(package.__file__ or "").is_relative_to(root), (package.__file__, root)
    for found in pkgutil.walk_packages(
        package.__path__, "specforge_trim.", onerror=lambda _: None
    ):
        try:
            importlib.import_module(found.name)
        except ImportError:  # a kernel whose optional package is not installed
            continue


def door(root: Path, name: str, arguments: list[str]) -> Callable[[], object]:
    """train_eagle3.py or train_draft_lm.py, to be called in a child."""

    def run() -> object:
        sys.argv = [name, *arguments]
        return runpy.run_path(str(root / name), run_name="__main__")

    return run


def console(root: Path, arguments: list[str]) -> Callable[[], object]:
    """The command `specforge-trim`, to be called in a child."""
    text = (root / "setup.py").read_text(encoding="utf-8")
    found = re.search(r"specforge-trim *= *([\w.]+):(\w+)", text)
    assert found, "setup.py names no specforge-trim"

    def run() -> object:
        sys.argv = ["specforge-trim", *arguments]
        sys.exit(getattr(importlib.import_module(found[1]), found[2])())

    return run


def killed_after(step: int) -> Callable[[], None]:
    """Kills the calling process when a checkpoint of a later step is about to get its name."""

    def see(event: str, arguments: tuple) -> None:
        if event == "os.rename":
            name = re.fullmatch(r"step-(\d+)", Path(os.fsdecode(arguments[1])).name)
            if name and int(name[1]) > step:
                os.kill(os.getpid(), signal.SIGKILL)

    return lambda: sys.addaudithook(see)


def run(
    call: Callable[[], object],
    folder: Path,
    log: str,
    *,
    ranks: int = 1,
    first: Callable[[], None] | None = None,
    dies: bool = False,
) -> str:
    """Runs `call` in `folder` on so many ranks; what rank 0 wrote on stdout.

    first: called in rank 0 before. dies: rank 0 is expected to be killed, and the others after it.
    Raises Failed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    outs = [folder / f"{log}.{rank}.out" for rank in range(ranks)]
    errs = [folder / f"{log}.{rank}.err" for rank in range(ranks)]
    pids = []
    for rank in range(ranks):
        pid = os.fork()
        if not pid:
            place = (str(rank), str(ranks), str(rank), "127.0.0.1", str(port))
            variables = dict(zip(_TORCHRUN, place, strict=True)) if ranks > 1 else {}
            _child(call, folder, outs[rank], errs[rank], variables, None if rank else first)
        pids.append(pid)
    codes = _wait(pids, dies)
    # Where rank 0 is killed, another may find its peer lost before it is killed too.
    fine = codes[0] == -signal.SIGKILL and all(codes) if dies else not any(codes)
    if not fine:
        ends = [f"rank {r}: {err.read_text()[-1500:]}" for r, err in enumerate(errs)]
        wanted = "rank 0 killed, the others after it" if dies else "0"
        raise Failed(f"{log}: exit codes {codes}, expected {wanted}\n" + "\n".join(ends))
    return outs[0].read_text()


def _wait(pids: list[int], dies: bool) -> list[int]:
    """Exit codes. One that fails ends the others, after a moment to say why; so does the clock."""
    codes: dict[int, int] = {}
    deadline = time.monotonic() + PATIENCE
    while len(codes) < len(pids):
        for pid in pids:
            if pid not in codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    codes[pid] = os.waitstatus_to_exitcode(status)
                    if codes[pid] != 0:
                        deadline = min(deadline, time.monotonic() + (0 if dies else 5))
        if time.monotonic() >= deadline:
            for pid in set(pids) - set(codes):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def _child(
    call: Callable[[], object],
    folder: Path,
    out: Path,
    err: Path,
    variables: dict[str, str],
    first: Callable[[], None] | None,
) -> None:
    """Becomes the child; does not return."""
    code = 70  # of no command: a traceback is a fault
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: ends with its parent
        for number, file in ((1, out), (2, err)):
            os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644), number)
        sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
        os.chdir(folder)
        os.environ.update(variables)
        if first is not None:
            first()
        call()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
