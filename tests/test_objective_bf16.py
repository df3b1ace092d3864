"""Gradients in bf16 where draft and teacher nearly agree, at a real vocabulary's size.

Catches: logits rounded to bf16 before the softmax (their error, 0.4 % of their size, is then as
large as what draft and teacher differ by), differences of two rounded probabilities.

The reference is the definition in fp64 by autograd, computed from the very bf16 values that the
fused function is given: hidden states of draft and target, and the two heads.  The draft's hidden
state is the target's plus noise, then rounded to bf16; both heads are one matrix, so logits differ
by the noise alone.
"""

import pytest
import torch
from dense_objectives import DENSE

from specforge_trim.config.objective import parse_objective
from specforge_trim.loss.linear_loss import linear_loss
from specforge_trim.loss.teacher import Teacher

V, D, ROWS = 32_000, 64, 8


@pytest.fixture(scope="module", params=[0.1, 0.01])
def inputs(request):
    gen = torch.Generator().manual_seed(0)
    head = torch.randn(V, D, generator=gen).mul(0.4).bfloat16()  # logits of size 3, at most 14
    last = torch.randn(ROWS, D, generator=gen).bfloat16()
    noise = torch.randn(ROWS, D, generator=gen) * request.param
    return head, last, (last.float() + noise).bfloat16()


def dense(name, head, last, hidden, rounded=False):
    """fp64 gradients of hidden and weight; `rounded`: the control, logits passed through bf16."""
    weight = head.double().requires_grad_()
    hidden = hidden.double().requires_grad_()
    total = torch.zeros((), dtype=torch.float64)
    for n in range(ROWS):
        target, logits = head.double() @ last[n].double(), weight @ hidden[n]
        if rounded:
            target = target.bfloat16().double()
            logits = logits + (logits.bfloat16() - logits).detach()
        row = DENSE[name](
            torch.softmax(target, 0), torch.log_softmax(logits, 0), int(target.argmax())
        )
        total = total + row
    return torch.autograd.grad(total, (hidden, weight))


def relative(got, want):
    return float((got.double() - want).norm() / want.norm())


@pytest.mark.parametrize("name", DENSE)
def test_gradients_within_one_percent_of_fp64(name, inputs):
    head, last, hidden = inputs
    want = dense(name, head, last, hidden)
    objective = parse_objective(name)
    teacher = Teacher(head, torch.arange(V), torch.ones(V, dtype=torch.bool))
    table = teacher.table(last, log_probs=objective.reads_log_probs)
    # The trainer's case: fp32 weights that are read in bf16, and their fp32 gradient buffer.
    hidden, weight = hidden.clone().requires_grad_(), head.float()
    buffer = torch.zeros_like(weight)
    loss, _ = linear_loss(
        hidden, weight, table, torch.arange(ROWS), scale=1.0, objective=objective,
        weight_grad=buffer,
    )  # fmt: skip
    loss.backward()
    assert hidden.grad.dtype == torch.bfloat16
    errors = relative(hidden.grad, want[0]), relative(buffer, want[1])
    assert max(errors) < 0.01, errors


def test_control_rounded_logits_miss_it(inputs):
    """The bound can fail: logits rounded to bf16 err by more, for the default objective too."""
    for name in ("soft_ce", "reverse_kl", "js"):
        want, got = dense(name, *inputs), dense(name, *inputs, rounded=True)
        assert max(relative(g, w) for g, w in zip(got, want, strict=True)) > 0.02
