"""The fused head and objective against dense autograd in fp64.

Catches: a wrong sign or constant in one of the analytic gradients, a sum of terms that mixes up
their weights, rows of a later block that read the first block's teacher, rows without loss that
leak a gradient, a gradient buffer that is overwritten instead of added to, per-row answers that
disagree with the sums made of them, tensors of all rows by all of the vocabulary.
"""

import math

import pytest
import torch
from dense_objectives import OBJECTIVES, dense_objective
from torch.utils._python_dispatch import TorchDispatchMode

from specforge_trim.config.objective import parse_objective
from specforge_trim.loss import linear_loss as fused
from specforge_trim.loss import teacher as teachers
from specforge_trim.loss.linear_loss import linear_loss
from specforge_trim.loss.teacher import Teacher, TeacherTable

D, V, VD, S, N = 6, 40, 24, 9, 14


def problem(seed=0, *, draft_vocab=VD, dtype=torch.float64):
    """Teacher, its hidden states [S, D], draft inputs [N, D], head, rows' teachers, weights."""
    gen = torch.Generator().manual_seed(seed)

    def rand(*shape, by=1.0):
        return (torch.randn(*shape, generator=gen, dtype=torch.float64) * by).to(dtype)

    kept = torch.randperm(V, generator=gen)[:draft_vocab].sort().values
    t2d = torch.zeros(V, dtype=torch.bool)
    t2d[kept] = True
    teacher = Teacher(rand(V, D), kept, t2d)
    index = torch.randint(S, (N,), generator=gen)  # rows share teachers
    weights = torch.tensor([1.0, 0.0, 0.5] * 5)[:N].to(dtype)
    return teacher, rand(S, D), rand(N, D), rand(draft_vocab, D), index, weights


def dense(text, teacher, last, hidden, weight, index, weights, scale):
    """Loss, sums and gradients row by row from the definitions; OOV rows add no loss."""
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    kept, row_loss = teacher.draft_to_target.tolist(), dense_objective(text)
    total, accept, in_vocab = torch.zeros((), dtype=torch.float64), 0.0, 0.0
    for n in range(hidden.shape[0]):
        target = teacher.head @ last[index[n]]
        best = int(target.argmax())
        log_q = torch.log_softmax(weight @ hidden[n], 0)
        full = torch.softmax(target, 0)[kept]
        accept += float(weights[n] * torch.minimum(full, log_q.detach().exp()).sum())
        if best in kept:
            p = torch.softmax(target[kept], 0)
            total = total + weights[n] * row_loss(p, log_q, kept.index(best))
            in_vocab += float(weights[n])
    grads = torch.autograd.grad(total * scale, (hidden, weight))
    return total.detach(), accept, in_vocab, *grads


def assert_close(got, want, what, tolerance=1e-12):
    error, size = float((got - want).abs().max()), float(want.abs().max())
    assert error <= tolerance * max(size, 1.0), f"{what}: error {error:.1e} of {size:.1e}"


@pytest.mark.parametrize("many_blocks", [False, True], ids=["one block", "many blocks"])
@pytest.mark.parametrize("text", OBJECTIVES)
def test_loss_and_gradients_equal_dense_autograd(text, many_blocks, monkeypatch):
    if many_blocks:  # 3 rows of logits; the teacher's by 4 rows and 7 of 40 tokens
        monkeypatch.setitem(fused._BLOCK_ELEMENTS, "cpu", 3 * VD)
        monkeypatch.setattr(fused, "_MIN_ROWS", 1)
        monkeypatch.setattr(teachers, "_BLOCK_VOCAB", 7)
        monkeypatch.setattr(teachers, "_BLOCK_ROWS", 4)
    teacher, last, hidden, weight, index, weights = problem()
    objective, scale = parse_objective(text), 0.37
    want, accept, in_vocab, d_hidden, d_weight = dense(
        text, teacher, last, hidden, weight, index, weights, scale
    )
    table = teacher.table(last, log_probs=objective.reads_log_probs)
    assert 0 < int(table.in_vocab.sum()) < S
    kwargs = dict(scale=scale, objective=objective, row_weight=weights)
    hidden.requires_grad_(), weight.requires_grad_()
    loss, metrics = linear_loss(hidden, weight, table, index, **kwargs)
    (loss * 3).backward()
    assert_close(loss.detach(), want * scale, "loss")
    assert_close(metrics.loss, want, "loss sum")
    assert_close(metrics.accept, torch.tensor(accept, dtype=torch.float64), "accept")
    assert float(metrics.in_vocab) == in_vocab
    assert_close(hidden.grad, 3 * d_hidden, "hidden")
    assert_close(weight.grad, 3 * d_weight, "weight")
    # The buffer is added to, and nothing goes to the weight through autograd.
    buffer = torch.ones_like(weight)
    hidden.grad = weight.grad = None
    loss, _ = linear_loss(hidden, weight, table, index, weight_grad=buffer, **kwargs)
    loss.backward()
    assert_close(buffer - 1, d_weight, "buffer")
    assert_close(hidden.grad, d_hidden, "hidden with a buffer")
    assert weight.grad is None


