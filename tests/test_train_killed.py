"""kill -9 at random moments of a run that saves every five steps; a full and a read-only disk.

Catches: a half-written checkpoint that is read, a finished one that is lost, a restart from an
older one than need be, a folder that stays locked, steps whose metrics stand twice or never, a
run put together from many pieces that differs from one in a piece, an error that hides what
happened or where.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import time
import zlib

import pytest
import tiny
from forked import rows, start, warm

FLAGS = ("--trim-loss-positions", "--trim-backbone-rows", "--epochs", "1000", "--save-every", "5")
KILLS, INSIDE = 50, 15
KEPT = 2  # checkpoints, the default


def whole_steps(out):
    """Steps of the checkpoints that are whole, by the test's own reading of meta.json."""
    found = []
    for folder in (out / "checkpoints").glob("step-*"):
        meta = json.loads((folder / "meta.json").read_text())
        for name, entry in meta["files"].items():
            content = (folder / name).read_bytes()
            assert (len(content), f"{zlib.crc32(content):08x}") == (
                entry["bytes"], entry["crc32"],
            ), (folder, name)  # fmt: skip
        found.append(meta["step"])
    return sorted(found)


def remains(out):
    """What kills have left, as (name, when it was made or last changed in its place)."""
    return {(p.name, p.stat().st_mtime_ns) for p in (out / "checkpoints").glob(".*")}


def resumed_from(child):
    """The step a child has gone on from; 0 for a start from nothing."""
    marks = [line for line in child.text.splitlines() if line.startswith("resuming after step")]
    return int(marks[0].split()[3]) if marks else 0


def slow_disk():
    """Makes an fsync take 20 ms, as on a disk: the test machine's may be memory."""
    sync = os.fsync

    def slow(handle):
        time.sleep(0.02)
        sync(handle)

    os.fsync = slow


def kill_often(place):
    """The same run is killed until KILLS and INSIDE are reached; then it is let to its end."""
    out, rng = place / "killed", random.Random(0)
    tally = {"outside a save": 0, "writing": 0, "removing an old one": 0}
    last, count = 0, KEPT
    while sum(tally.values()) < KILLS or tally["writing"] < INSIDE:
        assert sum(tally.values()) < 3 * KILLS, tally
        before = remains(out)  # of an earlier kill; stays until the next save
        child = start(place, out.name, *FLAGS, hook=slow_disk)
        child.until(lambda child=child: "train:" in child.log.read_text(errors="replace"))
        time.sleep(rng.uniform(0.0, 0.6))
        child.send(signal.SIGKILL, group=True)
        assert child.wait() == -signal.SIGKILL, child.text
        assert resumed_from(child) == last, (resumed_from(child), last)
        left = [name for name, _ in remains(out) - before]
        kind = "outside a save"
        if any("writing" in name for name in left):
            kind = "writing"
        elif left:
            kind = "removing an old one"
        tally[kind] += 1
        steps = whole_steps(out)
        now = steps[-1] if steps else 0
        # A kill between a save and the removal of older ones leaves one more, every time.
        assert now >= last and now % 5 == 0 and len(steps) <= max(count, KEPT) + 1, (steps, last)
        last, count = now, len(steps)
    print(f"\nkilled {sum(tally.values())} times by signal 9: {tally}; {last} steps survived")
    return last


def damage_the_newest(place, out, done):
    """Cut, changed, emptied: each time the run goes on from the one before, and says so."""
    for n, name in enumerate(("__0_0.distcp", ".metadata", "meta.json")):
        before, newest = whole_steps(out)[-2:]
        file = out / "checkpoints" / f"step-{newest:08d}" / name
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes((content[:-1], content, b"")[n])
        child = start(place, out.name, *FLAGS, "--max-steps", str(newest))
        assert child.wait() == 0, child.text
        assert resumed_from(child) == before
        assert len(whole_steps(out)) == KEPT
        text = f"checkpoint step-{newest:08d}: {name} "
        [line] = [line for line in child.text.splitlines() if line.startswith(text)]
        assert line.endswith(f"going on from step-{before:08d} instead"), line
        print(line)
    return done


def equals_the_straight_run(place, out, steps):
    flags = (*FLAGS, "--max-steps", str(steps))
    assert start(place, "straight", *flags).wait() == 0
    straight, killed = (
        [(r["step"], r["loss"], r["grad_norm"], r["lr"]) for r in rows(place / name)]
        for name in ("straight", out.name)
    )
    assert [r[0] for r in killed] == list(range(1, steps + 1))
    assert [r[1:3] for r in straight] == [r[1:3] for r in killed]
    print(
        f"{steps} steps: losses and gradient norms equal those of a run in one piece, bit for bit"
    )


