"""Bugs caught: a stopped run that starts over or ends in other bytes; two runs that write the same
files; a cache that survives an edited template, a changed file or another limit; half
written caches; rows lost without a count; a run that goes on with no data or mostly bad data.
"""

import json
import os
import pickle
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import chat_templates as chat
import numpy as np
import pytest
from chat_templates import assistant, chat_tokenizer, user

from specforge_trim.data import dataset, shards
from specforge_trim.data.conversation import Conversation
from specforge_trim.data.dataset import PreparedData, prepare
from specforge_trim.data.tokenize import render_and_mask

MAX_LENGTH = 200


def rows(count: int, *, start: int = 0) -> list[dict]:
    return [
        {"messages": [user(f"question {i}?"), assistant(f"answer {i}")]}
        for i in range(start, start + count)
    ]


def write(path: Path, items: list) -> Path:
    lines = [item if isinstance(item, str) else json.dumps(item) for item in items]
    path.write_text("".join(line + "\n" for line in lines))
    return path


def run(paths, tmp_path, tokenizer=None, **options) -> PreparedData:
    options = {"max_length": MAX_LENGTH, "progress": False} | options
    return prepare(paths, tokenizer or chat_tokenizer(), cache_dir=tmp_path / "cache", **options)


@pytest.fixture
def count_work(monkeypatch):
    """Counts how often documents are really tokenised rather than read from the cache."""
    calls = []
    real = dataset._write
    monkeypatch.setattr(dataset, "_write", lambda *a: (calls.append(1), real(*a)))
    return calls


def test_documents_equal_those_made_one_by_one(tmp_path):
    items = rows(5)
    path = write(tmp_path / "a.jsonl", items)
    tokenizer = chat_tokenizer()
    data = run(path, tmp_path, tokenizer)
    assert len(data) == 5
    for i, item in enumerate(items):
        row = Conversation(tuple(item["messages"]), None, f"{path}:{i + 1}")
        expected, found = render_and_mask(tokenizer, row), data[i]
        assert found.input_ids.tolist() == expected.input_ids.tolist()
        assert found.loss_mask.tolist() == expected.loss_mask.tolist()
        assert (found.source, found.doc_id) == (expected.source, expected.doc_id)
    assert data.num_tokens == sum(len(d.input_ids) for d in data) == data.lengths.sum()
    assert data.num_supervised == sum(int(d.loss_mask.sum()) for d in data)
    assert data[-1].doc_id == data[4].doc_id
    with pytest.raises(IndexError):
        data[5]


def test_the_second_run_reads_the_cache_and_gives_the_same(tmp_path, count_work):
    path = write(tmp_path / "a.jsonl", rows(3))
    first, second = run(path, tmp_path), run(path, tmp_path)
    assert len(count_work) == 1
    assert [d.doc_id for d in first] == [d.doc_id for d in second]
    assert first.fingerprint == second.fingerprint


def test_a_moved_file_is_the_same_content_with_new_places(tmp_path, count_work):
    path = write(tmp_path / "a.jsonl", [*rows(30), "{"])
    run(path, tmp_path)
    moved = path.rename(tmp_path / "b.jsonl")
    data = run(moved, tmp_path)
    assert len(count_work) == 1
    assert data[0].source == f"{moved}:1" and data.bad_rows[0].source == f"{moved}:31"


@pytest.mark.parametrize("change", ["template", "data", "order", "max_length", "tokenizer"])
def test_any_change_of_content_is_a_cache_miss(tmp_path, count_work, change):
    one, two = write(tmp_path / "a.jsonl", rows(3)), write(tmp_path / "b.jsonl", rows(3, start=9))
    paths, tokenizer, options = [one, two], chat_tokenizer(), {}
    before = run(paths, tmp_path, tokenizer)
    if change == "template":
        tokenizer.chat_template = tokenizer.chat_template.replace("<|im_end|>\n", "<|im_end|> ", 1)
    elif change == "data":
        one.write_text(one.read_text().replace("answer 1", "answer X"))
    elif change == "order":
        paths = [two, one]
    elif change == "max_length":
        options = {"max_length": MAX_LENGTH + 1}
    else:
        tokenizer.add_tokens(["question"])
    after = run(paths, tmp_path, tokenizer, **options)
    assert len(count_work) == 2 and before.fingerprint != after.fingerprint


