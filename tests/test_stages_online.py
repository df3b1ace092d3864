"""Features handed straight to the step, and features that went through a store, train alike.

Catches: a sample one token off on its way through capture, store, loader and packing (offline data
padded once more than online data); aux layers of one place that are not those of another; a mean
over no rows.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from tiny import random_ids_and_mask, save_tiny_target
from tiny_step import Doc, run_step

from specforge_trim.data.store import FeatureStore
from specforge_trim.drafts.eagle3.batch import PlanSettings
from specforge_trim.plan.pack import build_trim_pack
from specforge_trim.plan.segments import plan_chunks
from specforge_trim.train.loader import BatchLoader
from specforge_trim.train.metrics import StepCounts, metrics_row
from specforge_trim.train.sampler import Schedule
from specforge_trim.verifier.capture import capture, store_spec
from specforge_trim.verifier.hf import HFTarget

STEPS = 4
TRIM = {"trim_loss_positions": True, "trim_backbone_rows": True}


@dataclass(frozen=True)
class Offline:
    """Documents as the loader reads them."""

    documents: list
    store: FeatureStore

    def tokens(self, number):
        return self.documents[number]

    def features(self, number):
        return self.store.document(number)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = save_tiny_target(tmp_path_factory.mktemp("t"), tied=False)
    return HFTarget.load(folder, dtype=torch.float32)


@pytest.fixture(scope="module")
def documents():
    made = []
    for i, length in enumerate((9, 40, 23)):
        ids, mask = random_ids_and_mask(length, seed=i, spans=1 + i, span_length=5)
        made.append(Doc(ids, mask, f"data.jsonl:{i + 1}", f"id{i}"))
    return made


def online_batch(target, documents):
    """A batch straight from the model's own hidden states: no store, no loader, no packing."""
    ids = torch.cat([d.input_ids for d in documents])
    cu = torch.tensor([0] + [len(d.input_ids) for d in documents]).cumsum(0)
    aux, last, rows = [], [], []
    for d in documents:
        whole = target.model(d.input_ids[None], output_hidden_states=True, use_cache=False)
        aux.append(torch.cat([whole.hidden_states[k][0] for k in (2, 4, 5)], dim=-1))
        last.append(whole.hidden_states[-1][0])
        mask = d.loss_mask.tolist()
        rows += [t + 2 < len(mask) and mask[t + 1] and mask[t + 2] for t in range(len(mask))]
    aux, last = torch.cat(aux), torch.cat(last)
    pack = build_trim_pack(torch.tensor(rows), STEPS, cu_seqlens=cu)
    return SimpleNamespace(
        input_ids=ids,
        position_ids=torch.cat([torch.arange(n) for n in cu.diff().tolist()]),
        doc_end=cu[1:].repeat_interleave(cu.diff()),
        cu_seqlens=cu,
        pack=pack,
        chunks=plan_chunks(pack, chunk_rows=1024),
        loss_weights=None,
        shard=None,
        grad_rows=None,
        aux=lambda a, b: aux[a:b],
        teacher_hidden=last[pack.supervised + 1],
    )


def offline_batch(target, documents, folder, *, num_workers):
    """The same documents through capture, store and loader: one micro-batch of all of them."""
    capture(documents, target, folder, shard_tokens=32, progress=False)
    store = FeatureStore.open(folder, expect=store_spec(target.name, dtype=torch.float32))
    lengths = tuple(len(d.input_ids) for d in documents)
    schedule = Schedule(lengths=lengths, tokens_per_batch=sum(lengths), seed=0, epochs=1)
    loader = BatchLoader(
        Offline(documents, store),
        schedule,
        PlanSettings(ttt_length=STEPS, **TRIM),
        rank=0,
        num_workers=num_workers,
    )
    ((batch,),) = loader.steps(0)
    return batch


@pytest.mark.parametrize("num_workers", [0, 1])
def test_stages_online_equals_offline(target, documents, tmp_path, num_workers):
    offline = offline_batch(target, documents, tmp_path, num_workers=num_workers)
    by_id = {d.doc_id: d for d in documents}
    online = online_batch(target, [by_id[name] for name in offline.doc_ids])
    found, found_grads = run_step(target, offline, steps=STEPS)
    expected, expected_grads = run_step(target, online, steps=STEPS)
    assert bool((expected.loss > 1.0).all())  # every step has in-vocabulary rows to compare
    for name in ("loss", "correct", "accept", "accept_in_vocab", "in_vocab"):
        # The same numbers in the same order: no rounding is involved.
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for name, grad in expected_grads.items():
        assert torch.equal(found_grads[name], grad), name
        assert bool(grad.any()), name

    # The control: one token off is seen.
    moved = SimpleNamespace(**vars(online))
    moved.aux = lambda a, b: online.aux(0, len(online.input_ids)).roll(1, 0)[a:b]
    shifted, _ = run_step(target, moved, steps=STEPS)
    assert float((shifted.loss - expected.loss).abs().min()) > 1e-3


def test_stages_online_one_list_of_aux_layers_everywhere(target, documents, tmp_path):
    """Target, store and checkpoint identity name the layers alike: n // 2, not n // 2 - 1."""
    capture(documents, target, tmp_path, progress=False)
    assert target.aux_layers == (2, 4, 5)
    assert FeatureStore.open(tmp_path).spec.aux_layers == (2, 4, 5)
    assert store_spec(target.name).aux_layers == (2, 4, 5)
    other = HFTarget(target.model, aux_layers=(2, 3, 5), name=target.name)
    with pytest.raises(ValueError, match="target_fingerprint|aux_layers"):
        capture(documents, other, tmp_path, progress=False)


def test_stages_online_a_late_step_without_rows_has_no_mean():
    counts = StepCounts(
        rows=10.0,
        loss_rows=torch.tensor([4.0, 1.0, 0.0], dtype=torch.float64),
        backbone_rows=30.0,
        head_rows=5.0,
        kept_flops=1.0,
        full_flops=2.0,
    )
    sums = torch.tensor([[8.0, 3, 0], [2, 0, 0], [2, 0.5, 0], [2, 0.5, 0], [4, 1, 0]])
    sums = torch.cat((sums, torch.tensor([[4.0, 1, 0], [2, 0, 0]])))  # reached, and right
    row = metrics_row(sums, counts, decay=0.5)
    assert [row[f"accuracy/{i}"] for i in range(3)] == [0.5, 0.0, None]
    assert [row[f"conditional_accuracy/{i}"] for i in range(3)] == [0.5, 0.0, None]
    assert [row[f"acceptance/{i}"] for i in range(3)] == [0.5, 0.5, None]
    assert row["loss"] == 8 / 4 + 0.5 * 3 / 1
    assert row["acceptance_length"] == 1 + 0.5 + 0.25
