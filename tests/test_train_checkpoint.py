"""Checkpoints, optimizer schedule and metric lines, on a stub model.

Catches: moments or step counters lost or cast on resume, a half-written folder that is read, the
only good checkpoint removed before the new one is complete, a run continued under another
vocabulary, metrics of replayed steps that stand twice, a learning rate that jumps after resume.
"""

import json
import math

import pytest
import torch
from torch import nn

from specforge_trim.ranks.world import World
from specforge_trim.train import checkpoint as ck
from specforge_trim.train.optimizer import (
    build_optimizer,
    clip_gradients,
    learning_rate,
    set_learning_rate,
)
from specforge_trim.train.trackers import JsonLines

ALONE = World(rank=0, size=1, device=torch.device("cpu"))


class Stub(nn.Module):
    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.fc = nn.Linear(4, 3, bias=False)
        self.norm = nn.Parameter(torch.ones(3))
        self.embed_tokens = nn.Embedding(5, 4)
        self.embed_tokens.weight.requires_grad_(False)
        self.register_buffer("d2t", torch.arange(3))


def one_step(model, optimizer, step):
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(6, 4, generator=generator)
    (model.fc(x) * model.norm).square().sum().backward()
    set_learning_rate(optimizer, 0.1 / (step + 1))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def save(root, step, model, optimizer, keep=2, **identity):
    return ck.save(
        root,
        step=step,
        model=model,
        optimizer=optimizer,
        world=ALONE,
        identity=identity,
        provenance={"torch": torch.__version__},
        progress={"skipped_steps": 0},
        plan={},
        keep=keep,
    )


def test_train_straight_run_equals_resumed_run_bit_for_bit(tmp_path):
    straight = Stub(0)
    optimizer = build_optimizer(straight, weight_decay=0.1)
    for step in range(6):
        if step == 3:
            save(tmp_path, 3, straight, optimizer)
        one_step(straight, optimizer, step)

    resumed = Stub(1)
    optimizer = build_optimizer(resumed, weight_decay=0.1)
    done = ck.restore(ck.newest(tmp_path), model=resumed, optimizer=optimizer, world=ALONE)
    assert done == 3
    for step in range(done, 6):
        one_step(resumed, optimizer, step)
    assert torch.equal(straight.fc.weight, resumed.fc.weight)
    assert torch.equal(straight.norm, resumed.norm)
    for p in (resumed.fc.weight, resumed.norm):
        assert optimizer.state[p]["step"].dtype == torch.float32
        assert float(optimizer.state[p]["step"]) == 6


def test_train_checkpoint_before_the_first_step(tmp_path):
    model = Stub(0)
    optimizer = build_optimizer(model, weight_decay=0.0)
    save(tmp_path, 0, model, optimizer)
    one_step(model, optimizer, 0)
    other = Stub(1)
    optimizer = build_optimizer(other, weight_decay=0.0)
    assert ck.restore(ck.newest(tmp_path), model=other, optimizer=optimizer, world=ALONE) == 0
    one_step(other, optimizer, 0)
    assert torch.equal(model.fc.weight, other.fc.weight)


def test_train_random_state_is_restored(tmp_path):
    model = Stub(0)
    optimizer = build_optimizer(model, weight_decay=0.0)
    save(tmp_path, 1, model, optimizer)
    expected = torch.rand(3)
    torch.manual_seed(99)
    ck.restore(ck.newest(tmp_path), model=model, optimizer=optimizer, world=ALONE)
    assert torch.equal(torch.rand(3), expected)


def test_train_frozen_embedding_is_not_stored_and_maps_are(tmp_path):
    model = Stub(0)
    save(tmp_path, 1, model, build_optimizer(model, weight_decay=0.0))
    other = Stub(1)
    other.d2t.fill_(-1)
    embedding = other.embed_tokens.weight.clone()
    ck.restore_weights(ck.newest(tmp_path), model=other)
    assert torch.equal(other.fc.weight, model.fc.weight)
    assert torch.equal(other.d2t, torch.arange(3))
    assert torch.equal(other.embed_tokens.weight, embedding)


def test_train_newest_complete_checkpoint_wins(tmp_path):
    model = Stub(0)
    optimizer = build_optimizer(model, weight_decay=0.0)
    assert ck.newest(tmp_path) is None
    for step in (2, 4, 10):
        save(tmp_path, step, model, optimizer, keep=5)
    assert [c.step for c in ck.list_complete(tmp_path)] == [2, 4, 10]
    # A truncated file makes the newest one incomplete, a missing meta.json the next.
    data = next((tmp_path / "step-00000010").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:-1])
    assert ck.newest(tmp_path).step == 4
    (tmp_path / "step-00000004" / "meta.json").unlink()
    assert ck.newest(tmp_path).step == 2


