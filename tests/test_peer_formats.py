"""Feature files of other trainers train like our own store.

Catches: a final norm forgotten or applied twice; aux layers in another order; a mask of another
row; a file that is cut off, of another request or of another layout taken as it is; an index that
loses what was there; a map of ids read as offsets.
"""

import gzip
import io
import json
import shutil

import numpy as np
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from tiny_step import Doc, run_step

from specforge_trim.cli.main import train_main
from specforge_trim.data.document_features import BadFeatures
from specforge_trim.data.peer_formats.folder import PeerData
from specforge_trim.data.peer_formats.vocab_maps import read_vocab_maps
from specforge_trim.data.store import FeatureStore
from specforge_trim.drafts.eagle3.batch import PlanSettings, make_batch
from specforge_trim.train.loader import BatchLoader
from specforge_trim.train.sampler import Schedule
from specforge_trim.verifier.capture import capture
from specforge_trim.verifier.final_norm import load_final_norm
from specforge_trim.verifier.hf import HFTarget

STEPS = 3
SETTINGS = PlanSettings(ttt_length=STEPS, trim_loss_positions=True, trim_backbone_rows=True)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tiny.save_tiny_target(tmp_path_factory.mktemp("t"), tied=False)
    return HFTarget.load(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def documents():
    """Twelve, so that data_10 comes after data_2 only in natural order."""
    return [
        Doc(*tiny.random_ids_and_mask(8 + 3 * i, seed=i, spans=1 + i % 3), f"d:{i}", f"id{i}")
        for i in range(12)
    ]


def states(target, document):
    """(aux [L, 3*40], last [L, 40] after the final norm) as transformers gives them."""
    ids = document.input_ids[None]
    hidden = target.model(ids, output_hidden_states=True, use_cache=False).hidden_states
    return torch.cat([hidden[k][0] for k in (2, 4, 5)], dim=-1).detach(), hidden[-1][0].detach()


def specforge_sample(target, document):
    aux, last = states(target, document)
    return {
        "input_ids": document.input_ids,
        "loss_mask": document.loss_mask.long(),
        "hidden_state": last[None],
        "aux_hidden_state": aux[None],
    }


def write_specforge(folder, target, documents, *, packed=False):
    for i, document in enumerate(documents):
        place = folder / f"rows_{i // 5 * 5}-{i // 5 * 5 + 5}"
        place.mkdir(parents=True, exist_ok=True)
        sample = specforge_sample(target, document)
        if packed:
            buffer = io.BytesIO()
            torch.save(sample, buffer)
            (place / f"data_{i}.ckpt.gz").write_bytes(gzip.compress(buffer.getvalue(), 1))
        else:
            torch.save(sample, place / f"data_{i}.ckpt")


def write_specforge_gz(folder, target, documents):
    write_specforge(folder, target, documents, packed=True)


def write_modelopt(folder, target, documents):
    folder.mkdir(parents=True)
    for i, document in enumerate(documents):
        aux, last = states(target, document)
        sample = {"input_ids": document.input_ids, "loss_mask": document.loss_mask}
        sample |= {"hidden_states": last, "aux_hidden_states": aux, "conversation_id": str(i)}
        torch.save(sample, folder / f"conv-{i}.pt")


def write_speculators(folder, target, documents):
    """hidden_states/hs_{i}.safetensors, and the data set's two Arrow files around it."""
    pyarrow = pytest.importorskip("pyarrow")
    (folder / "hidden_states").mkdir(parents=True)
    raw = HFTarget(target.model, aux_layers=(2, 4, 5, 8))  # 8 of 8: before the final norm
    for i, document in enumerate(documents):
        hidden = raw.features(document.input_ids).aux.unflatten(1, (4, 40)).clone()
        tensors = {"token_ids": document.input_ids, "hidden_states": hidden}
        save_file(tensors, folder / "hidden_states" / f"hs_{i}.safetensors")
    names = ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"]
    for name, part in zip(names, (documents[:7], documents[7:]), strict=True):
        table = pyarrow.table(
            {
                "input_ids": [d.input_ids.tolist() for d in part],
                "loss_mask": [d.loss_mask.long().tolist() for d in part],
                "seq_len": [len(d.input_ids) for d in part],
            }
        )
        with pyarrow.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table)
    state = {"_data_files": [{"filename": name} for name in names]}
    (folder / "state.json").write_text(json.dumps(state))


