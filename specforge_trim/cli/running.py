"""How a command runs and ends: its log lines, its exit code, and the one line that says why.

What a user can correct ends as one message on stderr and exit code 2; a traceback is a fault of
this program.  Of several ranks one speaks.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NoReturn

from tqdm import tqdm

from specforge_trim.config.options import ConfigError

Command = Callable[[Sequence[str]], None]

_PATIENCE = 10.0  # seconds in which rank 0 finds the fault that another rank has found


def guarded(command: Command, argv: Sequence[str]) -> int:
    """Runs a command; returns its exit code.

    0 done, 2 something to correct, 130 ended by SIGINT (Ctrl-C), 143 by SIGTERM, 141 nobody reads
    the output (`| head`).
    """
    from safetensors import SafetensorError

    from specforge_trim.ranks.world import PeerFailed, PeerLost, Stopped

    try:
        with _log_lines(main=_rank() == 0), _terminable():
            command(argv)
            sys.stdout.flush()
    except Stopped as stopped:
        _tell(str(stopped))
        return 128 + stopped.signal
    except PeerFailed as error:
        _note_for_torchrun(str(error))  # the rank that failed has said why
        return 2
    except ConfigError as error:
        return _wrong_settings(error)
    except (ValueError, OSError, PeerLost) as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads():
            return 141
        return _report(str(error))
    except SafetensorError as error:
        return _report(f"a safetensors file is damaged or cut off: {error}")
    except KeyboardInterrupt as error:
        _tell("interrupted; run the same command to go on")
        return 143 if isinstance(error, _Terminated) else 130
    return 0


def leave(code: int) -> NoReturn:
    """Ends the process with an exit code, after the handlers that modules registered for its end.

    One of several ranks leaves out the interpreter's own teardown: threads of the collectives may
    still hold Python objects, and one that asks for the interpreter while it goes away aborts the
    process ("terminate called without an active exception") although its run is finished.
    """
    if int(os.environ.get("WORLD_SIZE", 1)) == 1:
        sys.exit(code)
    atexit._run_exitfuncs()
    with suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


class _Terminated(KeyboardInterrupt):
    """SIGTERM came: ends a command as Ctrl-C does."""


@contextmanager
def _terminable() -> Iterator[None]:
    """Lets SIGTERM end a command as Ctrl-C does; a second one kills.  Main thread only."""

    def terminate(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise _Terminated

    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    ):
        yield
        return
    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _tell(message: str) -> None:
    """Says how a run ended that nothing was wrong with; of several ranks one speaks."""
    if _rank() == 0:
        print(message, file=sys.stderr)
    _note_for_torchrun(message)


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


def _report(message: str) -> int:
    where = f" (rank {_rank()})" if _rank() else ""
    with suppress(OSError):  # what was printed before stands before it, in one file too
        sys.stdout.flush()
    print(f"error{where}: {message}", file=sys.stderr)
    _note_for_torchrun(message)
    return 2


def _wrong_settings(error: ConfigError) -> int:
    """Before the ranks have met, settings are wrong on all of them alike, and rank 0 says so.

    Afterwards they have agreed on the one that raises.
    """
    from torch import distributed

    if _rank() == 0 or distributed.is_initialized():
        return _report(str(error))
    _note_for_torchrun(str(error))
    if "TORCHELASTIC_RUN_ID" in os.environ:
        time.sleep(_PATIENCE)  # the first rank to end has the others killed, rank 0 unheard
    return 2


def _note_for_torchrun(message: str) -> None:
    """Leaves the message where torchrun looks for the cause that its own report shows."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        note = {"message": message, "extraInfo": {"timestamp": str(int(time.time()))}}
        with open(path, "w", encoding="utf-8") as file:
            json.dump({"message": note}, file)


def _nobody_reads() -> bool:
    """Whether stdout is a pipe whose reader has gone; if so, what it still holds is dropped."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)  # 0: only what cannot be masked, errors and hang-up
    if not poll.poll(0):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return True


class _BarHandler(logging.Handler):
    """Log lines on stderr that do not tear a progress bar."""

    def emit(self, record: logging.LogRecord) -> None:
        tqdm.write(self.format(record), file=sys.stderr)


@contextmanager
def _log_lines(*, main: bool) -> Iterator[None]:
    """Shows our log lines on rank 0, for as long as a command runs; others would repeat it."""
    logger = logging.getLogger("specforge_trim")
    before = (logger.level, logger.propagate)
    handler = _BarHandler()
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if main else logging.ERROR)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
