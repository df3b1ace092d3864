"""Rows that cannot be used: the file that lists them, and how many of them a run bears.

One job: bad rows in, a report beside the prepared data and an error that says which and why. The
limit is asked as soon as it can be answered: with more bad rows than max_bad_fraction of all rows
there may be, nothing that is still to come can mend it.
"""

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from specforge_trim.common.atomic import replaced
from specforge_trim.data.files import most_rows
from specforge_trim.data.prepared import PreparedData, reasons
from specforge_trim.data.records import BadRow
from specforge_trim.data.shards import NO_LOSS_LEFT, TOO_LONG, shard_rows

_SHOWN = 3  # bad rows quoted in an error
_LONG = (TOO_LONG, NO_LOSS_LEFT)  # left out by choice


def write_bad_rows(path: Path, rows: Iterable[BadRow]) -> None:
    """The rows as JSON lines with file, line, reason and detail."""
    with replaced(path) as temporary, open(temporary, "w") as file:
        for row in rows:
            name, _, line = row.source.rpartition(":")
            fields = {"file": name, "line": int(line), "reason": row.reason, "detail": row.detail}
            file.write(json.dumps(fields) + "\n")


def check_usable(data: PreparedData, max_bad_fraction: float, report: Path | None) -> None:
    """ValueError when nothing is left, or when more than max_bad_fraction of the rows are bad."""
    bad = sum(count for reason, count in data.skipped.items() if reason not in _LONG)
    if len(data) and bad <= max_bad_fraction * data.num_rows:
        return
    quoted = (row for row in data.read_bad_rows() if not bad or row.reason not in _LONG)
    if not len(data):
        found = reasons(data.skipped) or "no rows"
        names = ", ".join(data.paths)
        raise ValueError(f"no usable conversation in {names} ({found}){_shown(quoted, report)}")
    raise ValueError(
        f"{bad} of {data.num_rows} rows in {', '.join(data.paths)} cannot be used, more than "
        f"max_bad_fraction {max_bad_fraction:g} ({reasons(data.skipped)}){_shown(quoted, report)}"
    )


def check_bad_rows(
    bad: Sequence[BadRow], good: int, paths: Sequence[str | Path], most: float, report: Path
) -> None:
    """ValueError when more than the share `most` of good and bad rows together are bad."""
    rows = good + len(bad)
    if len(bad) > most * rows:
        counts = reasons(Counter(row.reason for row in bad))
        raise ValueError(
            f"{len(bad)} of {rows} rows in {', '.join(map(str, paths))} cannot be used, more than "
            f"max_bad_fraction {most:g} ({counts}){_shown(bad, report)}"
        )


class BadShare:
    """Counts bad rows shard by shard, and stops the run once it is certain they are too many.

    report: where the rows found until then are listed.
    """

    def __init__(self, paths: Sequence[str | Path], max_bad_fraction: float, report: Path):
        self.paths = [str(path) for path in paths]
        self.max_bad_fraction, self.report = max_bad_fraction, report
        self._rows = 0
        self._found: Counter = Counter()
        self._shards: list[Path] = []
        self._most: int | None = None  # rows there may be, counted when the first bad one is seen

    def add(self, shard: Path) -> None:
        """Count a whole shard; ValueError when too many rows are bad whatever comes next.

        With nothing more to come check_usable judges; as for files that cannot tell how many rows
        they may hold (gzip).
        """
        rows, bad = shard_rows(shard)
        self._rows += rows
        found = Counter(reason for _, _, reason, _ in bad if reason not in _LONG)
        if not found:
            return
        self._found += found
        self._shards.append(shard)
        if self._most is None:
            counts = [most_rows(path) for path in self.paths]
            self._most = -1 if None in counts else sum(count or 0 for count in counts)
        if self._rows < self._most and self._found.total() > self.max_bad_fraction * self._most:
            raise self._error()

    def _error(self) -> ValueError:
        rows = [
            BadRow(f"{self.paths[file]}:{line}", reason, detail)
            for shard in sorted(self._shards)
            for file, line, reason, detail in shard_rows(shard)[1]
        ]
        write_bad_rows(self.report, rows)
        quoted = (row for row in rows if row.reason not in _LONG)
        return ValueError(
            f"{self._found.total()} of the {self._rows} rows read so far (of {self._most}) in "
            f"{', '.join(self.paths)} cannot be used, more than max_bad_fraction "
            f"{self.max_bad_fraction:g} ({reasons(self._found)}){_shown(quoted, self.report)}"
        )


def _shown(rows: Iterable[BadRow], report: Path | None) -> str:
    text = "".join(f"\n  {row}" for row, _ in zip(rows, range(_SHOWN), strict=False))
    return f"{text}\nall of them: {report}" if report else ""