@pytest.mark.parametrize("text", [o for o in OBJECTIVES if "lk_lambda" not in o])
def test_gradcheck(text):
    """Numerical differences of the fused function itself, in fp64."""
    teacher, last, hidden, weight, index, weights = problem(seed=1)
    objective = parse_objective(text)
    table = teacher.table(last, log_probs=objective.reads_log_probs)

    assert float((table.in_vocab[index] * weights).sum()) > 2

    def loss(h, w):
        return linear_loss(h, w, table, index, scale=0.7, objective=objective, row_weight=weights)[
            0
        ]

    hidden.requires_grad_(), weight.requires_grad_()
    assert torch.autograd.gradcheck(loss, (hidden, weight))


def test_gradcheck_of_lk_lambda_with_its_blend_held():
    """Its gradient takes the blend as a constant: that of a sum of KL and tv with fixed weights.

    One row, since the blend is the row's own. Soft cross-entropy differs from KL by a constant.
    """
    teacher, last, hidden, weight, index, _ = problem(seed=2)
    table = teacher.table(last)
    row = int(table.in_vocab[index].nonzero()[0])
    hidden, index = hidden[row : row + 1].requires_grad_(), index[row : row + 1]
    q = torch.softmax(weight @ hidden.detach()[0], 0)
    accept = float(torch.minimum(q, table.probs[index[0]]).sum())
    for eta in (0.5, 3.0):
        blend = math.exp(-eta * accept)
        held = parse_objective(f"{blend}*soft_ce+{1 - blend}*tv")
        ours = parse_objective("lk_lambda", lk_eta=eta)

        def loss(h, objective=held):
            return linear_loss(h, weight, table, index, scale=1.0, objective=objective)[0]

        assert torch.autograd.gradcheck(loss, (hidden,))
        (want,) = torch.autograd.grad(loss(hidden), hidden)
        (got,) = torch.autograd.grad(loss(hidden, ours), hidden)
        assert_close(got, want, f"eta {eta}")


def test_right_says_which_rows_are_right():
    # The head is the identity: hidden states are logits.
    logits = torch.tensor([[5.0, 1, 0], [0, 5, 1], [0, 1, 5], [2, 2, 0]], dtype=torch.float64)
    choice = torch.tensor([0, 0, -1, 0])  # right; wrong; out of vocabulary; a tie goes to id 0
    table = TeacherTable(
        torch.full((4, 3), 1 / 3, dtype=torch.float64), choice, torch.ones(4, dtype=torch.float64)
    )
    _, metrics = linear_loss(
        logits, torch.eye(3, dtype=torch.float64), table, torch.arange(4), scale=1.0
    )
    assert metrics.right.dtype == torch.bool
    assert metrics.right.tolist() == [True, False, False, True]
    assert float(metrics.correct) == 2


@pytest.mark.parametrize("draft_vocab", [1, 3, V])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_zero_head_has_the_soft_cross_entropy_of_a_uniform_guess(draft_vocab, dtype):
    """ln(Vd) for any teacher: a peaked one, a flat one, one of extreme logits."""
    teacher, last, hidden, weight, index, _ = problem(seed=3, draft_vocab=draft_vocab, dtype=dtype)
    for size in (0.0, 1.0, 100.0):
        table = teacher.table(last * size)
        table = TeacherTable(table.probs, table.choice.clamp(min=0), table.draft_mass)  # all count
        _, metrics = linear_loss(hidden, weight * 0, table, index, scale=1.0)
        want = N * math.log(draft_vocab)
        tolerance = 1e-13 if dtype == torch.float64 else 1e-6
        assert abs(float(metrics.loss) - want) <= tolerance * max(want, 1.0), float(metrics.loss)


