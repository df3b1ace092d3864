"""A training step never asks the device a question.

Catches: `.item()`, boolean indexing, `nonzero` and the like inside the step, each of which makes a
GPU wait for the CPU. They are trapped as operators, so a CPU shows them too; the plan's own
integers live on the CPU and are read through `tolist`, which no operator carries out.
"""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from ttt_case import make_batch, make_case, make_pack

from specforge_trim.train.stages import StepSettings, ttt_step

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
