"""The step on a GPU, bf16 and fp32: errors within the classic path's own.

Catches: a causal mask aligned top-left where the kernel aligns it bottom-right, an lse in another
layout, gradients of K0/V0 in the wrong rows. benchmarks/gpu_check.sh runs it.
"""

import pytest
import torch
from test_stages_classic import run_classic
from ttt_case import make_batch, make_case, make_pack, run_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
BLOCKS = ([0] * 40 + [1] * 50 + [0] * 13 + [1, 0, 0, 0, 0, 0, 1, 1]) * 3


@pytest.mark.parametrize("dense", [False, True], ids=["trimmed", "dense"])
@pytest.mark.parametrize("max_keys", [None, 64])
@pytest.mark.parametrize("backend", ["sdpa", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_gradients_on_a_gpu(dtype, backend, max_keys, dense):
    case = make_case([BLOCKS, BLOCKS[:150]], head_dim=64, width=64, seed=1)
    exact = run_classic(case, torch.float64)
    theirs = run_classic(case, dtype)
    batch = make_batch(case, make_pack(case, dense=dense), chunk_rows=90, dtype=dtype)
    case.model.cuda()
    case.head = case.head.cuda()
    _, grads = run_step(case, batch, dtype=dtype, backend=backend, max_keys=max_keys)
    for name, want in exact.items():
        error = float((grads[name].cpu() - want).abs().max())
        own = float((theirs[name] - want).abs().max())
        bound = 4 * own + torch.finfo(dtype).eps * float(want.abs().max())
        assert error <= bound, f"{name}: {error:.2e} > {bound:.2e}"


def test_fp64_is_refused_with_the_remedy():
    case = make_case([BLOCKS], seed=1)
    case.model.cuda()
    case.head = case.head.cuda()
    batch = make_batch(case, make_pack(case), dtype=torch.float64)
    with pytest.raises(ValueError, match="reference"):
        run_step(case, batch, dtype=torch.float64)