def killed_main(place):
    assert start(place, "features", *FLAGS, "--max-steps", "1").wait() == 0
    out = place / "killed"
    done = kill_often(place)
    damage_the_newest(place, out, done)
    equals_the_straight_run(place, out, done)


@pytest.mark.slow
def test_train_killed_fifty_times_goes_on_from_the_newest_whole_checkpoint(tmp_path):
    tiny.training_place(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    # A constant rate: with another --max-steps the steps before it stay as they were.
    constant = "min_lr_ratio: 1.0, warmup_ratio: 0"
    recipe.write_text(recipe.read_text().replace("epochs: 2", constant))
    warm(killed_main, tmp_path, report=tmp_path / "report", seconds=290)


# ---------------------------------------------------------------------- disks


@contextlib.contextmanager
def small_disk(folder, size="4m"):
    """A disk of its own at `folder`; needs root."""
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", str(folder)], capture_output=True
    )
    if done.returncode != 0:
        pytest.skip(f"no disk can be mounted here: {done.stderr.decode().strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def read_only(disk):
    done = subprocess.run(["mount", "-o", "remount,ro", str(disk)], capture_output=True)
    return done.returncode == 0


def error_of(child):
    assert child.wait() == 2, child.text
    assert "Traceback" not in child.text, child.text
    [line] = [line for line in child.text.splitlines() if line.startswith("error")]
    return line


def fill(disk, leave):
    free = shutil.disk_usage(disk).free
    (disk / "filler").write_bytes(bytes(max(0, free - leave)))


def on(disk, out):
    """A run's folder whose checkpoints lie on another disk."""
    out.mkdir()
    (disk / out.name).mkdir()
    (out / "checkpoints").symlink_to(disk / out.name)
    return out


def check_goes_on(place, out):
    steps = whole_steps(out)
    again = start(place, out.name, *FLAGS, "--max-steps", str(steps[-1] + 5))
    assert again.wait() == 0, again.text
    assert resumed_from(again) == steps[-1] and whole_steps(out)[-1] == steps[-1] + 5


def full_disk_main(place, disk):
    """The disk fills up while a run saves; when there is room again, the run goes on."""
    out = on(disk, place / "full")
    child = start(place, out.name, *FLAGS)
    child.until(lambda: whole_or_none(out))
    fill(disk, 100_000)
    line = error_of(child)
    assert "checkpoint " in line and "could not be written: No space left on device" in line, line
    assert not remains(out)
    (disk / "filler").unlink()
    check_goes_on(place, out)
    print(line)
    # metrics.jsonl is what does not fit any more.
    fill(disk, 0)
    (place / "log").mkdir()
    (place / "log" / "metrics.jsonl").symlink_to(disk / "metrics.jsonl")
    line = error_of(start(place, "log", *FLAGS))
    (disk / "filler").unlink()
    assert "log/metrics.jsonl could not be written: No space left on device" in line, line


def whole_or_none(out):
    with contextlib.suppress(OSError):
        return whole_steps(out)


def read_only_main(place, disk):
    """Before a run: named with its setting, and nothing left. During one: as a full disk."""
    shutil.copytree(place / "cache", disk / "prepared")
    shutil.rmtree(disk / "prepared" / "features")
    assert read_only(disk)
    for folder, reason in ((f"{disk}/new/run", "Read-only file system"),
                           ("/proc/run", "No such file or directory")):  # fmt: skip
        line = error_of(start(place, "x", *FLAGS, "--output-dir", folder))
        assert f"output_dir = '{folder}' cannot be written ({reason})" in line, line
    for folder in (disk / "cache", disk / "prepared"):  # nothing there, and only features missing
        line = error_of(start(place, "cacheless", *FLAGS, "--cache-dir", str(folder)))
        assert f"cache_dir = '{folder}' cannot be used (Read-only file system" in line, line
        assert not (place / "cacheless").exists()
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)

    out = on(disk, place / "turned")
    child = start(place, out.name, *FLAGS)
    child.until(lambda: whole_or_none(out))
    child.until(lambda: read_only(disk))  # refused while a file there is open for writing
    line = error_of(child)
    assert "could not be written: Read-only file system" in line, line
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    check_goes_on(place, out)
    print(line)


def disks_main(place, full, other):
    assert start(place, "features", *FLAGS, "--max-steps", "1").wait() == 0
    full_disk_main(place, full)
    read_only_main(place, other)


@pytest.mark.slow
def test_train_disk_full_or_read_only_is_one_clear_error_and_nothing_is_lost(tmp_path):
    tiny.training_place(tmp_path)
    with small_disk(tmp_path / "disk") as full, small_disk(tmp_path / "other") as other:
        warm(disks_main, tmp_path, full, other, report=tmp_path / "report", seconds=200)
