"""Prepare data files once: conversations in, tokenised documents on disk, bad rows accounted for.

One job: files -> PreparedData, kept in a cache folder under a name made of the content it depends
on: the bytes of the data files, the tokenizer, the text of its chat template, the options. A file
path is not part of the name; places of rows are stored as file number and line.

    <cache_dir>/prepared/<name>/                 whole, or not there (files: see prepared.py)
    <cache_dir>/prepared/<name>.work/            shards of a run that was stopped
    <cache_dir>/prepared/<name>.lock             held by the process that works on it
    <cache_dir>/prepared/<name>.bad_rows.jsonl   file, line, reason, detail per row not used
"""

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import tokenizers
import transformers
from filelock import FileLock, Timeout
from tqdm import tqdm

from specforge_trim.data.made_from import made_from
from specforge_trim.data.prepared import PreparedData
from specforge_trim.data.quarantine import BadShare, check_usable, write_bad_rows
from specforge_trim.data.shards import POLICIES, Limit, join_shards, make_shards
from specforge_trim.data.supervision import MaskOptions
from specforge_trim.data.tokenize import ChatTokenizer

__all__ = ["PreparedData", "data_fingerprint", "find_prepared", "prepare"]

_FORMAT = 3  # raise when the stored layout or the meaning of a mask changes
_BYTES_PER_PROCESS = 8 << 20  # less data than this is not worth the seconds a process starts in
_MOST_PROCESSES = 8
_ABANDONED_DAYS = 7  # a stopped run is continued within a week, or not at all
_log = logging.getLogger(__name__)


def prepare(
    paths: str | Path | Sequence[str | Path],
    tokenizer,
    *,
    cache_dir: str | Path,
    max_length: int,
    too_long: str = "drop",
    masks: MaskOptions | None = None,
    max_bad_fraction: float = 0.1,
    processes: int | None = None,
    progress: bool = True,
) -> PreparedData:
    """Tokenise data files with their loss masks, or open the cached result.

    paths      JSON lines (also gzip) or Parquet
    max_length, too_long   rows of more than max_length tokens: "drop" leaves them out, "cut" keeps
               their first max_length tokens, "split" makes pieces that are documents of their own
    masks      which of the assistant's text carries loss
    processes  None: one per core and 8 MB of data, at most 8; this one is
               one of them
    progress   a bar on stderr

    Rows that cannot be used (unreadable, refused by the chat template, without an exact mask) are
    left out, counted and listed in a file. A stopped run continues where it was; two runs at once
    do the work once. Raises ValueError when nothing is left or when more than max_bad_fraction of
    the rows are bad (too long ones do not count; as soon as it is certain), OSError when a file
    cannot be read or written.
    """
    paths = [paths] if isinstance(paths, (str, Path)) else list(paths)
    _check(paths, max_length, too_long, max_bad_fraction, processes)
    masks, limit = masks or MaskOptions(), Limit(max_length, too_long)
    parts = _parts(paths, tokenizer, limit, masks)
    fingerprint = _fingerprint(parts)
    folder = _folder(cache_dir, fingerprint)
    folder.parent.mkdir(parents=True, exist_ok=True)
    if not folder.exists():
        with _only_one(folder.with_suffix(".lock")):
            if not folder.exists():  # or else another process has done it meanwhile
                chat = ChatTokenizer(tokenizer, masks=masks)
                bad = BadShare(paths, max_bad_fraction, folder.with_suffix(".bad_rows.jsonl"))
                _write(folder, fingerprint, paths, chat, limit, bad, processes, progress)
    shutil.rmtree(folder.with_suffix(".work"), ignore_errors=True)  # killed as it removed it
    _remove_abandoned(folder.parent)
    data = PreparedData.load(folder, paths)
    data = dataclasses.replace(data, made_from=made_from(data.paths, parts))
    report = folder.with_suffix(".bad_rows.jsonl")
    if data.skipped:
        write_bad_rows(report, data.read_bad_rows())
    else:
        report.unlink(missing_ok=True)
    check_usable(data, max_bad_fraction, report if data.skipped else None)
    if data.skipped:
        _log.warning("rows not used, with their reasons: %s", report)
    return data


