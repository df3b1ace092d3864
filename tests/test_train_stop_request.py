"""Signals that ask a run to stop, in this process.

Catches: two signals at one instant that print a traceback, or end the run although its step is not
saved; handlers that stay behind; a second signal that is noted instead of ending the process.
"""

import os
import signal
import threading

import pytest

from specforge_trim.train import stopping
from specforge_trim.train.stopping import SIGNALS, StopRequest


@pytest.fixture(autouse=True)
def heard():
    """Tests that run in the background ignore SIGINT, and a request leaves ignored signals be."""
    before = [signal.signal(number, signal.SIG_DFL) for number in SIGNALS]
    yield
    for number, handler in zip(SIGNALS, before, strict=True):
        signal.signal(number, handler)


@pytest.fixture
def ended(monkeypatch):
    """Exit codes the process would have ended with."""
    codes = []
    monkeypatch.setattr(stopping.os, "_exit", codes.append)
    monkeypatch.setattr(stopping.os, "write", lambda fd, text: len(text))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    return codes


def at_one_instant(*numbers):
    """All of them are pending for this thread before the first one's handler runs."""
    signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    for number in numbers:
        signal.pthread_kill(threading.main_thread().ident, number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)


@pytest.mark.parametrize("from_torchrun", [False, True])
def test_two_signals_at_one_instant_are_one_request(ended, monkeypatch, from_torchrun):
    if from_torchrun:
        monkeypatch.setitem(os.environ, "TORCHELASTIC_RUN_ID", "x")
    lost = []
    monkeypatch.setattr("sys.unraisablehook", lambda info: lost.append(str(info.exc_value)))
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopRequest(announce=True) as request:
        at_one_instant(*SIGNALS)
        assert request.signal in SIGNALS
        second = [signal.getsignal(number) for number in SIGNALS]
    assert not lost and not ended, (lost, ended)
    assert second == ([request._note] * 2 if from_torchrun else [signal.SIG_DFL] * 2)
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_a_later_signal_of_torchrun_ends_at_once(ended, monkeypatch):
    monkeypatch.setitem(os.environ, "TORCHELASTIC_RUN_ID", "x")
    monkeypatch.setattr(stopping, "_ECHO", 0.0)
    with StopRequest(announce=False) as request:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
        assert request.signal == signal.SIGTERM
    assert ended == [128 + signal.SIGINT]


def test_a_signal_that_was_ignored_stays_ignored(ended):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with StopRequest(announce=False) as request:
        signal.raise_signal(signal.SIGINT)
        assert not request.signal
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN and not ended
