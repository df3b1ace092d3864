"""Metrics of a table of eight loss rows, and what denominators and accumulation may change.

The draft is rigged: attention and MLP add nothing, so row t says the same distribution at every
step, chosen by a symbol of the table; so does the target.  Expected values are worked out by hand.

Catches: a metric divided on each rank instead of after the sum, rows whose target choice lies
outside the draft vocabulary left out of a count, conditional accuracy over rows that an earlier
step missed or did not ask, a logged loss that changes with the denominator of the gradient,
micro-batches that each divide by their own rows.
"""

import math
import os
import socket
from dataclasses import dataclass

import pytest
import torch
import torch.multiprocessing as mp
import ttt_case

from specforge_trim.drafts.eagle3.batch import PlanSettings, make_batch
from specforge_trim.drafts.eagle3.model import Eagle3Draft, row_only_parameters
from specforge_trim.drafts.eagle3.sizes import DraftConfig
from specforge_trim.drafts.eagle3.step import StepSettings, ttt_step
from specforge_trim.loss.teacher import Teacher
from specforge_trim.ranks import world as distributed
from specforge_trim.ranks.gradients import Replicated
from specforge_trim.ranks.world import World
from specforge_trim.train import loop
from specforge_trim.train.metrics import count_step, metrics_row

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
KEPT = [1, 2, 4]  # the draft vocabulary; the target has tokens 0..5
DRAFT = {  # probabilities of tokens 1, 2, 4
    "A": [0.5, 0.25, 0.25],
    "B": [0.25, 0.5, 0.25],
    "C": [0.125, 0.125, 0.75],
}
TARGET = {  # probabilities of tokens 0..5; the choices are 1, 2 and, outside, 0
    "P": [0.05, 0.5, 0.2, 0.05, 0.15, 0.05],
    "Q": [0.05, 0.1, 0.6, 0.1, 0.1, 0.05],
    "O": [0.6, 0.1, 0.1, 0.05, 0.1, 0.05],
}
# Draft symbols of the rows, target symbols at the supervised tokens: the last ones of a document.
TABLE = [("ABACA", "PPP"), ("CBBB", "QO"), ("BCBAB", "QQO"), ("ABA", "")]


@dataclass(frozen=True)
class Rigged:
    """A document as tokens and as stored features."""

    rows: list[list[float]]  # aux state of every token
    states: list[list[float]]  # the target's last state at supervised tokens
    doc_id: str = "rigged"

    @property
    def num_tokens(self):
        return len(self.rows)

    @property
    def input_ids(self):
        return torch.zeros(self.num_tokens, dtype=torch.int64)

    @property
    def last_positions(self):
        return torch.arange(self.num_tokens - len(self.states), self.num_tokens)

    @property
    def loss_mask(self):
        return torch.arange(self.num_tokens) >= self.num_tokens - len(self.states)

    def aux(self, lo, hi):
        own = torch.tensor(self.rows[lo:hi], dtype=torch.float64)
        return torch.nn.functional.pad(own, (0, 2 * own.shape[1]))

    def last(self):
        width = len(self.rows[0])
        return torch.tensor(self.states, dtype=torch.float64).view(-1, width)


def one_hot(index, width):
    return [float(index == i) for i in range(width)]


def rigged_document(symbols, targets):
    """One token more than rows: the last token has no teacher."""
    rows = [one_hot("ABC".index(s), 4) for s in symbols] + [one_hot(3, 4)]
    return Rigged(rows, [one_hot("PQO".index(s), 4) for s in targets])


