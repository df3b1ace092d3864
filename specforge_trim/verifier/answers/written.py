"""Rows that regeneration has written: found by their id, read when they are asked for.

    <out>             kept rows, in the order of the input
    <out>.dropped     rows that must not be trained on, with their reason
    <out>.partial     rows of a run under way, or of one that was interrupted
    <out>.others      rows of earlier runs that the input of the last one did not ask for

Memory holds an id and a place per row, not the row. No row is lost: every file is written beside
its place and renamed, and a row stands in its new file before it leaves its old one.
"""

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

from specforge_trim.common.atomic import replaced

logger = logging.getLogger(__name__)

OUT, DROPPED, PARTIAL, OTHERS = "", "dropped", "partial", "others"


def sibling(out: Path, kind: str) -> Path:
    return out.with_name(f"{out.name}.{kind}") if kind else out


class AnswerFiles:
    """The rows of `out` and the files beside it; a context, which holds them open."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self._places: dict[str, tuple[str, int]] = {}  # id -> file, offset of its line
        self._open: dict[str, BinaryIO] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "AnswerFiles":
        partial = sibling(self.out, PARTIAL)
        if partial.exists():  # the next row must not join a line cut off by a kill
            _write(partial, (line for _, _, line in _own_lines(partial)))
        for kind in (OTHERS, OUT, DROPPED, PARTIAL):  # the newest row of an id counts
            path = sibling(self.out, kind)
            if kind == PARTIAL:
                self._open[kind] = self._stack.enter_context(path.open("a+b"))
            elif path.exists():
                self._open[kind] = self._stack.enter_context(path.open("rb"))
            else:
                continue
            for offset, row, _ in _own_lines(path):
                self._places[row["id"]] = kind, offset
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()
        partial = sibling(self.out, PARTIAL)
        if partial.exists() and not partial.stat().st_size:
            partial.unlink()

    def __contains__(self, row_id: str) -> bool:
        return row_id in self._places

    def add(self, row: dict) -> None:
        """Keeps a new row; it is on disk when this returns."""
        file = self._open[PARTIAL]
        offset = file.seek(0, os.SEEK_END)
        # In a JSON string a lone surrogate's backslash form is its JSON escape.
        text = json.dumps(row, ensure_ascii=False) + "\n"
        file.write(text.encode("utf-8", "backslashreplace"))
        file.flush()
        self._places[row["id"]] = PARTIAL, offset

    def finish(self, ids: Iterable[str]) -> tuple[int, Counter]:
        """Makes out and out.dropped the rows of `ids`, in this order; (kept, dropped by reason).

        The rows of other ids go to out.others.
        """
        asked = dict.fromkeys(ids)
        rest = [i for i in self._places if i not in asked]
        others = sibling(self.out, OTHERS)
        leaving = sum(self._places[i][0] != OTHERS for i in rest)
        if leaving:
            before = (i for i, (kind, _) in self._places.items() if kind == OTHERS and i in asked)
            _write(others, self._lines([*rest, *before]))
            logger.warning(
                "%d rows of earlier runs are not of these requests and settings: kept in %s",
                leaving, others,
            )  # fmt: skip
        reasons: Counter = Counter()
        with replaced(self.out) as out, replaced(sibling(self.out, DROPPED)) as dropped:
            with open(out, "wb") as kept_file, open(dropped, "wb") as dropped_file:
                for line in self._lines(asked):
                    reason = json.loads(line).get("dropped")
                    (kept_file if reason is None else dropped_file).write(line)
                    reasons.update(() if reason is None else (reason,))
        if rest:
            _write(others, self._lines(rest))
        else:
            others.unlink(missing_ok=True)
        sibling(self.out, PARTIAL).unlink()
        return len(asked) - reasons.total(), reasons

    def _lines(self, ids: Iterable[str]) -> Iterator[bytes]:
        """The rows' own bytes; the files as they were opened, whatever has their names now."""
        for row_id in ids:
            kind, offset = self._places[row_id]
            self._open[kind].seek(offset)
            yield self._open[kind].readline().rstrip(b"\n") + b"\n"


def check_own(out: Path) -> None:
    """Raises ValueError where `out` holds anything else than rows of earlier runs."""
    if not out.is_file():
        return
    with out.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if _own_row(line) is None:
                raise ValueError(
                    f"--out {out} exists, and regenerate did not write its line {number}: name "
                    "another file, or remove this one"
                )


def _own_row(line: bytes) -> dict | None:
    """A line as it is written here; None for any other."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # JSON's errors, and those of UTF-8
        return None
    own = isinstance(row, dict) and isinstance(row.get("id"), str) and "messages" in row
    return row if own else None


def _own_lines(path: Path) -> Iterator[tuple[int, dict, bytes]]:
    """(offset, row, line) of every row; a half-written line of an interrupted run is left out."""
    offset = 0
    with path.open("rb") as file:
        for line in file:
            if (row := _own_row(line)) is None:
                logger.warning("%s: a half-written line is ignored", path)
            else:
                yield offset, row, line.rstrip(b"\n") + b"\n"
            offset += len(line)


def _write(path: Path, lines: Iterable[bytes]) -> None:
    with replaced(path) as temporary, open(temporary, "wb") as file:
        file.writelines(lines)
