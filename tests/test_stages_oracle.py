"""The two-stage step against the dense oracle: every metric and the gradient of every parameter.

Catches: wrong row sets, carry or diagonal maps off by one, a softmax split wrongly, a part's own
log-sum-exp in the backward, positions not advanced per step, leaves whose gradient is lost,
chunk edges, documents that see each other, denominators taken from the kept rows.
"""

import dataclasses

import pytest
import torch
from flash_attn_standin import install as install_flash_attn
from oracle import oracle
from ttt_case import make_batch, make_case, make_pack, oracle_model, run_step

# fp64 sums of a few thousand terms round to about 1e-13; 1e-10 leaves room for long chains.
TOLERANCE = 1e-10

# (backend, most keys of one kernel call, rows of a chunk, rows below which runs share a group).
# A threshold of 0 makes every run a segment, a huge one groups everything.
FULL_GRID = [
    (backend, max_keys, chunk_rows, gap)
    for backend, max_keys in [("sdpa", None), ("sdpa", 3), ("fa", None), ("fa", 3)]
    for chunk_rows in (1, 7, 1024)
    for gap in (0, 32, 10**6)
] + [("reference", None, chunk_rows, 0) for chunk_rows in (1, 7, 1024)]
# Every backend, chunk size and threshold at least once.
SHORT_GRID = [
    ("reference", None, 7, 0),
    ("sdpa", None, 1, 32),
    ("sdpa", None, 7, 0),
    ("sdpa", 3, 1024, 10**6),
    ("fa", None, 7, 32),
    ("fa", 3, 1024, 0),
]

MASKS = {
    "all ones": [1] * 20,
    "prompt heavy": [0] * 14 + [1] * 5 + [0],
    "blocks": [0, 0, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0],
    "isolated": [0, 0, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0],
    "first row": [1] + [0] * 19,
    "last row": [0] * 18 + [1, 0],
    "empty": [0] * 20,
}


@pytest.fixture(autouse=True)
def fa_on_the_cpu(monkeypatch):
    """Let attention_backend=fa run here, on a stand-in with flash-attn's interface."""
    from specforge_trim.attention.kernels import flash_attn
    from specforge_trim.drafts.eagle3 import step as stages

    install_flash_attn(monkeypatch)
    real = stages.select_kernel

    def select(backend, **where):
        return flash_attn.load() if backend == "fa" else real(backend, **where)

    monkeypatch.setattr(stages, "select_kernel", select)


def documents(name, count):
    if count == 1:
        return [MASKS[name]]
    # Unequal lengths; one document without any supervised row between two others.
    return [MASKS[name][:11], [0] * 4, MASKS[name][3:]]


def assert_equal(case, pack, batch, expected, params, **kwargs):
    result, grads = run_step(case, batch, **kwargs)
    for name in ("loss", "correct", "accept", "accept_in_vocab", "in_vocab"):
        want = {"loss": "loss_sum"}.get(name, name)
        want = torch.tensor(getattr(expected, want), dtype=torch.float64)
        error = float((getattr(result, name) - want).abs().max())
        assert error <= TOLERANCE * max(1.0, float(want.abs().max())), f"{name}: {error:.2e}"
    assert set(grads) == {n for n, p in params.items() if p.requires_grad}
    for name, grad in grads.items():
        want = params[name].grad
        want = torch.zeros_like(grad) if want is None else want
        error, scale = float((grad - want).abs().max()), float(want.abs().max())
        assert error <= TOLERANCE * max(scale, 1e-3), f"{name}: error {error:.2e} of {scale:.2e}"


def assert_grid_equals_oracle(case, grid):
    """Trimmed and dense packs, through every entry of a grid."""
    model = oracle_model(case)
    expected = oracle(model, case.docs, steps=case.steps)
    if expected.total.requires_grad:
        expected.total.backward()
    for dense in (False, True):
        pack = make_pack(case, dense=dense)
        for backend, max_keys, chunk_rows, gap in grid:
            batch = make_batch(case, pack, chunk_rows=chunk_rows, group_gap=gap)
            assert_equal(
                case, pack, batch, expected, model.params,
                backend=backend, max_keys=max_keys, context_chunk=5,
            )  # fmt: skip