WRITERS = {
    "specforge": write_specforge,
    "specforge gz": write_specforge_gz,
    "modelopt": write_modelopt,
    "speculators": write_speculators,
}


def open_folder(folder, target, cache, **options):
    options = {"num_aux": 3, "hidden_size": 40, "max_length": 999, "progress": False, **options}
    return PeerData(folder, final_norm=load_final_norm(target.name), cache_dir=cache, **options)


@pytest.mark.parametrize("writer", WRITERS)
def test_peer_files_give_the_loss_of_our_own_store(writer, target, documents, tmp_path):
    WRITERS[writer](tmp_path / "peer", target, documents)
    data = open_folder(tmp_path / "peer", target, tmp_path / "cache")
    assert len(data) == 12 and data.lengths.tolist() == [8 + 3 * i for i in range(12)]
    capture(documents, target, tmp_path / "own", progress=False)
    store = FeatureStore.open(tmp_path / "own")
    order = range(12)
    own = make_batch(documents, [store.document(i) for i in order], SETTINGS)
    stored = [data.features(i) for i in order]
    for features in stored:
        features.check()
    peer = make_batch([data.tokens(i) for i in order], stored, SETTINGS)
    found, found_grads = run_step(target, peer, steps=STEPS)
    expected, grads = run_step(target, own, steps=STEPS)
    assert bool((expected.loss > 1.0).all())
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-6, atol=0)
    assert torch.equal(found.correct, expected.correct)
    for name, grad in grads.items():
        # fp32: the final norm is computed once here and once there.
        error = float((found_grads[name] - grad).abs().max() / grad.abs().max())
        assert error < 1e-5, f"{name}: {error:.1e}"


def test_the_final_norm_is_the_targets_own(target):
    states = torch.randn(5, 40)
    expected = target.decoder.norm(states)
    assert torch.equal(load_final_norm(target.name)(states), expected)
    assert float((expected - states).abs().max()) > 0.1


# ---------------------------------------------------------------------- files that are no use


def test_bad_files_are_named_counted_and_left_out(target, documents, tmp_path):
    folder = tmp_path / "peer"
    write_specforge(folder, target, documents)
    rows = folder / "rows_0-5"
    cut = rows / "data_0.ckpt"
    cut.write_bytes(cut.read_bytes()[:500])
    (rows / "data_1.ckpt").write_text("not a checkpoint")
    torch.save({"input_ids": torch.arange(3)}, rows / "data_2.ckpt")
    torch.save({"input_ids": shutil.rmtree}, rows / "data_3.ckpt")  # code is never unpickled
    sample = specforge_sample(target, documents[4])
    torch.save(sample | {"hidden_state": sample["hidden_state"][:, :-1]}, rows / "data_4.ckpt")
    torch.save(sample | {"loss_mask": torch.zeros(20)}, folder / "rows_5-10" / "data_5.ckpt")
    with pytest.raises(ValueError, match="6 of 12 feature files.*max_bad_fraction 0.1"):
        open_folder(folder, target, tmp_path / "cache")
    data = open_folder(folder, target, tmp_path / "cache", max_bad_fraction=0.5)
    assert len(data) == 6 and data.skipped == {"cannot be used": 6}
    reasons = {row.source.rpartition("/")[2]: row.reason for row in data.bad_rows}
    for name, part in {
        "data_0.ckpt": "cannot be read",
        "data_1.ckpt": "cannot be read",
        "data_2.ckpt": "has no",
        "data_3.ckpt": "cannot be read",
        "data_4.ckpt": "[[20, 120], [19, 40]], expected [[20, 120], [20, 40]]",
        "data_5.ckpt": "no supervised token",
    }.items():
        assert part in reasons[name], (name, reasons[name])
    assert "6 of 12 feature files" in data.summary()


