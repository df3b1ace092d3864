"""The teacher's table against dense full-vocabulary logits.

Catches: an argmax that takes a later block's tie, a log-sum-exp that forgets a block, columns off
by a block's start, a block without draft tokens, a post-operation left out, and logits of a bf16
head that were rounded to bf16.
"""

import pytest
import torch
from test_objective_fused import Largest
from test_target_hf import FAMILIES
from tiny import random_ids_and_mask, randomise
from transformers import AutoModelForCausalLM

from specforge_trim.loss import teacher as teachers
from specforge_trim.loss.teacher import Teacher
from specforge_trim.verifier.hf import HFTarget, load_embedding_and_head

V, D = 23, 5


def make(kept, *, head=None, post=None, dtype=torch.float64):
    gen = torch.Generator().manual_seed(0)
    head = torch.randn(V, D, generator=gen, dtype=torch.float64) if head is None else head
    t2d = torch.zeros(head.shape[0], dtype=torch.bool)
    t2d[kept] = True
    return Teacher(head.to(dtype), torch.tensor(kept), t2d, post)


def assert_dense(table, logits, kept, tolerance):
    """The table of full-vocabulary logits [S, V], row by row."""
    full = torch.softmax(logits.double(), -1)
    for row, (line, probs) in enumerate(zip(logits, full, strict=True)):
        best = max(range(len(line)), key=lambda v: (float(line[v]), -v))
        assert int(table.choice[row]) == (kept.index(best) if best in kept else -1)
        assert abs(float(table.draft_mass[row] - probs[kept].sum())) < tolerance
        error = float((table.probs[row] - probs[kept] / probs[kept].sum()).abs().max())
        assert error < tolerance, f"row {row}: {error:.1e}"
    assert table.in_vocab.tolist() == [int(c) >= 0 for c in table.choice]


@pytest.mark.parametrize("block", [1, 4, 7, 23, 100])
@pytest.mark.parametrize("kept", [[0], [22], [3, 4, 5, 15], list(range(V))])
def test_streamed_equals_dense(kept, block, monkeypatch):
    monkeypatch.setattr(teachers, "_BLOCK_VOCAB", block)
    monkeypatch.setattr(teachers, "_BLOCK_ROWS", 3)
    teacher = make(kept)
    last = torch.randn(8, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 3
    table = teacher.table(last, log_probs=True)
    assert_dense(table, last @ teacher.head.T, kept, 1e-13)
    torch.testing.assert_close(table.log_probs.exp(), table.probs, rtol=1e-12, atol=0)
    assert teacher.table(last).log_probs is None


def test_a_vocabulary_of_128k_is_never_held_for_all_rows():
    """The block sizes in use: the largest tensor is the table of draft columns, 1/8 of [S, V]."""
    rows, vocab = 640, 128_000
    kept = list(range(5, vocab, 8))
    gen = torch.Generator().manual_seed(3)
    teacher = make(kept, head=torch.randn(vocab, 4, generator=gen), dtype=torch.float32)
    last = torch.randn(rows, 4, generator=gen)
    with Largest() as largest:
        table = teacher.table(last)
    assert largest.elements == rows * len(kept)
    some = slice(510, 515)  # on both sides of an edge between blocks of rows
    full = torch.softmax(last[some].double() @ teacher.head.double().T, -1)
    wanted = full[:, kept] / full[:, kept].sum(-1, keepdim=True)
    error = float((table.probs[some] / wanted - 1).abs().max())
    assert error < 1e-4, f"{error:.1e}"  # logits of about 10 in float32: exp() has 1e-5
    assert float((table.draft_mass[some] - full[:, kept].sum(-1)).abs().max()) < 1e-5


@pytest.mark.parametrize("block", [2, 5, 23])
def test_ties_go_to_the_lowest_id_across_blocks(block, monkeypatch):
    monkeypatch.setattr(teachers, "_BLOCK_VOCAB", block)
    head = torch.zeros(V, 1, dtype=torch.float64)
    head[[6, 7, 20]] = 1.0
    last = torch.ones(1, 1, dtype=torch.float64)
    assert make([6, 7, 20], head=head).table(last).choice.tolist() == [0]
    assert make([7, 20], head=head).table(last).choice.tolist() == [-1]  # id 6 is the argmax
    flat = make([0, 5], head=head * 0).table(last)
    assert flat.choice.tolist() == [0] and float(flat.draft_mass) == pytest.approx(2 / V)


def test_no_rows():
    table = make([1, 2]).table(torch.zeros(0, D, dtype=torch.float64))
    assert table.probs.shape == (0, 2) and table.choice.shape == table.draft_mass.shape == (0,)


def test_bf16_logits_are_not_rounded():
    """Equal to fp64 products of the same bf16 values to fp32 accuracy, not to bf16's 0.4 %."""
    gen = torch.Generator().manual_seed(2)
    head = torch.randn(V, 64, generator=gen).bfloat16()
    last = torch.randn(6, 64, generator=gen).bfloat16()
    kept = [2, 9, 11, 20]
    table = make(kept, head=head, dtype=torch.bfloat16).table(last)
    assert table.probs.dtype == torch.float32
    assert_dense(table, last.double() @ head.double().T, kept, 1e-5)


@pytest.mark.parametrize("name", ["llama", "cohere", "granite", "gemma2"])
def test_table_equals_the_real_models_logits(name, tmp_path, monkeypatch):
    """Post-operations included: of random transformers models, whole and streamed."""
    monkeypatch.setattr(teachers, "_BLOCK_VOCAB", 100)
    randomise(AutoModelForCausalLM.from_config(FAMILIES[name])).save_pretrained(tmp_path)
    target = HFTarget.load(tmp_path, dtype=torch.float32)
    found = load_embedding_and_head(tmp_path)
    assert (found.logit_post is None) == (name == "llama")
    ids, _ = random_ids_and_mask(21)
    with torch.no_grad():
        logits = target.model(input_ids=ids[None], use_cache=False).logits[0]
    kept = list(range(5, 272, 3))
    teacher = make(kept, head=found.head, post=found.logit_post, dtype=torch.float32)
    table = teacher.table(target.features(ids).last.float())
    assert_dense(table, logits, kept, 2e-5)
    bare = make(kept, head=found.head, dtype=torch.float32).table(target.features(ids).last)
    differs = float((bare.probs - table.probs).abs().max()) > 1e-3
    assert differs == (name != "llama")  # the check above would see it missing
