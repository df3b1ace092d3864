"""Two processes over gloo: agreement, gradient sums, failures, checkpoints.

Catches: a rank without gradients that is not counted, partial gradients averaged instead of
summed, a failure that leaves the other rank waiting or makes both speak, a checkpoint of two ranks
that another number of ranks cannot read.
"""

import os
import shutil
import socket

import torch
import torch.multiprocessing as mp
from torch import nn
from ttt_case import make_case

from specforge_trim.drafts.eagle3.model import row_only_parameters
from specforge_trim.ranks import world as distributed
from specforge_trim.ranks.gradients import Replicated
from specforge_trim.ranks.world import PeerFailed, World
from specforge_trim.train import checkpoint as ck
from specforge_trim.train.optimizer import build_optimizer


def small_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False))


def check_agreement(world):
    votes = torch.tensor([1, world.rank, 5 - world.rank], dtype=torch.int32)
    assert world.agree_min(votes).tolist() == [1, 0, 4]
    assert world.sum(torch.tensor([1.0, world.rank])).tolist() == [2.0, 1.0]


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def reduced(model, world, own, *, flat=False):
    """Gradients after the reduction; own: those of this rank, None = it has none at all.

    flat: in one sum, as dense language models are trained; otherwise in two buckets.
    """
    model.zero_grad(set_to_none=True)
    for p, grad in zip(trainable(model), own or [], strict=own is not None):
        p.grad = grad.clone()
    if flat:
        distributed.sum_gradients(model.parameters(), world)
        return [p.grad for p in trainable(model)]
    reducer = Replicated(model, world, early=row_only_parameters(model))
    reducer.begin()
    reducer.rows_done()
    reducer.finish()
    return [p.grad for p in trainable(model)]


def check_gradients(world):
    model = make_case([[1, 1, 0]]).model
    gen = torch.Generator().manual_seed(3)
    own = [
        [torch.randn(p.shape, generator=gen, dtype=p.dtype) for p in trainable(model)]
        for _ in range(world.size)
    ]
    for flat in (False, True):
        # Rank 1 has no supervised row and so no gradient at all.
        found = reduced(model, world, own[0] if world.rank == 0 else None, flat=flat)
        assert len(found) > 10
        assert all(torch.equal(g, w) for g, w in zip(found, own[0], strict=True))
        found = reduced(model, world, own[world.rank], flat=flat)
        for g, a, b in zip(found, *own, strict=True):
            assert torch.allclose(g, a + b, rtol=1e-14)


def check_failures(world):
    order = []
    assert world.first(lambda: order.append(world.rank) or "done") == "done"
    assert order == [world.rank]
    for failing, expected in ((0, (OSError, PeerFailed)), (1, (PeerFailed, OSError))):
        try:
            world.together(lambda failing=failing: fail() if world.rank == failing else 1)
        except (OSError, PeerFailed) as error:
            assert type(error) is expected[world.rank], error
        else:
            raise AssertionError("went on")
    try:  # both fail: only the lower one says why
        world.together(fail)
    except (OSError, PeerFailed) as error:
        assert type(error) is (OSError, PeerFailed)[world.rank]
    # Rank 0 only heard of a failure elsewhere; the rank that can say why is still the one to.
    try:
        world.together(lambda: heard() if world.rank == 0 else fail())
    except (OSError, PeerFailed) as error:
        assert type(error) is (PeerFailed, OSError)[world.rank]
    try:
        world.together(heard)
    except PeerFailed as error:
        assert str(error) == ("elsewhere" if world.rank == 0 else "rank 0 could not go on")
    assert world.voted(lambda: "done", lambda: 15 * world.rank) == ("done", 15)
    assert world.voted(lambda: "done", lambda: 0) == ("done", 0)
    assert world.share(("it", world.rank)) == ("it", 0)
    assert world.gather({"rank": world.rank}) == [{"rank": 0}, {"rank": 1}]
    world.barrier()  # collectives still match


def heard():
    raise PeerFailed("elsewhere")


def fail():
    raise OSError("disk")


def save(world, folder, step, model, optimizer):
    ck.save(
        folder,
        step=step,
        model=model,
        optimizer=optimizer,
        world=world,
        identity={},
        provenance={},
        progress={"skipped_steps": 0},
        plan={},
        keep=5,
    )


def check_checkpoint(world, folder):
    model = small_model()
    optimizer = build_optimizer(model, weight_decay=0.0)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.param_groups[0]["lr"] = 0.1
    optimizer.step()
    torch.manual_seed(100 + world.rank)
    save(world, folder, 1, model, optimizer)
    drawn = torch.rand(2)
    other = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizer = build_optimizer(other, weight_decay=0.0)
    ck.restore(ck.newest(folder), model=other, optimizer=optimizer, world=world)
    assert torch.equal(torch.rand(2), drawn)  # each rank its own random state
    assert torch.equal(other[0].weight, model[0].weight)
    check_damage(world, folder, model, optimizer)


def check_damage(world, folder, model, optimizer):
    """Only one rank reads the damaged file; both fall back to the same checkpoint."""
    for step in (2, 3):
        save(world, folder, step, model, optimizer)
    for n, name in enumerate((".metadata", "__0_0.distcp", "__1_0.distcp")):
        file = folder / "step-00000003" / name
        assert sorted(p.name for p in file.parent.iterdir()).index(name) % 2 == n % 2
        whole = file.read_bytes()
        world.barrier()
        if world.is_main:
            file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        world.barrier()
        assert ck.newest(folder, world).step == 2, name
        world.barrier()
        if world.is_main:
            file.write_bytes(whole)
        world.barrier()
    assert ck.newest(folder, world).step == 3
    world.barrier()
    if world.is_main:
        for step in (2, 3):
            shutil.rmtree(folder / f"step-{step:08d}")


def rank_main(rank, port, folder):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    world = distributed.start(device="cpu", timeout_minutes=1)
    assert (world.rank, world.size, world.is_main) == (rank, 2, rank == 0)
    check_agreement(world)
    check_gradients(world)
    check_failures(world)
    check_checkpoint(world, folder)
    distributed.stop(world)


def test_train_ranks_agree_sum_fail_and_save_together(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    mp.spawn(rank_main, args=(port, tmp_path / "ck"), nprocs=2)
    # One process reads what two wrote.
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False))
    optimizer = build_optimizer(model, weight_decay=0.0)
    alone = World(rank=0, size=1, device=torch.device("cpu"))
    found = ck.newest(tmp_path / "ck")
    assert found.meta["world_size"] == 2
    assert ck.restore(found, model=model, optimizer=optimizer, world=alone) == 1
    assert float(optimizer.state[model[0].weight]["step"]) == 1.0


def test_train_single_process_needs_no_group(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    world = distributed.start(device="cpu")
    assert (world.rank, world.size, world.group) == (0, 1, None)
    world.barrier()
    assert world.first(lambda: 3) == 3
    for flat in (False, True):
        found = reduced(make_case([[1, 1, 0]]).model, world, None, flat=flat)
        assert found and all(g is not None and not g.any() for g in found)
    distributed.stop(world)
