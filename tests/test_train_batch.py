"""Batches: which rank sees what, and what is handed to the training step.

Catches: a document seen twice or never in an epoch, ranks with different numbers of steps, another
order after a resume, positions that run on across documents, a teacher one token off, features of
other data taken without a word, zero loader workers that crash, weights that forget the loss mask
when nothing is trimmed.
"""

from dataclasses import dataclass

import pytest
import torch

from specforge_trim.drafts.eagle3.batch import PlanSettings, make_batch
from specforge_trim.plan.cost import DraftDims
from specforge_trim.train.loader import BatchLoader
from specforge_trim.train.sampler import Schedule

DT, AUX = 2, 6


@dataclass(frozen=True)
class Tokens:
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    doc_id: str
    source: str = "data.jsonl:1"


@dataclass(frozen=True)
class Stored:
    """Features whose values say which document and token they belong to."""

    number: int
    length: int
    mask: torch.Tensor

    @property
    def num_tokens(self):
        return self.length

    @property
    def last_positions(self):
        before = torch.cat([torch.zeros(1, dtype=torch.bool), self.mask[:-1]])
        return (self.mask | before).nonzero().squeeze(1)

    def aux(self, lo, hi):
        return (100.0 * self.number + torch.arange(lo, hi).float())[:, None].expand(-1, AUX)

    def last(self):
        return (100.0 * self.number + self.last_positions.float())[:, None].expand(-1, DT)

    def check(self):
        pass


class Fake:
    """Document n has lengths[n] tokens, of which the last `supervised` carry loss."""

    def __init__(self, lengths, supervised=3):
        self.lengths = tuple(lengths)
        self._supervised = supervised

    def tokens(self, number):
        length = self.lengths[number]
        mask = torch.arange(length) >= length - self._supervised
        return Tokens(1000 * number + torch.arange(length), mask, f"doc{number}")

    def features(self, number):
        return Stored(number, self.lengths[number], self.tokens(number).loss_mask)

    def batch(self, numbers, **settings):
        return make_batch(
            [self.tokens(n) for n in numbers],
            [self.features(n) for n in numbers],
            PlanSettings(ttt_length=3, **settings),
        )


BOTH = {"trim_loss_positions": True, "trim_backbone_rows": True}


def schedule(lengths, **kwargs):
    settings = {"tokens_per_batch": 20, "seed": 1, "epochs": 2, **kwargs}
    return Schedule(lengths=tuple(lengths), **settings)


def seen(plan, world_size, accumulate):
    """Micro-batches of every step in rank order, as lists of document numbers."""
    return [
        [
            plan.micro_batch(step, rank=rank, index=index)
            for rank in range(world_size)
            for index in range(accumulate)
        ]
        for step in range(plan.total_steps)
    ]


def test_train_every_document_once_per_epoch_within_the_budget():
    lengths = [3 + (7 * i) % 11 for i in range(50)]
    plan = schedule(lengths, world_size=4, epochs=2)
    steps = seen(plan, 4, 1)
    for epoch in (0, 1):
        own = [s for i, s in enumerate(steps) if plan.epoch_of(i) == epoch]
        numbers = [n for step in own for batch in step for n in batch]
        assert sorted(numbers) == list(range(50))
        for step in own:
            assert all(sum(lengths[n] for n in batch) <= 20 for batch in step)
        # Only the last step of an epoch may leave a rank without documents.
        assert all(batch for step in own[:-1] for batch in step)
    order = [[b for i, s in enumerate(steps) if plan.epoch_of(i) == e for b in s] for e in (0, 1)]
    assert order[0] != order[1]


def test_train_a_long_document_is_a_batch_alone():
    plan = schedule([30, 5, 5], epochs=1)
    batches = [batch for step in seen(plan, 1, 1) for batch in step]
    assert (0,) in batches
    assert sorted(n for b in batches for n in b) == [0, 1, 2]


