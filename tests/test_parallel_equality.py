"""Loss and every gradient of many ranks equal one rank's: 2 and 4 gloo ranks, fp64.

Catches: keys or gradients of a neighbour's tokens lost at a rank boundary, gradients averaged
instead of summed, sums that reach one rank only, a rank without rows or tokens that skips a
collective, a causal block cut wrong at a window's edge, ids or teachers read past the halo,
context gradients reduced before the last query has added its own.

One world per rank count runs all cases; rank 0 compares with the whole batch computed alone.
"""

import dataclasses
import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import own_part, run_world, some_documents
from test_stages_classic import run_classic
from ttt_case import make_batch, make_case, make_pack

from specforge_trim.attention.context_kv import segment_parts
from specforge_trim.drafts.eagle3.model import row_only_parameters
from specforge_trim.drafts.eagle3.step import StepSettings, ttt_step
from specforge_trim.loss.teacher import Teacher
from specforge_trim.plan.shard import SequenceSplit, bytes_sent
from specforge_trim.ranks.gradients import FullySharded, Replicated
from specforge_trim.ranks.layout import make_layout

LENGTHS = (19, 7, 11)  # 37 tokens: divisible by neither 2 nor 4
STEPS = 4


def spread(*positions):
    """Row masks of the three documents with ones at stream positions."""
    total, masks = 0, []
    for length in LENGTHS:
        masks.append([int(total + t in positions) for t in range(length)])
        total += length
    return masks


MASKS = {
    "all ones": spread(*range(37)),
    # Cuts: trimmed 17 of 2 ranks, 9, 18 and 27 of 4; with all rows 19, and 10, 20, 30.
    "rank boundaries": spread(8, 9, 10, 11, 16, 17, 18, 19, 20, 21, 26, 27, 28, 29, 30, 31, 32),
    "last rank": spread(31, 32, 33, 34, 35),
    "one point": spread(8),  # rows 5 to 8 of tokens 0 to 8: the last of 4 ranks has no token
    "first point": spread(0),  # rank 0 alone has a token
    "none": spread(),
}


def settings(backend="sdpa", dtype=torch.float64):
    return StepSettings(backend=backend, compute_dtype=dtype, context_chunk=6)


def new_case(mask, **changes):
    sizes = dict(heads=8, kv_heads=4, head_dim=4, width=16, steps=STEPS, seed=5)
    return make_case(MASKS[mask], **sizes | changes)


def same_everywhere(world, grads):
    """The gradients are this rank's and every other rank's, to the last bit."""
    flat = torch.cat([g.flatten() for g in grads.values()])
    least, most = flat.clone(), flat.clone()
    dist.all_reduce(least, op=dist.ReduceOp.MIN)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    assert torch.equal(least, most), f"rank {world.rank}: ranks hold different gradients"


def gradients(model):
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


def one_rank(case, dense):
    """Loss sums [K] and gradients of the whole batch."""
    case.model.zero_grad(set_to_none=True)
    result = ttt_step(
        case.model,
        make_batch(case, make_pack(case, dense=dense), chunk_rows=5),
        teacher=case.teacher,
        denominators=torch.full((STEPS,), 37.0),
        settings=settings(),
    )
    return torch.stack(dataclasses.astuple(result)[:5]), gradients(case.model)


def many_ranks(world, layout, case, dense, *, rows="dealt", backend="sdpa", reducer=Replicated):
    """The same, summed over ranks; data ranks take every data_size-th document."""
    case.model.zero_grad(set_to_none=True)
    reducer = reducer(case.model, world)
    own = some_documents(case, layout.data_rank, layout.data_size)
    batch = None
    if own.docs and layout.sequence is None:
        batch = make_batch(own, make_pack(own, dense=dense), chunk_rows=5)
    elif own.docs:
        split = SequenceSplit(
            rank=layout.sequence_rank,
            size=layout.sequence_size,
            rows=rows,
            gathered=not layout.splits_context,
            ulysses=1 if layout.ulysses is None else layout.ulysses.size,
        )
        pack, dims = make_pack(own, dense=dense), case.model.config.dims
        batch = own_part(own, pack, split, chunk_rows=5, dims=dims)
    reducer.begin()
    for group in (layout.sequence, layout.ulysses, layout.ring):
        if group is not None:
            group.sent.clear()
    sums = torch.zeros(5, STEPS, dtype=torch.float64)
    if batch is None:
        reducer.rows_done()
    else:
        result = ttt_step(
            case.model,
            batch,
            teacher=case.teacher,
            denominators=torch.full((STEPS,), 37.0),
            settings=settings(backend),
            layout=layout,
            after_rows=reducer.rows_done,
        )
        sums = torch.stack(dataclasses.astuple(result)[:5])
    reducer.finish()
    if batch is not None and layout.sequence is not None:
        check_bytes(layout, split, batch, case.model.config)
    found = {}
    for name, grad in gradients(case.model).items():
        found[name] = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
    same_everywhere(world, found)
    return world.sum(sums), found


