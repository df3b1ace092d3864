"""Faults seen in other trainers' unrolls, each as a small input with the right value.

Catches: training that differs from drafting (a shifted mask, positions that do not advance, an
un-normed state fed back), backends that disagree from step 2, masks that are ignored, documents
that leak into each other, a step that forgets its earlier keys.
"""

import pytest
import torch
from ttt_case import make_batch, make_case, make_pack, run_step

from specforge_trim.drafts.eagle3 import step as stages
from specforge_trim.drafts.eagle3.proposer import CachedDraft

MASK = [0, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 0]


@pytest.fixture
def logits_of_steps(monkeypatch):
    """Record the logits [n, Vd] of every step's loss rows, in order of the calls."""
    seen = []
    real = stages.linear_loss

    def record(hidden, weight, *args, **kwargs):
        seen.append((hidden @ weight.to(hidden.dtype).T).detach())
        return real(hidden, weight, *args, **kwargs)

    monkeypatch.setattr(stages, "linear_loss", record)
    return seen


@pytest.mark.parametrize("eagle31", [False, True], ids=["eagle3", "eagle3.1"])
def test_step_k_is_drafting_at_depth_k(logits_of_steps, eagle31):
    """The unroll's logits equal those of a draft with a cache that is fed token by token."""
    case = make_case([MASK], steps=5, eagle31=eagle31, seed=2)
    pack = make_pack(case)
    run_step(case, make_batch(case, pack))
    doc = case.docs[0]
    for i, step in enumerate(pack.steps):
        for n, t in enumerate(step.loss_rows.tolist()):
            draft = CachedDraft(case.model)
            draft.extend(doc.aux[: t + 1], doc.ids[1 : t + 2])
            for token in doc.ids[t + 2 : t + 2 + i]:
                draft.feed(token)
            error = float((draft.logits() - logits_of_steps[i][n]).abs().max())
            assert error < 1e-10, f"step {i}, row {t}: {error:.1e}"


def test_packed_equals_one_document_at_a_time():
    masks = [MASK, [0, 1, 1, 0], [1] * 9]
    case = make_case(masks, seed=3)
    total = float(case.cu_seqlens[-1])
    denominators = torch.full((case.steps,), total)
    together, grads = run_step(case, make_batch(case, make_pack(case)))
    docs, losses = case.docs, 0
    added = {name: torch.zeros_like(grad) for name, grad in grads.items()}
    for doc in docs:
        case.docs = [doc]
        result, own = run_step(case, make_batch(case, make_pack(case)), denominators=denominators)
        losses = losses + result.loss
        for name, grad in own.items():
            added[name] += grad
    torch.testing.assert_close(together.loss, losses, rtol=1e-12, atol=0)
    for name, grad in grads.items():
        error = float((grad - added[name]).abs().max() / grad.abs().max().clamp(min=1e-9))
        assert error < 1e-10, f"{name}: {error:.1e}"


def test_backends_agree_in_fp32_over_four_steps():
    case = make_case([MASK, MASK[3:]], heads=6, kv_heads=2, seed=4)
    case.model.float()
    batch = make_batch(case, make_pack(case), dtype=torch.float32)
    sdpa, sdpa_grads = run_step(case, batch, dtype=torch.float32)
    reference, grads = run_step(case, batch, dtype=torch.float32, backend="reference")
    # fp32 sums over a dozen keys: a few units in the last place.
    torch.testing.assert_close(sdpa.loss, reference.loss, rtol=1e-5, atol=0)
    for name, grad in grads.items():
        error = float((sdpa_grads[name] - grad).abs().max() / grad.abs().max())
        assert error < 1e-4, f"{name}: {error:.1e}"


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_tokens_outside_the_mask_change_nothing(backend):
    """Another document, and tokens after the last row that matters, may be anything."""
    masks = [[0, 1, 0, 0], [0, 0, 1, 0, 0, 0, 0, 0]]
    case = make_case(masks, draft_vocab=32, seed=5)  # every teacher is in the vocabulary
    second = slice(4, 12)
    pack = make_pack(case)
    before, _ = run_step(case, make_batch(case, pack), backend=backend)
    # Supervised row 2 of the second document reads tokens up to 2 + 1, and the last hidden of 3.
    case.docs[1].aux[3:] = 1e3
    case.docs[1].ids[4:] = [1] * 4
    after, _ = run_step(case, make_batch(case, pack), backend=backend)
    assert torch.equal(before.loss, after.loss)
    case.docs[0].row_mask = [0] * 4  # now only the second document emits loss
    pack = make_pack(case)
    alone, _ = run_step(case, make_batch(case, pack), backend=backend)
    case.docs[0].aux[:] = 1e3
    case.docs[0].ids[:] = [1] * 4
    moved, _ = run_step(case, make_batch(case, pack), backend=backend)
    assert torch.equal(alone.loss, moved.loss)
    assert pack.steps[0].rows.min() >= second.start
    # The control: a token that a kept row does attend to.
    case.docs[1].aux[0] += 1.0
    changed, _ = run_step(case, make_batch(case, pack), backend=backend)
    assert not torch.equal(changed.loss, moved.loss)


def test_step_k_sees_k_keys_of_its_own(monkeypatch):
    seen = []
    real = stages.row_attention

    def count(q, context, step, *, keys, values):
        seen.append((len(keys), [len(k) for k in keys][-1:], q.shape[0]))
        return real(q, context, step, keys=keys, values=values)

    monkeypatch.setattr(stages, "row_attention", count)
    case = make_case([MASK], steps=4)
    run_step(case, make_batch(case, make_pack(case)))
    assert [n for n, _, _ in seen] == [0, 1, 2, 3]
    assert all(not own or own == [rows] for _, own, rows in seen)


def test_no_supervised_row_gives_every_parameter_a_zero_gradient():
    case = make_case([[0] * 8])
    result, grads = run_step(case, make_batch(case, make_pack(case)))
    assert set(grads) == {n for n, p in case.model.named_parameters() if p.requires_grad}
    assert all(bool((g == 0).all()) for g in grads.values())
    assert float(result.loss.sum()) == 0.0
