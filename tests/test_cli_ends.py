"""How commands and ranks end: who speaks, what torchrun is told, what is refused.

Catches: a message lost because a silent rank ended first, an error only one rank has and none
reports, `| head` taken for a fault, a real broken pipe kept quiet, two runs in one output folder,
a folder that stays locked after its run, half a minute of waiting for a hub that is not there.
"""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from specforge_trim import running
from specforge_trim.distributed import PeerFailed
from specforge_trim.options import ConfigError
from specforge_trim.running import guarded
from specforge_trim.target.hub import check_hub
from specforge_trim.train.run_lock import hold

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
        "import sys; from specforge_trim.running import guarded; "
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


# ---------------------------------------------------------------------- one run per folder


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
