"""fp32 and bf16: our error against fp64 stays within the classic path's own error in that dtype.

Catches: gradients added up in bf16, norms or softmax below fp32, a step's weight gradient rounded
per chunk. The classic path is itself checked against the oracle in fp64 first, so that it may
serve as the yardstick.
"""

import itertools
import statistics

import pytest
import torch
from classic import ClassicShape, classic_losses, loss_rows
from classic_ring import RingContext, own_rows
from oracle import oracle
from ttt_case import EPS, THETA, make_batch, make_case, make_pack, oracle_model, run_step

MASKS = {
    "blocks": [0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0] * 2,
    "all ones": [1] * 40,
    "prompt heavy": [0] * 28 + [1] * 11 + [0],
    "isolated": [0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0] * 2,
    "first row": [1] + [0] * 39,
}
BLOCKS = MASKS["blocks"]


def run_classic(case, dtype, *, rank=0, size=1):
    """Total loss's gradient of every trainable parameter, fp64 masters.

    Of several ranks, each runs its block of tokens over a ring; their gradients' sum is the total.
    """
    config = case.model.config
    shape = ClassicShape(
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        EPS,
        THETA,
        config.fc_norm,
        config.norm_output,
    )
    params = {
        n: p.detach().clone().requires_grad_(p.requires_grad)
        for n, p in case.model.named_parameters()
    }
    last = torch.cat([d.last for d in case.docs]).to(dtype)
    supervised = case.row_mask.nonzero().flatten()
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    target = (last[supervised + 1] @ case.head.to(dtype).T).to(wide)
    kept = case.model.draft_to_target
    tokens = int(case.cu_seqlens[-1])
    bounds = list(itertools.pairwise(case.cu_seqlens.tolist()))
    n = -(-tokens // size)
    lo, hi = min(rank * n, tokens), min((rank + 1) * n, tokens)
    rows, own = own_rows(loss_rows(case.row_mask, case.cu_seqlens, case.steps), lo, hi)
    losses = classic_losses(
        params,
        shape,
        ids=torch.tensor([x for d in case.docs for x in d.ids]),
        cu=case.cu_seqlens,
        aux=torch.cat([d.aux for d in case.docs])[lo:hi],
        probs=target[own][:, kept].softmax(-1),
        in_vocab=case.model.t2d[target[own].argmax(-1)],
        rows=rows,
        steps=case.steps,
        dtype=dtype,
        lo=lo,
        context=RingContext(bounds, config.head_dim**-0.5, rank, size) if size > 1 else None,
    )
    total = sum(0.8**i * x / tokens for i, x in enumerate(losses))
    total.backward()
    return {n: p.grad for n, p in params.items() if p.requires_grad}


@pytest.mark.parametrize("eagle31", [False, True], ids=["eagle3", "eagle3.1"])
def test_classic_equals_the_oracle(eagle31):
    case = make_case([BLOCKS[:14], BLOCKS[:3], BLOCKS[:11]], eagle31=eagle31, seed=8)
    model = oracle_model(case)
    oracle(model, case.docs, steps=case.steps).total.backward()
    for name, grad in run_classic(case, torch.float64).items():
        want = model.params[name].grad
        error = float((grad - want).abs().max() / want.abs().max())
        assert error < 1e-10, f"{name}: {error:.2e}"


@pytest.mark.parametrize("eagle31", [False, True], ids=["eagle3", "eagle3.1"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "name", [n if n == "blocks" else pytest.param(n, marks=pytest.mark.slow) for n in MASKS]
)
def test_error_within_the_classic_paths_own(name, dtype, eagle31):
    """Median over seeds <= 2x the classic's; no seed above 4x its worst + eps * max|grad|.

    A row with one key has a query gradient of exactly 0: terms as large as other gradients cancel,
    and kernels sum them in fp32 in an order of their own, hence fp32's eps of the largest.
    """
    ours: dict[str, list[float]] = {}
    theirs: dict[str, list[float]] = {}
    scale: dict[str, float] = {}
    for seed in range(8):
        case = make_case([MASKS[name], MASKS[name][:9]], eagle31=eagle31, seed=seed)
        exact = run_classic(case, torch.float64)
        batch = make_batch(case, make_pack(case), chunk_rows=9, dtype=dtype)
        mine = run_step(case, batch, dtype=dtype)[1]
        for key, want in run_classic(case, dtype).items():
            theirs.setdefault(key, []).append(float((want - exact[key]).abs().max()))
            ours.setdefault(key, []).append(float((mine[key] - exact[key]).abs().max()))
            scale[key] = max(scale.get(key, 0.0), float(exact[key].abs().max()))
    cancelled = torch.finfo(torch.float32).eps * max(scale.values())
    for key in ours:
        mine_median = statistics.median(ours[key])
        classic_median = statistics.median(theirs[key])
        bound = 2 * classic_median
        assert mine_median <= bound, (
            f"{key}: median {mine_median:.2e}, classic {classic_median:.2e}"
        )
        worst = 4 * max(theirs[key]) + torch.finfo(dtype).eps * scale[key] + cancelled
        assert max(ours[key]) <= worst, f"{key}: worst {max(ours[key]):.2e} > {worst:.2e}"