def check_bytes(layout, split, batch, config):
    """What the plan says is sent equals what was counted where it was sent."""
    if config.num_hidden_layers > 1:
        return
    groups = (layout.sequence, layout.ulysses, layout.ring)
    counted = sum(group.bytes_sent for group in groups if group is not None)
    planned = 0 if batch.shard.is_empty else bytes_sent(
        batch.shard, split, batch.chunks, config.dims, itemsize=8, grad_itemsize=8
    )  # fmt: skip
    assert counted == planned, (counted, planned)


def compare(name, found, expected, *, has_loss=True):
    assert bool(expected[0][0].any()) == has_loss, f"{name}: the losses are {expected[0][0]}"
    assert torch.equal(found[0][1:3].round(), expected[0][1:3].round()), name
    pairs = {"sums": (found[0], expected[0])}
    pairs |= {n: (found[1][n], g) for n, g in expected[1].items()}
    for what, (a, b) in pairs.items():
        scale = max(1.0, float(b.abs().max()))
        error = float((a - b).abs().max()) / scale
        assert error < 1e-10, f"{name}: {what} is off by {error:.1e}"
    assert expected[0][0].any() == any(g.any() for g in expected[1].values()), name


def kinds(world):
    """name -> (layout, how rows are dealt, backend) of the sequence parallel cases."""
    size = world.size
    gathered = make_layout(world, ulysses=size)
    found = {
        "gathered, dealt": (gathered, "dealt", "sdpa"),
        "gathered, owner": (gathered, "owner", "sdpa"),
        "ulysses": (make_layout(world, ulysses=size, splits_context=True), "dealt", "sdpa"),
        "ring": (make_layout(world, ring=size, splits_context=True), "dealt", "sdpa"),
        "ring, owner": (make_layout(world, ring=size, splits_context=True), "owner", "sdpa"),
        "data parallel": (make_layout(world), "dealt", "sdpa"),
    }
    if size == 2:
        found["gathered, reference"] = (gathered, "dealt", "reference")
    if size == 4:
        both = make_layout(world, ulysses=2, ring=2, splits_context=True)
        found["ulysses 2 x ring 2"] = (both, "dealt", "sdpa")
        found["data 2 x gathered 2"] = (make_layout(world, ring=2), "dealt", "sdpa")
        ring = make_layout(world, ring=2, splits_context=True)
        found["data 2 x ring 2"] = (ring, "dealt", "sdpa")
    return found


def equality_main(world, whole):
    layouts = kinds(world)
    for mask in MASKS:
        for dense in (False, True):
            if dense and not whole and mask not in ("rank boundaries", "none"):
                continue
            case = new_case(mask)
            expected = one_rank(case, dense) if world.is_main else None
            for name, (layout, rows, backend) in layouts.items():
                found = many_ranks(world, layout, case, dense, rows=rows, backend=backend)
                if world.is_main:
                    compare(
                        f"{name}, {mask}, dense {dense}", found, expected, has_loss=mask != "none"
                    )
    deeper_main(world, layouts["gathered, dealt"][0])
    fsdp_main(world, whole)
    positions_main(world)
    mask_main(world, layouts)
    layers_main(world, layouts)
    classic_main(world)
    if world.size == 4:
        accumulation_main(world)


def deeper_main(world, layout):
    """Drafts of two layers, EAGLE-3.1 too: a lower layer's keys have queries on every rank."""
    for changes in (dict(layers=2), dict(eagle31=True)):
        case = new_case("rank boundaries", **changes)
        expected = one_rank(case, False) if world.is_main else None
        found = many_ranks(world, layout, case, False)
        if world.is_main:
            compare(f"gathered {changes}", found, expected)


def fsdp_main(world, whole):
    layouts = {"fsdp": make_layout(world)}
    layouts["fsdp x gathered"] = make_layout(world, ring=2)
    layouts["fsdp x ring"] = make_layout(world, ring=2, splits_context=True)
    short = (("rank boundaries", False), ("one point", False), ("all ones", True))
    for name, layout in layouts.items():
        for mask, dense in itertools.product(MASKS, (False, True)) if whole else short:
            expected = one_rank(new_case(mask), dense)
            found = many_ranks(world, layout, new_case(mask), dense, reducer=FullySharded)
            if world.is_main:
                compare(f"{name}, {mask}, dense {dense}", found, expected, has_loss=mask != "none")


