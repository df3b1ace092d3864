"""stop_grad_context_tokens on the EAGLE step, against the oracle cut at g^0 outside R_0.

Catches: keys and values cut as well, fc that still learns from context rows, a cut that follows
the guard or the trim flags instead of the rows that reach a loss, a gradient of kept rows lost
where a chunk holds both kinds, a changed forward, lower layers cut.
"""

from types import SimpleNamespace

import pytest
import torch
from oracle import oracle, unroll_document
from ranks import own_part, run_world
from test_stages_oracle import assert_equal
from test_stages_sync import Trap
from ttt_case import make_batch, make_case, make_pack, oracle_model, run_step

from specforge_trim.drafts.eagle3.batch import PlanSettings
from specforge_trim.drafts.eagle3.batch import make_batch as plan_batch
from specforge_trim.drafts.eagle3.model import row_only_parameters
from specforge_trim.drafts.eagle3.step import StepSettings, ttt_step
from specforge_trim.plan.shard import SequenceSplit
from specforge_trim.ranks.gradients import Replicated
from specforge_trim.ranks.layout import make_layout

MASKS = {
    "blocks": [[0, 0, 0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]],
    "documents": [[0, 0, 0, 0, 0, 0, 1, 1, 0], [0] * 4, [0, 0, 0, 0, 0, 0, 0, 1, 1, 0], [1] * 5],
    "all": [[1] * 8],
}


def reaching(masks, steps):
    """Per document {s - j}, and the same as positions of the stream: R_0, from its definition."""
    sets = []
    for mask in masks:
        supervised = [s for s, m in enumerate(mask[:-1]) if m]  # the last has no teacher
        sets.append({s - j for s in supervised for j in range(steps) if s >= j})
    starts = [sum(len(m) for m in masks[:n]) for n in range(len(masks))]
    flat = sorted(a + t for a, rows in zip(starts, sets, strict=True) for t in rows)
    return sets, torch.tensor(flat, dtype=torch.int64)


def cut_oracle(case, sets):
    model = oracle_model(case)
    unrolled = [
        unroll_document(model, doc, case.steps, learning=rows)
        for doc, rows in zip(case.docs, sets, strict=True)
    ]
    expected = oracle(model, case.docs, steps=case.steps, unrolled=unrolled)
    expected.total.backward()
    return model, expected


@pytest.mark.parametrize(
    "layers, backend",
    [
        (1, "sdpa"), (2, "sdpa"), (1, "reference"),
        pytest.param(3, "sdpa", marks=pytest.mark.slow),
        pytest.param(2, "reference", marks=pytest.mark.slow),
    ],
)  # fmt: skip
@pytest.mark.parametrize("eagle31", [False, True], ids=["eagle3", "eagle3.1"])
@pytest.mark.parametrize("name", MASKS)
def test_every_gradient_equals_the_oracle_cut_at_g0(name, eagle31, layers, backend):
    case = make_case(MASKS[name], eagle31=eagle31, layers=layers, steps=3)
    sets, rows = reaching(MASKS[name], 3)
    model, expected = cut_oracle(case, sets)
    for dense in (False, True):  # the cut does not follow what trimming runs
        pack = make_pack(case, dense=dense)
        for chunk in (4, 4096):
            batch = make_batch(case, pack, chunk_rows=5, grad_rows=rows)
            assert_equal(
                case, pack, batch, expected, model.params, backend=backend, context_chunk=chunk
            )


def test_the_cut_changes_fc_and_not_the_losses():
    case = make_case(MASKS["documents"], eagle31=True)
    _, rows = reaching(MASKS["documents"], case.steps)
    pack = make_pack(case)
    whole, grads = run_step(case, make_batch(case, pack))
    cut, cut_grads = run_step(case, make_batch(case, pack, grad_rows=rows))
    assert torch.equal(whole.loss, cut.loss) and torch.equal(whole.accept, cut.accept)
    changed = {n for n in grads if float((grads[n] - cut_grads[n]).abs().max()) > 1e-9}
    assert changed == {"fc.weight", "fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"}


@pytest.mark.parametrize("layers", [1, 2])
def test_no_question_in_a_step(layers):
    case = make_case(MASKS["documents"], layers=layers)
    _, rows = reaching(MASKS["documents"], case.steps)
    batch = make_batch(case, make_pack(case), chunk_rows=5, grad_rows=rows)
    settings = StepSettings(compute_dtype=torch.float64, context_chunk=5)
    teacher, denominators = case.teacher, torch.full((case.steps,), 24.0)
    with Trap():
        ttt_step(case.model, batch, teacher=teacher, denominators=denominators, settings=settings)


@pytest.mark.parametrize("trim", [True, False])
def test_the_plan_names_the_rows_whatever_is_trimmed(trim):
    def stored(length):
        states = torch.zeros(length, 4)
        return SimpleNamespace(
            num_tokens=length, last_positions=torch.arange(length), last=lambda: states
        )

    masks = [[0, 0, 0, 0, 0, 0, 1, 1, 0, 0], [0, 0, 0], [1, 1, 1, 1]]
    documents = [
        SimpleNamespace(
            input_ids=torch.arange(len(m)), loss_mask=torch.tensor(m).bool(), doc_id="d"
        )
        for m in masks
    ]
    settings = PlanSettings(
        ttt_length=3, alignment="token", trim_loss_positions=True, trim_backbone_rows=trim,
        max_density=0.5, stop_grad=True,
    )  # fmt: skip
    batch = plan_batch(documents, [stored(len(m)) for m in masks], settings)
    _, rows = reaching(masks, 3)
    assert batch.grad_rows.tolist() == rows.tolist() == [4, 5, 6, 7, 13, 14, 15]
    off = PlanSettings(ttt_length=3, trim_loss_positions=True)
    assert plan_batch(documents, [stored(len(m)) for m in masks], off).grad_rows is None
    nothing = documents[1:2]
    assert plan_batch(nothing, [stored(3)], settings).grad_rows.tolist() == []


def shared(world):
    """Two ranks that share the sequence against one that has it alone."""
    for layers in (1, 2):
        case = make_case(MASKS["documents"], layers=layers, heads=4, kv_heads=2)
        _, rows = reaching(MASKS["documents"], case.steps)
        _, expected = run_step(case, make_batch(case, make_pack(case), grad_rows=rows))
        layout = make_layout(world, ulysses=2, ring=1, splits_context=False)
        split = SequenceSplit(rank=world.rank, size=2, rows="dealt", gathered=True, ulysses=2)
        batch = own_part(case, make_pack(case), split, chunk_rows=5, grad_rows=rows)
        case.model.zero_grad(set_to_none=True)
        reducer = Replicated(case.model, world, early=row_only_parameters(case.model))
        reducer.begin()
        total = float(case.cu_seqlens[-1])
        ttt_step(
            case.model, batch, teacher=case.teacher,
            denominators=torch.full((case.steps,), total), layout=layout,
            settings=StepSettings(compute_dtype=torch.float64, context_chunk=5),
            after_rows=reducer.rows_done,
        )  # fmt: skip
        reducer.finish()
        for name, p in case.model.named_parameters():
            if p.requires_grad:
                gap = float((p.grad - expected[name]).abs().max())
                assert gap <= 1e-10, f"{name}: {gap:.2e}"


def test_ranks_that_share_a_sequence_cut_the_same_rows(tmp_path):
    run_world(2, shared, tmp_path)
