"""Bugs caught: hours of work on a file whose first rows already say that it is of no use; a run
stopped by bad rows that later good ones would have outweighed; shards of abandoned runs that fill
the disk, or a sweep that takes those of a run at work; two processes that write the same folder.
"""

import gc
import gzip
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pyarrow
import pytest
from chat_templates import assistant, chat_tokenizer, user
from filelock import FileLock
from pyarrow import parquet

from specforge_trim.data import shards
from specforge_trim.data.dataset import prepare
from specforge_trim.data.files import most_rows

GOOD = json.dumps({"messages": [user("question?"), assistant("answer")]})


def run(path, tmp_path, **options):
    options = {"max_length": 200, "progress": False} | options
    return prepare(path, chat_tokenizer(), cache_dir=tmp_path / "cache", **options)


@pytest.fixture
def made(monkeypatch):
    """Numbers of the chunks, of 10 rows each, that were tokenised."""
    numbers, real = [], shards.write_shard
    monkeypatch.setattr(shards, "_CHUNK_ROWS", 10)
    monkeypatch.setattr(
        shards,
        "write_shard",
        lambda chunk, *rest: (numbers.append(chunk.number), real(chunk, *rest)),
    )
    return numbers


def test_a_run_stops_once_too_many_rows_are_bad_whatever_comes(tmp_path, made):
    """100 rows, 20 may be bad: the 21st bad one is row 41, in the fifth chunk of ten."""
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f"{line}\n" for line in [GOOD, "{"] * 20 + ["{"] + [GOOD] * 59))
    expected = r"21 of the 50 rows read so far \(of 100\) .* max_bad_fraction 0.2 \(21 x line is"
    with pytest.raises(ValueError, match=expected) as caught:
        run(path, tmp_path, max_bad_fraction=0.2)
    assert f"{path}:2: line is not valid JSON" in str(caught.value)
    assert made == [0, 1, 2, 3, 4]
    report = Path(str(caught.value).rpartition("all of them: ")[2])
    listed = [json.loads(line)["line"] for line in report.read_text().splitlines()]
    assert listed == [*range(2, 41, 2), 41]
    # Asked again it says the same at once; with a higher limit it goes on where it was.
    with pytest.raises(ValueError, match=r"21 of the 50 rows"):
        run(path, tmp_path, max_bad_fraction=0.2)
    data = run(path, tmp_path, max_bad_fraction=0.21)
    assert made == [*range(10)] and len(data) == 79 and data.skipped.total() == 21


def test_bad_rows_that_come_first_stop_nothing_that_is_in_time(tmp_path, made):
    """20 of 100 rows are bad, all at the start, and as many may be."""
    path = tmp_path / "a.jsonl"
    path.write_text("{\n" * 20 + f"{GOOD}\n" * 80)
    assert len(run(path, tmp_path, max_bad_fraction=0.2)) == 80


def test_rows_too_long_are_no_bad_rows(tmp_path, made):
    long = json.dumps({"messages": [user("long " * 300), assistant("a")]})
    path = tmp_path / "a.jsonl"
    path.write_text(f"{long}\n" * 30 + f"{GOOD}\n" * 10)
    assert len(run(path, tmp_path, max_bad_fraction=0.0)) == 10


def test_a_gzip_file_is_judged_at_its_end(tmp_path, made):
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(("{\n" * 25 + f"{GOOD}\n" * 5).encode()))
    with pytest.raises(ValueError, match=r"25 of 30 rows"):
        run(path, tmp_path, max_bad_fraction=0.2)
    assert made == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "count"), [("", 0), ("{}", 1), ("{}\n", 1), ("{}\n\n{}", 3), ("\n" * 3, 3)]
)
def test_no_file_has_more_rows_than_lines(tmp_path, text, count):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    assert most_rows(path) == count


def test_rows_of_parquet_are_known_before_they_are_read(tmp_path, monkeypatch):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"text": ["a"] * 7}), path)
    assert most_rows(path) == 7
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert most_rows(path) is None
    monkeypatch.undo()
    path.write_bytes(path.read_bytes()[:-9])
    assert most_rows(path) is None


def test_shards_of_abandoned_runs_are_swept(tmp_path):
    """Not a young one, and not that of a run which holds its lock."""
    path, folder = tmp_path / "a.jsonl", tmp_path / "cache" / "prepared"
    path.write_text(GOOD + "\n")
    now = time.time()
    for name, days in (("old", 8), ("young", 6), ("held", 8)):
        work = folder / f"{name}.work"
        work.mkdir(parents=True)
        (work / "000000.safetensors").write_bytes(b"0")
        os.utime(work, (now, now - 86_400 * days))
    with FileLock(folder / "held.lock"):
        run(path, tmp_path)
    assert sorted(p.name for p in folder.glob("*.work")) == ["held.work", "young.work"]


SLOW_RUN = """
import sys, time
from pathlib import Path
from chat_templates import chat_tokenizer
from specforge_trim.data import shards
from specforge_trim.data.dataset import prepare

real = shards.write_shard
def write_shard(chunk, *rest):
    with open(sys.argv[3], "a") as file:
        file.write(f"{chunk.number}\\n")
    time.sleep(0.2)  # long enough for the other to come
    real(chunk, *rest)

shards._CHUNK_ROWS, shards.write_shard = 10, write_shard
Path(sys.argv[4]).touch()
while not all(Path(f"{sys.argv[3]}{k}").exists() for k in (0, 1)):
    time.sleep(0.01)
options = {"cache_dir": sys.argv[2], "max_length": 200, "progress": False}
data = prepare(sys.argv[1], chat_tokenizer(), **options)
print(len(data), data.folder)
"""


def test_two_processes_at_once_make_each_chunk_once(tmp_path):
    path, log = tmp_path / "a.jsonl", tmp_path / "chunks"
    path.write_text(f"{GOOD}\n" * 30)
    whole = run(path, tmp_path / "alone")
    where = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    both = [
        subprocess.Popen(
            [sys.executable, "-c", SLOW_RUN, path, tmp_path / "cache", log, f"{log}{k}"],
            env=os.environ | {"PYTHONPATH": where},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for k in (0, 1)
    ]
    ends = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    assert ends[0][0] == ends[1][0] and ends[0][0].startswith("30 ")
    assert sorted(log.read_text().split()) == ["0", "1", "2"]
    (folder,) = (p for p in (tmp_path / "cache" / "prepared").iterdir() if p.is_dir())
    found = {p.name: p.read_bytes() for p in folder.iterdir()}
    assert found == {p.name: p.read_bytes() for p in whole.folder.iterdir()}


def test_what_the_collector_may_look_at_is_as_before(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(f"{GOOD}\n{{\n")
    assert gc.get_freeze_count() == 0
    with pytest.raises(ValueError):
        run(path, tmp_path, max_bad_fraction=0.0)
    assert gc.get_freeze_count() == 0
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        run(path, tmp_path, max_bad_fraction=0.5)
        assert frozen and gc.get_freeze_count() >= frozen // 2  # some have died meanwhile
    finally:
        gc.unfreeze()