def test_settings_of_a_call_are_no_part_of_the_tokenizer(tmp_path, count_work):
    path, tokenizer = write(tmp_path / "a.jsonl", rows(3)), chat_tokenizer()
    run(path, tmp_path, tokenizer)
    tokenizer(["a", "a b c"], padding=True, truncation=True, max_length=3)
    assert len(run(path, tmp_path, tokenizer)) == 3 and len(count_work) == 1


def test_bad_and_long_rows_are_counted_and_listed(tmp_path):
    long = {"messages": [user("long " * 300), assistant("a")]}
    path = write(tmp_path / "a.jsonl", [*rows(20), "{", long, {"messages": []}, *rows(2)])
    data = run(path, tmp_path)
    assert data.num_rows == 25 and len(data) == 22
    assert data.skipped == {
        "line is not valid JSON": 1,
        "longer than max_length": 1,
        "no user message": 1,
    }
    assert [row.source for row in data.bad_rows] == [f"{path}:{n}" for n in (21, 22, 23)]
    assert "22 of 25 conversations" in data.summary()
    assert "1 x no user message" in data.summary()
    (report,) = (tmp_path / "cache" / "prepared").glob("*.bad_rows.jsonl")
    listed = [json.loads(line) for line in report.read_text().splitlines()]
    assert [(f"{item['file']}:{item['line']}", item["reason"]) for item in listed] == [
        (row.source, row.reason) for row in data.bad_rows
    ]


def test_a_template_that_refuses_some_rows_skips_those(tmp_path):
    backwards = {"messages": [assistant("a"), user("q")]}
    path = write(tmp_path / "a.jsonl", [*rows(2), backwards])
    data = run(path, tmp_path, chat_tokenizer(chat.MISTRAL), max_bad_fraction=0.5)
    assert len(data) == 2 and data.skipped == {"chat template refuses the conversation": 1}


def test_too_many_bad_rows_stop_the_run_also_from_the_cache(tmp_path):
    path = write(tmp_path / "a.jsonl", [*rows(7), "{", "{", "{"])
    for _ in range(2):
        with pytest.raises(ValueError, match=r"3 of 10 rows") as caught:
            run(path, tmp_path, max_bad_fraction=0.29)
        assert f"{path}:8: line is not valid JSON" in str(caught.value)
        assert "bad_rows.jsonl" in str(caught.value)
    assert len(run(path, tmp_path, max_bad_fraction=0.3)) == 7


@pytest.mark.parametrize(
    ("items", "reason"),
    [
        ([], "no rows"),
        (["{", "{"], "2 x line is not valid JSON"),
        ([{"messages": [user("long " * 300), assistant("a")]}], "1 x longer than max_length"),
    ],
)
def test_no_usable_conversation_is_an_error(tmp_path, items, reason):
    path = write(tmp_path / "a.jsonl", items)
    with pytest.raises(ValueError, match="no usable conversation") as caught:
        run(path, tmp_path, max_bad_fraction=1.0)
    assert str(path) in str(caught.value) and reason in str(caught.value)


@pytest.mark.parametrize(
    ("paths", "options", "message"),
    [
        ([], {}, "no data file"),
        ("a.jsonl", {"max_length": 0}, "max_length"),
        ("a.jsonl", {"max_length": 10.0}, "max_length"),
        ("a.jsonl", {"max_bad_fraction": 1.5}, "max_bad_fraction"),
    ],
)
def test_wrong_settings_are_named(tmp_path, paths, options, message):
    with pytest.raises(ValueError, match=message):
        run(paths, tmp_path, **options)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nothing\.jsonl"):
        run(tmp_path / "nothing.jsonl", tmp_path)


@pytest.fixture
def small_chunks(monkeypatch):
    monkeypatch.setattr(shards, "_CHUNK_ROWS", 2)


def contents(data: PreparedData) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in data.folder.iterdir()}


@pytest.fixture
def seven_rows(tmp_path):
    """A data file with a bad row and one of 40,000 tokens; what an undisturbed run makes of it."""
    long = {"messages": [user("x " * 20_000), assistant("a")]}
    path = write(tmp_path / "a.jsonl", [*rows(3), "{", long, *rows(2, start=3)])
    whole = run(path, tmp_path / "undisturbed", max_bad_fraction=1.0)
    assert len(whole) == 5 and whole.num_rows == 7
    return path, contents(whole)