@pytest.mark.parametrize("eagle31", [False, True], ids=["eagle3", "eagle3.1"])
@pytest.mark.parametrize(
    "heads",
    [
        pytest.param((2, 2), id="mha", marks=pytest.mark.slow),
        pytest.param((4, 2), id="gqa"),
        pytest.param((4, 1), id="mqa", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize(
    "grid",
    [
        pytest.param(SHORT_GRID, id="short"),
        pytest.param(FULL_GRID, id="full", marks=pytest.mark.slow),
    ],
)
def test_every_gradient_equals_the_oracle(grid, name, count, heads, eagle31):
    case = make_case(
        documents(name, count), heads=heads[0], kv_heads=heads[1], eagle31=eagle31, seed=3
    )
    assert_grid_equals_oracle(case, grid)


@pytest.mark.parametrize("layers", [2, 3])
@pytest.mark.parametrize("name", ["all ones", "blocks", "isolated", "empty"])
def test_deeper_drafts(name, layers):
    """Catches: a lower layer's key gradients read before its later queries have added theirs."""
    case = make_case(documents(name, 3), layers=layers, seed=7)
    assert_grid_equals_oracle(case, SHORT_GRID)


@pytest.mark.parametrize("denominator", ["rows", "supervised"])
@pytest.mark.parametrize("chain", ["shift", "run"])
def test_chains_and_denominators(chain, denominator):
    case = make_case(documents("blocks", 3), steps=5, seed=1)
    model = oracle_model(case)
    expected = oracle(model, case.docs, steps=5, chain=chain, denominator=denominator)
    expected.total.backward()
    pack = make_pack(case, chain=chain)
    assert [s.num_loss_rows for s in pack.steps] == expected.loss_rows
    denominators = None
    if denominator == "supervised":
        denominators = torch.tensor(expected.loss_rows)
    batch = make_batch(case, pack)
    assert_equal(case, pack, batch, expected, model.params, denominators=denominators)


def test_untrimmed_loss_end_weights_every_row_by_the_mask():
    """Without trimming the loss end, all rows are forwarded and unsupervised ones weigh zero."""
    case = make_case(documents("blocks", 3), seed=2)
    model = oracle_model(case)
    expected = oracle(model, case.docs, steps=case.steps)
    expected.total.backward()
    mask = case.row_mask
    for doc in case.docs:
        doc.row_mask = [1] * (len(doc.ids) - 1) + [0]
    pack = make_pack(case, dense=True)
    weights = tuple(mask[pack.supervised[step.teacher_index]].double() for step in pack.steps)
    batch = make_batch(case, pack, chunk_rows=7, loss_weights=weights)
    assert_equal(case, pack, batch, expected, model.params)


def fixed_rows(pack):
    """THE mistake: forward the supervised rows themselves at every step."""
    from specforge_trim.plan.pack import Step, TrimPack

    rows = pack.supervised
    everything = torch.arange(rows.shape[0])
    steps = tuple(
        Step(
            rows=rows,
            loss_rows=rows,
            loss_index=everything,
            teacher_index=everything,
            carry_index=None if i == 0 else everything,
            diagonal_index=tuple(everything for _ in range(1, i)),
            is_dead=False,
        )
        for i in range(pack.ttt_length)
    )
    return TrimPack(
        **{
            **{f: getattr(pack, f) for f in [x.name for x in dataclasses.fields(TrimPack)]},
            "steps": steps,
        }
    )


def test_negative_control_fixed_rows_fail_from_step_1():
    """The comparison can fail: step 0 is exact, step 1 errs by 1e-2 or more."""
    case = make_case([MASKS["isolated"]], seed=4)
    expected = oracle(oracle_model(case), case.docs, steps=case.steps)
    result, _ = run_step(case, make_batch(case, fixed_rows(make_pack(case))))
    want = torch.tensor(expected.loss_sum, dtype=torch.float64)
    error = ((result.loss - want) / want.clamp(min=1e-9)).abs()
    assert float(error[0]) < TOLERANCE, error
    assert float(error[1]) > 1e-2, error


def test_negative_control_part_own_lse_shows_in_gradients_only(monkeypatch):
    from specforge_trim.attention import rows as module

    case = make_case([MASKS["blocks"]], seed=5)
    batch = make_batch(case, make_pack(case))
    good, good_grads = run_step(case, batch)
    original = module._RowAttention.backward

    def own_lse(ctx, do):
        real = ctx.context.backward

        class Wrong:
            def backward(self, do, q, o, lse, step, _context=ctx.context):
                own_o, own = _context.forward(q, step)
                return real(do, q, own_o, own, step)

        ctx.context = Wrong()
        return original(ctx, do)

    monkeypatch.setattr(module._RowAttention, "backward", staticmethod(own_lse))
    bad, bad_grads = run_step(case, batch)
    assert torch.equal(good.loss, bad.loss)
    name = "midlayer.self_attn.k_proj.weight"
    error = (bad_grads[name] - good_grads[name]).abs().max() / good_grads[name].abs().max()
    assert float(error) > 1e-3, error


def test_negative_control_unshifted_mask():
    """The loss mask itself as row mask trains other rows than the served alignment does."""
    from specforge_trim import row_mask

    loss_mask = torch.tensor([0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 0])
    # Row t is asked for x_{t+2} after x_{t+1}: both written by the assistant.
    served = [0, 0, 1, 1, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0]
    assert row_mask(loss_mask).int().tolist() == served
    case = make_case([served], draft_vocab=32, seed=6)
    expected = oracle(oracle_model(case), case.docs, steps=case.steps)
    good, _ = run_step(case, make_batch(case, make_pack(case)))
    want = torch.tensor(expected.loss_sum, dtype=torch.float64)
    assert torch.allclose(good.loss, want, rtol=1e-10)
    case.docs[0].row_mask = loss_mask.tolist()
    bad, _ = run_step(case, make_batch(case, make_pack(case)))
    assert float(((bad.loss - want) / want).abs().min()) > 1e-2


def test_negative_control_rope_off_by_one():
    case = make_case([MASKS["blocks"]], seed=6)
    batch = make_batch(case, make_pack(case))
    good, _ = run_step(case, batch)
    # All positions shifted alike changes nothing: rotary attention is relative.
    batch.position_ids = batch.position_ids + 1
    shifted, _ = run_step(case, batch)
    assert torch.allclose(good.loss, shifted.loss, rtol=1e-12, atol=0)
    real = case.model.rotary.cos_sin
    case.model.rotary.cos_sin = lambda p, d: real(p // 2 * 2, d)
    bad, _ = run_step(case, batch)
    assert float(((bad.loss - good.loss) / good.loss).abs().max()) > 1e-4
