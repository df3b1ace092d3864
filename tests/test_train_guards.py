"""Steps whose loss or gradient is not finite, on one rank and on two.

Catches: a value that is not finite in one rank's documents that ends the run, or that only that
rank leaves out, so that ranks hold other weights from then on; a step left out that still moves a
weight or a moment of AdamW; a whole micro-batch blamed for one document; a run that leaves steps
out for ever; rows of metrics.jsonl that no JSON reader takes.

Two kinds of poison: NaN features, found as they are read, and huge finite states of the target,
whose logits overflow inside the step.
"""

import json
import logging
from pathlib import Path

import pytest
import tiny
import torch
from ranks import run_world

from specforge_trim.data.document_features import MemoryDocument
from specforge_trim.drafts.eagle3.settings import load_config
from specforge_trim.ranks.world import World
from specforge_trim.train import checkpoint as checkpoints
from specforge_trim.train import run as pipeline
from specforge_trim.train.loop import train
from specforge_trim.train.sampler import Schedule

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
TRIM = ["--trim-loss-positions", "--trim-backbone-rows"]
BAD = 5  # the number of the poisoned document: line 6 of train.jsonl
EPOCHS = 2  # of the recipe


class Poisoned(pipeline.TrainingDocuments):
    """The training documents, of which one has NaN or huge values where `kind` says."""

    kind = "none"

    def features(self, number):
        whole = super().features(number)
        if number != BAD or self.kind == "none":
            return whole
        aux, last = whole.aux(0, whole.num_tokens).clone(), whole.last().clone()
        if self.kind == "nan":
            aux[3, 2] = float("nan")
        else:
            last = last.sign() * 3e38  # finite, unlike its product with the head
            assert bool(last.isfinite().all())
        return MemoryDocument(aux, last, whole.last_positions)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tiny.training_place(tmp_path_factory.mktemp("guards"))


def run(place, world, name, kind, *flags):
    """Trains; returns the summary, the rows of rank 0, the model and this rank's log lines."""
    out = place / name
    argv = ["--config", str(place / "recipe.yaml"), "--output-dir", str(out), *TRIM, *flags]
    config = load_config(argv, prog="t", description="d")
    target = pipeline.open_target(config, world)
    data, documents = pipeline.training_data(config, target, world)
    poisoned = Poisoned(documents.data, documents.store)
    object.__setattr__(poisoned, "kind", kind)
    model, teacher = pipeline.build_draft(config, target, data, device=world.device)
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("specforge_trim").addHandler(handler)
    try:
        summary = train(
            config,
            model=model,
            teacher=teacher,
            documents=poisoned,
            lengths=[int(n) for n in data.lengths],
            world=world,
            identity={},
            provenance={},
        )
    finally:
        logging.getLogger("specforge_trim").removeHandler(handler)
    rows = [json.loads(t, parse_constant=pytest.fail) for t in lines_of(out / "metrics.jsonl")]
    return summary, rows, model, [line for line in lines if "left out" in line]


def lines_of(path: Path):
    return path.read_text().splitlines()


def weights(model):
    return {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}


def steps_with_the_bad_one(place, *, ranks, tokens_per_batch=400):
    """1-based optimizer steps whose documents include the poisoned one, on any rank."""
    config = load_config(["--config", str(place / "recipe.yaml")], prog="t", description="d")
    target = pipeline.open_target(config, ALONE)
    data = pipeline.prepare_data(config, target, ALONE)
    plan = Schedule(
        lengths=tuple(int(n) for n in data.lengths),
        tokens_per_batch=tokens_per_batch,
        seed=0,
        epochs=EPOCHS,
        world_size=ranks,
    )
    return [
        step + 1
        for step in range(plan.total_steps)
        if any(BAD in plan.micro_batch(step, rank=r, index=0) for r in range(ranks))
    ]


# ---------------------------------------------------------------------- one rank


def test_an_overflow_in_the_step_leaves_it_out_and_names_the_document(place):
    flags = ("--tokens-per-batch", "1200")  # several documents in a micro-batch
    bad = steps_with_the_bad_one(place, ranks=1, tokens_per_batch=1200)
    assert len(bad) == EPOCHS
    summary, rows, model, lines = run(place, ALONE, "overflow", "huge", *flags)
    assert [row["step"] for row in rows if row["loss"] is None] == bad
    assert [row["non_finite_steps"] for row in rows][-1] == summary.non_finite_steps == EPOCHS
    left_out = [row for row in rows if row["loss"] is None]
    assert all(row["grad_norm"] is None and row["loss_rows"] == 0 for row in left_out)
    assert summary.skipped_steps == 0 and rows[-1]["skipped_documents"] == 0
    for line, step in zip(lines, bad, strict=True):
        assert line.startswith(f"step {step} left out")
        assert f"train.jsonl:{BAD + 1} (document " in line and "train.jsonl:" in line
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_a_step_left_out_moves_nothing(place):
    """The poisoned document alone in its batch: the run equals one whose schedule lacks it."""
    flags = ("--tokens-per-batch", "1", "--epochs", "1", "--keep-checkpoints", "9")
    _, rows, model, _ = run(place, ALONE, "alone", "huge", *flags, "--save-every", "1")
    (bad,) = [row["step"] for row in rows if row["loss"] is None]
    before, after = (
        tensors(place / "alone" / "checkpoints", bad - 1, model),
        tensors(place / "alone" / "checkpoints", bad, model),
    )
    assert bad > 1 and len(before) > 20
    for name, tensor in before.items():
        assert torch.equal(tensor, after[name]), name
    moved = tensors(place / "alone" / "checkpoints", bad - 2 or 1, model)
    assert any(not torch.equal(moved[n], before[n]) for n in before)


