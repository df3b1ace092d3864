"""A whole training step of a dense draft reads nothing back from the device.

The step runs on the meta device, whose tensors have no values: `.item()`, `.tolist()`, `.cpu()`,
`nonzero`, an index by a mask and every other copy to the host raise there, in forward, losses and
backward alike. The plan's integers are on the CPU and stay readable, as they are beside a GPU.

Catches what a trap of operators on a CPU cannot see: `.tolist()` and `.cpu()` of device tensors,
and copies to the device that block. In bf16, since the attention kernel of fp32 has no meta form.
"""

import contextlib
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from lm_case import make_model, make_stream
from test_lm_train import documents, soft_targets
from test_stages_sync import Elsewhere
from torch import nn

import specforge_trim.loss.linear_loss as linear_loss_module
from specforge_trim.config.objective import parse_objective
from specforge_trim.drafts.lm.layers import RowSparseSettings, enable_row_sparse
from specforge_trim.loss import labels as head
from specforge_trim.train import lm_step as step_module
from specforge_trim.train.lm_batch import LmPlan, make_lm_batch
from specforge_trim.train.lm_step import LmStepSettings, lm_step


@pytest.fixture(autouse=True)
def blocks_of_a_gpu(monkeypatch):
    for module, name in ((head, "BLOCK_ELEMENTS"), (linear_loss_module, "_BLOCK_ELEMENTS"),
                         (step_module, "TABLE_ELEMENTS")):  # fmt: skip
        sizes = getattr(module, name)
        monkeypatch.setitem(sizes, "meta", sizes["cuda"])
    # The meta device has no autocast; the step's is off here anyway.
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())


@pytest.mark.parametrize(
    "question",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
        lambda x: (x > 0).nonzero(),
        lambda x: bool(x.sum() > 0),
        lambda x: x.numpy(),
    ],
)
def test_the_meta_device_answers_nothing(question):
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
        question(torch.randn(4, device="meta"))


class Decoder(nn.Module):
    """Stands for the target's layers: transformers' own code asks once per document, whether its
    positions are those of several, when it makes its mask."""

    def __init__(self, embedding):
        super().__init__()
        self.embedding = embedding

    def forward(self, input_ids, use_cache):
        return SimpleNamespace(last_hidden_state=self.embedding(input_ids))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("skip_head, cut", [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_a_step_asks_nothing(family, skip_head, cut, checkpointing):
    masks = ["000000111000110", "0001", "00000", "010010010010010"]
    stream = make_stream(masks)
    settings = LmStepSettings(
        RowSparseSettings(skip_head, cut), label_weight=0.5, distill_weight=0.5,
        objective=parse_objective("0.5*soft_ce+0.5*tv"),
    )  # fmt: skip
    target = make_model("llama", seed=3, dtype=torch.bfloat16).to("meta")
    targets = replace(soft_targets(target), decoder=Decoder(target.model.embed_tokens))
    for name in ("draft_to_target", "t2d"):  # read once, when the teacher is made
        object.__setattr__(targets.teacher, name, getattr(targets.teacher, name).to("meta"))
    model = make_model(family, dtype=torch.bfloat16).to("meta")
    enable_row_sparse(model, settings.row_sparse)
    if checkpointing:
        model.activation_checkpointing_enable()
    batch = make_lm_batch(documents(stream), LmPlan(skip_head))
    assert batch.plan.keep.device.type == "cpu"  # made in the loader
    with Elsewhere():  # copies to it do not block, either
        result = lm_step(model, batch, num_loss_rows=9.0, settings=settings, targets=targets)
    assert result.distill_loss.is_meta
    assert all(p.grad.is_meta for p in model.parameters())
