"""What lies in output_dir/checkpoints, and what of it can be trusted.

    <root>/step-00000200/     .metadata, *.distcp (weights, AdamW state, RNG), meta.json
    <root>/best.json          which of them decoded best, if that was measured
    <root>/.writing-...       a save in progress, or what a killed one left; never read
    <root>/.removing-...      likewise of a removal

meta.json holds size and CRC-32 of every other file, and its own; its other entries are named in
checkpoint.py.  A folder is complete when the sizes agree, and sound when the checksums do.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specforge_trim.ranks.world import World

ALONE = World(rank=0, size=1, device=torch.device("cpu"))

logger = logging.getLogger(__name__)

META, BEST = "meta.json", "best.json"
_OWN_SUM = "meta_crc32"
_PARTS = ("step", "world_size", "files", "identity", "provenance", "progress")
_CHUNK = 1 << 24  # bytes read at once for a checksum


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint folder and its meta.json."""

    path: Path
    step: int
    meta: Mapping[str, Any]

    @property
    def has_checksums(self) -> bool:
        """False for a folder of an early version, which noted sizes only."""
        return _OWN_SUM in self.meta


class Damaged(ValueError):
    """A checkpoint that is not what was written; says which file and how."""


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


# ---------------------------------------------------------------------- writing


def write_meta(folder: Path, meta: Mapping[str, Any], sums: Mapping[str, str]) -> None:
    """Writes folder/meta.json: `meta`, and the size and checksum of every file there.

    sums: file name -> `checksum` of it.
    """
    whole = dict(meta)
    whole["files"] = {
        name: {"bytes": (folder / name).stat().st_size, "crc32": crc}
        for name, crc in sorted(sums.items())
    }
    whole[_OWN_SUM] = _meta_sum(whole)
    (folder / META).write_text(json.dumps(whole, indent=1), encoding="utf-8")


def checksum(file: Path) -> str:
    """CRC-32 of a file's bytes, eight hex digits."""
    total = 0
    with file.open("rb") as stream:
        while chunk := stream.read(_CHUNK):
            total = zlib.crc32(chunk, total)
    return f"{total:08x}"


def _meta_sum(meta: Mapping[str, Any]) -> str:
    """CRC-32 of everything in meta.json but this sum itself, whatever its layout on disk."""
    rest = {key: value for key, value in meta.items() if key != _OWN_SUM}
    text = json.dumps(json.loads(json.dumps(rest)), sort_keys=True)
    return f"{zlib.crc32(text.encode()):08x}"


def publish(writing: Path, final: Path) -> None:
    """Gives a written folder its name once every byte of it is on disk."""
    for file in writing.iterdir():
        sync(file)
    sync(writing)
    remove(final)
    os.replace(writing, final)
    sync(final.parent)


