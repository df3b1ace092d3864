"""Tokenise data files piece by piece, in one process or several, so that a killed run continues.

One job: files -> shard files in a work folder -> the files of PreparedData. A chunk is the next
rows of one file, cut by count and size alone; its shard is written under a temporary name and
renamed. A later run with the same work folder finds the shards that are whole and makes the rest.
Shards are joined in order, so the result does not depend on how many processes made them or how
often they were stopped.
"""

import gc
import json
import os
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.numpy import save_file

from specforge_trim.common.atomic import replaced
from specforge_trim.data.conversation import BadRow, RowError, parse_line
from specforge_trim.data.files import Line, read_lines
from specforge_trim.data.prepared import COLUMNS
from specforge_trim.data.tokenize import ChatTokenizer, Document, make_document

TOO_LONG = "longer than max_length"
NO_LOSS_LEFT = "no supervised token within max_length"
POLICIES = ("drop", "cut", "split")

OnShard = Callable[[Path, int], object]
_CHUNK_ROWS = 512
_CHUNK_BYTES = 2 << 20


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of one file: its number, (line, raw) pairs, and bytes of the file."""

    number: int
    file: int
    lines: tuple[Line, ...]
    size: int


@dataclass(frozen=True)
class Limit:
    """Rows beyond max_length tokens: drop them, cut off what is beyond, or split into pieces."""

    max_length: int
    policy: str = "drop"


# ---------------------------------------------------------------------- rows to shards


def read_chunks(paths: Sequence[str | Path]) -> Iterator[Chunk]:
    """The rows of all files in order, in chunks of at most 512 rows and about 2 MB."""
    number = 0
    for file, path in enumerate(paths):
        lines: list[Line] = []
        raw_bytes, sizes = 0, [0]

        def count(size: int, sizes: list[int] = sizes) -> None:
            sizes[0] += size

        for line in read_lines(path, on_bytes=count):
            lines.append(line)
            raw_bytes += len(line[1]) if isinstance(line[1], bytes) else 0
            if len(lines) == _CHUNK_ROWS or raw_bytes >= _CHUNK_BYTES:
                yield Chunk(number, file, tuple(lines), sizes[0])
                number, lines, raw_bytes, sizes[0] = number + 1, [], 0, 0
        if lines:
            yield Chunk(number, file, tuple(lines), sizes[0])
            number += 1


def write_shard(chunk: Chunk, chat: ChatTokenizer, limit: Limit, work: Path) -> None:
    """Tokenise a chunk into work/<number>.safetensors, whole or not at all."""
    bad: list[tuple[int, int, str, str]] = []
    pieces: list[tuple[Document, int, int]] = []  # document, line, place of its first token
    long_rows = lost = 0
    rows = [parse_line(raw, source=str(line)) for line, raw in chunk.lines]
    good = [row for row in rows if not isinstance(row, BadRow)]
    results = iter(chat.documents(good))
    for (line, _), row in zip(chunk.lines, rows, strict=True):
        found = row if isinstance(row, BadRow) else next(results)
        if isinstance(found, (BadRow, RowError)):
            bad.append((chunk.file, line, found.reason, found.detail))
            continue
        if len(found.input_ids) <= limit.max_length:
            pieces.append((found, line, 0))
            continue
        kept = fit(found, limit)
        supervised = int(found.loss_mask.sum())
        long_rows += 1
        lost += supervised - sum(int(piece.loss_mask.sum()) for piece, _ in kept)
        pieces += [(piece, line, first) for piece, first in kept]
        if not kept:
            reason = TOO_LONG if limit.policy == "drop" else NO_LOSS_LEFT
            detail = f"{len(found.input_ids)} tokens, {supervised} supervised"
            bad.append((chunk.file, line, reason, f"{detail}, max_length {limit.max_length}"))
    counts = {"num_rows": len(rows), "long_rows": long_rows, "lost": lost}
    arrays = _arrays(pieces, chunk.file)
    with replaced(_shard_path(work, chunk.number)) as temporary:
        save_file(arrays, temporary, {"counts": json.dumps(counts), "bad": json.dumps(bad)})


def fit(document: Document, limit: Limit) -> list[tuple[Document, int]]:
    """What stays of a document beyond max_length: (piece, place of its first token) pairs.

    Pieces without a supervised token are left out. The first token of a later piece keeps its
    place in the mask, but no row of the piece stands before it to predict it.
    """
    if limit.policy == "drop":
        return []
    ids, mask = document.input_ids.numpy(), document.loss_mask.numpy()
    starts = [0] if limit.policy == "cut" else range(0, len(ids), limit.max_length)
    pieces = []
    for start in starts:
        part = slice(start, start + limit.max_length)
        if mask[part].any():
            piece = make_document(ids[part].copy(), mask[part].copy(), source=document.source)
            pieces.append((piece, start))
    return pieces


def _arrays(pieces: Sequence[tuple[Document, int, int]], file: int) -> dict[str, np.ndarray]:
    """The columns of one shard, as PreparedData has them; places count from the shard's start."""
    ids = [document.input_ids.numpy() for document, _, _ in pieces]
    masks = [document.loss_mask.numpy() for document, _, _ in pieces]
    rows, end = [], 0
    for mask, (_, line, first) in zip(masks, pieces, strict=True):
        start, end = end, end + len(mask)
        rows.append((start, end, np.count_nonzero(mask), file, line, first))
    index = np.array(rows, dtype="<i8").reshape(-1, len(COLUMNS))
    names = bytes.fromhex("".join(document.doc_id for document, _, _ in pieces))
    return {
        "input_ids": np.concatenate([np.zeros(0, np.int64), *ids]).astype("<i4"),
        "loss_mask": np.concatenate([np.zeros(0, bool), *masks]),
        "index": index,
        "doc_ids": np.frombuffer(names, np.uint8).reshape(-1, 32),
    }


