"""A training step never asks the device a question.

Catches: `.item()`, boolean indexing, `nonzero` and the like inside the step, each of which makes a
GPU wait for the CPU. They are trapped as operators, so a CPU shows them too; the plan's own
integers live on the CPU and are read through `tolist`, which no operator carries out.

The same step with its weights on the meta device, which holds no values, so that no question to
it has an answer: catches copies that block, and tensors left on the CPU.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from ttt_case import make_batch, make_case, make_pack

from specforge_trim.drafts.eagle3.step import StepSettings, ttt_step
from specforge_trim.loss import linear_loss

ASKING = {
    "aten::_local_scalar_dense",
    "aten::is_nonzero",
    "aten::item",
    "aten::equal",
    "aten::nonzero",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::unique_consecutive",
    "aten::bincount",
}


class Trap(TorchDispatchMode):
    """Raises at an operator whose result's shape or value the host must wait for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split(".")[0]
        if name in ASKING:
            raise AssertionError(f"the step asks the device: {name}")
        if name in ("aten::index", "aten::index_put_", "aten::index_put"):
            masks = [i for i in args[1] if i is not None and i.dtype in (torch.bool, torch.uint8)]
            if masks:
                raise AssertionError(f"the step indexes by a mask: {name}")
        return func(*args, **(kwargs or {}))


class Elsewhere(TorchDispatchMode):
    """Raises where the meta device would not be let alone."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, name = kwargs or {}, func.name().split(".")[0]
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if name in ("aten::_to_copy", "aten::copy_"):
            # copy_(to, from, non_blocking); _to_copy(from, device=)
            ends = [str(t.device) for t in tensors] + [str(kwargs.get("device") or "")]
            moves = any("meta" in e for e in ends) and any("cpu" in e for e in ends)
            waits = not (kwargs.get("non_blocking") or args[2:3] == (True,))
            assert not (moves and waits), f"a copy that blocks: {name} of {tensors[-1].shape}"
        else:
            # Any device takes a number from the CPU.
            devices = {t.device.type for t in tensors if t.dim()}
            assert len(devices) < 2, f"{name}: tensors on {sorted(devices)}"
        return func(*args, **kwargs)


def move_fields(x, device):
    """Every tensor of a frozen object that has been set up on the CPU."""
    for name, value in vars(x).items():
        if isinstance(value, torch.Tensor):
            object.__setattr__(x, name, value.to(device))


@pytest.mark.parametrize(
    "question",
    [
        lambda x: x.sum().item(),
        lambda x: float(x.sum()),
        lambda x: bool(x.sum() > 0),
        lambda x: x[x > 0],
        lambda x: (x > 0).nonzero(),
    ],
)
def test_the_trap_catches(question):
    with pytest.raises(AssertionError, match="the step"), Trap():
        question(torch.randn(4))


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("dense", [False, True], ids=["trimmed", "dense"])
def test_no_question_in_a_step(dense, layers, backend):
    masks = [[0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0], [0] * 4, [1, 0, 0, 0, 0, 1, 1, 0]]
    case = make_case(masks, layers=layers, eagle31=True)
    batch = make_batch(case, make_pack(case, dense=dense), chunk_rows=5)
    assert batch.chunks
    settings = StepSettings(backend=backend, compute_dtype=torch.float64, context_chunk=5)
    teacher, denominators = case.teacher, torch.full((case.steps,), 24.0)
    with Trap():
        ttt_step(case.model, batch, teacher=teacher, denominators=denominators, settings=settings)


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("dense", [False, True], ids=["trimmed", "dense"])
def test_a_step_on_a_device_without_values(dense, layers, backend, monkeypatch):
    monkeypatch.setitem(linear_loss._BLOCK_ELEMENTS, "meta", 2**24)
    masks = [[0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0] * 4, [0] * 4, [1, 0, 0, 0, 0, 1, 1, 0]]
    case = make_case(masks, layers=layers, eagle31=True)
    case.head = case.head.bfloat16()
    teacher = case.teacher
    move_fields(teacher, "meta")
    case.model.float().to("meta")
    batch = make_batch(case, make_pack(case, dense=dense), chunk_rows=25, dtype=torch.bfloat16)
    settings = StepSettings(backend=backend, compute_dtype=torch.bfloat16, context_chunk=20)
    denominators = torch.full((case.steps,), 24.0)
    with Elsewhere():
        ttt_step(case.model, batch, teacher=teacher, denominators=denominators, settings=settings)
    assert all(p.grad.is_meta for p in case.model.parameters() if p.requires_grad)


@pytest.mark.parametrize(
    "question",
    [
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: x + torch.ones(4),
        lambda x: x.copy_(torch.ones(4)),
        lambda x: torch.ones(4).to(x.device),
    ],
)
def test_the_device_without_values_catches(question):
    with pytest.raises((AssertionError, RuntimeError, NotImplementedError)), Elsewhere():
        question(torch.ones(4, device="meta"))
