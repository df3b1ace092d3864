"""The whole path on a tiny random target: conversations in, a measured draft out.

Catches: phases that do not fit together, a resumed run that differs from a straight one, a trimmed
run that differs from a full one, ranks that differ from accumulation, a draft that changes on its
way through a checkpoint and an export, work that is done again although its result is there.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch

from specforge_trim.cli.main import main, train_main
from specforge_trim.drafts.eagle3.settings import load_config
from specforge_trim.drafts.eagle3.writing import load_draft
from specforge_trim.ranks.world import PeerLost, World
from specforge_trim.train import checkpoint as checkpoints
from specforge_trim.train import loop
from specforge_trim.train import run as pipeline
from specforge_trim.train.checkpoint_files import write_meta
from specforge_trim.train.loop import train

ROOT = Path(__file__).resolve().parent.parent
TRIM = ["--trim-loss-positions", "--trim-backbone-rows"]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a tiny target, training and held-out conversations, and a recipe."""
    return tiny.training_place(tmp_path_factory.mktemp("path"))


run, rows = tiny.run_recipe, tiny.metric_rows


def losses(metric_rows):
    return [row["loss"] for row in metric_rows]


@pytest.fixture(scope="module")
def straight(place):
    return run(place, "straight", *TRIM)


def test_train_path_from_conversations_to_a_measured_draft(place, straight, capsys):
    assert len(straight) >= 4
    assert [row["step"] for row in straight] == list(range(1, len(straight) + 1))
    assert straight[-1]["loss"] < straight[0]["loss"]
    common = ["--config", str(place / "recipe.yaml"), "--output-dir", str(place / "straight")]
    assert main(["export", *common]) == 0
    assert main(["evaluate", *common]) == 0
    out = capsys.readouterr().out
    assert "greedy output equals target: 2/2" in out

    draft = load_draft(place / "straight" / "export", dtype=torch.float32)
    found = checkpoints.newest(place / "straight" / "checkpoints")
    model = load_draft(place / "straight" / "export", dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data.fill_(7.0)
    checkpoints.restore_weights(found, model=model)
    for name, tensor in model.state_dict().items():
        # The export is bf16: half a unit in the last of 8 significant bits.
        torch.testing.assert_close(draft.state_dict()[name], tensor, rtol=2**-8, atol=1e-6)


def test_train_path_resumed_run_equals_the_straight_one(place, straight, capfd):
    run(place, "resumed", *TRIM, "--max-steps", str(len(straight)), "--save-every", "1")
    kept = place / "resumed" / "checkpoints"
    for checkpoint in checkpoints.list_complete(kept)[1:]:
        for file in checkpoint.path.iterdir():
            file.unlink()
        checkpoint.path.rmdir()
    assert checkpoints.newest(kept).step == len(straight) - 1
    resumed = run(place, "resumed", *TRIM)
    assert f"max_steps {len(straight)} -> None" in capfd.readouterr().err
    assert [row["step"] for row in resumed] == [row["step"] for row in straight]
    assert losses(resumed) == losses(straight)


def test_train_path_a_checkpoint_says_how_it_came_about(place, straight):
    found = checkpoints.newest(place / "straight" / "checkpoints").meta
    made = found["provenance"]
    assert made["packages"]["torch"] == torch.__version__ and "commit" in made
    assert made["config"]["loss"]["ttt_length"] == 3 and "arguments" in made
    assert len(found["identity"]["target"]) >= 16 and len(found["identity"]["data"]) == 64
    assert found["plan"]["chunk_rows"] > 0 and found["plan"]["trim_backbone_rows"] is True
    progress, steps = found["progress"], len(straight)
    assert (found["step"], progress["total_steps"], progress["epoch"]) == (steps, steps, 1)
    assert progress["step_of_epoch"] == sum(row["epoch"] == 1 for row in straight)
    assert (found["world_size"], found["random"]) == (1, ["cpu"])


def test_train_path_another_order_of_documents_is_no_continuation(place, straight, capsys):
    """As if a version of the package that deals documents otherwise went on."""
    shutil.copytree(place / "straight", place / "dealt")
    path = checkpoints.newest(place / "dealt" / "checkpoints").path / "meta.json"
    meta = json.loads(path.read_text())
    meta["progress"]["order"] = "00000000"
    files = {name: entry["crc32"] for name, entry in meta.pop("files").items()}
    del meta["meta_crc32"]
    write_meta(path.parent, meta, files)
    argv = ["--config", str(place / "recipe.yaml"), "--output-dir", str(place / "dealt")]
    assert train_main([*argv, *TRIM]) == 2
    assert "has seen other documents" in capsys.readouterr().err


@pytest.mark.parametrize("fewer", [("--max-steps", "2"), ("--epochs", "1")])
def test_train_path_fewer_steps_than_are_done_leave_everything_as_it_is(
    place, straight, fewer, capfd
):
    name = f"fewer {fewer[0]}"
    shutil.copytree(place / "straight", place / name)
    assert run(place, name, *TRIM, *fewer) == straight
    assert f"nothing left to train: {len(straight)} of " in capfd.readouterr().err
    assert checkpoints.newest(place / name / "checkpoints").step == len(straight)


def test_train_path_metrics_that_cannot_be_written_are_an_error_on_a_line_of_its_own(
    place, straight, capfd
):
    (place / "folder" / "metrics.jsonl").mkdir(parents=True)
    argv = ["--config", str(place / "recipe.yaml"), "--output-dir", str(place / "folder")]
    assert train_main([*argv, *TRIM]) == 2
    last = capfd.readouterr().err.splitlines()[-1]
    assert last.startswith("error: output_dir = ") and "metrics.jsonl" in last, last


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_train_path_a_signal_lets_the_step_be_finished_and_saved(
    place, straight, number, monkeypatch, capfd
):
    step, calls = loop.ttt_step, []

    def signalled(*args, **kwargs):
        calls.append(1)
        if len(calls) == 3:
            os.kill(os.getpid(), number)
        return step(*args, **kwargs)

    out = place / f"signal-{number}"
    argv = ["--config", str(place / "recipe.yaml"), "--output-dir", str(out), *TRIM]
    before = (
        signal.getsignal(signal.SIGTERM),
        signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    monkeypatch.setattr(loop, "ttt_step", signalled)
    assert train_main(argv) == 128 + number
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    signal.signal(signal.SIGINT, before[1])
    assert signal.getsignal(signal.SIGTERM) == before[0]
    assert "stopped after step 3, which is saved" in capfd.readouterr().err
    assert checkpoints.newest(out / "checkpoints").step == len(rows(out)) == 3
    assert losses(run(place, out.name, *TRIM)) == losses(straight)


@pytest.mark.parametrize("flags", [(), TRIM[:1]], ids=["no trimming", "loss only"])
def test_train_path_trimming_does_not_change_the_losses(place, straight, flags):
    full = run(place, "full" + str(len(flags)), *flags)
    # fp32: the same sums in another order, over a few optimizer steps.
    assert losses(full) == pytest.approx(losses(straight), rel=1e-5)
    assert full[0]["perf/backbone_row_fraction"] == 1.0
    assert straight[0]["perf/backbone_row_fraction"] < 0.5
    assert full[0]["loss_rows"] == straight[0]["loss_rows"]


@pytest.mark.parametrize(
    "source", [[], pytest.param(["--online"], marks=pytest.mark.slow)], ids=["store", "online"]
)
def test_train_path_accumulation_equals_ranks(place, source):
    alone = run(place, f"alone{len(source)}", *TRIM, "--accumulate", "2")
    out = place / f"ranks{len(source)}"
    command = [sys.executable, str(ROOT / "train_eagle3.py"), *TRIM, *source]
    command += ["--config", str(place / "recipe.yaml"), "--output-dir", str(out)]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2"}
    shared |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(command, env=os.environ | shared | {"RANK": r}, stderr=subprocess.PIPE)
        for r in ("0", "1")
    ]
    errors = [process.communicate(timeout=240)[1].decode() for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], errors
    assert "train:" not in errors[1]  # one progress bar, not one per rank
    assert losses(rows(out)) == pytest.approx(losses(alone), rel=1e-5)


@pytest.mark.slow
def test_train_path_killed_run_continues_as_if_nothing_happened(place):
    flags = [*TRIM, "--epochs", "12", "--save-every", "3", "--num-workers", "1"]
    straight = run(place, "unkilled", *flags)
    out = place / "killed"
    command = [sys.executable, str(ROOT / "train_eagle3.py"), *flags]
    command += ["--config", str(place / "recipe.yaml"), "--output-dir", str(out)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, env=env)
    metrics = out / "metrics.jsonl"
    while not metrics.exists() or metrics.read_text().count("\n") < 8:
        assert process.poll() is None, process.stderr.read().decode()
        time.sleep(0.01)
    process.kill()
    # A loader worker that outlives the run would hold its stderr open for good.
    process.communicate(timeout=30)
    assert checkpoints.newest(out / "checkpoints").step < len(straight)
    continued = run(place, "killed", *flags)
    assert [row["step"] for row in continued] == [row["step"] for row in straight]
    assert losses(continued) == losses(straight)


def test_train_path_nothing_is_done_twice(place, straight, capfd):
    again = run(place, "straight", *TRIM)
    assert again == straight
    err = capfd.readouterr().err
    assert "nothing left to train" in err
    assert "capture" not in err and "tokenize" not in err


def test_train_path_another_vocabulary_is_no_continuation(place, straight, capsys):
    argv = ["--config", str(place / "recipe.yaml"), "--output-dir", str(place / "straight")]
    assert train_main([*argv, *TRIM, "--draft-vocab-size", "32"]) == 2
    err = capsys.readouterr().err
    assert "draft_vocab_size = 64" in err and "32" in err and "--output-dir" in err


def test_train_path_inspect_predicts_the_work_kept(place, straight, capsys):
    data = str(place / "train.jsonl")
    assert main(["inspect", data, "--config", str(place / "recipe.yaml"), "--no-color"]) == 0
    out, err = capsys.readouterr()
    assert "[[" in out and "<|im_end|>]]" in out and "EXPECTED MEMORY" in out
    assert (out + err).count("8 of 8 conversations") == 1


def test_train_path_without_its_launcher_a_rank_stops(place, straight):
    argv = ["--config", str(place / "recipe.yaml"), "--output-dir", str(place / "orphan"), *TRIM]
    config = load_config(argv, prog="t", description="d")
    alone = {"rank": 0, "size": 1, "device": torch.device("cpu")}
    pipeline.train_draft(config, World(**alone, launcher=os.getppid()))
    again = replace(config, train=replace(config.train, resume=False))
    with pytest.raises(PeerLost, match="torchrun .* is gone"):
        pipeline.train_draft(again, World(**alone, launcher=os.getpid()))
    assert rows(place / "orphan") == []


def test_train_path_inspect_writes_a_page(place, straight, capsys):
    data, page = str(place / "train.jsonl"), place / "pages" / "report.html"
    recipe = str(place / "recipe.yaml")
    assert main(["inspect", data, "--config", recipe, "--html", str(page)]) == 0
    assert capsys.readouterr().out.strip() == str(page)
    assert "<svg" in page.read_text() and "Expected memory" in page.read_text()


class Unsupervised(pipeline.TrainingDocuments):
    """The training documents without a supervised token."""

    def tokens(self, number):
        document = super().tokens(number)
        return replace(document, loss_mask=torch.zeros_like(document.loss_mask))


@pytest.mark.parametrize("flags", [(), TRIM], ids=["no trimming", "both"])
def test_train_path_steps_without_loss_move_no_weight(place, straight, flags):
    out = place / f"unsupervised{len(flags)}"
    argv = ["--config", str(place / "recipe.yaml"), "--output-dir", str(out), *flags]
    config = load_config([*argv, "--weight-decay", "0.1"], prog="t", description="d")
    world = World(rank=0, size=1, device=torch.device("cpu"))
    target = pipeline.open_target(config, world)
    data = pipeline.prepare_data(config, target, world)
    store = pipeline.make_features(config, target, data, world)
    model, teacher = pipeline.build_draft(config, target, data, device=world.device)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    summary = train(
        config,
        model=model,
        teacher=teacher,
        documents=Unsupervised(data, store),
        lengths=[int(n) for n in data.lengths],
        world=world,
        identity={},
        provenance={},
    )
    assert summary.skipped_steps == summary.steps > 2
    assert all(torch.equal(before[n], tensor) for n, tensor in model.state_dict().items())
    assert [row["loss"] for row in rows(out)] == [None] * summary.steps
    assert checkpoints.newest(out / "checkpoints").meta["progress"]["skipped_steps"] > 2
