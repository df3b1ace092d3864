"""Read data files row by row, each row as the bytes of one JSON value with its place.

One job: JSON lines, gzip-compressed JSON lines and Parquet look the same to whoever comes next.
What a file is, is decided by its first bytes, never by its name. One row is in memory at a time
(of Parquet, some megabytes of rows), so that files of any size and lines of any length pass.
"""

import datetime
import decimal
import gzip
import json
import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

from specforge_trim.data.records import ROW_KEYS, RowError, quote

Line = tuple[int, bytes | RowError]
OnBytes = Callable[[int], object]

_PARQUET_BATCH_BYTES = 4 << 20


def read_lines(path: str | Path, *, on_bytes: OnBytes = lambda count: None) -> Iterator[Line]:
    """Yield (line, raw JSON) of every row that is not blank, in order; lines count from 1.

    The line of a Parquet row is its row number; one with a value that JSON cannot hold comes as a
    RowError in place of its bytes. on_bytes is called with the bytes of the file
    (as it lies on disk) that each step consumed, for a progress bar.

    Raises FileNotFoundError or another OSError when the file cannot be read, ValueError when it is
    neither of the known kinds, when it is cut off, and for Parquet without pyarrow.
    """
    path = Path(path)
    with path.open("rb") as file:
        head = file.read(64)
    if head[:4] == b"PAR1":
        yield from _parquet_lines(path, on_bytes)
    elif head[:2] == b"\x1f\x8b":
        yield from _gzip_lines(path, on_bytes)
    else:
        _check_plain(path, head)
        with path.open("rb") as file:
            for number, raw in enumerate(file, start=1):
                on_bytes(len(raw))
                if raw.strip():
                    yield number, raw


def most_rows(path: str | Path) -> int | None:
    """How many rows a file can hold at most; None where only read_lines can tell, as for gzip."""
    path = Path(path)
    with path.open("rb") as file:
        head = file.read(4)
        if head == b"PAR1":
            try:
                from pyarrow import parquet

                return int(parquet.read_metadata(path).num_rows)
            except (ImportError, ValueError, OSError):  # pyarrow's own are of the last two
                return None  # read_lines says what is wrong
        if head[:2] == b"\x1f\x8b":
            return None
        file.seek(0)
        count, last = 0, b""
        while block := file.read(1 << 20):
            count, last = count + block.count(b"\n"), block[-1:]
    return count + (last not in (b"", b"\n"))


def _check_plain(path: Path, head: bytes) -> None:
    """Files that are not JSON lines at all get one message, not one per line."""
    if head[:4] == b"\x28\xb5\x2f\xfd":
        raise ValueError(f"{path} is zstd-compressed; decompress it, or compress it with gzip")
    if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
        raise ValueError(f"{path} is one JSON array; expected JSON lines, one object per line")


def _gzip_lines(path: Path, on_bytes: OnBytes) -> Iterator[Line]:
    number, told = 0, 0
    try:
        with path.open("rb") as packed, gzip.open(packed) as file:
            for number, raw in enumerate(file, start=1):
                if number == 1:
                    _check_plain(path, raw[:64])
                on_bytes(packed.tell() - told)
                told = packed.tell()
                if raw.strip():
                    yield number, raw
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(
            f"{path}: the gzip data are damaged or cut off after line {number} ({error}); "
            "compress or copy the file again"
        ) from None


def _parquet_lines(path: Path, on_bytes: OnBytes) -> Iterator[Line]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise ValueError(
            f"{path} is a Parquet file, which needs pyarrow: pip install 'specforge_trim[parquet]'"
        ) from None
    number, told, size = 0, 0, os.path.getsize(path)
    try:
        with parquet.ParquetFile(path) as file:
            rows = file.metadata.num_rows
            groups = range(file.metadata.num_row_groups)
            plain = sum(file.metadata.row_group(i).total_byte_size for i in groups)
            per_batch = min(1024, max(1, _PARQUET_BATCH_BYTES * rows // max(plain, 1)))
            for batch in file.iter_batches(batch_size=per_batch):
                for row in _rows_of(batch):
                    number += 1
                    done = size * number // rows
                    on_bytes(done - told)
                    told = done
                    yield number, row
    except (pyarrow.ArrowException, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{path}: damaged Parquet file after row {number}: {reason}") from None


_NO_JSON = (TypeError, ValueError, KeyError, OverflowError, RecursionError)


def _rows_of(batch) -> Iterator[bytes | RowError]:
    """The rows of an Arrow batch as JSON; a RowError for one that has no such form."""
    try:
        rows = batch.to_pylist(maps_as_pydicts="strict")
    except _NO_JSON:  # one value is enough
        rows = [None] * batch.num_rows
    for i, row in enumerate(rows):
        try:
            found = None if row is None else json.dumps(_without_nulls(row)).encode()
        except _NO_JSON:
            found = None
        yield _row_by_columns(batch, i) if found is None else found


def _row_by_columns(batch, i: int) -> bytes | RowError:
    """Row i without the values that have no JSON form; RowError where a row is read from one."""
    row = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            value = _without_nulls(column[i].as_py(maps_as_pydicts="strict"))
            json.dumps(value)
        except _NO_JSON as error:
            if name in ROW_KEYS:
                return RowError("a Parquet value has no JSON form", f"{name}: {quote(error)}")
            continue
        if value is not None:
            row[name] = value
    return json.dumps(row).encode()


def _without_nulls(value: object) -> object:
    """A Parquet value as JSON would have held it.

    A column has one type, so every object of it has every key: those a row did not have are null.
    They are left out, or a tool schema would reach the chat template with keys it never had.
    """
    if isinstance(value, dict):
        return {k: _without_nulls(item) for k, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    if isinstance(value, bytes):
        # Bytes that are no text become lone surrogates, which refuse the row where they are used.
        return value.decode("utf-8", "surrogateescape")
    if isinstance(value, (datetime.date, datetime.time, datetime.timedelta, decimal.Decimal)):
        return str(value)
    return value