def rigged_model(logits, kept, vocab, head, width):
    """A draft whose row with state e_k has the logits[k], and the teacher with its head."""
    config = DraftConfig(
        hidden_size=width,
        intermediate_size=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=2,
        vocab_size=vocab,
        draft_vocab_size=len(kept),
        target_hidden_size=width,
        max_position_embeddings=64,
        rms_norm_eps=1e-12,
    )
    model = Eagle3Draft(config).double()
    with torch.no_grad():
        model.midlayer.self_attn.o_proj.weight.zero_()
        model.midlayer.mlp.down_proj.weight.zero_()
        model.fc.weight.copy_(torch.eye(width, 3 * width))
        # The final norm turns e_k into sqrt(width) e_k.
        model.lm_head.weight.copy_(logits.T / width**0.5)
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[kept] = True
    model.set_vocab(torch.tensor(kept) - torch.arange(len(kept)), t2d)
    return model, Teacher(head, model.draft_to_target, model.t2d)


def table_model():
    logits, head = torch.zeros(4, 3).double(), torch.zeros(6, 4).double()
    for k, symbol in enumerate("ABC"):
        logits[k] = torch.tensor(DRAFT[symbol], dtype=torch.float64).log()
    for k, symbol in enumerate("PQO"):
        head[:, k] = torch.tensor(TARGET[symbol], dtype=torch.float64).log()
    return rigged_model(logits, KEPT, 6, head, 4)


def logged(world, model, teacher, batches, *, steps, kind="rows"):
    """The metrics row of one optimizer step, gradients summed into the model."""
    counts = count_step(batches, ttt_length=steps, world=world)
    denominators = loop._denominators(counts, kind)
    settings = StepSettings(compute_dtype=torch.float64)
    reducer = Replicated(model, world, early=row_only_parameters(model))
    reducer.begin()
    results = [
        ttt_step(model, batch, teacher=teacher, denominators=denominators, settings=settings)
        for batch in batches
    ]
    reducer.rows_done()
    reducer.finish()
    return metrics_row(loop._sum_results(results, steps, world), counts, decay=0.8)


def rigged_batches(documents, **settings):
    plan = PlanSettings(ttt_length=3, alignment="teacher", **settings)
    return [make_batch([d], [d], plan) for d in documents]


def check_table(row):
    """By hand, rows as document:row.

    step 0  a2 AP .85 right, a3 CP .4, a4 AP .85 right | b2 BQ .7 right, b3 BO .3 |
            c2 BQ .7 right, c3 AQ .45, c4 BO .3
    step 1  a1 BP .6, a2 AP .85 right, a3 CP .4 | b1 BQ .7 right, b2 BO .3 |
            c1 CQ .325, c2 BQ .7 right, c3 AO .3;   reached: a2, b2, c2
    step 2  a0 AP .85 right, a1 BP .6, a2 AP .85 right | b0 CQ .325, b1 BO .3 |
            c0 BQ .7 right, c1 CQ .325, c2 BO .3;   reached: a2, c2
    """
    close = {"rel": 1e-9}
    assert row["loss_rows"] == 24 and row["rows"] == 6 + 5 + 6 + 4
    expected = {
        "accuracy": [4 / 8, 3 / 8, 3 / 8],
        "conditional_accuracy": [4 / 8, 2 / 3, 1 / 2],
        "acceptance": [4.55 / 8, 4.175 / 8, 4.25 / 8],
        "acceptance_in_vocab": [3.95 / 6, 3.575 / 6, 3.65 / 6],
    }
    for name, values in expected.items():
        assert [row[f"{name}/{i}"] for i in range(3)] == pytest.approx(values, **close), name
    a, b, c = expected["acceptance"]
    assert row["acceptance_length"] == pytest.approx(1 + a + a * b + a * b * c, **close)

    def entropy(draft, target):
        kept = [TARGET[target][v] for v in KEPT]
        return -sum(p / sum(kept) * math.log(q) for p, q in zip(kept, DRAFT[draft], strict=True))

    pairs = ["AP CP AP BQ BQ AQ", "BP AP CP BQ CQ BQ", "AP BP AP CQ BQ CQ"]
    loss = [sum(entropy(*pair) for pair in step.split()) / 8 for step in pairs]
    assert [row[f"loss/{i}"] for i in range(3)] == pytest.approx(loss, **close)
    assert row["loss"] == pytest.approx(loss[0] + 0.8 * loss[1] + 0.64 * loss[2], **close)


