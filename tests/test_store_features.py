"""Catches: features of another target, layer set, dtype or data used as if they fitted; shards
read half-written; a resume that redoes or overwrites; offline features that differ from online
ones; the last hidden state missing where a teacher needs it."""

import json
import os
import pickle
import resource
from dataclasses import dataclass, replace

import pytest
import torch
from tiny import random_ids_and_mask, save_tiny_target

from specforge_trim.data.document_features import BadFeatures, MemoryDocument, teacher_positions
from specforge_trim.data.store import FeatureStore, StoreSpec, StoreWriter
from specforge_trim.verifier.capture import capture, capture_document, is_captured, store_spec
from specforge_trim.verifier.hf import HFTarget, TargetFeatures

SPEC = StoreSpec("abc", (2, 4, 5), 4, "float32", target_name="t")


@dataclass(frozen=True)
class Doc:
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    source: str
    doc_id: str


def documents(count=7, seed=0):
    """Documents of 5, 16, 27, ... tokens."""
    made = []
    for i in range(count):
        ids, mask = random_ids_and_mask(5 + 11 * i, seed=seed + i, spans=1 + i % 2, span_length=3)
        made.append(Doc(ids, mask, f"data.jsonl:{i + 1}", f"id{seed}-{i}"))
    return made


def features(lengths, width=12):
    """Memory documents whose values tell document, token and column."""
    made = []
    for i, length in enumerate(lengths):
        aux = i * 1000 + torch.arange(length * width, dtype=torch.float32).view(length, width)
        positions = torch.arange(0, length, 2)
        made.append(MemoryDocument(aux, aux[positions, :4] + 0.5, positions))
    return made


def write_store(folder, lengths, *, shard_tokens=10, shards=None):
    made = features(lengths)
    ids = [f"d{i}" for i in range(len(lengths))]
    writer = StoreWriter(folder, SPEC, doc_ids=ids, lengths=lengths, shard_tokens=shard_tokens)
    for shard in range(writer.num_shards) if shards is None else shards:
        writer.write(shard, [made[i] for i in writer.documents(shard)])
    return writer, made, ids


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return HFTarget.load(save_tiny_target(tmp_path_factory.mktemp("t")), dtype=torch.float32)


def test_teacher_positions_by_hand():
    mask = torch.tensor([0, 0, 1, 1, 0, 0, 1, 0, 0, 1]).bool()
    assert teacher_positions(mask).tolist() == [2, 3, 4, 6, 7, 9]
    assert teacher_positions(torch.tensor([True])).tolist() == [0]
    assert teacher_positions(torch.zeros(3, dtype=torch.bool)).tolist() == []


def test_round_trip_whole_and_sliced(tmp_path):
    lengths = [4, 7, 1, 12, 3]
    writer, made, ids = write_store(tmp_path, lengths)
    assert [list(writer.documents(s)) for s in range(writer.num_shards)] == [[0, 1], [2, 3], [4]]
    store = FeatureStore.open(tmp_path, expect=SPEC, doc_ids=ids)
    assert store.is_complete and len(store) == 5 and store.num_tokens == 27
    for i in (4, 0, 2, 1, 3):
        stored, expected = store.document(i), made[i]
        assert stored.num_tokens == lengths[i]
        assert torch.equal(stored.aux(), expected.aux_states)
        lo, hi = lengths[i] // 3, lengths[i] // 2 + 1
        assert torch.equal(stored.aux(lo, hi), expected.aux_states[lo:hi])
        assert torch.equal(stored.aux(lo), expected.aux_states[lo:])
        assert torch.equal(stored.aux(0, 999), expected.aux_states)  # never the next document's
        assert torch.equal(stored.last(), expected.last_states)
        assert torch.equal(stored.last_positions, expected.last_positions)
        assert stored.last_positions.dtype == torch.int64


@pytest.mark.parametrize("text", ["[]", '{"format":', "5"])
def test_store_damaged_manifest_is_named_with_the_remedy(tmp_path, text):
    write_store(tmp_path, [4])
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(ValueError, match="manifest.json is damaged: remove the folder"):
        FeatureStore.open(tmp_path)


def test_store_travels_to_a_worker(tmp_path):
    _, made, _ = write_store(tmp_path, [4, 7])
    store = FeatureStore.open(tmp_path)
    store.document(0).aux()
    again = pickle.loads(pickle.dumps(store))
    assert torch.equal(again.document(1).aux(), made[1].aux_states)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(store.document(1).aux(), made[1].aux_states) else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_document_without_supervised_tokens(tmp_path):
    empty = MemoryDocument(torch.ones(3, 12), torch.empty(0, 4), torch.empty(0, dtype=torch.int64))
    writer = StoreWriter(tmp_path, SPEC, doc_ids=["a"], lengths=[3])
    writer.write(0, [empty])
    stored = FeatureStore.open(tmp_path).document(0)
    assert stored.last().shape == (0, 4) and stored.last_positions.tolist() == []


