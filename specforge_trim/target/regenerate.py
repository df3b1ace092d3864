"""Let the target write the assistant's answers itself, so that a draft learns its voice.

Text turns of the assistant are replaced one after the other, each asked for with the answers
already written before it. Turns that call tools stay as they are, since the tool results after
them belong to them. Answers that would teach nonsense are dropped and counted, never kept quietly.
Who writes is an AnswerSource: local_answers.py or server_answers.py.
"""

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

from filelock import FileLock, Timeout

from specforge_trim.data.conversation import BadRow, Conversation, read_conversations
from specforge_trim.data.quarantine import check_bad_rows, write_bad_rows
from specforge_trim.target.answers import AnswerSource, is_answer

logger = logging.getLogger(__name__)


@dataclass
class RegenerateReport:
    """Counts of one run: rows kept in the output (of them resumed), dropped by reason, bad."""

    written: int = 0
    resumed: int = 0
    dropped: Counter = field(default_factory=Counter)
    bad_rows: list[BadRow] = field(default_factory=list)


def regenerate(
    paths: Iterable[str | Path],
    out_path: str | Path,
    source: AnswerSource,
    *,
    max_bad_fraction: float = 1.0,
    progress: bool = True,
) -> RegenerateReport:
    """Write `out_path` (JSONL), the conversations of `paths` with the answers of `source`.

    Finished rows go to `<out_path>.partial` as they come, under a hash of the request and the
    settings, so an interrupted run continues where it stopped, whatever the order of the input.
    At the end `out_path` holds the kept rows in the order of the input, `<out_path>.dropped` the
    others with their reason, `<out_path>.bad_rows.jsonl` file, line and reason of rows that hold
    nothing to answer. Two runs into one file at once are an error.

    paths: data files (`data/conversation.py`).

    Raises ValueError when no conversation is usable, when more than max_bad_fraction of the rows
    are bad, and when out_path holds anything else than rows of earlier runs; OSError when a server
    gives no answers.
    """
    report = RegenerateReport()
    out, paths = Path(out_path), list(paths)
    if out.resolve() in [Path(path).resolve() for path in paths]:
        raise ValueError(f"--out {out} is one of the input files; name another file to write")
    _check_out(out)
    conversations = _read_all(paths, report)
    out.parent.mkdir(parents=True, exist_ok=True)
    bad_rows = _sibling(out, "bad_rows.jsonl")
    if report.bad_rows:
        write_bad_rows(bad_rows, report.bad_rows)
        check_bad_rows(report.bad_rows, len(conversations), paths, max_bad_fraction, bad_rows)
    else:
        bad_rows.unlink(missing_ok=True)
    ids = [request_id(conversation, source.settings) for conversation in conversations]
    try:
        with FileLock(_sibling(out, "lock"), timeout=0):
            done = _answered(ids, conversations, out, source, report, progress=progress)
            rows = [done[i] for i in dict.fromkeys(ids)]
            _replace(_sibling(out, "dropped"), [row for row in rows if "dropped" in row])
            _replace(out, [row for row in rows if "dropped" not in row])
            _sibling(out, "partial").unlink(missing_ok=True)
            _sibling(out, "lock").unlink(missing_ok=True)
    except Timeout:
        raise ValueError(
            f"another run is writing {out}: wait for it or choose another --out"
        ) from None
    report.dropped = Counter(row["dropped"] for row in rows if "dropped" in row)
    report.written = len(rows) - report.dropped.total()
    return report


def _answered(
    ids: Sequence[str],
    conversations: Sequence[Conversation],
    out: Path,
    source: AnswerSource,
    report: RegenerateReport,
    *,
    progress: bool,
) -> dict[str, dict]:
    """Rows by id: those of earlier runs, and the others as the source writes them."""
    done = _read_done(out)
    todo = {i: c for i, c in zip(ids, conversations, strict=True) if i not in done}
    report.resumed = sum(i in done for i in ids)
    if todo:
        with _open(_sibling(out, "partial"), "a") as partial:
            for row in source.answer_all(todo, progress=progress):
                done[row["id"]] = row
                partial.write(_line(row))
                partial.flush()
    return done


def _read_all(paths: Sequence[str | Path], report: RegenerateReport) -> list[Conversation]:
    """The conversations of all files; bad rows go to the report."""
    conversations: list[Conversation] = []
    for path in paths:
        for item in read_conversations(path):
            if isinstance(item, BadRow):
                report.bad_rows.append(item)
            elif isinstance(item, Conversation):
                conversations.append(item)
            else:
                report.bad_rows.append(BadRow(item.source, "row has no messages to answer"))
    if not conversations:
        reasons = "; ".join(map(str, report.bad_rows[:3]))
        raise ValueError(f"nothing to answer in {[str(p) for p in paths]} ({reasons or 'empty'})")
    return conversations


def request_id(conversation: Conversation, settings: str) -> str:
    """Content hash of what is asked: stable when rows move, new when the settings change.

    The answers that stand in the row count too where they stay (tool calls); the text turns, which
    are replaced, do not.
    """
    kept = [m if not is_answer(m) else {"role": "assistant"} for m in conversation.messages]
    if kept[-1]["role"] == "user":
        kept.append({"role": "assistant"})  # an answer still missing is asked for all the same
    content = json.dumps([kept, conversation.tools, settings], sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()[:24]


def _sibling(out: Path, kind: str) -> Path:
    return out.with_name(f"{out.name}.{kind}")


def _read_done(out: Path) -> dict[str, dict]:
    """Rows of earlier runs by id; a half-written last line of an interrupted run is ignored."""
    done = {}
    partial = _sibling(out, "partial")
    for path in (out, _sibling(out, "dropped"), partial):
        if not path.exists():
            continue
        rows = {}
        with path.open("rb") as file:
            for line in file:
                if (row := _own_row(line)) is None:
                    logger.warning("%s: a half-written line is ignored", path)
                else:
                    rows[row["id"]] = row
        if path == partial:
            _replace(path, list(rows.values()))  # or the next row would join a half-written line
        done.update(rows)
    return done


def _own_row(line: bytes) -> dict | None:
    """A line as _line writes it; None for any other."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):  # JSON's errors, and those of UTF-8
        return None
    own = isinstance(row, dict) and isinstance(row.get("id"), str) and "messages" in row
    return row if own else None


def _check_out(out: Path) -> None:
    """Rows of earlier runs are replaced; a file of anybody else's is not."""
    if not out.is_file():
        return
    with out.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if _own_row(line) is None:
                raise ValueError(
                    f"--out {out} exists, and regenerate did not write its line {number}: name "
                    "another file, or remove this one"
                )


def _open(path: Path, mode: str) -> TextIO:
    # In a JSON string a lone surrogate's backslash form is its JSON escape.
    return path.open(mode, encoding="utf-8", errors="backslashreplace", newline="\n")


def _line(row: dict) -> str:
    return json.dumps(row, ensure_ascii=False) + "\n"


def _replace(path: Path, rows: list[dict]) -> None:
    """Write JSON lines under a temporary name and rename."""
    temporary = path.with_name(f".{path.name}.tmp")
    with _open(temporary, "w") as file:
        file.writelines(map(_line, rows))
    os.replace(temporary, path)
