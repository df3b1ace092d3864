"""Targets named by their hub id, from a hub cache made here.

Catches: an embedding that is only found once the whole model has been downloaded; other shards
fetched with it; a fingerprint that changes when the weights arrive, so that features captured in
the first run belong to another target in the second.
"""

import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from tiny import save_tiny_target
from transformers import AutoModelForCausalLM

from specforge_trim.verifier.hf import load_embedding_and_head, target_fingerprint

NAME, COMMIT = "org/tiny", "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def model(tmp_path, monkeypatch):
    """The model and its snapshot in a hub cache that is never left: sharded and untied, of its
    shards only those that hold the two matrices."""
    cache = tmp_path / "hub"
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    saved = save_tiny_target(tmp_path / "target", tied=False)
    model = AutoModelForCausalLM.from_pretrained(saved)
    snapshot = cache / "models--org--tiny" / "snapshots" / COMMIT
    model.save_pretrained(snapshot, max_shard_size="40KB")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text(COMMIT)
    whole = tmp_path / "whole"
    shutil.copytree(snapshot, whole)
    keep = {"config.json", "model.safetensors.index.json"}
    for file in snapshot.iterdir():
        if file.name not in keep and not holds_a_matrix(file):
            file.unlink()
    return model, snapshot, whole


def holds_a_matrix(file: Path) -> bool:
    content = file.read_bytes()
    return b"embed_tokens" in content or b"lm_head" in content


def test_two_matrices_come_without_the_other_shards(model):
    model, snapshot, whole = model
    assert 2 <= len(list(snapshot.glob("*.safetensors"))) < len(list(whole.glob("*.safetensors")))
    head = load_embedding_and_head(NAME)
    assert torch.equal(head.embed, model.model.embed_tokens.weight)
    assert torch.equal(head.head, model.lm_head.weight) and not head.tied


def test_a_shard_that_cannot_be_had_is_named(model):
    _, snapshot, _ = model
    for file in snapshot.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(ValueError, match="embed_tokens.weight"):
        load_embedding_and_head(NAME)


def test_the_fingerprint_is_the_same_before_and_after_the_weights_arrive(model):
    _, snapshot, whole = model
    before = target_fingerprint(NAME)
    for file in whole.glob("*.safetensors"):
        shutil.copy(file, snapshot / file.name)
    assert target_fingerprint(NAME) == before
    moved = snapshot.with_name(COMMIT[::-1])
    snapshot.rename(moved)
    (snapshot.parents[1] / "refs" / "main").write_text(moved.name)
    assert target_fingerprint(NAME) != before