@pytest.mark.parametrize(
    "change",
    [
        {"target_fingerprint": "other"},
        {"aux_layers": (1, 3, 4)},
        {"dtype": "bfloat16"},
        {"hidden_size": 5},
        {"last_state": "before final norm"},
    ],
)
def test_a_mismatch_is_named(tmp_path, change):
    write_store(tmp_path, [4, 7])
    (key,) = change
    with pytest.raises(ValueError, match=key):
        FeatureStore.open(tmp_path, expect=replace(SPEC, **change))
    with pytest.raises(ValueError, match=key):
        StoreWriter(tmp_path, replace(SPEC, **change), doc_ids=["d0", "d1"], lengths=[4, 7])
    FeatureStore.open(tmp_path, expect=replace(SPEC, target_name="moved elsewhere"))


def test_other_documents_are_named(tmp_path):
    write_store(tmp_path, [4, 7])
    with pytest.raises(ValueError, match="doc_ids.*document 1"):
        FeatureStore.open(tmp_path, doc_ids=["d0", "x"])
    with pytest.raises(ValueError, match="doc_ids.*document 2"):
        FeatureStore.open(tmp_path, doc_ids=["d0", "d1", "d2"])
    with pytest.raises(ValueError, match="manifest.json"):
        FeatureStore.open(tmp_path / "nothing")


def test_half_written_shards_do_not_count(tmp_path):
    lengths = [4, 7, 1, 12, 3]
    writer, made, _ = write_store(tmp_path, lengths, shards=[0, 2])
    (tmp_path / ".tmp-shard-00001.safetensors-x").write_bytes(b"half")
    store = FeatureStore.open(tmp_path)
    assert store.missing_shards() == [1] and writer.missing() == [1]
    assert torch.equal(store.document(4).aux(), made[4].aux_states)
    with pytest.raises(ValueError, match="shard-00001.*capture again"):
        store.document(2)
    cut = tmp_path / "shard-00000.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])  # one byte short
    assert FeatureStore.open(tmp_path).missing_shards() == [0, 1]
    writer.write(1, [made[2], made[3]])
    assert torch.equal(store.document(2).aux(), made[2].aux_states)  # seen without reopening


def test_a_failed_write_leaves_nothing(tmp_path):
    writer, made, _ = write_store(tmp_path, [4, 7], shards=[])
    with pytest.raises(ValueError, match="document 1.*expected"):
        writer.write(0, [made[0], made[0]])
    # A disk that is full is not a damaged file, and the shard is named.
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        with pytest.raises(OSError, match="safetensors cannot be written: .*File too large"):
            writer.write(0, [made[i] for i in writer.documents(0)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in tmp_path.iterdir()] == ["manifest.json"]


def test_old_leftovers_are_removed_young_ones_stay(tmp_path):
    writer, _, ids = write_store(tmp_path, [4, 7])
    old, young = tmp_path / ".tmp-old", tmp_path / ".tmp-young"
    old.write_bytes(b"")
    young.write_bytes(b"")
    os.utime(old, (0, 0))
    StoreWriter(tmp_path, SPEC, doc_ids=ids, lengths=[4, 7])
    assert not old.exists() and young.exists()


def test_capture_equals_the_hidden_states_and_online(tmp_path, target):
    data = documents()
    capture(data, target, tmp_path / "new" / "store", shard_tokens=40, progress=False)
    spec = store_spec(target.name, dtype=torch.float32)
    assert is_captured(data, spec, tmp_path / "new" / "store")
    store = FeatureStore.open(tmp_path / "new" / "store", expect=spec)
    for i, document in enumerate(data):
        whole = target.model(document.input_ids[None], output_hidden_states=True, use_cache=False)
        aux = torch.cat([whole.hidden_states[k][0] for k in (2, 4, 5)], dim=-1)
        mask = document.loss_mask.tolist()
        needed = [p for p in range(len(mask)) if mask[p] or (p > 0 and mask[p - 1])]
        stored, online = store.document(i), capture_document(target, document)
        for found in (stored, online):
            assert torch.equal(found.aux(), aux)
            assert found.last_positions.tolist() == needed
            assert torch.equal(found.last(), whole.hidden_states[-1][0, needed])


def test_ranks_share_the_shards_and_a_rerun_keeps_them(tmp_path, target, monkeypatch):
    data = documents()
    capture(data, target, tmp_path / "one", shard_tokens=40, progress=False)
    capture(data, target, tmp_path / "two", rank=1, world_size=2, shard_tokens=40, progress=False)
    assert not is_captured(data, store_spec(target.name, dtype=torch.float32), tmp_path / "two")
    captured = []
    whole = HFTarget.features
    monkeypatch.setattr(
        HFTarget, "features", lambda self, ids: captured.append(len(ids)) or whole(self, ids)
    )
    # The rerun has another number of ranks and another wish for the shard size.
    capture(data, target, tmp_path / "two", shard_tokens=999, progress=False)
    names = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert names == sorted(p.name for p in (tmp_path / "two").iterdir())
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    # Shards of 40 tokens: [5, 16, 27] [38, 49] -> 38+49 [60] [71]; rank 1 had the odd ones.
    ends = json.loads((tmp_path / "two" / "manifest.json").read_text())["shard_ends"]
    assert ends == [3, 5, 6, 7]
    assert captured == [5, 5, 16, 27, 60]  # the first is the probe of the head
    captured.clear()
    capture(data, target, tmp_path / "two", progress=False)
    assert captured == []


def spoiled_target(target, lengths):
    """The target with states that are not finite for documents of these lengths."""
    broken = HFTarget(target.model, name=target.name, fingerprint=target.fingerprint)
    whole = broken.features

    def features(ids):
        aux, last = (states.clone() for states in whole(ids))
        if len(ids) in lengths:
            aux[2] = float("nan")
        return TargetFeatures(aux, last)

    broken.features = features
    return broken


def test_states_that_are_not_finite_are_named_and_too_many_stop(tmp_path, target, caplog):
    data = documents()
    capture(data, spoiled_target(target, {16}), tmp_path / "a", max_bad_fraction=0.2,
            progress=False)  # fmt: skip
    assert "data.jsonl:2: the aux state of token 2 is not finite" in caplog.text
    store = FeatureStore.open(tmp_path / "a")
    assert store.problems(0) == {1: "the aux state of token 2 is not finite"}
    with pytest.raises(BadFeatures, match="shard-00000.*token 2"):
        store.document(1).check()
    store.document(0).check()
    with pytest.raises(ValueError, match="2 of 7 documents.*max_bad_fraction"):
        capture(data, spoiled_target(target, {16, 27}), tmp_path / "b", max_bad_fraction=0.2,
                progress=False)  # fmt: skip


def test_damage_is_found_once_per_shard(tmp_path, monkeypatch):
    write_store(tmp_path, [4, 7, 1, 12, 3])
    path = tmp_path / "shard-00001.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:])  # one bit
    store = FeatureStore.open(tmp_path)
    assert store.is_complete and store.problems(0) == {}
    assert set(store.problems(1)) == {2, 3} and "checksum" in store.problems(1)[2]
    with pytest.raises(BadFeatures, match="shard-00001.*damaged"):
        store.document(3).check()
    path.write_bytes(whole)
    assert store.problems(1) != {}  # what was found stays, nothing is read twice
    assert FeatureStore.open(tmp_path).problems(1) == {}


def test_a_check_reads_the_documents_own_bytes_ahead(tmp_path, monkeypatch):
    _, made, _ = write_store(tmp_path, [4, 7, 1, 12, 3])
    asked = []
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, place, size, advice: asked.append(
        (os.pread(fd, size, place), advice)))  # fmt: skip
    FeatureStore.open(tmp_path).document(3).check()  # second of its shard
    assert asked == [(made[3].aux_states.numpy().tobytes(), os.POSIX_FADV_WILLNEED)]