def shard_rows(path: Path) -> tuple[int, list[tuple[int, int, str, str]]]:
    """How many rows a shard is made of; file number, line, reason and detail of the bad ones."""
    with safe_open(path, "numpy") as shard:
        texts = shard.metadata()
    return json.loads(texts["counts"])["num_rows"], json.loads(texts["bad"])


def _shard_path(work: Path, number: int) -> Path:
    return work / f"{number:06d}.safetensors"


# ---------------------------------------------------------------------- processes


def make_shards(
    paths: Sequence[str | Path],
    chat: ChatTokenizer,
    limit: Limit,
    work: Path,
    *,
    processes: int,
    on_shard: OnShard,
) -> int:
    """Every shard of the files in `work`; returns their number.

    on_shard(path, bytes of the data file) is called for each as soon as it is whole, in no
    particular order; what it raises ends the work.

    Raises ValueError when a process ends without a word (killed for memory, most often).
    """
    for left_over in work.glob(".tmp-*"):
        left_over.unlink()
    total = 0

    def missing() -> Iterator[Chunk]:
        nonlocal total
        for chunk in read_chunks(paths):
            total += 1
            if (path := _shard_path(work, chunk.number)).exists():
                on_shard(path, chunk.size)
            else:
                yield chunk

    def done(number: int, size: int) -> None:
        on_shard(_shard_path(work, number), size)

    def here(chunk: Chunk) -> None:
        write_shard(chunk, chat, limit, work)
        done(chunk.number, chunk.size)

    with _without_threads(), _old_objects_left_alone():
        if processes == 1:
            for chunk in missing():
                here(chunk)
        else:
            task = (chat.tokenizer, chat.masks, limit, work)
            _share(missing(), here, done, processes - 1, task)
    return total


