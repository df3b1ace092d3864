"""Training that is stopped from outside, in processes of its own.

Catches: loader processes that print tracebacks when Ctrl-C reaches the whole group, a worker that
trains on after its torchrun was killed, a folder that a rerun then finds locked.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny

from specforge_trim.train import checkpoint as checkpoints

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = str(ROOT / "train_eagle3.py")
LONG = ("--epochs", "1000", "--save-every", "5", "--num-workers", "1")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory):
    return tiny.training_place(tmp_path_factory.mktemp("stopped")) / "recipe.yaml"


def start(command, recipe, out, *flags):
    """A training process group of its own, once it has taken some steps."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, SCRIPT, "--config", str(recipe), "--output-dir", str(out), *LONG, *flags],
        stderr=subprocess.PIPE,
        env=environment,
        start_new_session=True,
        # a shell starts background jobs with SIGINT ignored, which children inherit
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    metrics = out / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 8:
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return process


@pytest.mark.slow
def test_ctrl_c_ends_training_with_one_line(recipe, tmp_path):
    process = start([sys.executable], recipe, tmp_path / "run")
    os.killpg(process.pid, signal.SIGINT)
    err = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 130
    assert "Traceback" not in err
    last = err.splitlines()[-1]
    assert "SIGINT: stopped after step" in last and last.endswith("the same command goes on"), err


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_torchrun_ends_both_ranks_after_a_saved_step(recipe, tmp_path, number):
    """SIGINT reaches the whole group from a terminal, and the ranks once more from torchrun."""
    out = tmp_path / "run"
    process = start([*TORCHRUN, "2"], recipe, out)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    err = process.communicate(timeout=60)[1].decode()
    assert process.returncode != 0
    done = checkpoints.newest(out / "checkpoints").step
    assert f"{number.name}: stopped after step {done}, which is saved" in err, err[-3000:]
    assert "train_eagle3.py" not in err.split("Traceback")[-1] or "Traceback" not in err
    assert "error" not in err.lower().split("traceback")[0], err[-3000:]
    again = start([*TORCHRUN, "2"], recipe, out, "--max-steps", str(done + 20))
    err = again.communicate(timeout=60)[1].decode()
    assert again.returncode == 0, err[-2000:]
    assert f"resuming after step {done}" in err


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_a_rank_whose_torchrun_was_killed_stops_and_a_rerun_goes_on(recipe, tmp_path, ranks):
    out = tmp_path / "run"
    process = start([*TORCHRUN, ranks], recipe, out)
    process.kill()  # torchrun alone
    # communicate returns when the ranks have closed the stderr they inherited
    err = process.communicate(timeout=60)[1].decode()
    assert err.count(": torchrun (process") == 1 and err.count("error") == 1, err[-2000:]
    done = checkpoints.newest(out / "checkpoints").step
    again = start([*TORCHRUN, ranks], recipe, out, "--max-steps", str(done + 20))
    err = again.communicate(timeout=60)[1].decode()
    assert again.returncode == 0, err[-2000:]
    assert f"resuming after step {done}" in err
