"""The whole training step under every objective, alignment, chain and denominator.

Catches: an objective that is not what the step's rows are trained on, row masks of one alignment
with the teachers of another, a denominator that scales only some of the terms, a decay that is
always the default's, steps that add up wrongly where nothing (or nothing in the vocabulary) is
supervised.
"""

import pytest
import torch
from dense_objectives import OBJECTIVES, dense_objective
from oracle import oracle, unroll_document
from ttt_case import make_batch, make_case, make_pack, oracle_model, run_step

from specforge_trim import row_mask

# Assistant tokens of two documents; the second turn of the first is one token long.
LOSS_MASKS = [[0, 0, 1, 1, 1, 0, 0, 0, 1, 0], [0, 1, 1, 1, 1, 0, 1]]
STEPS = 3


def aligned(mask, alignment):
    """ttt-math's definitions of m; the last position has no teacher."""
    length = len(mask)
    at = [*mask, 0, 0]
    m = {
        "served": lambda t: at[t + 1] and at[t + 2],
        "teacher": lambda t: at[t + 1],
        "token": lambda t: at[t],
    }[alignment]
    return [int(bool(m(t))) for t in range(length - 1)] + [0]


def assert_equal(result, grads, expected, want_grads, what):
    """1e-10: sums of a few thousand fp64 terms round to about 1e-13."""
    for name in ("correct", "accept", "accept_in_vocab", "in_vocab", "loss"):
        want = getattr(expected, {"loss": "loss_sum"}.get(name, name))
        want = torch.tensor(want, dtype=torch.float64)
        error = float((getattr(result, name) - want).abs().max())
        assert error <= 1e-10 * max(1.0, float(want.abs().max())), f"{what} {name}: {error:.1e}"
    for name, want in want_grads.items():
        error, size = float((grads[name] - want).abs().max()), float(want.abs().max())
        assert error <= 1e-10 * max(size, 1e-3), f"{what} {name}: error {error:.1e} of {size:.1e}"


@pytest.mark.parametrize("chain", ["shift", "run"])
@pytest.mark.parametrize("alignment", ["served", "teacher", "token"])
def test_every_objective_equals_the_oracle(alignment, chain):
    masks = [aligned(mask, alignment) for mask in LOSS_MASKS]
    case = make_case(masks, steps=STEPS, seed=1)
    flat = torch.tensor(sum(LOSS_MASKS, [])).bool()
    m = row_mask(flat, alignment=alignment, cu_seqlens=case.cu_seqlens)
    assert torch.equal(m, case.row_mask)
    model = oracle_model(case)
    trained = {n: p for n, p in model.params.items() if p.requires_grad}
    unrolled = [unroll_document(model, doc, STEPS) for doc in case.docs]
    pack = make_pack(case, chain=chain)
    batch = make_batch(case, pack, chunk_rows=7)
    for objective in OBJECTIVES:
        for denominator in ("rows", "supervised"):
            expected = oracle(
                model, case.docs, steps=STEPS, chain=chain, denominator=denominator,
                row_loss=dense_objective(objective), unrolled=unrolled,
            )  # fmt: skip
            want = torch.autograd.grad(expected.total, list(trained.values()), retain_graph=True)
            rows = None if denominator == "rows" else torch.tensor(expected.loss_rows)
            result, grads = run_step(case, batch, denominators=rows, objective=objective)
            what = f"{objective}, {denominator}:"
            assert_equal(result, grads, expected, dict(zip(trained, want, strict=True)), what)


def check_case(case, objective, decay=0.8):
    """A case against the oracle; the step's result and gradients."""
    model = oracle_model(case)
    row_loss = dense_objective(objective)
    expected = oracle(model, case.docs, steps=case.steps, row_loss=row_loss, decay=decay)
    trained = {n: p for n, p in model.params.items() if p.requires_grad}
    want = [torch.zeros_like(p) for p in trained.values()]
    if expected.total.requires_grad:
        found = torch.autograd.grad(expected.total, list(trained.values()), allow_unused=True)
        want = [w if g is None else g for g, w in zip(found, want, strict=True)]
    batch = make_batch(case, make_pack(case))
    result, grads = run_step(case, batch, objective=objective, decay=decay)
    assert set(grads) == set(trained)
    assert_equal(result, grads, expected, dict(zip(trained, want, strict=True)), objective)
    return result, grads


@pytest.mark.parametrize("decay", [1.0, 0.3])
def test_step_i_weighs_decay_to_the_i(decay):
    case = make_case([[0, 1, 1, 1, 0, 1, 1, 0]], steps=3, seed=6)
    check_case(case, "soft_ce", decay)


@pytest.mark.parametrize("objective", ["soft_ce", "0.5*lk_lambda+js"])
@pytest.mark.parametrize("draft_vocab", [1, 16, 32])
@pytest.mark.parametrize("steps", [1, 3])
def test_one_step_and_the_smallest_and_largest_draft_vocabulary(steps, draft_vocab, objective):
    """K = 1; a draft vocabulary of 1, some, and all of the target's 32 tokens."""
    case = make_case([[0, 1, 1, 1, 0, 1, 1, 0]], steps=steps, draft_vocab=draft_vocab, seed=2)
    result, _ = check_case(case, objective)
    if draft_vocab == 32:
        assert float(result.in_vocab[0]) == 5


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_supervised_rows_all_outside_the_draft_vocabulary(objective):
    """No loss and zero gradients everywhere, but the rows stay in the denominators and metrics."""
    case = make_case([[0, 1, 1, 1, 0, 1, 1, 0]], steps=3, seed=3)
    case.head[case.model.t2d] = 0.0  # some of the other 16 logits are above 0 at every row
    result, grads = check_case(case, objective)
    assert result.loss.tolist() == result.correct.tolist() == result.in_vocab.tolist() == [0.0] * 3
    assert bool((result.accept > 0).all())  # the draft still overlaps with what little is left
    assert all(bool((grad == 0).all()) for grad in grads.values())


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_no_supervised_row(objective):
    result, grads = check_case(make_case([[0] * 6], steps=3, seed=4), objective)
    assert float(result.loss.abs().sum() + result.accept.sum()) == 0.0
    assert all(bool((grad == 0).all()) for grad in grads.values())