def _share(
    chunks: Iterator[Chunk],
    here: Callable[[Chunk], object],
    done: Callable[[int, int], object],
    helpers: int,
    task: tuple,
) -> None:
    """Chunks over this process and `helpers` others, which have two each in their queue.

    This one works too: the others take seconds to start, and handing out chunks takes no time.
    They are started anew, not forked: a fork of a process whose tokenizer has used its own threads
    may wait for them for ever.
    """
    pool = ProcessPoolExecutor(
        helpers,
        mp_context=get_context("spawn"),
        initializer=_start_worker,
        initargs=(*task, os.getpid()),
    )
    running: dict[Future, tuple[int, int]] = {}  # number and size of the chunk

    def settle(futures: list[Future]) -> None:
        for future in futures:
            future.result()
            done(*running.pop(future))

    try:
        for chunk in chunks:
            settle([future for future in running if future.done()])
            if len(running) < 2 * helpers:
                running[pool.submit(_work, chunk)] = (chunk.number, chunk.size)
            else:
                here(chunk)
        settle(list(running))
    except BrokenProcessPool:
        raise ValueError(
            "a process that tokenises data ended without a word, most often because memory ran "
            "out: use fewer with --prepare-processes; the same command continues"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


@contextmanager
def _without_threads() -> Iterator[None]:
    """Keeps the tokenizer from starting threads, unless the user has said what it shall do.

    A process that has used them gets a warning on stderr from every later fork, such as those of
    the batch loader.
    """
    name = "TOKENIZERS_PARALLELISM"
    if name in os.environ:
        yield
        return
    os.environ[name] = "false"
    try:
        yield
    finally:
        del os.environ[name]


@contextmanager
def _old_objects_left_alone() -> Iterator[None]:
    """Keeps the garbage collector off what is there already, which it would walk every chunk.

    Libraries and vocabularies are hundreds of thousands of objects: a tenth of the time.
    """
    if gc.get_freeze_count():  # someone else's choice
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


_worker: tuple[ChatTokenizer, Limit, Path] | None = None  # of this process, set once as it starts


def _start_worker(tokenizer, masks, limit: Limit, work: Path, parent: int) -> None:
    global _worker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent says when to stop
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()
    _worker = (ChatTokenizer(tokenizer, masks=masks), limit, work)
    gc.freeze()  # see _old_objects_left_alone


def _end_with(parent: int) -> None:
    """Ends this process when its parent was killed; it would wait for work for ever."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def _work(chunk: Chunk) -> None:
    assert _worker is not None
    chat, limit, work = _worker
    write_shard(chunk, chat, limit, work)


# ---------------------------------------------------------------------- shards to prepared data


def join_shards(work: Path, count: int, out: Path) -> dict:
    """Write PreparedData's files from `count` shards; returns the counts of its manifest."""
    tokens = documents = supervised = 0
    totals: Counter = Counter()
    skipped: Counter = Counter()
    with ExitStack() as stack:
        files = {
            name: stack.enter_context(open(out / f"{name}.bin", "wb"))
            for name in ("input_ids", "loss_mask", "index", "doc_ids")
        }
        bad_rows = stack.enter_context(open(out / "bad_rows.jsonl", "w"))
        for number in range(count):
            with safe_open(_shard_path(work, number), "numpy") as shard:
                texts = shard.metadata()
                arrays = {name: shard.get_tensor(name) for name in files}
            arrays["index"][:, :2] += tokens  # start and end
            for name, file in files.items():
                file.write(arrays[name].tobytes())
            tokens += len(arrays["input_ids"])
            documents += len(arrays["index"])
            supervised += int(arrays["loss_mask"].sum())
            totals.update(json.loads(texts["counts"]))
            for row in json.loads(texts["bad"]):
                bad_rows.write(json.dumps(row) + "\n")
                skipped[row[2]] += 1
    return {
        "num_rows": totals["num_rows"],
        "num_documents": documents,
        "num_tokens": tokens,
        "num_supervised": supervised,
        "skipped": dict(skipped.most_common()),
        "too_long": {"rows": totals["long_rows"], "lost": totals["lost"]},
    }