def test_files_of_speculators_old_layout_are_told_by_name(target, documents, tmp_path):
    """data_{i}.pt with a list of layers: nothing in it says whether the last one is normed."""
    folder = tmp_path / "peer"
    write_modelopt(folder, target, documents)
    aux, last = states(target, documents[0])
    layers = [*aux.chunk(3, dim=1), last]
    sample = {"input_ids": documents[0].input_ids, "loss_mask": documents[0].loss_mask}
    torch.save(sample | {"hidden_states": layers}, folder / "data_0.pt")
    data = open_folder(folder, target, tmp_path / "cache")
    (bad,) = data.bad_rows
    assert bad.source.endswith("data_0.pt") and len(data) == 12
    assert "speculators' old layout" in bad.reason and "hs_*.safetensors" in bad.reason


def test_states_of_another_request_are_refused(target, documents, tmp_path):
    write_speculators(tmp_path / "peer", target, documents)
    hidden = tmp_path / "peer" / "hidden_states"
    (hidden / "hs_3.safetensors").rename(hidden / "hs_12.safetensors")  # a row too many
    shutil.copy(hidden / "hs_5.safetensors", hidden / "hs_4.safetensors")
    other = load_file(hidden / "hs_6.safetensors")  # of as many tokens, equal up to the last
    other["token_ids"][-1] += 1
    save_file(other, hidden / "hs_6.safetensors")
    shorter = load_file(hidden / "hs_7.safetensors")  # all ids, but states of a shorter prefix
    shorter["hidden_states"] = shorter["hidden_states"][:-2].clone()
    save_file(shorter, hidden / "hs_7.safetensors")
    data = open_folder(hidden, target, tmp_path / "cache", max_bad_fraction=0.5)
    reasons = {row.source.rpartition("/")[2]: row.reason for row in data.bad_rows}
    assert "23 tokens that are not the 20 of row 4" in reasons["hs_4.safetensors"]
    assert "row 12 of a data set of 12 rows" in reasons["hs_12.safetensors"]
    count = len(documents[6].input_ids)
    assert f"{count} tokens that are not the {count} of row 6" in reasons["hs_6.safetensors"]
    assert f"for {len(documents[7].input_ids)} tokens" in reasons["hs_7.safetensors"]
    assert len(data) == 8


def test_states_that_are_not_finite_are_found_before_they_train(target, documents, tmp_path):
    write_specforge(tmp_path / "peer", target, documents)
    path = tmp_path / "peer" / "rows_0-5" / "data_2.ckpt"
    sample = specforge_sample(target, documents[2])
    sample["aux_hidden_state"][0, 5, 0] = float("inf")
    torch.save(sample, path)
    data = open_folder(tmp_path / "peer", target, tmp_path / "cache")
    with pytest.raises(BadFeatures, match="data_2.ckpt: the aux state of token 5"):
        data.features(2).check()
    data.features(3).check()
    torch.save(specforge_sample(target, documents[3]), path)  # changed after it was indexed
    with pytest.raises(BadFeatures, match="data_2.ckpt: 17 tokens, 14 when it was indexed"):
        data.features(2).check()


def test_a_file_cut_off_after_it_was_indexed_is_left_out(target, documents, tmp_path, caplog):
    write_specforge(tmp_path / "peer", target, documents[:3])
    data = open_folder(tmp_path / "peer", target, tmp_path / "cache")
    cut = data.path(1)
    cut.write_bytes(cut.read_bytes()[:300])
    lengths = tuple(data.lengths.tolist())
    schedule = Schedule(lengths=lengths, tokens_per_batch=99, seed=0, epochs=1)
    ((batch,),) = BatchLoader(data, schedule, SETTINGS, rank=0, num_workers=0).steps(0)
    assert len(batch.doc_ids) == 2 and batch.num_rows == 8 + 14
    assert "data_1.ckpt: cannot be read" in caplog.text


