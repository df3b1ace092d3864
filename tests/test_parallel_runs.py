"""Many ranks from the command: torchrun, a tiny target, metrics, checkpoints.

Catches: a layout that the training command cannot run although its stage can, metrics of one rank
logged as those of all, a checkpoint that only as many ranks can go on from, a hang that no error
ends.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import tiny

from specforge_trim.train import checkpoint as checkpoints

ROOT = Path(__file__).resolve().parent.parent
TRIM = ["--trim-loss-positions", "--trim-backbone-rows"]
SAVE_ALL = ["--save-every", "1", "--keep-checkpoints", "99"]
USP = ["--attention-backend", "usp", "--local-attention", "sdpa"]
# What one rank and many must log alike; the rest are speeds and memory.
COUNTS = ("step", "epoch", "rows", "loss_rows", "skipped_documents", "skipped_steps")
PREFIXES = ("loss", "accuracy", "conditional", "acceptance", "grad_norm", "perf/backbone", "lr")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tiny.training_place(tmp_path_factory.mktemp("runs"))


def start(place, ranks, name, *flags):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", str(ranks), str(ROOT / "train_eagle3.py"), *TRIM, *flags]
    command += ["--config", str(place / "recipe.yaml"), "--output-dir", str(place / name)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stderr=subprocess.PIPE, env=environment, text=True)


def run_ranks(place, ranks, name, *flags):
    """Metrics rows of a run of many ranks."""
    process = start(place, ranks, name, *flags)
    err = process.communicate(timeout=150)[1]
    assert process.returncode == 0, err[-3000:]
    return tiny.metric_rows(place / name)


def alone(place, accumulate):
    """The same steps on one rank, which accumulates."""
    name = f"alone{accumulate}"
    if (place / name).exists():
        return tiny.metric_rows(place / name)
    return tiny.run_recipe(place, name, *TRIM, "--accumulate", str(accumulate))


def same(rows, expected):
    assert len(rows) == len(expected) >= 2
    for row, wanted in zip(rows, expected, strict=True):
        for key, value in wanted.items():
            if key in COUNTS or (value is None and key.startswith(PREFIXES)):
                assert row[key] == value, key
            elif key.startswith(PREFIXES):
                # fp32 sums in another order, over a few optimizer steps.
                assert row[key] == pytest.approx(value, rel=2e-5, abs=1e-7), key


def forget_after(out, step):
    """Removes later checkpoints, as if the run had been killed."""
    for found in checkpoints.list_complete(out / "checkpoints"):
        if found.step > step:
            shutil.rmtree(found.path)
    assert checkpoints.newest(out / "checkpoints").step == step


def test_parallel_run_shared_sequences_split_weights_and_one_rank_goes_on(place):
    """2 ranks: one sequence, FSDP2, two micro-batches a step. Then one rank from the middle."""
    flags = [*USP, "--fsdp", "--accumulate", "2"]
    same(run_ranks(place, 2, "both", *flags, *SAVE_ALL), alone(place, 2))
    forget_after(place / "both", 2)
    same(tiny.run_recipe(place, "both", *TRIM, "--accumulate", "2"), alone(place, 2))


RING = [*USP, "--sp-context", "ring"]
CASES = {
    "gathered 4": (4, 1, USP),
    "ring 2, owner": (2, 1, [*RING, "--sp-rows", "owner"]),
    "ulysses 2 x ring 2": (4, 1, [*RING, "--sp-ulysses", "2", "--sp-ring", "2"]),
    "data 2 x ring 2": (4, 2, [*RING, "--sp-ring", "2"]),
    "data 2 x ulysses 2": (4, 2, [*USP, "--sp-context", "ulysses", "--sp-ulysses", "2"]),
    "fsdp 2": (2, 2, ["--fsdp"]),
    "fsdp, data 2 x gathered 2": (4, 2, [*USP, "--fsdp", "--sp-ulysses", "2"]),
    "online gathered 2": (2, 1, [*USP, "--online"]),
    "online fsdp 2": (2, 2, ["--fsdp", "--online"]),
    "guard refuses": (2, 1, [*RING, "--trim-backbone-rows-max-density", "0.1"]),
    "loader processes": (2, 1, [*USP, "--num-workers", "2"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_parallel_run_logs_and_trains_as_one_rank(place, name):
    ranks, micro_batches, flags = CASES[name]
    rows, expected = run_ranks(place, ranks, name, *flags), alone(place, micro_batches)
    if name == "guard refuses":
        dense = [row.pop("perf/backbone_row_fraction") for row in rows]
        assert max(dense) == 1.0
        expected = [dict(row) for row in expected]
        for row in expected:
            del row["perf/backbone_row_fraction"]
    same(rows, expected)


@pytest.mark.slow
def test_parallel_run_goes_on_with_as_many_ranks_and_with_others(place):
    """FSDP2 on 2 ranks, killed in the middle: on 2 ranks the rest is the same to the last bit.

    Draft and target vocabulary are equal, whose maps, all zero and all true, once broke the load.
    """
    full = ["--draft-vocab-size", str(tiny.VOCAB_SIZE), "--epochs", "4", "--accumulate", "2"]
    flags = ["--fsdp", *SAVE_ALL, *full]
    straight = run_ranks(place, 2, "straight", *flags)
    middle = len(straight) // 2
    forget_after(place / "straight", middle)
    others = {
        "four": (4, ["--fsdp", *USP, "--sp-ulysses", "2", *full]),
        "whole": (2, full),
    }
    for name in others:
        shutil.copytree(place / "straight", place / name)
    again = run_ranks(place, 2, "straight", *flags)
    for row, wanted in zip(again, straight, strict=True):
        changed = {k for k in wanted if row[k] != wanted[k] and not k.startswith(("perf", "time"))}
        assert not changed, changed
    for name, (ranks, changes) in others.items():
        same(run_ranks(place, ranks, name, *changes), straight)


def _workers(launcher):
    """rank -> process id of a torchrun's ranks."""
    found = {}
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        variables = Path(f"/proc/{child}/environ").read_text().split("\0")
        ranks = [v.removeprefix("RANK=") for v in variables if v.startswith("RANK=")]
        found |= {int(rank): int(child) for rank in ranks}
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "flags"), {"hang data": [], "hang fsdp": ["--fsdp"], "hang ring": RING}.items()
)
def test_parallel_run_a_rank_that_stands_still_ends_the_others(place, name, flags):
    """Rank 1 is stopped. Rank 0 ends by itself after its timeout and names itself and the step."""
    endless = ["--epochs", "1000", "--timeout-minutes", "0.1", *flags]
    process = start(place, 2, name, *endless)
    metrics = place / name / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or metrics.read_text().count("\n") < 6:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.02)
    stopped = _workers(process.pid)[1]
    os.kill(stopped, signal.SIGSTOP)
    lines = iter(process.stderr.readline, "")
    message = next(line for line in lines if "error:" in line)
    os.kill(stopped, signal.SIGCONT)  # else torchrun waits 30 s for it to end
    process.communicate(timeout=60)
    done = metrics.read_text().count("\n")
    steps = [int(s) for s in message.split("optimizer step ")[1].split(":")[0].split()]
    assert steps[0] in (done, done + 1), (message, done)
    assert ": rank 0: " in message and "imed out" in message, message
    assert process.returncode == 1
