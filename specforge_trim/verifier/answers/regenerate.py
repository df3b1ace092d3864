"""Let the target write the assistant's answers itself, so that a draft learns its voice.

Text turns of the assistant are replaced one after the other, each asked for with the answers
already written before it. Turns that call tools stay as they are, since the tool results after
them belong to them. Answers that would teach nonsense are dropped and counted, never kept quietly.
Who writes is an AnswerSource: local_answers.py or server_answers.py.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from filelock import FileLock, Timeout

from specforge_trim.data.conversation import BadRow, Conversation, read_conversations
from specforge_trim.data.quarantine import check_bad_rows, write_bad_rows
from specforge_trim.verifier.answers.source import AnswerSource, is_answer
from specforge_trim.verifier.answers.written import AnswerFiles, check_own, sibling


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
    nothing to answer. Rows of earlier runs that were not asked for now are kept in
    `<out_path>.others`, and taken from there when they are. Two runs into one file at once are an
    error.

    paths: data files (`data/conversation.py`), read twice: memory holds an id per conversation.

    Raises ValueError when no conversation is usable, when more than max_bad_fraction of the rows
    are bad, and when out_path holds anything else than rows of earlier runs; OSError when a server
    gives no answers.
    """
    report = RegenerateReport()
    out, paths = Path(out_path), list(paths)
    if out.resolve() in [Path(path).resolve() for path in paths]:
        raise ValueError(f"--out {out} is one of the input files; name another file to write")
    check_own(out)
    ids = [request_id(item, source.settings) for item in _read_all(paths, report.bad_rows)]
    if not ids:
        reasons = "; ".join(map(str, report.bad_rows[:3]))
        raise ValueError(f"nothing to answer in {[str(p) for p in paths]} ({reasons or 'empty'})")
    out.parent.mkdir(parents=True, exist_ok=True)
    bad_rows = sibling(out, "bad_rows.jsonl")
    if report.bad_rows:
        write_bad_rows(bad_rows, report.bad_rows)
        check_bad_rows(report.bad_rows, len(ids), paths, max_bad_fraction, bad_rows)
    else:
        bad_rows.unlink(missing_ok=True)
    try:
        with FileLock(sibling(out, "lock"), timeout=0):
            with AnswerFiles(out) as files:
                report.resumed = sum(i in files for i in ids)
                _answer(paths, {i for i in ids if i not in files}, source, files, progress)
                report.written, report.dropped = files.finish(ids)
            sibling(out, "lock").unlink(missing_ok=True)
    except Timeout:
        raise ValueError(
            f"another run is writing {out}: wait for it or choose another --out"
        ) from None
    return report


def _answer(
    paths: Sequence[str | Path],
    missing: set[str],
    source: AnswerSource,
    files: AnswerFiles,
    progress: bool,
) -> None:
    """Has the source answer the conversations whose ids are `missing`."""

    def todo() -> Iterator[tuple[str, Conversation]]:
        left = set(missing)
        for conversation in _read_all(paths, []):
            row_id = request_id(conversation, source.settings)
            if row_id in left:
                left.remove(row_id)
                yield row_id, conversation
        if left:
            raise ValueError(
                f"{[str(p) for p in paths]} changed while they were read: start again"
            )

    if missing:
        for row in source.answer_all(todo(), total=len(missing), progress=progress):
            files.add(row)


def _read_all(paths: Sequence[str | Path], bad_rows: list[BadRow]) -> Iterator[Conversation]:
    """The conversations of all files, one after the other; bad rows are added to bad_rows."""
    for path in paths:
        for item in read_conversations(path):
            if isinstance(item, BadRow):
                bad_rows.append(item)
            elif isinstance(item, Conversation):
                yield item
            else:
                bad_rows.append(BadRow(item.source, "row has no messages to answer"))


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