def tensors(root, step, model):
    """Weights and AdamW's state of a checkpoint."""
    (found,) = [c for c in checkpoints.list_complete(root) if c.step == step]
    copy = type(model)(model.config)
    copy.set_vocab(model.d2t.clone(), model.t2d.clone())
    optimizer = torch.optim.AdamW([p for p in copy.parameters() if p.requires_grad])
    checkpoints.restore(found, model=copy, optimizer=optimizer, world=ALONE)
    names = {id(p): n for n, p in copy.named_parameters()}
    state = {
        f"{names[id(p)]}/{key}": value
        for p, entries in optimizer.state.items()
        for key, value in entries.items()
    }
    return weights(copy) | state


def test_one_step_more_than_the_limit_stops_the_run(place):
    run(place, ALONE, "at the limit", "huge", "--max-non-finite-steps", "2")
    with pytest.raises(ValueError, match="2 steps .* more than max_non_finite_steps 1: "):
        run(place, ALONE, "above", "huge", "--max-non-finite-steps", "1", "--save-every", "1")
    # It was counted before the stop too: the run does not get a fresh allowance by resuming.
    with pytest.raises(ValueError, match="2 steps"):
        run(place, ALONE, "above", "huge", "--max-non-finite-steps", "1", "--save-every", "1")


def test_weights_that_run_away_are_not_blamed_on_documents(place, monkeypatch):
    monkeypatch.setattr(
        "specforge_trim.train.loop.clip_gradients", lambda *_: torch.tensor(float("inf"))
    )
    _, _, _, lines = run(place, ALONE, "away", "none", "--max-steps", "2")
    assert len(lines) == 2
    assert all("none of its documents alone is the cause" in line for line in lines)


# ---------------------------------------------------------------------- two ranks


def check_same_weights(world, model):
    for name, p in weights(model).items():
        whole = p.full_tensor() if hasattr(p, "full_tensor") else p
        total = world.sum(whole.clone())
        assert torch.equal(total, whole * 2), name


def two_ranks(world, place):
    handler = logging.NullHandler()
    logging.getLogger("specforge_trim").addHandler(handler)
    more = ["--max-bad-fraction", "0.2", "--epochs", str(EPOCHS)]
    bad = steps_with_the_bad_one(place, ranks=2)

    summary, rows, model, lines = run(place, world, "nan", "nan", *more)
    assert rows[-1]["skipped_documents"] == EPOCHS and summary.non_finite_steps == 0
    assert summary.steps == len(rows) and all(row["loss"] > 0 for row in rows)
    assert int(world.sum(torch.tensor([len(lines)]))[0]) == EPOCHS  # each named by one rank
    assert all(f"train.jsonl:{BAD + 1}: the aux state of token 3" in line for line in lines)
    check_same_weights(world, model)

    losses = {}
    layouts = {
        "data": (),
        "fsdp": ("--fsdp",),
        "ring": ("--attention-backend", "usp", "--sp-context", "ring"),
    }
    for name, flags in layouts.items():
        summary, rows, model, lines = run(place, world, name, "huge", *more, *flags)
        out = [row["step"] for row in rows if row["loss"] is None]
        assert summary.non_finite_steps == len(out) == EPOCHS, (name, out)
        assert name == "ring" or out == bad, (name, out)
        assert int(world.sum(torch.tensor([len(lines)]))[0]) == EPOCHS, name
        assert all(f"train.jsonl:{BAD + 1} (document" in line for line in lines), name
        check_same_weights(world, model)
        losses[name] = [row["loss"] for row in rows if row["loss"] is not None]
    assert losses["fsdp"] == pytest.approx(losses["data"], rel=1e-5)

    with pytest.raises(ValueError, match="max_non_finite_steps 0"):
        run(place, world, "stop", "huge", *more, "--max-non-finite-steps", "0")
    world.barrier()


def test_two_ranks_leave_out_the_same_steps(place, tmp_path):
    run(place, ALONE, "features", "none", "--max-steps", "1")  # captured once, by one process
    run_world(2, two_ranks, tmp_path, place)


def test_nothing_is_left_out_of_a_sound_run(place):
    summary, rows, _, lines = run(place, ALONE, "sound", "none")
    assert summary.non_finite_steps == 0 and not lines
    assert [row["non_finite_steps"] for row in rows] == [0] * summary.steps
