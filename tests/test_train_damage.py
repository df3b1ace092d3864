"""Checkpoints that are not what was written: any file cut, changed, emptied or gone.

Catches: a flipped bit that trains on, a damaged meta.json that decides what is loaded, a fallback
nobody is told of, a start from nothing because the newest checkpoint is damaged, ranks that fall
back to different checkpoints, a damaged mark of the best one that has it removed, a damaged folder
that rotation counts as one of those to keep, a traceback of the library's own.
"""

import json
import logging
import random

import pytest
import torch
from test_train_checkpoint import ALONE, Stub, save

from specforge_trim.train import checkpoint as ck
from specforge_trim.train.optimizer import build_optimizer

FILES = (".metadata", "__0_0.distcp", "meta.json")


@pytest.fixture
def root(tmp_path):
    """Checkpoints of steps 2 and 4."""
    model = Stub(0)
    optimizer = build_optimizer(model, weight_decay=0.0)
    for step in (2, 4):
        save(tmp_path, step, model, optimizer)
    assert sorted(p.name for p in (tmp_path / "step-00000004").iterdir()) == sorted(FILES)
    return tmp_path


def told(caplog):
    """Warnings and errors that a user sees, whichever library gives them."""
    shown = [r for r in caplog.records if "NullHandler" not in r.name]
    return [r.getMessage() for r in shown if r.levelno >= logging.WARNING]


def cut_one_byte(file):
    file.write_bytes(file.read_bytes()[:-1])


