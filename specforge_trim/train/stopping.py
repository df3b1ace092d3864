"""What ends a run between two steps: a signal, which lets the step be saved, or a fault."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from specforge_trim.ranks.world import PeerLost, Stopped, World

T = TypeVar("T")

SIGNALS = (signal.SIGTERM, signal.SIGINT)

_ECHO = 3.0  # seconds in which torchrun passes on a signal that the terminal sent to all already


class StopRequest:
    """Notes a signal instead of ending; the training loop asks for it after every step.

    A second signal ends the process at once. Signals that were ignored when the process started
    (as a shell does for background jobs) stay ignored; outside the main thread nothing is noted.
    """

    def __init__(self, *, announce: bool) -> None:
        """announce: this rank tells the user."""
        self.signal = 0  # the first signal's number
        self._announce = announce
        self._since = 0.0
        self._handing_over = False
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._handing_over:
            return
        from_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        if self.signal:
            if not from_torchrun or time.monotonic() - self._since > _ECHO:
                os._exit(128 + number)
            return
        self.signal, self._since = number, time.monotonic()
        if self._announce:
            name = signal.Signals(number).name
            # Not through logging or print: either may be what the signal interrupted.
            text = f"\n{name}: finishing this step, then saving; a second one ends at once\n"
            os.write(2, text.encode())
        if not from_torchrun:
            self._hand_over(number)

    def _hand_over(self, number: int) -> None:
        """Has the system end the process at a second signal: that works inside a library call too.

        One that came at the same instant still waits for its handler, and Python would report it
        as lost, with a traceback, if that were gone. Raising one more has all that wait handled;
        what comes later, `signal.signal` handles before it changes anything. They are one request.
        """
        self._handing_over = True
        signal.raise_signal(number)
        for other in self._before:
            signal.signal(other, signal.SIG_DFL)


class Steps:
    """The optimizer steps of a run until it ends: at its last one, by a signal, by a fault."""

    def __init__(self, done: int, world: World, request: StopRequest) -> None:
        """done: steps taken before; request: where this rank's signals are noted."""
        self.done, self._world, self._request = done, world, request
        self.stopped = 0  # the number of the signal that ended this run

    def until_stopped(self, steps: Iterable[T]) -> Iterator[tuple[int, T]]:
        """The number and the batches of each step; ends early where a signal came on any rank.

        Raises what reading the batches raises, on the lowest rank where it did, and PeerFailed on
        the others.
        """
        iterator = iter(steps)

        def fetch() -> T | None:
            self._world.see_launcher()
            return next(iterator, None)

        while True:
            # One agreement for all that may end a run here: the launcher, the data, a signal.
            batches, signalled = self._world.voted(fetch, lambda: self._request.signal)
            if batches is None:  # a signal now comes too late: the run is complete
                return
            if signalled:
                self.stopped = signalled
                return
            self.done += 1
            yield self.done, batches


@contextmanager
def counted_steps(done: int, world: World) -> Iterator[Steps]:
    """The steps of a run that has taken `done`, while signals are noted.

    Has PeerLost say in which step contact was lost.
    """
    with StopRequest(announce=world.is_main) as request:
        steps = Steps(done, world, request)
        try:
            yield steps
        except PeerLost as error:
            again = "the same command continues from the newest checkpoint"
            text = f"in or after optimizer step {steps.done}: {error}"
            raise PeerLost(text if text.endswith(again) else f"{text}; {again}") from error


def stopped_by(number: int, step: int) -> Stopped:
    """How a run ends that a signal stopped after this step, once that is saved."""
    name = signal.Signals(number).name
    return Stopped(
        number, f"{name}: stopped after step {step}, which is saved; the same command goes on"
    )