TRIM = {"trim_loss_positions": True, "trim_backbone_rows": True}


@pytest.mark.parametrize("chunk_rows", [1, 3, 100])
@pytest.mark.parametrize("settings", [{}, TRIM], ids=["no trimming", "both"])
@pytest.mark.parametrize("kind", ["rows", "supervised"])
def test_table_of_eight_rows(settings, kind, chunk_rows):
    documents = [rigged_document(*line) for line in TABLE]
    model, teacher = table_model()
    together = make_batch(
        documents,
        documents,
        PlanSettings(ttt_length=3, alignment="teacher", chunk_rows=chunk_rows, **settings),
    )
    check_table(logged(ALONE, model, teacher, [together], steps=3, kind=kind))
    apart = rigged_batches(documents, chunk_rows=chunk_rows, **settings)
    check_table(logged(ALONE, model, teacher, apart, steps=3, kind=kind))


def test_chain_run_reaches_the_same_rows_as_chain_shift():
    """Rows that emit a loss at all earlier steps are rows of the run chain, so 0..i agree."""
    documents = [rigged_document(*line) for line in TABLE]
    model, teacher = table_model()
    batches = rigged_batches(documents, chain="run", **TRIM)
    row = logged(ALONE, model, teacher, batches, steps=3)
    # Loss rows of step 1: a2, a3, b2, c2, c3; of step 2: a2, c2.
    assert row["loss_rows"] == 8 + 5 + 2
    assert [row[f"accuracy/{i}"] for i in range(3)] == [4 / 8, 2 / 5, 1 / 2]
    assert [row[f"conditional_accuracy/{i}"] for i in range(3)] == [4 / 8, 2 / 3, 1 / 2]


def perfect_half():
    """Eight rows whose teacher chooses tokens 0, 2, .., 14; a perfect draft that knows half."""
    kept = [0, 4, 8, 12, 1, 3, 5, 7]
    kept = sorted(kept)
    logits = torch.zeros(16, 8).double()
    for draft_id, token in enumerate(kept):
        logits[token, draft_id] = 50.0
    model, teacher = rigged_model(logits, kept, 16, 50.0 * torch.eye(16).double(), 16)
    documents = [
        Rigged(
            [one_hot(2 * n, 16), one_hot(2 * n + 2, 16), one_hot(15, 16)],
            [one_hot(2 * n, 16), one_hot(2 * n + 2, 16)],
        )
        for n in range(0, 8, 2)
    ]
    plan = PlanSettings(ttt_length=1, alignment="teacher", **TRIM)
    return model, teacher, [make_batch([d], [d], plan) for d in documents]


def check_perfect_half(row):
    assert row["loss_rows"] == 8
    assert row["accuracy/0"] == row["conditional_accuracy/0"] == 0.5
    assert row["acceptance_in_vocab/0"] == pytest.approx(1.0, abs=1e-9)
    assert row["acceptance/0"] == pytest.approx(0.5, abs=1e-9)
    assert row["acceptance_length"] == pytest.approx(1.5, abs=1e-9)


def test_perfect_draft_that_cannot_say_half_of_the_words_is_half_right():
    model, teacher, batches = perfect_half()
    check_perfect_half(logged(ALONE, model, teacher, batches, steps=1))


# ---------------------------------------------------------------------- ranks


MASKS = [
    [0, 0, 1, 1, 0, 0, 1],
    [0, 1, 1, 1, 1, 0],
    [0, 0, 0, 0, 0],
    [0, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1],
]


def micro_batches(case, groups):
    """Batches of groups of a case's documents, with what the loop reads of a batch."""
    batches, docs = [], case.docs
    for numbers in groups:
        case.docs = [docs[n] for n in numbers]
        pack = ttt_case.make_pack(case)
        batch = ttt_case.make_batch(case, pack)
        batch.num_rows = int(case.cu_seqlens[-1])
        batch.num_loss_rows = tuple(step.num_loss_rows for step in pack.steps)
        batch.cost = None
        batches.append(batch)
    case.docs = docs
    return batches