def cut_in_half(file):
    content = file.read_bytes()
    file.write_bytes(content[: len(content) // 2])


def empty(file):
    file.write_bytes(b"")


def zero(file):
    file.write_bytes(bytes(file.stat().st_size))


def flip(at):
    """Flips one bit of the byte at this share of the file."""

    def damage(file):
        content = bytearray(file.read_bytes())
        content[int(at * (len(content) - 1))] ^= 4
        file.write_bytes(content)

    damage.__name__ = f"flip at {at}"
    return damage


def append(file):
    file.write_bytes(file.read_bytes() + b"0")


def remove(file):
    file.unlink()


DAMAGES = [
    cut_one_byte, cut_in_half, empty, zero, append, remove, flip(0.0), flip(0.3), flip(0.5),
    flip(0.9), flip(1.0),
]  # fmt: skip


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda d: d.__name__)
def test_damage_of_the_newest_falls_back_to_the_one_before_and_says_so(root, name, damage, caplog):
    damage(root / "step-00000004" / name)
    assert ck.newest(root).step == 2
    [message] = told(caplog)
    assert name in message and "step-00000004" in message, message
    assert "going on from step-00000002" in message
    assert ck.restore(ck.newest(root), **stub()) == 2


def stub():
    model = Stub(1)
    return {
        "model": model,
        "optimizer": build_optimizer(model, weight_decay=0.0),
        "world": ALONE,
    }


def test_no_changed_byte_of_meta_json_goes_unnoticed(root):
    """Any byte to any other value: refused, or a change of layout that keeps every entry."""
    path = root / "step-00000004" / "meta.json"
    whole = path.read_bytes()
    rng = random.Random(0)
    for place in range(len(whole)):
        content = bytearray(whole)
        content[place] = rng.choice([b for b in range(256) if b != whole[place]])
        path.write_bytes(content)
        found = ck.newest(root)
        if found.step == 4:
            assert json.loads(content) == json.loads(whole), (place, content[place])


def test_sound_checkpoints_pass_without_a_word(root, caplog):
    assert ck.newest(root).step == 4 and not told(caplog)


def test_when_all_are_damaged_nothing_starts_over_by_itself(root):
    remove(root / "step-00000002" / "meta.json")
    flip(0.5)(root / "step-00000004" / "__0_0.distcp")
    with pytest.raises(ValueError) as error:
        ck.newest(root)
    for words in ("step-00000004: __0_0.distcp", "step-00000002: meta.json is missing",
                  "--no-resume"):  # fmt: skip
        assert words in str(error.value)


def test_a_folder_under_another_name_is_not_taken_for_that_step(root, caplog):
    (root / "step-00000004").rename(root / "step-00000009")
    assert ck.newest(root).step == 2
    assert "meta.json is of step 4" in told(caplog)[0]
    (root / "step-backup").mkdir()  # not one of ours, so it stays
    ck.remove_all(root)
    assert [p.name for p in root.iterdir()] == ["step-backup"]


def test_the_best_one_is_checked_too(root, caplog):
    ck.mark_best(root, step=2, measured={"acceptance_length": 1.5})
    assert ck.best(root)[0].step == 2
    flip(0.5)(root / "step-00000002" / "__0_0.distcp")
    assert ck.best(root) is None
    assert "__0_0.distcp does not have the checksum" in told(caplog)[0]


@pytest.mark.parametrize(
    "text",
    ["", "\x00" * 20, "[]", "{}", '{"step": null, "measured": {}}', '{"step": 2, "measured": [1]}',
     '{"step": 2, "measured": {"length": "1.5"}}'],
)  # fmt: skip
def test_a_damaged_mark_is_not_taken_for_none(root, text):
    """Rotation would remove the best checkpoint, and any later one would be the best."""
    (root / "best.json").write_text(text)
    with pytest.raises(ValueError, match="best.json cannot be read.*remove that file to go on"):
        ck.best(root)
    state = stub()
    with pytest.raises(ValueError, match="best.json cannot be read"):
        save(root, 6, state["model"], state["optimizer"], keep=1)
    assert [c.step for c in ck.list_complete(root)] == [2, 4, 6]
    (root / "best.json").unlink()
    assert ck.best(root) is None


def test_rotation_counts_no_damaged_checkpoint_from_beyond(root):
    """Step 4 was passed over when the run started, so step 3 is its next checkpoint."""
    flip(0.5)(root / "step-00000004" / "__0_0.distcp")
    state = stub()
    ck.restore(ck.newest(root), **state)
    save(root, 3, state["model"], state["optimizer"], keep=2)
    assert sorted(p.name for p in root.iterdir()) == ["step-00000002", "step-00000003"]


def test_remains_of_killed_removals_are_cleared(root):
    (root / "step-00000002").rename(root / ".removing-step-00000002")
    state = stub()
    save(root, 6, state["model"], state["optimizer"])
    assert sorted(p.name for p in root.iterdir()) == ["step-00000004", "step-00000006"]


def without_checksums(folder):
    """A checkpoint as the first version wrote it: sizes only."""
    path = folder / "meta.json"
    meta = json.loads(path.read_text())
    del meta["meta_crc32"], meta["plan"], meta["random"]
    meta["files"] = {name: entry["bytes"] for name, entry in meta["files"].items()}
    path.write_text(json.dumps(meta))


def test_a_checkpoint_of_the_first_version_is_read_and_named(root, caplog):
    without_checksums(root / "step-00000004")
    assert ck.restore(ck.newest(root), **stub()) == 4
    [message] = told(caplog)
    assert "without checksums: only file sizes were compared" in message
    cut_one_byte(root / "step-00000004" / "__0_0.distcp")
    assert ck.newest(root).step == 2


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_where_no_checksum_tells_the_error_is_one_line(root, name, caplog):
    without_checksums(root / "step-00000004")
    zero(root / "step-00000004" / name)
    found = ck.newest(root)
    caplog.clear()
    with pytest.raises(ValueError, match="step-00000004 cannot be read.*remove that folder") as e:
        ck.restore(found, **stub())
    assert "\n" not in str(e.value)
    assert not told(caplog)  # torch logs a traceback for a .metadata that it cannot read


def test_a_flipped_bit_in_weights_would_load(root):
    """Why checksums: the library reads a changed tensor without a word."""
    folder = root / "step-00000004"
    without_checksums(folder)
    state = stub()
    ck.restore(ck.newest(root), **state)
    before = state["model"].fc.weight.clone()
    data = bytearray((folder / "__0_0.distcp").read_bytes())
    where = data.find(before.detach().numpy().tobytes())
    assert where > 0
    data[where] ^= 1
    (folder / "__0_0.distcp").write_bytes(data)
    ck.restore(ck.newest(root), **state)
    assert not torch.equal(state["model"].fc.weight, before)