def test_a_long_document_is_checked_in_parts(monkeypatch):
    aux = torch.zeros(10_000, 3)
    aux[9_000, 1] = float("nan")
    last = MemoryDocument(aux, aux[:1], torch.zeros(1, dtype=torch.int64))
    sizes = []
    whole = MemoryDocument.aux
    monkeypatch.setattr(
        MemoryDocument, "aux", lambda self, lo, hi: sizes.append(hi - lo) or whole(self, lo, hi)
    )
    with pytest.raises(BadFeatures, match="token 9000"):
        last.check()
    assert sizes == [4096] * 3


def test_a_shard_of_another_store_is_foreign(tmp_path):
    write_store(tmp_path / "a", [4, 7, 1])
    made = features([4, 7, 1])
    for name, spec, ids in (
        ("other documents", SPEC, ["x", "y", "z"]),
        ("other target", replace(SPEC, target_fingerprint="def"), ["d0", "d1", "d2"]),
    ):
        writer = StoreWriter(
            tmp_path / name, spec, doc_ids=ids, lengths=[4, 7, 1], shard_tokens=10
        )
        writer.write(0, made[:2])
        foreign = (tmp_path / name / "shard-00000.safetensors").read_bytes()
        (tmp_path / "a" / "shard-00000.safetensors").write_bytes(foreign)
        problems = FeatureStore.open(tmp_path / "a").problems(0)
        assert set(problems) == {0, 1} and "foreign" in problems[0], name


def test_too_small_a_disk_is_an_error_before_the_work(tmp_path, target, monkeypatch):
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr("specforge_trim.verifier.capture.shutil.disk_usage", lambda path: usage)
    with pytest.raises(OSError, match="features need.*--no-check-disk"):
        capture(documents(), target, tmp_path, progress=False)
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.json"]
    capture(documents(2), target, tmp_path / "told", check_disk=False, progress=False)
    assert FeatureStore.open(tmp_path / "told").is_complete


def test_stored_dtype_is_recorded(tmp_path, target):
    data = documents(2)
    capture(data, target, tmp_path, dtype=torch.bfloat16, progress=False)
    store = FeatureStore.open(tmp_path, expect=store_spec(target.name, dtype=torch.bfloat16))
    expected = capture_document(target, data[1]).aux().bfloat16()
    assert torch.equal(store.document(1).aux(), expected)
