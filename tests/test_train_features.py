"""Where a training run's features come from, and what becomes of damaged ones.

Catches: an online run that differs from one on stored features; one bad file that ends a run, or
trains on in silence; a batch made of placeholders of another shape or dtype; a run that goes on
when most of its data is gone; files left in shared memory.
"""

import functools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from tiny_step import Doc

from specforge_trim.cli.main import main, train_main
from specforge_trim.data import store as stores
from specforge_trim.data.document_features import BadFeatures
from specforge_trim.drafts.eagle3 import features as feature_sources
from specforge_trim.drafts.eagle3.batch import PlanSettings
from specforge_trim.drafts.eagle3.settings import ConfigError, load_config
from specforge_trim.ranks.world import World
from specforge_trim.train import run as pipeline
from specforge_trim.train.loader import BatchLoader
from specforge_trim.train.loop import train
from specforge_trim.train.sampler import Schedule
from specforge_trim.verifier.capture import capture
from specforge_trim.verifier.hf import HFTarget

TRIM = ["--trim-loss-positions", "--trim-backbone-rows"]
ALONE = World(rank=0, size=1, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("features")
    tiny.save_tiny_target(folder / "target")
    tiny.write_conversations(folder / "train.jsonl", 8)
    recipe = f"""
model: {{target: {folder}/target, draft_vocab_size: 64, target_dtype: float32}}
data:
  train_data: [{folder}/train.jsonl]
  cache_dir: {folder}/cache
  feature_dtype: bfloat16
  tokens_per_batch: 700
loss: {{ttt_length: 3}}
train: {{learning_rate: 1.0e-3, device: cpu}}
"""
    (folder / "recipe.yaml").write_text(recipe)
    return folder


def argv(place, out, *flags):
    return ["--config", str(place / "recipe.yaml"), "--output-dir", str(out), *TRIM, *flags]


def metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def test_online_training_equals_training_from_the_store(place, tmp_path, capsys):
    cache = ["--cache-dir", str(tmp_path / "cache"), "--num-workers", "1"]
    assert train_main(argv(place, tmp_path / "online", "--online", *cache)) == 0
    err = capsys.readouterr().err
    assert err.count("num_workers has no effect") == 1
    (sample,) = [line for line in err.splitlines() if "a sample, text with loss" in line]
    assert "between [[ and ]]" in sample and "train.jsonl:1: " in sample
    assert len(re.findall(r"\[\[[^\[\]]+<\|im_end\|>\]\]", sample)) == 1
    assert not (tmp_path / "cache" / "features").exists()
    assert train_main(argv(place, tmp_path / "offline", *cache)) == 0
    assert "num_workers has no effect" not in capsys.readouterr().err
    assert list((tmp_path / "cache" / "features").iterdir())
    online, offline = metrics(tmp_path / "online"), metrics(tmp_path / "offline")
    assert len(online) == len(offline) >= 2
    for one, other in zip(online, offline, strict=True):
        for key in ("loss", "acceptance_length", "grad_norm", "loss/2", "accuracy/1"):
            assert one[key] == pytest.approx(other[key], rel=1e-6), key


def test_online_refuses_a_target_split_over_ranks(place, tmp_path):
    flags = argv(place, tmp_path, "--online", "--target-tensor-parallel")
    with pytest.raises(ConfigError, match="online.*target_tensor_parallel"):
        load_config(flags, prog="t", description="d")


# ---------------------------------------------------------------------- damaged features


def spoil(path, key, value):
    """Put a value that is not finite into a shard whose checksum is right all the same."""
    tensors = load_file(path)
    tensors[key][1, 0] = value
    with stores.safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()[stores.HEADER])
    header = json.dumps(header | {"crc32": stores._crc32(tensors)})
    save_file(tensors, path, metadata={stores.HEADER: header})


@dataclass
class Run:
    config: object
    target: object
    data: object
    store: object
    model: object
    teacher: object

    def train(self):
        return train(
            self.config,
            model=self.model,
            teacher=self.teacher,
            documents=pipeline.TrainingDocuments(self.data, self.store),
            lengths=[int(n) for n in self.data.lengths],
            world=ALONE,
            identity={},
            provenance={},
        )


@pytest.fixture
def damaged(place, tmp_path, monkeypatch):
    """A run whose shards 0 to 2 (a document each, of 8) go bad just before training."""
    monkeypatch.setattr(feature_sources, "capture", functools.partial(capture, shard_tokens=1))

    def make(*flags):
        config = load_config(
            argv(place, tmp_path / "out", "--cache-dir", str(tmp_path / "cache"), *flags),
            prog="t",
            description="d",
        )
        target = pipeline.open_target(config, ALONE)
        data = pipeline.prepare_data(config, target, ALONE)
        store = pipeline.make_features(config, target, data, ALONE)
        assert store.num_shards == len(data) == 8
        spoil(store.shard_path(0), "aux", float("nan"))
        spoil(store.shard_path(1), "last", float("inf"))
        cut = store.shard_path(2)
        cut.write_bytes(cut.read_bytes()[:-100])
        draft = pipeline.build_draft(config, target, data, device=ALONE.device)
        return Run(config, target, data, store, *draft)

    return make


