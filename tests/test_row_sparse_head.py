"""The head at kept rows against the full head by autograd.

Catches: a row's label off by one, entropy without its sign or its gradient, a soft cap left out of
the value or of the chain rule, blocks that overlap or miss rows, skipped rows that are not zero,
keep-all and keep-none undefined, a bf16 head that rounds its logits, logits of all rows held.
"""

import pytest
import torch
from lm_case import make_stream
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from specforge_trim.drafts.lm.rows import loss_rows, plan_rows
from specforge_trim.loss import labels as head
from specforge_trim.loss.labels import LogitForm, kept_log_probs, label_loss

T, D, V = 23, 12, 37
FORMS = {"plain": LogitForm(), "capped": LogitForm(softcap=3.0), "both": LogitForm(0.5, 2.0)}
KEEPS = {
    "some": [2, 3, 4, 9, 15, 22],
    "one": [7],
    "all": list(range(T)),
    "none": [],
}


def make_head(dtype=torch.float64, *, bias=True, seed=0):
    gen = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64).to(dtype)  # noqa: E731
    hidden = draw(T, D).requires_grad_()
    weight = draw(V, D).requires_grad_()
    own_bias = draw(V).requires_grad_() if bias else None
    labels = torch.randint(V, (T,), generator=gen)
    return hidden, weight, own_bias, labels


def full_head(hidden, weight, bias, labels, keep, form):
    """log-probabilities, entropy [T] of the whole head, zero outside keep, by autograd."""
    z = hidden @ weight.T
    if bias is not None:
        z = z + bias
    z = z * form.scale
    if form.softcap is not None:
        z = form.softcap * torch.tanh(z / form.softcap)
    p = z.softmax(-1)
    entropy = -(p * p.log()).sum(-1)
    log_probs = p.log()[torch.arange(T), labels]
    mask = torch.zeros(T, dtype=z.dtype)
    mask[keep] = 1
    return log_probs * mask, entropy * mask, (z.argmax(-1) == labels) & mask.bool()


def gradients(value, *inputs):
    return torch.autograd.grad(value, [x for x in inputs if x is not None])


def assert_near(found, expected, tolerance, name):
    gap = float((found - expected).detach().abs().max()) if found.numel() else 0.0
    assert gap <= tolerance, f"{name}: {gap:.2e}"


