"""How commands and ranks end: who speaks, what torchrun is told, what is refused.

Catches: a message lost because a silent rank ended first, an error only one rank has and none
reports, `| head` taken for a fault, a real broken pipe kept quiet, two runs in one output folder,
a folder that stays locked after its run, half a minute of waiting for a hub that is not there.
"""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from specforge_trim.cli import running
from specforge_trim.cli.running import guarded
from specforge_trim.config.options import ConfigError
from specforge_trim.ranks.world import PeerFailed, Stopped, World
from specforge_trim.train.run_lock import hold, only_run
from specforge_trim.verifier.hub import check_hub

ROOT = Path(__file__).resolve().parent.parent


def raises(error):
    def command(argv):
        raise error

    return command


@pytest.fixture
def torchrun_rank(monkeypatch, tmp_path):
    """Makes this process look like a rank; gives what it then tells torchrun."""

    def become(rank):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
        return lambda: json.loads((tmp_path / "error.json").read_text())["message"]

    return become


@pytest.mark.parametrize("rank", [0, 1])
def test_wrong_settings_are_said_by_rank_0_and_others_let_it_speak(
    rank, torchrun_rank, monkeypatch, capfd
):
    note, slept = torchrun_rank(rank), []
    monkeypatch.setattr(running.time, "sleep", slept.append)
    assert guarded(raises(ConfigError("epochs = 0")), []) == 2
    assert capfd.readouterr().err == ("" if rank else "error: epochs = 0\n")
    assert bool(slept) == bool(rank)
    assert note()["message"] == "epochs = 0" and "py_callstack" not in note()["extraInfo"]


def test_settings_wrong_on_one_rank_only_are_said_by_it(torchrun_rank, monkeypatch, capfd):
    torchrun_rank(1)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    assert guarded(raises(ConfigError("no such file")), []) == 2
    assert capfd.readouterr().err == "error (rank 1): no such file\n"


def test_a_rank_whose_peer_failed_is_quiet(torchrun_rank, capfd):
    note = torchrun_rank(0)
    assert guarded(raises(PeerFailed("rank 1 could not go on")), []) == 2
    assert capfd.readouterr().err == ""
    assert note()["message"] == "rank 1 could not go on"