@pytest.mark.parametrize(
    "damage",
    [
        lambda meta: [],
        lambda meta: {**meta, "files": None},
        lambda meta: {**meta, "progress": None},
        lambda meta: {**meta, "identity": 3},
        lambda meta: {k: v for k, v in meta.items() if k != "step"},
        lambda meta: {k: v for k, v in meta.items() if k != "identity"},
    ],
)
def test_train_a_checkpoint_whose_meta_is_damaged_is_passed_over(tmp_path, damage):
    model = Stub(0)
    optimizer = build_optimizer(model, weight_decay=0.0)
    for step in (2, 4):
        save(tmp_path, step, model, optimizer, keep=5)
    path = tmp_path / "step-00000004" / "meta.json"
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    assert ck.newest(tmp_path).step == 2


def test_train_rotation_keeps_the_newest_and_clears_remains(tmp_path):
    model = Stub(0)
    optimizer = build_optimizer(model, weight_decay=0.0)
    remains = tmp_path / ".writing-step-00000001"
    remains.mkdir()
    for step in (1, 2, 3):
        save(tmp_path, step, model, optimizer, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_train_rotation_spares_the_best(tmp_path):
    model = Stub(0)
    optimizer = build_optimizer(model, weight_decay=0.0)
    assert ck.best(tmp_path) is None
    for step in (1, 2, 3, 4):
        save(tmp_path, step, model, optimizer, keep=1)
        if step in (1, 2):
            ck.mark_best(tmp_path, step=step, measured={"acceptance_length": step / 2})
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "best.json",
        "step-00000002",
        "step-00000004",
    ]
    found, measured = ck.best(tmp_path)
    assert (found.step, measured) == (2, {"acceptance_length": 1.0})
    assert ck.newest(tmp_path).step == 4
    ck.remove_all(tmp_path)
    assert list(tmp_path.iterdir()) == [] and ck.best(tmp_path) is None


def test_train_failed_save_leaves_the_previous_checkpoint(tmp_path, monkeypatch):
    model = Stub(0)
    optimizer = build_optimizer(model, weight_decay=0.0)
    save(tmp_path, 1, model, optimizer, keep=1)

    def full_disk(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="step-00000002.*No space left"):
        save(tmp_path, 2, model, optimizer, keep=1)
    monkeypatch.undo()
    assert ck.newest(tmp_path).step == 1


def test_train_other_identity_is_refused(tmp_path):
    model = Stub(0)
    save(tmp_path, 1, model, build_optimizer(model, weight_decay=0.0), draft_vocab=48, aux=(1, 2))
    ck.check_identity(ck.newest(tmp_path), {"draft_vocab": 48, "aux": (1, 2)})
    with pytest.raises(ValueError, match="draft_vocab = 48.*32.*--output-dir"):
        ck.check_identity(ck.newest(tmp_path), {"draft_vocab": 32, "aux": (1, 2)})


def test_train_learning_rate_written_out():
    def at(step):
        return learning_rate(step, total_steps=12, peak=0.8, warmup_ratio=0.25, min_ratio=0.5)

    # warm-up = 3 steps; then 0.8 * (0.5 + 0.25 * (1 + cos(pi * (step - 3) / 9)))
    assert [at(0), at(1), at(2)] == pytest.approx([0.8 / 3, 1.6 / 3, 0.8])
    assert at(3) == pytest.approx(0.8)
    assert at(6) == pytest.approx(0.8 * (0.5 + 0.25 * (1 + math.cos(math.pi / 3))))
    assert at(12) == pytest.approx(0.4)
    assert learning_rate(0, total_steps=1, peak=1.0, warmup_ratio=0.0, min_ratio=0.0) == 1.0


def test_train_decay_spares_norm_weights():
    groups = build_optimizer(Stub(0), weight_decay=0.1).param_groups
    assert [(g["weight_decay"], [p.dim() for p in g["params"]]) for g in groups] == [
        (0.1, [2]),
        (0.0, [1]),
    ]


def test_train_clip_returns_the_norm_before():
    model = Stub(0)
    model.fc.weight.grad = torch.full((3, 4), 2.0)
    model.norm.grad = torch.full((3,), 4.0)
    norm = math.sqrt(12 * 4 + 3 * 16)
    assert float(clip_gradients(model, 1.0)) == pytest.approx(norm)
    assert torch.allclose(model.norm.grad, torch.full((3,), 4.0 / norm), rtol=1e-4)


def test_train_metric_lines_of_replayed_steps_stand_once(tmp_path):
    path = tmp_path / "metrics.jsonl"
    log = JsonLines(path, resume_step=0)
    for step in (1, 2, 3):
        log.write({"step": step, "loss": step})
    with path.open("a") as file:
        file.write('5\n{}\n{"step": 4, "lo')  # not ours, and cut off by a kill
    log = JsonLines(path, resume_step=2)
    log.write({"step": 3, "loss": 33})
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(r["step"], r["loss"]) for r in rows] == [(1, 1), (2, 2), (3, 33)]