def test_train_order_is_a_function_of_the_seed():
    lengths = [5] * 40
    assert seen(schedule(lengths), 1, 1) == seen(schedule(lengths), 1, 1)
    assert seen(schedule(lengths), 1, 1) != seen(schedule(lengths, seed=2), 1, 1)


def test_train_accumulation_sees_the_batches_of_as_many_ranks():
    lengths = [3 + i % 9 for i in range(41)]
    ranks = seen(schedule(lengths, world_size=3), 3, 1)
    alone = seen(schedule(lengths, accumulate=3), 1, 3)
    assert ranks == alone


def test_train_max_steps_ends_early():
    lengths = [5] * 40
    short = schedule(lengths, max_steps=3)
    assert short.total_steps == 3
    assert seen(short, 1, 1) == seen(schedule(lengths), 1, 1)[:3]


def test_train_batch_lays_documents_end_to_end():
    batch = Fake([5, 4]).batch([1, 0], **BOTH)
    assert batch.input_ids.tolist() == [1000, 1001, 1002, 1003, 0, 1, 2, 3, 4]
    assert batch.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 4]
    assert batch.doc_end.tolist() == [4] * 4 + [9] * 5
    assert batch.cu_seqlens.tolist() == [0, 4, 9]
    assert batch.num_rows == 9
    assert batch.doc_ids == ("doc1", "doc0")
    # served: m[t] = mask[t+1] and mask[t+2]: rows 0, 1 of doc1 (4 tokens), 1, 2 of doc0.
    assert batch.pack.supervised.tolist() == [0, 1, 5, 6]
    # K = 3 steps of chain shift: loss rows of step i are m shifted left by i inside the document.
    assert [s.loss_rows.tolist() for s in batch.pack.steps] == [[0, 1, 5, 6], [0, 4, 5], [4]]
    assert batch.num_loss_rows == (4, 3, 1)
    assert batch.loss_weights is None


def test_train_teacher_of_row_s_is_the_state_at_token_s_plus_1():
    batch = Fake([5, 4]).batch([1, 0], **BOTH)
    # Rows 0, 1 of doc1 -> its tokens 1, 2; rows 5, 6 = rows 1, 2 of doc0 -> its tokens 2, 3.
    assert batch.teacher_hidden[:, 0].tolist() == [101, 102, 2, 3]


@pytest.mark.parametrize("alignment", ["served", "teacher", "token"])
def test_train_stored_states_suffice_for_every_alignment(alignment):
    batch = Fake([7, 9]).batch([0, 1], alignment=alignment, **BOTH)
    tokens = batch.pack.supervised + 1
    expected = tokens + torch.where(tokens >= 7, 100 - 7, 0)
    assert batch.teacher_hidden[:, 0].tolist() == expected.tolist()


def test_train_aux_windows_cross_documents():
    batch = Fake([5, 4]).batch([1, 0], **BOTH)
    assert batch.aux(0, 9)[:, 0].tolist() == [100, 101, 102, 103, 0, 1, 2, 3, 4]
    assert batch.aux(3, 6)[:, 0].tolist() == [103, 0, 1]
    assert batch.aux(6, 7).shape == (1, AUX)


def test_train_without_trimming_weights_are_the_loss_mask():
    fake = Fake([6, 5])
    plain, loss_only = fake.batch([0, 1]), fake.batch([0, 1], trim_loss_positions=True)
    assert plain.num_loss_rows == loss_only.num_loss_rows
    for i, (every, counting) in enumerate(
        zip(plain.pack.steps, loss_only.pack.steps, strict=True)
    ):
        assert every.rows.tolist() == counting.rows.tolist() == list(range(11))
        # Every row with a teacher at t+i: inside the document, its last position excluded.
        teachers = [t for t in range(6) if t + i < 5] + [t for t in range(6, 11) if t + i < 10]
        assert every.loss_rows.tolist() == teachers
        weights = plain.loss_weights[i]
        assert every.loss_rows[weights == 1].tolist() == counting.loss_rows.tolist()
        assert set(weights.tolist()) <= {0.0, 1.0}
    with_weight = torch.zeros(11, dtype=torch.bool)
    with_weight[loss_only.pack.supervised] = True
    kept = with_weight[plain.pack.supervised]
    assert torch.equal(plain.teacher_hidden[kept], loss_only.teacher_hidden)