def left_in_shared_memory():
    """torch's files of this process and of ended ones; other tests may be at work beside."""
    names = [name for name in os.listdir("/dev/shm") if name.startswith("torch_")]
    pids = {name: name.split("_")[1] for name in names}
    ended = {name for name, pid in pids.items() if not Path(f"/proc/{pid}").exists()}
    return ended | {name for name, pid in pids.items() if pid == str(os.getpid())}


@pytest.mark.parametrize("workers", ["0", "1"])
def test_bad_files_are_left_out_named_and_counted(damaged, caplog, tmp_path, workers):
    run = damaged("--max-bad-fraction", "0.5", "--num-workers", workers)
    before = left_in_shared_memory()
    summary = run.train()
    row = metrics(tmp_path / "out")[-1]
    assert row["skipped_documents"] == 3 and summary.skipped_steps == 0
    assert row["step"] == summary.steps and row["loss"] > 0
    lines = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert len(lines) == 3
    for shard, reason in enumerate(("aux state of token 1", "last hidden state", "not whole")):
        (line,) = [text for text in lines if f"train.jsonl:{shard + 1}:" in text]
        assert f"shard-0000{shard}.safetensors" in line and reason in line
    assert left_in_shared_memory() <= before


def test_too_many_bad_files_stop_the_run(damaged):
    run = damaged("--max-bad-fraction", "0.3", "--num-workers", "0")
    with pytest.raises(ValueError, match="3 of 8 documents.*max_bad_fraction 0.3"):
        run.train()


def test_verify_names_damage_and_makes_room_for_a_new_capture(damaged, capsys):
    run = damaged()
    folder = str(run.store.folder)
    assert main(["verify", folder]) == 2
    captured = capsys.readouterr()
    for shard, reason in enumerate(("aux state of token 1", "last hidden state", "not whole")):
        (line,) = [t for t in captured.out.splitlines() if f"shard-0000{shard}" in t]
        assert reason in line and f"documents {run.data[shard].doc_id[:12]}" in line
    assert "5 of 8 shards are whole" in captured.out and "3 shards are damaged" in captured.err
    assert main(["verify", folder, "--remove"]) == 2
    assert run.store.missing_shards() == [0, 1, 2]
    pipeline.make_features(run.config, run.target, run.data, ALONE)
    assert main(["verify", folder]) == 0
    assert main(["verify", str(run.store.folder.parent)]) == 2
    assert "no manifest.json" in capsys.readouterr().err


def test_verify_writes_its_last_line_last_also_into_a_file(damaged, tmp_path):
    """Output and errors in one file, where output is not written line by line."""
    with open(tmp_path / "log", "w+") as log:
        code = "import sys; from specforge_trim.cli.main import main; sys.exit(main(sys.argv[1:]))"
        command = [sys.executable, "-c", code, "verify", damaged().store.folder]
        held_back = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
        done = subprocess.run(
            command, stdout=log, stderr=subprocess.STDOUT, env=held_back, check=False
        )
    lines = (tmp_path / "log").read_text().splitlines()
    assert done.returncode == 2 and "3 shards are damaged" in lines[-1]
    assert "5 of 8 shards are whole" in lines[-2]


def test_one_of_four_fails_with_four_layers_in_bf16(place, tmp_path):
    """What is left is a smaller batch of the same layers and dtype, not a placeholder."""
    target = HFTarget.load(place / "target", dtype=torch.bfloat16, aux_layers=(1, 3, 5, 7))
    documents = [
        Doc(*tiny.random_ids_and_mask(20 + i, seed=i), f"f.jsonl:{i + 1}", f"id{i}")
        for i in range(4)
    ]
    capture(documents, target, tmp_path, shard_tokens=1, progress=False)
    store = stores.FeatureStore.open(tmp_path)
    store.shard_path(2).unlink()

    class Documents:
        tokens = staticmethod(documents.__getitem__)
        features = staticmethod(store.document)

    schedule = Schedule(lengths=(20, 21, 22, 23), tokens_per_batch=100, seed=0, epochs=1)
    loader = BatchLoader(Documents(), schedule, PlanSettings(ttt_length=2), rank=0, num_workers=0)
    ((batch,),) = loader.steps(0)
    assert loader.take_skipped() == 1 and loader.take_skipped() == 0
    assert sorted(batch.doc_ids) == ["id0", "id1", "id3"]
    aux = batch.aux(0, 64)
    assert aux.shape == (64, 160) and aux.dtype == torch.bfloat16 == batch.teacher_hidden.dtype
    assert bool(torch.isfinite(aux).all())


def test_a_rank_whose_documents_are_all_bad_still_takes_its_steps(place, tmp_path):
    class Documents:
        def tokens(self, number):
            return Doc(*tiny.random_ids_and_mask(9), "f.jsonl:1", "id")

        def features(self, number):
            raise BadFeatures("gone")

    schedule = Schedule(lengths=(9, 9), tokens_per_batch=9, seed=0, epochs=1)
    loader = BatchLoader(Documents(), schedule, PlanSettings(ttt_length=2), rank=0, num_workers=0)
    assert list(loader.steps(0)) == [[], []]
    assert loader.take_skipped() == 2


def test_a_cache_folder_that_cannot_be_written_is_an_error(place, capsys):
    # /proc refuses new folders even to root.
    code = main(["capture", "--config", str(place / "recipe.yaml"), "--cache-dir", "/proc/none"])
    assert code == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: cache_dir = '/proc/none' cannot be used (No such file"), line
    assert line.endswith("choose another --cache-dir")
    assert not Path("/proc/none").exists()