def find_prepared(
    paths: Sequence[str | Path],
    tokenizer,
    *,
    cache_dir: str | Path,
    max_length: int,
    too_long: str = "drop",
    masks: MaskOptions | None = None,
) -> PreparedData | None:
    """What prepare() has made of the same files and options before; None when it has not."""
    limit, masks = Limit(max_length, too_long), masks or MaskOptions()
    folder = _folder(cache_dir, data_fingerprint(paths, tokenizer, limit=limit, masks=masks))
    return PreparedData.load(folder, paths) if folder.exists() else None


def _folder(cache_dir: str | Path, fingerprint: str) -> Path:
    return Path(cache_dir) / "prepared" / fingerprint[:24]


def _check(paths, max_length, too_long, max_bad_fraction, processes) -> None:
    if not paths:
        raise ValueError("no data file given; name at least one JSON-lines or Parquet file")
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 2:
        raise ValueError(f"max_length must be an integer of at least 2, got {max_length!r}")
    if too_long not in POLICIES:
        raise ValueError(f"too_long must be one of {', '.join(POLICIES)}, got {too_long!r}")
    if not 0 <= max_bad_fraction <= 1:
        raise ValueError(f"max_bad_fraction must be in [0, 1], got {max_bad_fraction!r}")
    if processes is not None and processes < 1:
        raise ValueError(f"processes must be at least 1 or None, got {processes!r}")


def data_fingerprint(
    paths: Sequence[str | Path], tokenizer, *, limit: Limit, masks: MaskOptions
) -> str:
    """sha256 (hex) of everything prepared data depends on, see the module's first lines."""
    return _fingerprint(_parts(paths, tokenizer, limit, masks))


def _parts(paths: Sequence[str | Path], tokenizer, limit: Limit, masks: MaskOptions) -> dict:
    """All that prepared data depends on."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    # padding and truncation are settings of the last call, not of the tokenizer
    state.pop("padding", None), state.pop("truncation", None)
    return {
        "format": _FORMAT,
        "files": [_file_digest(path) for path in paths],
        "tokenizer": state,
        "special_tokens": {k: str(v) for k, v in tokenizer.special_tokens_map.items()},
        "chat_template": tokenizer.chat_template,
        "versions": [tokenizers.__version__, transformers.__version__],
        "limit": dataclasses.asdict(limit),
        "masks": dataclasses.asdict(masks),
    }


def _fingerprint(parts: dict) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _file_digest(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _only_one(path: Path) -> FileLock:
    """The lock, taken; the system releases it when its process ends in any way."""
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        _log.info("another process prepares the same data; waiting for it")
        lock.acquire()
    return lock


def _remove_abandoned(parent: Path) -> None:
    """Shards of stopped runs with other settings or files, which nothing has touched for days."""
    for work in parent.glob("*.work"):
        try:
            days = (time.time() - work.stat().st_mtime) / 86_400
            if days > _ABANDONED_DAYS:
                with FileLock(work.with_suffix(".lock"), timeout=0):
                    shutil.rmtree(work)
                    _log.info("removed %s, left %.0f days ago by a run that stopped", work, days)
        except (Timeout, OSError):
            continue


def _write(
    folder: Path, fingerprint, paths, chat, limit: Limit, bad: BadShare, processes, progress
) -> None:
    """Make or complete the shards, join them, rename the result; a stop leaves whole shards."""
    work = folder.with_suffix(".work")
    work.mkdir(exist_ok=True)
    size = sum(os.path.getsize(path) for path in paths)
    if processes is None:
        cores = len(os.sched_getaffinity(0))
        processes = max(1, min(cores, _MOST_PROCESSES, size // _BYTES_PER_PROCESS))
    with tqdm(
        total=size, unit="B", unit_scale=True, desc="tokenize", file=sys.stderr,
        disable=not progress,
    ) as bar:  # fmt: skip

        def on_shard(shard: Path, size: int) -> None:
            bar.update(size)
            bad.add(shard)

        count = make_shards(paths, chat, limit, work, processes=processes, on_shard=on_shard)
    out = work / "joined"
    out.mkdir(exist_ok=True)
    manifest = {"fingerprint": fingerprint, **join_shards(work, count, out)}
    manifest["too_long"]["policy"] = limit.policy
    (out / "manifest.json").write_text(json.dumps(manifest, indent=1))
    out.rename(folder)
    shutil.rmtree(work)