def test_train_dense_conversations_keep_all_rows():
    # doc0: 4 supervised of 40 rows; doc1: 10 of 12.
    fake = Fake([40, 12], supervised=11)
    batch = fake.batch([0, 1], max_density=0.35, **BOTH)
    rows = batch.pack.steps[1].rows
    assert (rows < 40).sum() < 20 and (rows >= 40).sum() == 12


def test_train_cost_is_reported_where_dims_are_known():
    dims = DraftDims(
        hidden=8, heads=2, kv_heads=1, head_dim=4, intermediate=16, draft_vocab=10, aux_width=24
    )
    assert Fake([40]).batch([0], **BOTH).cost is None
    assert 0 < Fake([40]).batch([0], dims=dims, **BOTH).cost.fraction < 0.5
    assert Fake([40]).batch([0], dims=dims, trim_loss_positions=True).cost.fraction == 1.0


def test_train_features_of_other_data_are_refused():
    fake = Fake([5, 6])
    with pytest.raises(ValueError, match="doc0.*6 tokens.*has 5.*other data"):
        make_batch([fake.tokens(0)], [fake.features(1)], PlanSettings(ttt_length=2))
    hole = Stored(0, 5, torch.tensor([False, False, False, False, True]))
    with pytest.raises(ValueError, match="doc0.*no target state.*token 2.*served"):
        make_batch([fake.tokens(0)], [hole], PlanSettings(ttt_length=2))


@pytest.mark.parametrize("num_workers", [0, 1])
def test_train_loader_continues_where_it_is_told(num_workers):
    fake = Fake([5 + i % 7 for i in range(12)])
    plan = schedule(fake.lengths, world_size=2, accumulate=2, epochs=1, tokens_per_batch=12)
    settings = PlanSettings(ttt_length=3, **BOTH)
    assert plan.total_steps > 2
    for rank in (0, 1):
        loader = BatchLoader(fake, plan, settings, rank=rank, num_workers=num_workers)
        steps = list(loader.steps(1))
        assert len(steps) == plan.total_steps - 1
        for step, batches in enumerate(steps, start=1):
            wanted = [plan.micro_batch(step, rank=rank, index=i) for i in (0, 1)]
            assert [b.doc_ids for b in batches] == [
                tuple(f"doc{n}" for n in numbers) for numbers in wanted if numbers
            ]
            for batch in batches:
                first = int(batch.input_ids[0]) // 1000
                assert batch.aux(0, 2)[:, 0].tolist() == [100 * first, 100 * first + 1]


def test_train_loader_gives_the_same_batches_with_and_without_workers():
    fake = Fake([5 + i % 7 for i in range(6)])
    plan = schedule(fake.lengths, epochs=1)
    settings = PlanSettings(ttt_length=3, **BOTH)
    runs = [
        [b for s in BatchLoader(fake, plan, settings, rank=0, num_workers=n).steps(0) for b in s]
        for n in (0, 1)
    ]
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a.input_ids, b.input_ids)
        assert torch.equal(a.teacher_hidden, b.teacher_hidden)
        for x, y in zip(a.pack.steps, b.pack.steps, strict=True):
            assert torch.equal(x.rows, y.rows) and torch.equal(x.loss_rows, y.loss_rows)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_train_loader_error_keeps_its_one_line_message(num_workers):
    class Mixed(Fake):
        def features(self, number):
            return Stored(number, 99, torch.ones(99, dtype=torch.bool))

    fake = Mixed([5, 6])
    loader = BatchLoader(
        fake, schedule(fake.lengths), PlanSettings(ttt_length=2), rank=0, num_workers=num_workers
    )
    with pytest.raises(ValueError, match="99 tokens") as error:
        next(loader.steps(0))
    assert "\n" not in str(error.value)