@pytest.mark.parametrize("stop_at", [0, 1, 3])
def test_an_interrupted_run_continues_to_the_same_bytes(
    tmp_path, monkeypatch, small_chunks, seven_rows, stop_at
):
    """Chunks of 2 rows, stopped in one: those before it are not made again."""
    path, expected = seven_rows
    real, made = shards.write_shard, []

    def stop(chunk, chat, limit, work):
        if chunk.number == stop_at and stop_at not in made:
            made.append(stop_at)
            (work / ".tmp-half").write_bytes(b"half")
            raise KeyboardInterrupt
        made.append(chunk.number)
        real(chunk, chat, limit, work)

    monkeypatch.setattr(shards, "write_shard", stop)
    with pytest.raises(KeyboardInterrupt):
        run(path, tmp_path, max_bad_fraction=1.0)
    assert contents(run(path, tmp_path, max_bad_fraction=1.0)) == expected
    assert made == [*range(stop_at), stop_at, *range(stop_at, 4)]
    names = {entry.suffix for entry in (tmp_path / "cache" / "prepared").iterdir()}
    assert names == {"", ".lock", ".jsonl"}


def test_a_killed_run_continues_in_two_processes_to_the_same_bytes(
    tmp_path, small_chunks, seven_rows
):
    path, expected = seven_rows
    script = """
import os, signal, sys
from chat_templates import chat_tokenizer
from specforge_trim.data import shards
from specforge_trim.data.dataset import prepare

real = shards.write_shard
def write_shard(chunk, *rest):
    if chunk.number == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    real(chunk, *rest)

shards._CHUNK_ROWS, shards.write_shard = 2, write_shard
options = {"max_length": 200, "max_bad_fraction": 1.0}
prepare(sys.argv[1], chat_tokenizer(), cache_dir=sys.argv[2], **options)
"""
    here = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    done = subprocess.run(
        [sys.executable, "-c", script, path, tmp_path / "cache"],
        env=os.environ | {"PYTHONPATH": here},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    left = [p.name for p in (tmp_path / "cache" / "prepared").glob("*.work/*")]
    assert sorted(left) == ["000000.safetensors", "000001.safetensors"]
    tokenizer = chat_tokenizer()
    tokenizer(["used with its own threads before"] * 64)
    data = run(path, tmp_path, tokenizer, max_bad_fraction=1.0, processes=2)
    assert contents(data) == expected


def test_two_runs_at_once_do_the_work_once(tmp_path, count_work, seven_rows):
    path, expected = seven_rows
    count_work.clear()
    with ThreadPoolExecutor(3) as pool:
        found = pool.map(lambda _: run(path, tmp_path, max_bad_fraction=1.0), range(3))
        assert all(contents(data) == expected for data in found)
    assert len(count_work) == 1


def test_a_cut_file_in_the_cache_is_an_error_that_names_it(tmp_path):
    path = write(tmp_path / "a.jsonl", rows(6))
    ids = run(path, tmp_path).folder / "input_ids.bin"
    ids.write_bytes(ids.read_bytes()[:-4])
    with pytest.raises(ValueError, match=r"input_ids\.bin has \d+ bytes"):
        run(path, tmp_path)


@pytest.mark.parametrize("text", ["[]", "{}", '{"num_documents":'])
def test_a_damaged_manifest_is_named_with_the_remedy(tmp_path, text):
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match="manifest.json is damaged: remove the folder"):
        PreparedData.load(tmp_path, [])


def test_a_pickled_data_set_is_opened_again_not_copied(tmp_path):
    data = run(write(tmp_path / "a.jsonl", rows(50)), tmp_path)
    raw = pickle.dumps(data)
    assert len(raw) < 1000
    assert [d.doc_id for d in pickle.loads(raw)] == [d.doc_id for d in data]


def test_documents_are_private_copies(tmp_path):
    data = run(write(tmp_path / "a.jsonl", rows(2)), tmp_path)
    data[0].loss_mask.fill_(True)
    data[0].input_ids.fill_(0)
    assert not data[0].loss_mask.all() and data[0].input_ids.any()
    assert data[0].input_ids.dtype.is_floating_point is False
    assert np.array_equal(data.lengths, [len(d.input_ids) for d in data])