@pytest.mark.parametrize("text", OBJECTIVES)
def test_a_draft_vocabulary_of_one_leaves_nothing_to_learn(text):
    """One token: draft and teacher both give it all; every objective and gradient is 0."""
    teacher, last, hidden, weight, index, _ = problem(seed=4, draft_vocab=1)
    objective = parse_objective(text)
    table = teacher.table(last, log_probs=objective.reads_log_probs)
    hidden.requires_grad_(), weight.requires_grad_()
    loss, metrics = linear_loss(hidden, weight, table, index, scale=1.0, objective=objective)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert float(hidden.grad.abs().max()) == float(weight.grad.abs().max()) == 0.0
    assert float(metrics.correct) == float(metrics.in_vocab)  # right wherever it can be


@pytest.mark.parametrize("text", OBJECTIVES)
def test_no_rows_and_no_row_in_the_vocabulary(text):
    teacher, last, hidden, weight, index, _ = problem(seed=5)
    objective = parse_objective(text)
    table = teacher.table(last, log_probs=objective.reads_log_probs)
    outside = index[~table.in_vocab[index]]
    assert len(outside)
    for rows in (index[:0], outside):
        h = hidden[: len(rows)].clone().requires_grad_()
        w = weight.clone().requires_grad_()
        loss, metrics = linear_loss(h, w, table, rows, scale=1.0, objective=objective)
        loss.backward()
        assert float(loss.detach()) == float(metrics.loss) == float(metrics.correct) == 0.0
        assert float(metrics.in_vocab) == float(metrics.accept_in_vocab) == 0.0
        assert bool((h.grad == 0).all()) and bool((w.grad == 0).all())
        assert (float(metrics.accept) > 0) == (len(rows) > 0)


def test_teacher_probabilities_too_small_for_a_float():
    """reverse_kl of logits 300 apart in fp32: finite, and equal to fp64's."""
    head = torch.tensor([[0.0], [-300.0], [-150.0]])
    values = []
    for dtype in (torch.float32, torch.float64):
        teacher = Teacher(head.to(dtype), torch.arange(3), torch.ones(3, dtype=torch.bool))
        table = teacher.table(torch.ones(1, 1, dtype=dtype), log_probs=True)
        hidden = torch.ones(1, 1, dtype=dtype, requires_grad=True)
        weight = torch.tensor([[0.0], [1.0], [0.5]], dtype=dtype)
        loss, _ = linear_loss(
            hidden, weight, table, torch.tensor([0]), scale=1.0,
            objective=parse_objective("reverse_kl+js+tv+lk_alpha+lk_lambda"),
        )  # fmt: skip
        loss.backward()
        values.append((float(loss.detach()), float(hidden.grad)))
    assert float(table.probs[0, 1]) > 0  # in fp64; in fp32 it is 0
    assert values[0] == pytest.approx(values[1], rel=1e-5)


class Largest(TorchDispatchMode):
    """Elements of the largest tensor any operator returns, views of known tensors aside."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out._base is None:
            self.elements = max(self.elements, out.numel())
        return out


@pytest.mark.parametrize("text", OBJECTIVES)
def test_no_tensor_of_all_rows_by_the_vocabulary(text, monkeypatch):
    """Working set: blocks. Of rows x Vd there is the teacher's table, of rows x V nothing."""
    monkeypatch.setitem(fused._BLOCK_ELEMENTS, "cpu", 16 * 100)
    monkeypatch.setattr(teachers, "_BLOCK_VOCAB", 200)
    monkeypatch.setattr(teachers, "_BLOCK_ROWS", 16)
    gen = torch.Generator().manual_seed(0)
    kept = torch.arange(0, 1000, 10)
    t2d = torch.zeros(1000, dtype=torch.bool)
    t2d[kept] = True
    teacher = Teacher(torch.randn(1000, 8, generator=gen), kept, t2d)
    last, objective = torch.randn(64, 8, generator=gen), parse_objective(text)
    with Largest() as largest:
        table = teacher.table(last, log_probs=objective.reads_log_probs)
    assert largest.elements == 64 * 100  # the table itself; 16 x 200 logits are fewer
    hidden = torch.randn(200, 8, generator=gen, requires_grad=True)
    weight, index = torch.randn(100, 8, generator=gen), torch.arange(200) % 64
    with Largest() as largest:
        linear_loss(
            hidden, weight, table, index, scale=1.0, objective=objective,
            weight_grad=torch.zeros_like(weight),
        )  # fmt: skip
    # Two buffers and a quarter in one; 200 x 100 logits would be five times as many.
    assert largest.elements == (2 * 16 + 4) * 100