@pytest.mark.parametrize("blocks", [8192, 4, 1])
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("form", FORMS)
def test_values_and_gradients_equal_the_full_head(form, keep, blocks, monkeypatch):
    monkeypatch.setattr(head, "_MIN_ROWS", 1)
    hidden, weight, bias, labels = make_head()
    keep, form = torch.tensor(KEEPS[keep], dtype=torch.int64), FORMS[form]
    a, b = torch.randn(2, T, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    log_probs, entropy, right = full_head(hidden, weight, bias, labels, keep, form)
    wanted = gradients((a * log_probs + b * entropy).sum(), hidden, weight, bias)
    found = kept_log_probs(hidden, weight, labels, keep, bias=bias, form=form, chunk_tokens=blocks)
    assert_near(found.log_probs, log_probs, 1e-12, "log_probs")
    assert_near(found.entropy, entropy, 1e-12, "entropy")
    assert torch.equal(found.right, right)
    assert found.fraction == len(keep) / T
    skipped = torch.ones(T, dtype=torch.bool)
    skipped[keep] = False
    for x in (found.log_probs, found.entropy, found.right):
        assert x.shape == (T,) and not x[skipped].any()
    got = gradients((a * found.log_probs + b * found.entropy).sum(), hidden, weight, bias)
    for name, x, y in zip(("hidden", "weight", "bias"), got, wanted, strict=True):
        assert_near(x, y, 1e-11, name)


@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("form", FORMS)
def test_the_fused_loss_equals_the_full_head(form, keep, buffer):
    hidden, weight, bias, labels = make_head()
    keep, form = torch.tensor(KEEPS[keep], dtype=torch.int64), FORMS[form]
    scale = torch.rand(len(keep), generator=torch.Generator().manual_seed(6)).double()
    log_probs, entropy, _ = full_head(hidden, weight, bias, labels, keep, form)
    expected = -(log_probs[keep] * scale).sum()
    wanted = gradients(expected, hidden, weight, bias)
    held = torch.full_like(weight, 0.25) if buffer else None
    loss, rows = label_loss(
        hidden, weight, labels, keep, row_scale=scale, bias=bias, form=form, weight_grad=held
    )
    assert_near(loss, expected, 1e-12, "loss")
    assert_near(rows.log_probs, log_probs, 1e-12, "log_probs")
    assert_near(rows.entropy, entropy, 1e-12, "entropy")
    if buffer:
        got = gradients(loss, hidden, bias)
        got = (got[0], held - 0.25, got[1])
    else:
        got = [g / 3 for g in gradients(loss * 3.0, hidden, weight, bias)]
    for name, x, y in zip(("hidden", "weight", "bias"), got, wanted, strict=True):
        assert_near(x, y, 1e-11, name)


def test_no_bias_and_one_scale_for_all():
    hidden, weight, _, labels = make_head(bias=False)
    keep = torch.tensor(KEEPS["some"])
    log_probs, _, _ = full_head(hidden, weight, None, labels, keep, LogitForm())
    loss, _ = label_loss(hidden, weight, labels, keep, row_scale=0.5)
    assert_near(loss, -0.5 * log_probs.sum(), 1e-12, "loss")


def test_bf16_lies_inside_the_error_of_the_full_head():
    """The head at kept rows and the full one in bf16 against fp64 of the same bf16 inputs: the
    former must err no more than the latter does, value and gradients.
    """
    keep, form = torch.tensor(KEEPS["some"]), LogitForm(softcap=5.0)
    low = make_head(torch.bfloat16)
    exact = [None if x is None else x.detach().double().requires_grad_() for x in low[:3]]
    truth = full_head(*exact, low[3], keep, form)
    true_grads = gradients(truth[0].sum(), *exact)
    control = full_head(*low, keep, form)
    control_grads = gradients(control[0].sum(), *low[:3])
    ours = kept_log_probs(low[0], low[1], low[3], keep, bias=low[2], form=form)
    our_grads = gradients(ours.log_probs.sum(), *low[:3])
    error = lambda x, y: float((x.double() - y).detach().abs().max())  # noqa: E731
    # The control rounds its logits to bf16, 2^-9 of values near 5; ours stay in fp32.
    assert error(ours.log_probs, truth[0]) <= 1e-5 < 0.01 * error(control[0], truth[0])
    assert error(ours.entropy, truth[1]) <= 1e-5 < 0.01 * error(control[1], truth[1])
    for name, x, y, z in zip("hwb", our_grads, control_grads, true_grads, strict=True):
        assert error(x, z) <= 1.05 * error(y, z), name
    again = kept_log_probs(low[0], low[1], low[3], keep, bias=low[2], form=form)
    assert torch.equal(again.log_probs, ours.log_probs)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("keep", KEEPS)
def test_the_gap_in_bf16_lies_inside_that_of_two_full_heads(keep, form):
    """The control: a full head whose logits the product rounds to bf16, and one that keeps fp32.

    The head at kept rows is nearer to the exact one than they are to one another, and as near to
    the rounded one, but for a single row: there the roundings of two gradients do not average.
    """
    keep, form = torch.tensor(KEEPS[keep], dtype=torch.int64), FORMS[form]
    hidden, weight, bias, labels = make_head(torch.bfloat16)
    inputs = (hidden, weight, bias)
    a, b = torch.randn(2, T, generator=torch.Generator().manual_seed(6))

    def values(log_probs, entropy, _):
        score = (a * log_probs.float() + b * entropy.float()).sum()
        return [log_probs, entropy, *gradients(score, *inputs)]

    rounded = values(*full_head(*inputs, labels, keep, form))
    wide = values(*full_head(*(x.float() for x in inputs), labels, keep, form))
    rows = kept_log_probs(hidden, weight, labels, keep, bias=bias, form=form)
    ours = values(rows.log_probs, rows.entropy, None)
    names = ("log_probs", "entropy", "hidden", "weight", "bias")
    for name, x, one, other in zip(names, ours, rounded, wide, strict=True):
        gap = lambda p, q: float((p.double() - q.double()).norm().detach())  # noqa: E731
        control = gap(one, other)
        assert (control > 0) == (keep.numel() > 0), name  # what is read differs; nothing else does
        assert gap(x, other) <= control, (name, gap(x, other), control)
        if keep.numel() != 1:
            assert gap(x, one) <= 1.05 * control, (name, gap(x, one), control)


def test_many_blocks_in_bf16_err_no_more_than_one(monkeypatch):
    """The head's gradient is a sum over blocks; in bf16 each addition would round it."""
    monkeypatch.setattr(head, "_MIN_ROWS", 1)
    gen = torch.Generator().manual_seed(3)
    hidden = torch.randn(512, D, generator=gen).bfloat16().requires_grad_()
    weight = torch.randn(V, D, generator=gen).bfloat16().requires_grad_()
    bias = torch.randn(V, generator=gen).bfloat16().requires_grad_()
    labels, keep = torch.randint(V, (512,), generator=gen), torch.arange(512)
    h, w, b = (x.detach().double() for x in (hidden, weight, bias))
    p = (h @ w.T + b).softmax(-1)
    p[keep, labels] -= 1
    for fused in (False, True):
        if fused:
            loss, _ = label_loss(
                hidden, weight, labels, keep, row_scale=1.0, bias=bias, chunk_tokens=2
            )
        else:
            rows = kept_log_probs(hidden, weight, labels, keep, bias=bias, chunk_tokens=2)
            loss = -rows.log_probs.sum()
        d_weight, d_bias = torch.autograd.grad(loss, (weight, bias))
        for found, exact in ((d_weight, p.T @ h), (d_bias, p.sum(0))):
            assert found.dtype == torch.bfloat16
            # Factors rounded once, and the result once: 2^-9 each.
            gap = float((found.double() - exact).norm() / exact.norm())
            assert gap < 4e-3, f"{gap:.1e}"


class Largest(TorchDispatchMode):
    """The most elements of any tensor an operator returns."""

    def __init__(self):
        super().__init__()
        self.found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor):
                self.found = max(self.found, x.numel())
        return out


