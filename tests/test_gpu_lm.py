"""A step of a dense draft with gradients cut, on a GPU, against the cut fp64 reference.

Catches: kernels of kept queries that align their causal mask otherwise, index tensors left on the
CPU, and (on a GPU) a question to the device, which its own debug mode turns into an error. The CPU
runs the same test; benchmarks/gpu_check.sh runs the GPU half.
"""

import pytest
import torch
from lm_case import make_model, make_stream, reference_step
from test_gpu_ranks import GPU
from test_lm_train import documents

from specforge_trim.drafts.lm.layers import RowSparseSettings, enable_row_sparse
from specforge_trim.train.lm_batch import LmPlan, make_lm_batch
from specforge_trim.train.lm_step import LmStepSettings, lm_step

MASKS = ["0" * 30 + "1" * 20 + "0" * 9 + "110", "0" * 5, "0" * 40 + "1" * 7]
SIZES = {"head_dim": 64, "hidden_size": 64, "intermediate_size": 96}


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("cut", [True, False], ids=["cut", "whole"])
@pytest.mark.parametrize("low", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_gradients_of_a_step(device, family, low, cut):
    stream = make_stream(MASKS)
    count = int(stream.kept().sum())
    _, exact = reference_step(
        make_model(family, **SIZES), stream, cut=cut, weight=1 / count
    )  # fmt: skip
    model = make_model(family, dtype=torch.float32, **SIZES).to(device)
    settings = LmStepSettings(
        RowSparseSettings(stop_grad_context_tokens=cut),
        compute_dtype=torch.bfloat16 if low else torch.float32,
    )
    enable_row_sparse(model, settings.row_sparse)
    batch = make_lm_batch(documents(stream), LmPlan())
    lm_step(model, batch, num_loss_rows=float(count), settings=settings)  # libraries load here
    model.zero_grad()
    watched = device == "cuda"
    if watched:
        torch.cuda.set_sync_debug_mode("error")
    try:
        lm_step(model, batch, num_loss_rows=float(count), settings=settings)
    finally:
        if watched:
            torch.cuda.set_sync_debug_mode("default")
    for name, want in exact.items():
        grad = model.get_parameter(name).grad.cpu().double()
        gap = float((grad - want).norm() / want.norm())
        assert gap <= (4e-2 if low else 1e-4), f"{name}: {gap:.1e}"
