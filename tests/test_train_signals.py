"""Training that is told to stop, or loses a part of itself, in processes of their own.

Catches: a step half done or not saved when a signal comes, ranks that stop at different steps, a
second signal that has to wait, a signal before the first step that shows a traceback, loader
processes that die of the signal their parent still works under, a loader process or a rank whose
death is a traceback or a hang, a checkpoint lost to any of these, a continued run that differs.
"""

import os
import signal
import time

import pytest
import tiny
from forked import rows, start, start_ranks, taken, warm

from specforge_trim.train import checkpoint as checkpoints

TRIM = ("--trim-loss-positions", "--trim-backbone-rows")
FLAGS = (*TRIM, "--epochs", "300", "--save-every", "5", "--num-workers", "1")


def newest(out):
    return checkpoints.newest(out / "checkpoints").step


def losses(out):
    return {row["step"]: row["loss"] for row in rows(out)}


def check_stopped(out, children, number):
    """Every rank ended with the signal's code after the same, saved step; rank 0 said so once."""
    assert [child.wait() for child in children] == [128 + number] * len(children), [
        child.text for child in children
    ]
    last = rows(out)[-1]["step"]
    assert newest(out) == last
    name = signal.Signals(number).name
    text = f"{name}: stopped after step {last}, which is saved; the same command goes on"
    assert children[0].text.count(text) == 1 and children[0].text.endswith(text)
    for child in children:
        assert "Traceback" not in child.text and "error" not in child.text, child.text
    for child in children[1:]:
        assert "stopped" not in child.text


def check_one_process(place):
    stopped = []
    for number in (signal.SIGTERM, signal.SIGINT):
        out = place / number.name
        child = start(place, out.name, *FLAGS)
        child.until(taken(out, 8))
        child.send(number, group=True)  # loader processes too, as from a terminal
        check_stopped(out, [child], number)
        steps = newest(out) + 7
        again = start(place, out.name, *FLAGS, "--max-steps", str(steps))
        assert again.wait() == 0, again.text
        assert f"resuming after step {steps - 7}" in again.text
        assert list(losses(out)) == list(range(1, steps + 1))
        stopped.append(losses(out))
    longest = max(stopped, key=len)
    assert start(place, "whole", *FLAGS, "--max-steps", str(len(longest))).wait() == 0
    whole = losses(place / "whole")
    for found in stopped:  # a continued run is the run in one piece, bit for bit
        assert found == {step: whole[step] for step in found}


def check_two_ranks(place):
    """The signal reaches one rank only; both stop, after the same step."""
    for told in (0, 1):
        out = place / f"told-{told}"
        ranks = start_ranks(place, out.name, *FLAGS)
        ranks[0].until(taken(out, 8))
        ranks[told].send(signal.SIGTERM)
        check_stopped(out, ranks, signal.SIGTERM)


def slow_step():
    """Makes step 7 take an hour."""
    from specforge_trim.train import loop

    step, calls = loop.ttt_step, []

    def slow(*args, **kwargs):
        calls.append(1)
        if len(calls) == 7:
            time.sleep(3600)
        return step(*args, **kwargs)

    loop.ttt_step = slow


def check_second_signal(place):
    out = place / "twice"
    child = start(place, out.name, *FLAGS, hook=slow_step)
    child.until(taken(out, 6))
    time.sleep(0.2)  # into step 7
    child.send(signal.SIGTERM)
    child.until(lambda: "SIGTERM: finishing this step" in child.text)
    time.sleep(0.2)
    assert child.poll() is None
    child.send(signal.SIGINT)
    assert child.wait(5.0) == -signal.SIGINT
    assert newest(out) == 5


def pretend_torchrun():
    os.environ["TORCHELASTIC_RUN_ID"] = "x"
    slow_step()


def check_second_signal_of_torchrun(place):
    """Ctrl-C comes from the terminal and at once again from torchrun: that is one request."""
    from specforge_trim.train import stopping

    out = place / "echo"
    child = start(place, out.name, *FLAGS, hook=pretend_torchrun)
    child.until(taken(out, 6))
    time.sleep(0.2)
    child.send(signal.SIGINT)
    child.until(lambda: "SIGINT: finishing this step" in child.text)
    child.send(signal.SIGINT)
    time.sleep(0.3)
    assert child.poll() is None
    time.sleep(stopping._ECHO)
    child.send(signal.SIGINT)
    assert child.wait(5.0) == 128 + signal.SIGINT