def positions_main(world):
    """Every home covers positions 0..L-1 once and in order, over all ranks together."""
    case = new_case("all ones")
    pack = make_pack(case)
    for ulysses in {1, 2, world.size}:
        split = SequenceSplit(world.rank, world.size, gathered=False, ulysses=ulysses)
        batch = own_part(case, pack, split)
        own = torch.zeros(37, dtype=torch.int64)
        own[slice(*batch.shard.tokens)] = 1
        # The last position has no teacher, so no row attends to it.
        assert world.sum(own).tolist() == [1] * 36 + [0]
        starts = torch.zeros(world.size, dtype=torch.int64)
        starts[world.rank] = batch.shard.tokens[0]
        assert world.sum(starts).tolist() == [36 // world.size * r for r in range(world.size)]


def mask_main(world, layouts):
    """With the mask off, rows see later keys: the comparison of this file must see that.

    Runs lose their causal mask, groups their own; the shapes and counts stay as they were.
    """
    for name in ("gathered, dealt", "ring", "ulysses"):
        layout = layouts[name][0]
        case = new_case("rank boundaries")
        expected = one_rank(case, False)
        with mock.patch("specforge_trim.attention.context_kv.segment_parts", unmasked_parts):
            found = many_ranks(world, layout, case, False)
        with pytest.raises(AssertionError, match=name):
            compare(name, found, expected)


def unmasked_parts(segment, **options):
    for part in segment_parts(segment, **options):
        mask = None if part.mask is None else torch.ones_like(part.mask)
        yield dataclasses.replace(part, causal=False, mask=mask)


def layers_main(world, layouts):
    """Split homes are for one layer, and say so before anything is sent."""
    case = new_case("rank boundaries", layers=2)
    with pytest.raises(ValueError, match="one layer.*has 2.*gathered"):
        many_ranks(world, layouts["ring"][0], case, False)


def classic_main(world):
    """The opponent of the memory benchmark: a classic unroll over ring attention, 36 tokens."""
    case = make_case([[1] * 17, [0] * 8 + [1] * 11], steps=STEPS, seed=4)
    expected = run_classic(case, torch.float64)
    for name, grad in run_classic(case, torch.float64, rank=world.rank, size=world.size).items():
        error = float((world.sum(grad) - expected[name]).abs().max())
        assert error < 1e-10 * float(expected[name].abs().max()), f"{name}: {error:.1e}"


def accumulation_main(world):
    """fp32: one rank that accumulates four micro-batches equals four ranks with one each."""
    masks = [[0] * 5 + [1] * 6, [1] * 9, [0] * 12, [0] * 3 + [1] * 4]
    case = make_case(masks, steps=STEPS, seed=9)
    case.model.float()
    teacher = Teacher(case.head.float(), case.teacher.draft_to_target, case.teacher.t2d)

    def step(part, after_rows=None):
        own = some_documents(case, part, 4)
        ttt_step(
            case.model,
            make_batch(own, make_pack(own), dtype=torch.float32),
            teacher=teacher,
            denominators=torch.full((STEPS,), float(sum(map(len, masks)))),
            settings=settings(dtype=torch.float32),
            after_rows=after_rows,
        )

    for part in range(4):
        step(part)
    alone = gradients(case.model)
    case.model.zero_grad(set_to_none=True)
    reducer = Replicated(case.model, world, early=row_only_parameters(case.model))
    reducer.begin()
    sent = reducer._group
    step(world.rank, reducer.rows_done)
    reducer.finish()
    numbers = sum(p.numel() for p in case.model.parameters() if p.requires_grad)
    # Each gradient once per step, in two buckets: 2 (P-1)/P of its bytes.
    assert abs(sent.bytes_sent - 2 * 3 * numbers * 4 // 4) <= 2
    for name, grad in gradients(case.model).items():
        error = float((grad - alone[name]).abs().max() / alone[name].abs().max().clamp(min=1e-3))
        assert error < 1e-6, f"{name}: {error:.1e}"


@pytest.mark.parametrize("whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", [2, 4])
def test_parallel_every_layout_equals_one_rank(size, whole, tmp_path):
    """Not whole: dense packs on two of the masks only."""
    run_world(size, equality_main, tmp_path, whole)