def gradients(case, world, groups, kind):
    case.model.zero_grad(set_to_none=True)
    batches = micro_batches(case, groups)
    row = logged(world, case.model, case.teacher, batches, steps=case.steps, kind=kind)
    return row, {n: p.grad.clone() for n, p in case.model.named_parameters() if p.requires_grad}


def check_accumulation(world, groups, kind):
    case = ttt_case.make_case(MASKS, steps=4, seed=5)
    whole, wanted = gradients(case, ALONE, [range(4)], kind)
    row, found = gradients(case, world, groups, kind)
    assert row["loss"] == pytest.approx(whole["loss"], rel=1e-10)
    for name, grad in wanted.items():
        error = float((found[name] - grad).abs().max() / grad.abs().max())
        assert error < 1e-10, f"{kind}, {name}: {error:.1e}"


@pytest.mark.parametrize("kind", ["rows", "supervised"])
def test_four_micro_batches_equal_one_batch_of_all(kind):
    check_accumulation(ALONE, [[0], [1], [2], [3]], kind)


def test_the_denominator_scales_the_gradient_and_not_the_log():
    case = ttt_case.make_case(MASKS, steps=1, seed=5)
    rows, by_rows = gradients(case, ALONE, [range(4)], "rows")
    supervised, by_supervised = gradients(case, ALONE, [range(4)], "supervised")
    assert rows == supervised
    count = rows["loss_rows"]
    assert 0 < count < rows["rows"]
    for name, grad in by_rows.items():
        torch.testing.assert_close(by_supervised[name], grad * (rows["rows"] / count))


def rank_main(rank, port):
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    world = distributed.start(device="cpu", timeout_minutes=1)
    model, teacher = table_model()
    own = rigged_batches([rigged_document(*TABLE[rank])], **TRIM)
    check_table(logged(world, model, teacher, own, steps=3))
    model, teacher, batches = perfect_half()
    check_perfect_half(logged(world, model, teacher, batches[rank : rank + 1], steps=1))
    for kind in ("rows", "supervised"):
        check_accumulation(world, [[rank]], kind)
        # All documents on one rank: the others have no batch at all.
        check_accumulation(world, [[0, 1], [2], [3]] if rank == 2 else [], kind)
    distributed.stop(world)


def test_four_ranks_log_and_train_as_one():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    mp.spawn(rank_main, args=(port,), nprocs=4)


# ---------------------------------------------------------------------- steps without rows


def test_rows_outside_the_vocabulary_alone_give_zero_loss_and_zero_gradient():
    """They count: accuracy is 0 of 2, not undefined; acceptance still sees the draft."""
    model, teacher = table_model()
    batches = rigged_batches([rigged_document("ABAB", "OO")], **TRIM)
    row = logged(ALONE, model, teacher, batches, steps=3)
    assert row["loss_rows"] == 6
    assert row["loss"] == row["loss/0"] == row["accuracy/0"] == row["conditional_accuracy/0"] == 0
    assert row["acceptance/0"] == pytest.approx(0.3)
    assert row["acceptance_in_vocab/0"] is None
    assert row["conditional_accuracy/1"] is None  # no row was right before
    grads = [p.grad for p in model.parameters() if p.requires_grad]
    assert len(grads) > 5 and not any(bool(g.any()) for g in grads)


def test_a_batch_without_loss_rows_has_null_metrics_and_gradients_of_zero():
    model, teacher = table_model()
    row = logged(ALONE, model, teacher, rigged_batches([rigged_document("ABA", "")]), steps=3)
    for name in ("loss", "acceptance_length", "accuracy/0", "conditional_accuracy/2", "loss/1"):
        assert row[name] is None, name
    assert row["loss_rows"] == 0
    assert all(not p.grad.any() for p in model.parameters() if p.requires_grad)