def sync(path: Path) -> None:
    """Asks the disk to hold what was written; a folder's entries count too."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---------------------------------------------------------------------- removing


def remove(folder: Path) -> None:
    """Removes a checkpoint: it is gone at once, so a kill leaves no half of one."""
    if folder.exists():
        aside = folder.with_name(f".removing-{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(folder, aside)
        shutil.rmtree(aside)


def remove_remains(root: Path) -> None:
    """Removes what killed saves and removals have left."""
    for pattern in (".writing-step-*", ".removing-step-*"):
        for stale in root.glob(pattern):
            shutil.rmtree(stale)


def remove_all(root: str | Path) -> None:
    """Removes every checkpoint under root: what --no-resume asks for."""
    for folder in _folders(root):
        remove(folder)
    (Path(root) / BEST).unlink(missing_ok=True)


def rotate(root: Path, *, step: int, keep: int) -> None:
    """Removes all but the `keep` newest complete checkpoints up to `step`, and the best one.

    What lies beyond the step just saved was passed over as damaged when this run started.
    """
    best_step, _ = _best_mark(root)
    complete = list_complete(root)
    spared = {c.step for c in [c for c in complete if c.step <= step][-keep:]} | {best_step}
    for folder in _folders(root):
        if _step_of(folder) not in spared:
            remove(folder)


# ---------------------------------------------------------------------- reading


def _folders(root: str | Path) -> list[Path]:
    """Checkpoint folders, oldest first; a name that is not ours is left alone."""
    named = [f for f in Path(root).glob("step-*") if f.name[5:].isdecimal() and f.is_dir()]
    return sorted(named, key=_step_of)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def read(folder: Path) -> Checkpoint:
    """The checkpoint in a folder whose files are there with the sizes that were written.

    Raises Damaged naming the file; contents are compared by `check_files`.
    """
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise Damaged(f"{META} is missing") from None
    except (OSError, ValueError) as error:
        raise Damaged(f"{META} cannot be read ({error})") from None
    _check_meta(meta)
    if folder.name != folder_name(meta["step"]):
        raise Damaged(f"{META} is of step {meta['step']}")
    for name, entry in meta["files"].items():
        size = entry["bytes"] if isinstance(entry, dict) else entry
        try:
            found = (folder / name).stat().st_size
        except OSError:
            raise Damaged(f"{name} is missing") from None
        if found != size:
            raise Damaged(f"{name} has {found:,} bytes, {size:,} were written")
    return Checkpoint(folder, meta["step"], meta)


def _check_meta(meta: Any) -> None:
    if not isinstance(meta, dict) or not set(_PARTS) <= meta.keys():
        raise Damaged(f"{META} lacks entries")
    files = meta["files"]
    whole = isinstance(meta["step"], int) and isinstance(meta["world_size"], int)
    whole = whole and all(isinstance(meta[key], dict) for key in _PARTS[2:])
    whole = whole and "skipped_steps" in meta["progress"]
    if not whole or not files:
        raise Damaged(f"{META} has entries of another form")
    if _OWN_SUM in meta or any(isinstance(entry, dict) for entry in files.values()):
        if meta.get(_OWN_SUM) != _meta_sum(meta):
            raise Damaged(f"{META} does not have the checksum that was written")


def check_files(checkpoint: Checkpoint, names: Iterable[str]) -> str | None:
    """What is wrong with the bytes of these files; None when they are as written."""
    for name in names:
        try:
            found = checksum(checkpoint.path / name)
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
        if found != checkpoint.meta["files"][name]["crc32"]:
            return f"{name} does not have the checksum that was written"
    return None


def list_complete(root: str | Path) -> list[Checkpoint]:
    """Complete checkpoints under root, oldest first; their checksums are not compared."""
    found = []
    for folder in _folders(root):
        try:
            found.append(read(folder))
        except Damaged:
            continue
    return found


def newest(root: str | Path, world: World = ALONE) -> Checkpoint | None:
    """The newest sound checkpoint, the same on every rank; None when there is no checkpoint.

    Every rank of `world` compares the checksums of its share of the files.  A damaged checkpoint
    is passed over with a warning.  Raises ValueError when all are damaged.
    """
    damaged: list[str] = []
    # Rank 0 looks: a folder may reach the other machines of a shared file system late.
    folders = world.share(world.together(lambda: _folders(root) if world.is_main else []))
    for folder in reversed(folders):
        found = _sound(folder, world)
        if isinstance(found, Checkpoint):
            _warn(found, damaged)
            return found
        damaged.append(f"{folder.name}: {found}")
    if damaged:
        error = ValueError(
            f"no checkpoint in {root} is whole ({'; '.join(damaged)}): start over with "
            "--no-resume, which removes them, or choose another --output-dir"
        )
        world.together(lambda: _raise(error))
    return None


def _raise(error: Exception) -> None:
    """Within `together`, of all ranks that know of an error one says so."""
    raise error


def _sound(folder: Path, world: World = ALONE) -> Checkpoint | str:
    """The checkpoint, or what is wrong with it; every rank gets the same answer."""

    def look() -> Checkpoint | str:
        try:
            return read(folder)
        except Damaged as error:
            return str(error)

    found = world.share(look() if world.is_main else "")
    if isinstance(found, str) or not found.has_checksums:
        return found
    names = sorted(found.meta["files"])
    reasons = world.gather(check_files(found, names[world.rank :: world.size]))
    return next((reason for reason in reasons if reason), found)


def _warn(found: Checkpoint, damaged: list[str]) -> None:
    for reason in damaged:
        logger.warning("checkpoint %s; going on from %s instead", reason, found.path.name)
    if not found.has_checksums:
        logger.warning(
            "checkpoint %s was written without checksums: only file sizes were compared",
            found.path,
        )


# ---------------------------------------------------------------------- the best one


def mark_best(root: str | Path, *, step: int, measured: Mapping[str, Any]) -> None:
    """Names the checkpoint of `step` as the best so far: rotation then spares it.

    measured: what it was chosen by (JSON values), such as its acceptance length.
    The mark is root/best.json and takes the place of the one before whole or not at all.
    """
    root = Path(root)
    beside = root / f".writing-{BEST}"
    text = json.dumps({"step": step, "measured": dict(measured)}, indent=1)
    beside.write_text(text + "\n", encoding="utf-8")
    sync(beside)
    os.replace(beside, root / BEST)
    sync(root)


def best(root: str | Path) -> tuple[Checkpoint, Mapping[str, Any]] | None:
    """The sound checkpoint marked as best and what it was chosen by; None without one.

    Raises Damaged when the mark itself cannot be read.
    """
    step, measured = _best_mark(Path(root))
    if step is None:
        return None
    found = _sound(Path(root) / folder_name(step))
    if isinstance(found, Checkpoint):
        return found, measured
    logger.warning("the best checkpoint %s: %s", folder_name(step), found)
    return None


def _best_mark(root: Path) -> tuple[int | None, Mapping[str, Any]]:
    """The marked step and what it was chosen by; (None, {}) without a mark.

    Raises Damaged: without a mark rotation would remove the checkpoint that it spared so far.
    """
    try:
        mark = json.loads((root / BEST).read_text(encoding="utf-8"))
        step, measured = mark["step"], mark["measured"]
        numbers = (step, *measured.values())
        whole = isinstance(step, int) and all(isinstance(n, int | float) for n in numbers)
        reason = "entries of another form"
    except FileNotFoundError:
        return None, {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        whole, reason = False, f"{type(error).__name__}: {error}"
    if not whole:
        raise Damaged(
            f"{root / BEST} cannot be read ({reason}), and it alone says which checkpoint is the "
            "best: remove that file to go on as if none had been measured"
        )
    return step, measured
