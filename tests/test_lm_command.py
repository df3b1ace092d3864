"""train_draft_lm.py as a command: its plan, profile, held-out rows and what it says of bad data.

Catches: a plan of another model than is trained, a plan that writes, a trace of the warm-up,
held-out losses that no tracker sees, a bad document that is blamed on all of its batch.
"""

import gzip
import json

import pytest
from lm_run import make_place, run
from transformers import AutoModelForCausalLM

from specforge_trim.cli.lm import train_lm_main
from specforge_trim.train import lm_loop


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return make_place(tmp_path_factory.mktemp("lm-command"), evaluate={"eval_prompts": 1})


def cells(text):
    """The last column of each line, by what stands before it."""
    split = (line.rsplit("  ", 1) for line in text.splitlines() if "  " in line)
    return {name.strip(): value.strip() for name, value in split}


def test_a_plan_counts_parameters_memory_and_steps_and_writes_nothing(place, capsys):
    run(place, "before", "--max-steps", "1")  # prepares the data
    files = sorted(place.rglob("*"))
    capsys.readouterr()
    flags = ["--config", f"{place}/recipe.yaml", "--output-dir", f"{place}/new", "--dry-run"]
    assert train_lm_main(flags) == 0
    said = capsys.readouterr().out
    assert sorted(place.rglob("*")) == files
    draft = AutoModelForCausalLM.from_pretrained(place / "before" / "export")
    count = sum(p.numel() for p in draft.parameters())
    lines = cells(said)
    assert lines["trained"] == f"{count / 1e6:,.2f}"
    assert lines["weights, gradients, Adam (fp32)"] == f"{16 * count / 2**20:,.0f}"
    _, rows = run(place, "whole epochs")
    assert f"steps: about {len(rows)}\n" in said + "\n"
    share = sum(r["loss_rows"] for r in rows) / sum(r["rows"] for r in rows)
    assert f"rows with loss: {share:.1%} (6 conversations" in said
    assert "1 x soft_ce against the target" in said and "no checkpoint there" in said
    assert train_lm_main([*flags, "--fsdp", "--output-dir", f"{place}/before"]) == 0
    said = capsys.readouterr().out
    assert "2 x cpu, sdpa, fsdp" in said and "resumes after step 1" in said
    lines = cells(said)
    assert lines["weights, gradients, Adam (fp32)"] == f"{(8 + 8) * count / 2**20:,.0f}"


def test_a_plan_refuses_what_training_would(place, capsys):
    flags = ["--config", f"{place}/recipe.yaml", "--dry-run", "--draft-layers", "9"]
    assert train_lm_main(flags) == 2
    assert "draft_layers = 9: the draft has 3 layers" in capsys.readouterr().err
    assert train_lm_main([*flags[:3], "--target", "smollm2-135m-instruct"]) == 2
    assert "specforge-trim prepare --target smollm2-135m-instruct" in capsys.readouterr().err


def test_a_profile_and_the_services_get_what_metrics_get(place):
    out, rows = run(place, "traced", "--profile", "2")
    (file,) = (out / "profile").iterdir()
    trace = json.loads(gzip.decompress(file.read_bytes()))
    steps = {e["name"] for e in trace["traceEvents"] if e["name"].startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#2", "ProfilerStep#3"}
    held = [json.loads(line) for line in (out / "heldout.jsonl").read_text().splitlines()]
    last = {k.removeprefix("eval/"): v for k, v in rows[-1].items() if k.startswith("eval/")}
    assert last and last | {"step": rows[-1]["step"]} == held[-1]
    assert "eval/loss" not in rows[0] and rows[0]["time/loader_wait_seconds"] >= 0


def test_documents_of_a_step_that_is_not_finite_are_named_each(place, monkeypatch, capsys):
    real = lm_loop.lm_step

    def step(model, batch, *, learn=True, **more):
        result = real(model, batch, learn=learn, **more)
        if learn and int(batch.cu_seqlens[1]) == bad:
            model.lm_head.weight.grad[0, 0] = float("inf")
        return result

    data = [json.loads(line) for line in (place / "train.jsonl").read_text().splitlines()]
    lengths = {}
    original = lm_loop.make_lm_batch

    def seen(documents, plan):
        batch = original(documents, plan)
        lengths[int(batch.cu_seqlens[1])] = documents[0].source
        return batch

    monkeypatch.setattr("specforge_trim.train.lm_batch.make_lm_batch", seen)
    bad = -1
    monkeypatch.setattr(lm_loop, "lm_step", step)
    run(place, "fine", "--tokens-per-batch", "100", "--max-steps", "6", "--epochs", "1")
    assert len(lengths) == len(data), "documents of equal length: the test needs others"
    bad = min(lengths)
    capsys.readouterr()
    _, rows = run(place, "bad", "--tokens-per-batch", "200", "--epochs", "1")
    err = capsys.readouterr().err
    assert [row["non_finite_steps"] for row in rows][-1] == 1
    (line,) = [line for line in err.splitlines() if "left out, loss or gradient" in line]
    assert lengths[bad] in line
    (null,) = [row for row in rows if row["loss"] is None]
    assert null["loss_rows"] == 0 and null["grad_norm"] is None
