"""train_draft_lm.py under torchrun on two ranks against one, replicated and FSDP2.

Catches: a gradient that is a mean over ranks, a rank without a supervised row that waits or is
waited for, a denominator of one rank, FSDP2 that loses the head's gradient (which is added by
hand), metrics of one rank, a resumed run on two ranks that differs, an export of a shard, a rank
that evaluates alone while the others are gone.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import lm_ranks
import pytest
import torch
from lm_run import make_place
from safetensors.torch import load_file
from test_parallel_runs import forget_after
from tiny import metric_rows

from specforge_trim.cli.lm import train_lm_main

ROOT = Path(__file__).resolve().parent.parent
CUT = ("--stop-grad-context-tokens",)
TUNE = ("--label-weight", "1.0", "--distill-weight", "0.0")
KINDS = {"distil": CUT, "tune": (*CUT, *TUNE), "mixed, uncut": ("--label-weight", "0.5")}
# What one rank and many must log alike; the rest are speeds and memory.
SAME = ("step", "epoch", "rows", "loss_rows", "skipped_steps", "non_finite_steps", "lr")
CLOSE = ("loss", "label_loss", "distill_loss", "accuracy", "acceptance", "grad_norm",
         "perf/lm_head_token_fraction")  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Micro-batches of one conversation, so that one without loss is a rank's whole step."""
    return make_place(
        tmp_path_factory.mktemp("lm-ranks"),
        conversations=8,
        data={"tokens_per_batch": 100},
        train={"epochs": 1, "save_every": 1, "keep_checkpoints": 9},
        evaluate={"eval_prompts": 1, "held_out_every": 2},
    )


@pytest.fixture
def blanked(monkeypatch):
    for where, name, other in lm_ranks.patches():
        monkeypatch.setattr(where, name, other)


def alone(place, kind):
    """The same batches on one rank, which accumulates."""
    out = place / f"alone {kind}"
    if not out.exists():
        flags = ["--config", f"{place}/recipe.yaml", "--output-dir", str(out), *KINDS[kind]]
        assert train_lm_main([*flags, "--accumulate", "2"]) == 0
    return out


def compare(out, expected):
    """Rows of metrics, held-out losses and the exported weights."""
    rows, wanted_rows = metric_rows(out), metric_rows(expected)
    assert len(rows) == len(wanted_rows) >= 4
    for row, wanted in zip(rows, wanted_rows, strict=True):
        close = [k for k in wanted if k.removeprefix("eval/") in CLOSE]
        assert "eval/loss" in close or row["step"] % 2
        assert {k: row[k] for k in SAME} == {k: wanted[k] for k in SAME}
        for key in close:
            # fp32 sums in another order, over a few optimizer steps.
            assert row[key] == pytest.approx(wanted[key], rel=2e-5, abs=1e-7), (row["step"], key)
    found, start = (load_file(f / "model.safetensors") for f in (out / "export", place_of(out)))
    for name, want in load_file(expected / "export" / "model.safetensors").items():
        # AdamW's first steps have the size of the rate whatever the gradient's, which magnifies
        # the rounding of gradients near zero; it stays far below what was learnt.
        gap, moved = (found[name] - want).norm(), (want - start[name]).norm()
        assert moved > 0 and gap <= 2e-3 * moved, f"{name}: {gap:.1e} of {moved:.1e}"


def place_of(out):
    return out.parent / "target"


def rows_of_ranks(folder):
    """Loss rows of each step, by rank."""
    files = [folder / "rank-0", folder / "rank-1"]
    return [[int(n) for n in f.read_text().split()] for f in files]


def assert_one_rank_was_empty(folder):
    first, second = rows_of_ranks(folder)
    assert any((a == 0) != (b == 0) for a, b in zip(first, second, strict=True)), (first, second)


def torchrun(place, name, *flags, script="tests/lm_ranks.py"):
    out, notes = place / name, place / f"rows {name}"
    notes.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc_per_node", "2", str(ROOT / script), *flags]
    command += ["--config", str(place / "recipe.yaml"), "--output-dir", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment["LOSS_ROWS"] = str(notes)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr[-3000:]
    return out, done


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [False, True], ids=["replicated", "fsdp"])
def test_torchrun_trains_exports_and_decodes_as_one_rank(place, blanked, split, kind):
    """And goes on from the middle with the same numbers, to the last bit."""
    name = f"{kind} {'fsdp' if split else 'whole'}"
    flags = [*KINDS[kind], *(["--fsdp"] if split else [])]
    out, done = torchrun(place, name, *flags)
    assert_one_rank_was_empty(place / f"rows {name}")
    expected = alone(place, kind)
    compare(out, expected)
    assert done.stdout.count("acceptance length") == 1, done.stdout  # one rank prints
    report, wanted = (json.loads((f / "evaluation.json").read_text()) for f in (out, expected))
    assert report["sets"][0]["equal"] == 1 and report["sets"] == wanted["sets"]
    rows, weights = metric_rows(out), load_file(out / "export" / "model.safetensors")
    held = (out / "heldout.jsonl").read_text()
    forget_after(out, 2)
    torchrun(place, name, *flags)
    for row, before in zip(metric_rows(out), rows, strict=True):
        assert {
            k for k in row if row[k] != before[k] and not k.startswith(("perf", "time"))
        } == set()
    assert (out / "heldout.jsonl").read_text() == held
    for key, value in load_file(out / "export" / "model.safetensors").items():
        assert torch.equal(value, weights[key]), key


@pytest.mark.slow
def test_torchrun_of_the_script_itself(place):
    """Without a conversation that is empty, and with loader processes."""
    flags = [*CUT, "--num-workers", "1"]
    out, _ = torchrun(place, "script", *flags, script="train_draft_lm.py")
    expected = place / "script alone"
    arguments = ["--config", f"{place}/recipe.yaml", "--output-dir", str(expected), *CUT]
    assert train_lm_main([*arguments, "--accumulate", "2"]) == 0
    compare(out, expected)