def slow_start():
    from specforge_trim.train import run as pipeline

    def slow(*args, **kwargs):
        print("building")
        time.sleep(3600)

    pipeline.build_draft = slow


def check_before_the_first_step(place):
    for number in (signal.SIGTERM, signal.SIGINT):
        child = start(place, f"early-{number}", *FLAGS, hook=slow_start)
        child.until(lambda child=child: "building" in child.text)
        child.send(number)
        assert child.wait(5.0) == 128 + number
        assert child.text.endswith("interrupted; run the same command to go on"), child.text
        assert "Traceback" not in child.text


def check_ignored_signal(place):
    """A shell starts background jobs with SIGINT ignored: Ctrl-C is not meant for them."""
    out = place / "background"
    child = start(place, out.name, *FLAGS, "--max-steps", "20", ignore=(signal.SIGINT,))
    child.until(taken(out, 5))
    child.send(signal.SIGINT)
    assert child.wait() == 0, child.text
    assert rows(out)[-1]["step"] == 20


def check_lost_loader(place):
    out = place / "loader"
    child = start(place, out.name, *FLAGS)
    child.until(taken(out, 8))
    os.kill(child.workers()[0], signal.SIGKILL)
    assert child.wait() == 2
    assert child.text.count("error: a loader process was killed or crashed") == 1, child.text
    assert "--num-workers" in child.text and "Traceback" not in child.text
    check_goes_on(place, out)


def check_lost_loader_of_a_rank(place):
    out = place / "loader-2"
    ranks = start_ranks(place, out.name, *FLAGS)
    ranks[0].until(taken(out, 8))
    os.kill(ranks[1].workers()[0], signal.SIGKILL)
    assert [child.wait() for child in ranks] == [2, 2]
    assert "error (rank 1): a loader process was killed" in ranks[1].text, ranks[1].text
    assert "error" not in ranks[0].text and "Traceback" not in ranks[0].text, ranks[0].text


def check_lost_rank(place):
    for lost in (0, 1):
        out = place / f"lost-{lost}"
        ranks = start_ranks(place, out.name, *FLAGS)
        ranks[0].until(taken(out, 8))
        ranks[lost].send(signal.SIGKILL)
        assert ranks[lost].wait() == -signal.SIGKILL
        left = ranks[1 - lost]
        assert left.wait() == 2
        [line] = [line for line in left.text.splitlines() if line.startswith("error")]
        assert "in or after optimizer step" in line and f"rank {1 - lost}: " in line, line
        assert line.endswith("the same command continues from the newest checkpoint"), line
        assert "Traceback" not in left.text, left.text
        steps = newest(out) + 3
        again = start_ranks(place, out.name, *FLAGS, "--max-steps", str(steps))
        assert [child.wait() for child in again] == [0, 0], again[0].text
        assert f"resuming after step {steps - 3}" in again[0].text


def check_goes_on(place, out):
    """The same command continues from the newest checkpoint."""
    done = newest(out)
    assert done > 0 and done % 5 == 0
    again = start(place, out.name, *FLAGS, "--max-steps", str(done + 3))
    assert again.wait() == 0, again.text
    assert f"resuming after step {done}" in again.text
    assert "damaged" not in again.text


CHECKS = [
    check_one_process, check_two_ranks, check_second_signal, check_second_signal_of_torchrun,
    check_before_the_first_step, check_ignored_signal, check_lost_loader,
    check_lost_loader_of_a_rank, check_lost_rank,
]  # fmt: skip


def all_checks(place):
    assert start(place, "features", *FLAGS, "--max-steps", "1").wait() == 0
    for check in CHECKS:
        begun = time.monotonic()
        check(place)
        print(f"{check.__name__} {time.monotonic() - begun:.1f} s")


@pytest.mark.slow
def test_train_signals_and_losses(tmp_path):
    tiny.training_place(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    # A constant rate: with another --max-steps the steps before it stay as they were.
    constant = "min_lr_ratio: 1.0, warmup_ratio: 0"
    recipe.write_text(recipe.read_text().replace("epochs: 2", constant))
    warm(all_checks, tmp_path, report=tmp_path / "report", seconds=280)