def test_torchrun_shows_the_message_once_and_no_traceback_of_ours():
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2"]
    command += ["--standalone", str(ROOT / "train_eagle3.py"), "--config", "no/such.yaml"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 1  # torchrun's own
    said, report = done.stderr.split("error: --config no/such.yaml: no such file\n")
    assert "specforge_trim" not in said and "Traceback" not in said
    assert "traceback : --config no/such.yaml: no such file" in report
    assert str(ROOT / "specforge_trim") not in report


def test_output_that_nobody_reads_ends_a_command_quietly():
    code = (
        "import sys; from specforge_trim.cli.running import guarded; "
        "sys.exit(guarded(lambda argv: print('x\\n' * int(argv[0])), sys.argv[1:]))"
    )
    for lines in ("100000", "1"):  # more than a buffer; less, which is written at the end
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run(
            [sys.executable, "-c", code, lines],
            stdout=write, stderr=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        os.close(write)
        assert (done.returncode, done.stderr) == (141, "")


def test_another_broken_pipe_is_an_error(capfd):
    assert guarded(raises(BrokenPipeError("loader is gone")), []) == 2
    assert capfd.readouterr().err == "error: loader is gone\n"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_a_signal_stopped_ends_with_its_code(rank, number, torchrun_rank, capfd):
    note = torchrun_rank(rank)
    assert guarded(raises(Stopped(number, "stopped after step 7")), []) == 128 + number
    assert capfd.readouterr().err == ("" if rank else "stopped after step 7\n")
    assert note()["message"] == "stopped after step 7"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_command_with_one_line_and_its_code(number, capfd, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)

    def command(argv):
        os.kill(os.getpid(), number)
        time.sleep(10)

    try:
        assert guarded(command, []) == 128 + number
    finally:
        signal.signal(signal.SIGINT, before)
    assert capfd.readouterr().err == "interrupted; run the same command to go on\n"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# ---------------------------------------------------------------------- one run per folder


def test_a_run_that_wrote_nothing_leaves_nothing(tmp_path):
    alone = World(rank=0, size=1, device=torch.device("cpu"))
    (tmp_path / "old").mkdir()
    for folder in (tmp_path / "new" / "run", tmp_path / "old"):
        with pytest.raises(ValueError, match="refused"), only_run(folder, alone):
            assert [p.name for p in folder.iterdir()] == [".lock"]
            raise ValueError("refused")
    assert [p.name for p in tmp_path.iterdir()] == ["old"] and not list(tmp_path.glob("*/*"))
    with only_run(tmp_path / "new" / "run", alone):
        (tmp_path / "new" / "run" / "metrics.jsonl").touch()
    assert [p.name for p in (tmp_path / "new" / "run").iterdir()] == ["metrics.jsonl"]


def test_a_lock_that_its_run_has_just_removed_is_not_taken_for_ours(tmp_path, monkeypatch):
    """Between opening the file and locking it, the run before may end and remove it."""
    lockf, calls = fcntl.lockf, []

    def late(file, kind):
        if not calls:
            (tmp_path / ".lock").unlink()
        calls.append(kind)
        lockf(file, kind)

    monkeypatch.setattr(fcntl, "lockf", late)
    file = hold(tmp_path)
    assert len(calls) == 2 and os.path.samestat(os.fstat(file.fileno()), os.stat(file.name))
    file.close()


def test_an_output_folder_that_cannot_be_made_is_named_with_its_setting():
    with pytest.raises(
        OSError, match="output_dir = '/proc/run/x' cannot be written.*--output-dir"
    ):
        hold(Path("/proc/run/x"))


HOLD = """
import fcntl, os, sys
file = open(sys.argv[1], "a+")
fcntl.lockf(file, fcntl.LOCK_EX)
file.write("process 42"); file.flush()
if os.fork() == 0:  # a loader process, which lives on when its parent is killed
    sys.stdin.read(); os._exit(0)
print("held", flush=True)
sys.stdin.read()
"""


def test_two_runs_in_one_folder_are_refused_until_the_first_is_gone(tmp_path):
    command = [sys.executable, "-c", HOLD, str(tmp_path / ".lock")]
    other = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    )
    try:
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(
            ValueError, match="in use by another run .process 42.*--output-dir"
        ) as e:
            hold(tmp_path, wait=0.0)
        assert str(tmp_path) in str(e.value)
        other.kill()
        other.wait()
        hold(tmp_path, wait=5.0).close()  # its child still waits for input, and holds nothing
    finally:
        other.stdin.close()
        other.stdout.close()
    assert f"process {os.getpid()} on" in (tmp_path / ".lock").read_text()


def test_a_run_waits_for_one_that_is_just_ending(tmp_path, monkeypatch):
    """A rank whose torchrun was killed notices at its next step."""
    command = [sys.executable, "-c", HOLD, str(tmp_path / ".lock")]
    other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout.readline() == b"held\n"
    asked = []

    def sleep(seconds):
        asked.append(seconds)
        other.communicate()

    monkeypatch.setattr(time, "sleep", sleep)
    hold(tmp_path, wait=30.0).close()
    assert len(asked) == 1


# ---------------------------------------------------------------------- hub


def test_a_hub_that_does_not_answer_is_an_error_at_once(monkeypatch):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(
        constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/{revision}/{filename}"
    )
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("tried again"))
    with pytest.raises(OSError, match="'nobody/nothing'.*cannot be reached") as error:
        check_hub("nobody/nothing")
    assert url in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_one_of_many_ranks_leaves_without_the_teardown_that_can_abort_it(ranks):
    """Its exit code, its output and handlers stay; objects that live on are not torn down."""
    code = """
import atexit, os, sys
from specforge_trim.cli.running import leave
class Late:
    def __del__(self, write=os.write): write(1, b"torn down\\n")
sys.late = Late()
atexit.register(print, "handler")
print("printed")
leave(3)
"""
    environment = os.environ | {"WORLD_SIZE": str(ranks), "RANK": "0", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    lines = ["printed", "handler", *(["torn down"] if ranks == 1 else [])]
    assert (done.returncode, done.stdout.splitlines()) == (3, lines), done.stderr
