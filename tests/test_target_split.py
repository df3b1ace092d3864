"""Targets spread over devices or split over ranks give the states of the whole target.

Catches: a part of a state instead of the sum over ranks; every rank writing the store; ranks that
wait for each other because they run different documents.
"""

import os
import socket

import pytest
import torch
import torch.multiprocessing as mp
from tiny import random_ids_and_mask, save_tiny_target
from tiny_step import Doc

from specforge_trim.data.store import FeatureStore
from specforge_trim.ranks import world as distributed
from specforge_trim.verifier.capture import capture
from specforge_trim.verifier.hf import HFTarget


def documents():
    return [Doc(*random_ids_and_mask(9 + 5 * i, seed=i), f"d:{i}", f"id{i}") for i in range(4)]


def test_a_device_map_gives_the_same_states(tmp_path):
    """On a CPU the map has one device: what is shown is that hooks and inputs work under it."""
    pytest.importorskip("accelerate")
    folder = save_tiny_target(tmp_path / "target")
    whole = HFTarget.load(folder, dtype=torch.float32)
    spread = HFTarget.load(folder, dtype=torch.float32, device_map="auto")
    for document in documents():
        for one, other in zip(
            whole.features(document.input_ids), spread.features(document.input_ids), strict=True
        ):
            assert torch.equal(one, other)


def test_a_model_without_a_plan_cannot_be_split(tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=50, n_embd=16, n_layer=8, n_head=2, n_positions=32)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no tensor-parallel plan.*gpt2.*device-map"):
        HFTarget.load(tmp_path, tensor_parallel=True)


def rank_main(rank, port, place):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    world = distributed.start(device="cpu", timeout_minutes=1)
    target = HFTarget.load(place / "target", dtype=torch.float32, tensor_parallel=True)
    q = target.decoder.layers[0].self_attn.q_proj.weight
    held = q.to_local() if hasattr(q, "to_local") else q
    assert held.shape[0] == 32, held.shape  # half of the 4 heads of 16
    capture(documents(), target, place / "split", shard_tokens=20, write=world.is_main,
            progress=False)  # fmt: skip
    distributed.stop(world)


def test_a_target_split_over_two_ranks_captures_the_same_states(tmp_path):
    folder = save_tiny_target(tmp_path / "target", tied=False)
    whole = HFTarget.load(folder, dtype=torch.float32)
    capture(documents(), whole, tmp_path / "whole", shard_tokens=20, progress=False)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    mp.spawn(rank_main, args=(port, tmp_path), nprocs=2)
    one, two = (FeatureStore.open(tmp_path / name) for name in ("whole", "split"))
    assert one.spec == two.spec and two.is_complete
    for i in range(4):
        for found, expected in (
            (two.document(i).aux(), one.document(i).aux()),
            (two.document(i).last(), one.document(i).last()),
        ):
            # fp32, sums over two halves in another order, eight layers.
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
