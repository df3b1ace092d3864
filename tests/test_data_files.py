"""Bugs caught: tool schemas that gain keys on their way through Parquet; a cut archive read as a
short one; kinds told by the file's name; a whole row group in memory; a
value that JSON cannot hold ends the run.
"""

import datetime
import gzip
import json
import pickle
import sys
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specforge_trim.data import conversation
from specforge_trim.data.conversation import Conversation, read_conversations
from specforge_trim.data.files import read_lines
from specforge_trim.data.records import ROW_KEYS
from specforge_trim.data.shards import read_chunks


def chat(text: str, **more) -> dict:
    return {
        "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "a"}],
        **more,
    }


def lines_of(rows) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


@pytest.mark.parametrize("name", ["data.jsonl", "data.jsonl.gz", "data.txt"])
@pytest.mark.parametrize("packed", [False, True])
def test_gzip_is_told_by_its_bytes_and_reads_the_same(tmp_path, name, packed):
    raw = lines_of([chat("one"), chat("two")]).replace(b"\n", b"\n \n", 1) + b'{"no": "newline"}'
    path = tmp_path / name
    path.write_bytes(gzip.compress(raw) if packed else raw)
    seen = []
    rows = list(read_lines(path, on_bytes=seen.append))
    assert [number for number, _ in rows] == [1, 3, 4]
    assert [json.loads(line) for _, line in rows] == [chat("one"), chat("two"), {"no": "newline"}]
    assert sum(seen) == path.stat().st_size


@pytest.mark.parametrize("damage", ["cut", "flipped"])
def test_a_damaged_archive_is_an_error_that_says_where(tmp_path, damage):
    raw = bytearray(gzip.compress(lines_of([chat(f"row {i} {i * 7919}") for i in range(20000)])))
    if damage == "cut":
        raw = raw[: len(raw) // 2]
    else:
        raw[-5] ^= 1  # of the length at the end
    path = tmp_path / "a.gz"
    path.write_bytes(raw)
    with pytest.raises(ValueError, match=r"a\.gz: the gzip data are damaged or cut off"):
        list(read_lines(path))


def test_an_array_inside_gzip_is_one_error(tmp_path):
    path = tmp_path / "a.gz"
    path.write_bytes(gzip.compress(b'[{"a": 1},\n{"a": 2}]'))
    with pytest.raises(ValueError, match="one JSON array"):
        list(read_lines(path))


def test_parquet_gives_the_rows_that_were_written(tmp_path):
    """Struct columns hold null where a row had no such key; it must not come back as a key."""
    schema = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    other = {"type": "function", "function": {"name": "g", "description": "d"}}
    rows = [chat("one", tools=[schema]), chat("two", tools=[other]), chat("caf\u00e9 \U0001f600")]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=2)
    seen = []
    found = list(read_lines(path, on_bytes=seen.append))
    assert [json.loads(line) for _, line in found] == rows
    assert [number for number, _ in found] == [1, 2, 3] and sum(seen) == path.stat().st_size
    read = list(read_conversations(path))
    assert all(isinstance(row, Conversation) for row in read)
    assert read[0].tools == (schema,) and read[2].source == f"{path}:3"


def test_parquet_columns_of_json_text_bytes_and_dates(tmp_path):
    table = pa.table(
        {
            "conversations": [
                [{"from": b"human", "value": b"q"}, {"from": b"gpt", "value": b"a"}]
            ],
            "made": [datetime.date(2024, 5, 17)],
            "picture": [b"\xff\xd8"],
        }
    )
    path = tmp_path / "a.parquet"
    pq.write_table(table, path)
    ((_, raw),) = read_lines(path)
    row = json.loads(raw)
    assert row["conversations"][1] == {"from": "gpt", "value": "a"}
    assert row["made"] == "2024-05-17" and row["picture"] == "\udcff\udcd8"


MADE = datetime.date(2024, 5, 17)
NO_JSON = {
    "uuid": pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16] * 2, pa.binary(16))),
    "nanoseconds": pa.array([1234567890123456789] * 2, pa.timestamp("ns")),
    "keys twice": pa.array([[("a", 1), ("a", 2)]] * 2, pa.map_(pa.string(), pa.int8())),
    "keys that are dates": pa.array([[(MADE, 1)]] * 2, pa.map_(pa.date32(), pa.int8())),
    "dates after 9999": pa.array([90_000_000] * 2, pa.int32()).view(pa.date32()),
    "no UTF-8": pa.array([b"ok", b"\xff"], pa.large_binary()).view(pa.large_string()),
}


@pytest.mark.parametrize("name", NO_JSON)
def test_parquet_values_without_a_json_form_spoil_no_row_that_is_not_read_from_them(
    tmp_path, name
):
    path = tmp_path / "a.parquet"
    messages = [chat("one")["messages"], chat("two")["messages"]]
    pq.write_table(pa.table({"made": NO_JSON[name], "messages": messages}), path)
    rows = list(read_conversations(path))
    assert [row.messages[0]["content"] for row in rows] == ["one", "two"]


def test_parquet_rows_with_such_values_are_refused_one_by_one(tmp_path):
    path = tmp_path / "a.parquet"
    texts = pa.array([b"<s>one", b"\xff", b"<s>three"], pa.large_binary()).view(pa.large_string())
    pq.write_table(pa.table({"text": texts}), path)
    rows = list(read_conversations(path))
    assert [row.source for row in rows] == [f"{path}:{i}" for i in (1, 2, 3)]
    assert rows[0].text == "<s>one" and rows[2].text == "<s>three"
    assert rows[1].reason == "a Parquet value has no JSON form" and "text: " in rows[1].detail
    pickled = pickle.loads(pickle.dumps(list(read_lines(path))))  # on its way to another process
    assert pickled[1][1].reason == rows[1].reason
    (chunk,) = read_chunks([path])
    assert [number for number, _ in chunk.lines] == [1, 2, 3]


def test_the_keys_a_row_is_read_from_are_those_the_parser_knows():
    known = {*conversation._FORMS, *conversation._RESPONSES, *conversation._MASKS}
    assert known | {"tools", "system", "spans"} == ROW_KEYS


def test_parquet_is_read_in_pieces(tmp_path):
    """60 MB of text in one row group: the reader's Python objects stay far below that."""
    text = "word " * 40_000
    rows = [chat(f"{i} {text}") for i in range(300)]
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, use_dictionary=False, compression="snappy")
    del rows
    tracemalloc.start()
    assert sum(1 for _ in read_lines(path)) == 300
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30e6, f"{peak / 1e6:.0f} MB of Python objects"


def test_damaged_parquet_is_an_error_that_names_it(tmp_path):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([chat("one")]), path)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(ValueError, match=r"a\.parquet: damaged Parquet file"):
        list(read_lines(path))


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match=r"pip install 'specforge_trim\[parquet\]'"):
        list(read_lines(path))