def test_logits_exist_for_a_chunk_of_tokens_only():
    hidden = torch.randn(512, 8, requires_grad=True)
    weight = torch.randn(256, 8, requires_grad=True)
    labels, keep = torch.zeros(512, dtype=torch.int64), torch.arange(512)
    with Largest() as seen:
        loss, _ = label_loss(hidden, weight, labels, keep, row_scale=1.0, chunk_tokens=32)
        loss.backward()
        kept_log_probs(hidden, weight, labels, keep, chunk_tokens=32).log_probs.sum().backward()
    assert seen.found <= 512 * 32, seen.found
    assert head.CHUNK_TOKENS == 8192


def test_rows_are_the_union_of_the_masks_aligned_to_the_label():
    #          a b c d | e f g h
    scored = ["00110000", "00010100", "00001000"]
    masks = [torch.tensor([c == "1" for c in m]) for m in scored]
    cu = torch.tensor([0, 4, 8])
    assert loss_rows(masks, cu_seqlens=cu).nonzero().flatten().tolist() == [1, 2, 4]
    assert loss_rows(masks[:1]).nonzero().flatten().tolist() == [1, 2]
    plan = plan_rows(loss_rows(masks, cu_seqlens=cu), cu_seqlens=cu)
    assert plan.keep.tolist() == [1, 2, 4]
    assert (plan.num_tokens, plan.longest, plan.fraction) == (8, 4, 3 / 8)
    assert [(s.k_lo, s.k_hi) for s in plan.documents] == [(0, 4), (4, 8)]
    with pytest.raises(ValueError, match="no loss mask"):
        loss_rows([])
    with pytest.raises(ValueError, match=r"\[7, 8\] tokens"):
        loss_rows([masks[0], masks[1][:7]])


def test_segments_show_every_kept_row_its_document_up_to_itself():
    stream = make_stream(["0100110001", "0", "00000000", "1111", "010101010101"])
    plan = plan_rows(stream.kept(), cu_seqlens=stream.cu)
    start = torch.repeat_interleave(stream.cu[:-1], stream.cu.diff())
    done = 0
    for segment in plan.segments:
        rows = plan.keep[segment.q0 : segment.q1]
        assert segment.q0 == done
        done = segment.q1
        for r, row in enumerate(rows.tolist()):
            mask = segment.mask
            local = range(segment.k_mid, segment.k_hi)
            if mask is None:
                seen = [k for k in local if k <= row]
            else:
                seen = [k for j, k in enumerate(local) if mask[r, j]]
            seen = [*range(segment.k_lo, segment.k_mid), *seen]
            assert seen == list(range(int(start[row]), row + 1))
    assert done == plan.num_kept


def test_a_linear_head_module_is_what_the_weight_stands_for():
    layer = nn.Linear(D, V).double()
    hidden, _, _, labels = make_head()
    keep = torch.tensor(KEEPS["some"])
    rows = kept_log_probs(hidden, layer.weight, labels, keep, bias=layer.bias)
    expected = -nn.functional.cross_entropy(layer(hidden)[keep], labels[keep], reduction="none")
    assert_near(rows.log_probs[keep], expected, 1e-12, "log_probs")