def test_a_folder_that_fills_up_keeps_its_index(target, documents, tmp_path, monkeypatch):
    folder, cache = tmp_path / "peer", tmp_path / "cache"
    write_specforge(folder, target, documents[:6])
    half = folder / "rows_5-10" / "data_5.ckpt"
    whole = half.read_bytes()
    half.write_bytes(whole[: len(whole) // 2])  # still being written
    first = open_folder(folder, target, cache, max_bad_fraction=0.5)
    assert len(first) == 5 and "data_5.ckpt" in first.bad_rows[0].source
    half.write_bytes(whole)
    write_specforge(tmp_path / "more", target, documents)
    shutil.copy(tmp_path / "more" / "rows_5-10" / "data_6.ckpt", folder / "rows_5-10")
    opened = []
    real = PeerData._open
    monkeypatch.setattr(
        PeerData, "_open", lambda self, path: opened.append(path.name) or real(self, path)
    )
    second = open_folder(folder, target, cache)
    assert opened == ["data_5.ckpt", "data_6.ckpt"]  # the others are known
    assert second.lengths.tolist() == [8 + 3 * i for i in range(7)]
    assert first.fingerprint != second.fingerprint


def test_folders_without_feature_files_say_what_is_expected(target, tmp_path):
    with pytest.raises(ValueError, match="no such folder"):
        open_folder(tmp_path / "none", target, tmp_path)
    (tmp_path / "peer").mkdir()
    torch.save({"d2t": torch.zeros(2)}, tmp_path / "peer" / "vocab_mapping.pt")
    with pytest.raises(ValueError, match=r"data_\*.ckpt.*hs_\*.safetensors.*ModelOpt"):
        open_folder(tmp_path / "peer", target, tmp_path)


# ---------------------------------------------------------------------- vocabulary maps

# Kept ids 2, 3, 7 of 8: offsets 2, 2, 5 (ttt: target id = draft id + d2t).
D2T, IDS = torch.tensor([2, 2, 5]), torch.tensor([2, 3, 7])
T2D = torch.tensor([0, 0, 1, 1, 0, 0, 0, 1]).bool()


def test_vocabulary_maps_of_each_trainer(tmp_path):
    specforge = tmp_path / "specforge" / "vocab_mapping"
    specforge.mkdir(parents=True)
    torch.save({"d2t": D2T.int(), "t2d": T2D}, specforge / "vocab_mapping.pt")
    speculators = tmp_path / "speculators"
    speculators.mkdir()
    np.save(speculators / "d2t.npy", D2T.numpy())
    np.save(speculators / "t2d.npy", T2D.numpy())
    ids = tmp_path / "ids.pt"
    torch.save({"d2t": IDS, "t2d": T2D}, ids)
    for path in (tmp_path / "specforge", specforge / "vocab_mapping.pt", speculators, ids):
        d2t, t2d = read_vocab_maps(path, vocab_size=10)  # two rows of padding in the target
        assert d2t.dtype == torch.int64 and d2t.tolist() == [2, 2, 5], path
        assert t2d.dtype == torch.bool and t2d.tolist() == [*T2D.tolist(), False, False]
    torch.save({7: 5, 2: 1}, tmp_path / "token_freq.pt")
    counts = read_vocab_maps(tmp_path / "token_freq.pt", vocab_size=8)
    assert counts.tolist() == [0, 0, 1, 0, 0, 0, 0, 5]


def test_maps_that_do_not_fit_are_refused(tmp_path):
    path = tmp_path / "vocab_mapping.pt"
    torch.save({"d2t": D2T, "t2d": T2D}, path)
    with pytest.raises(ValueError, match="keeps token 7.*below 6"):
        read_vocab_maps(path, vocab_size=6)
    torch.save({"d2t": torch.tensor([2, 2, 4]), "t2d": T2D}, path)
    with pytest.raises(ValueError, match="do not describe one vocabulary"):
        read_vocab_maps(path, vocab_size=8)
    torch.save({"t2d": T2D}, path)
    with pytest.raises(ValueError, match="does not hold d2t"):
        read_vocab_maps(path, vocab_size=8)
    torch.save({"d2t": [2, 2, 5], "t2d": T2D}, path)
    with pytest.raises(ValueError, match="d2t and t2d are no tensors"):
        read_vocab_maps(path, vocab_size=8)
    np.save(tmp_path / "d2t.npy", D2T.numpy())
    with pytest.raises(ValueError, match="d2t.npy and t2d.npy go together"):
        read_vocab_maps(tmp_path / "d2t.npy", vocab_size=8)
    for name, content in (("a.pt", b"not torch"), ("token_freq.pt", b""), ("t2d.npy", b"x")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} cannot be read as a vocabulary map") as it:
            read_vocab_maps(tmp_path / name, vocab_size=8)
        assert "weights_only" not in str(it.value) and "\n" not in str(it.value)
    path.write_text("x")
    with pytest.raises(ValueError, match="cannot be read"):
        read_vocab_maps(path, vocab_size=8)
    with pytest.raises(ValueError, match="no vocabulary map"):
        read_vocab_maps(tmp_path / "none", vocab_size=8)


@pytest.mark.parametrize(
    "counts, says",
    [
        ({3: float("nan")}, "holds 3: nan; expected a token id"),
        ({3: float("inf")}, "holds 3: inf"),
        ({"the": 4}, "holds 'the': 4"),
        ({8: 1}, "counts token 8, the target has ids below 8"),
        ({3: [1, 2]}, "expected a token id and how often"),
    ],
)
def test_counts_that_are_none_name_the_file(tmp_path, counts, says):
    torch.save(counts, tmp_path / "token_freq.pt")
    with pytest.raises(ValueError, match="token_freq.pt ") as error:
        read_vocab_maps(tmp_path, vocab_size=8)
    assert says in str(error.value)


def test_training_on_peer_files_with_their_vocabulary(target, documents, tmp_path, capsys):
    """The command on a SpecForge folder: same losses with files mapped and with files unpacked."""
    kept = torch.arange(3, 260, 2)  # 129 of 272
    t2d = torch.zeros(272, dtype=torch.bool)
    t2d[kept] = True
    maps = {"d2t": kept - torch.arange(129), "t2d": t2d}
    rows = []
    for name, writer in (("ckpt", write_specforge), ("gz", write_specforge_gz)):
        writer(tmp_path / name, target, documents)
        torch.save(maps, tmp_path / name / "vocab_mapping.pt")
        argv = ["--target", str(target.name), "--train-features", str(tmp_path / name)]
        argv += ["--vocab-map", str(tmp_path / name), "--cache-dir", str(tmp_path / "cache")]
        argv += ["--output-dir", str(tmp_path / f"out-{name}"), "--tokens-per-batch", "150"]
        argv += ["--ttt-length", "3", "--trim-loss-positions", "--trim-backbone-rows"]
        argv += ["--device", "cpu", "--max-steps", "2", "--num-workers", "1", "--draft-vocab-size"]
        (tmp_path / "empty.yaml").write_text("{}")
        argv += ["129", "--config", str(tmp_path / "empty.yaml")]
        assert train_main(argv) == 0, capsys.readouterr().err
        lines = (tmp_path / f"out-{name}" / "metrics.jsonl").read_text().splitlines()
        rows.append([json.loads(line)["loss"] for line in lines])
    assert rows[0] == rows[1] and len(rows[0]) == 2
    argv[argv.index("129")] = "100"
    assert train_main(argv) == 2
    assert "keeps 129 tokens" in capsys.readouterr().err