def test_the_progress_bar_goes_to_stderr_only(tmp_path, capfd):
    run(write(tmp_path / "a.jsonl", rows(2)), tmp_path, progress=True)
    captured = capfd.readouterr()
    assert captured.out == "" and "tokenize" in captured.err


def test_importing_prints_and_loads_nothing_heavy():
    code = "import specforge_trim.data.conversation, sys; assert 'transformers' not in sys.modules"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_padding_left_set_by_another_call_does_not_reach_the_documents(tmp_path):
    tokenizer = chat_tokenizer()
    tokenizer(["a", "b c"], padding="max_length", truncation=True, max_length=7)
    data = run(write(tmp_path / "a.jsonl", rows(2)), tmp_path, tokenizer)
    assert len(set(data.lengths)) == 1 and data.lengths[0] > 7
    assert tokenizer.decode(data[0].input_ids).endswith("answer 0<|im_end|>\n")


LONG = {
    "messages": [user("long " * 60), assistant("first"), user("next"), assistant("b " * 100)],
}


@pytest.mark.parametrize("policy", ["drop", "cut", "split"])
def test_rows_beyond_max_length(tmp_path, policy):
    """The pieces are cut from the ids of a run without a limit; the cost is counted by hand."""
    path = write(tmp_path / "a.jsonl", [*rows(1), LONG])
    whole = run(path, tmp_path, max_length=10_000)[1]
    ids, mask = whole.input_ids.tolist(), whole.loss_mask.tolist()
    size = 370
    assert 2 * size > len(ids) > size and 0 < sum(mask[:size]) < sum(mask)
    data = run(path, tmp_path, max_length=size, too_long=policy)
    pieces = {"drop": [], "cut": [(0, size)], "split": [(0, size), (size, len(ids))]}[policy]
    assert len(data) == 1 + len(pieces)
    for document, (start, end) in zip(list(data)[1:], pieces, strict=True):
        assert document.input_ids.tolist() == ids[start:end]
        assert document.loss_mask.tolist() == mask[start:end]
        place = f", from token {start} on" if start else ""
        assert document.source == f"{path}:2{place}"
    lost = {"drop": sum(mask), "cut": sum(mask[size:]), "split": 0}[policy]
    assert (data.too_long.rows, data.too_long.lost, data.too_long.policy) == (1, lost, policy)
    assert data.skipped == ({"longer than max_length": 1} if policy == "drop" else {})
    assert f"1 beyond max_length ({policy}) cost {lost} supervised tokens" in data.summary()
    assert data.supervised.tolist() == [int(d.loss_mask.sum()) for d in data]


def test_a_cut_that_leaves_no_loss_is_counted(tmp_path):
    path = write(tmp_path / "a.jsonl", [*rows(1), LONG])
    data = run(path, tmp_path, max_length=100, too_long="cut")
    assert len(data) == 1 and data.skipped == {"no supervised token within max_length": 1}
    assert data.too_long.rows == 1


def test_a_sample_is_drawn_over_all_files_by_content(tmp_path):
    """100 rows of A and 100 of B, capped at 50: both are present, in any order of the files."""
    one, two = (
        write(tmp_path / "a.jsonl", rows(100)),
        write(tmp_path / "b.jsonl", rows(100, start=100)),
    )
    data = run([one, two], tmp_path)
    sample = data.sample(50, seed=0)
    assert len(sample) == 50 and sample.fingerprint != data.fingerprint
    counts = np.bincount(sample.file_numbers)
    assert counts.sum() == 50 and counts.min() > 10
    ids = {d.doc_id for d in sample}
    assert ids <= {d.doc_id for d in data} and len(ids) == 50
    assert ids == {d.doc_id for d in run([two, one], tmp_path).sample(50, seed=0)}
    assert ids != {d.doc_id for d in data.sample(50, seed=1)}
    assert [d.doc_id for d in pickle.loads(pickle.dumps(sample))] == [d.doc_id for d in sample]
    assert sample.num_tokens == sum(len(d.input_ids) for d in sample)
    assert data.sample(200, seed=0) is data
