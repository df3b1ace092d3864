"""A row-sparse step asks the device nothing: keep indices come from the loader.

Catches: a mask turned into indices on the device, a count read back, a copy to the host. The trap
is that of test_stages_sync.py; tensors of the step are on the CPU here, and the plan's integers
are read where it is made.
"""

import pytest
import torch
from lm_case import make_model, make_stream
from test_stages_sync import Trap

from specforge_trim.drafts.lm.layers import RowSparseSettings, enable_row_sparse, hidden_states
from specforge_trim.drafts.lm.rows import loss_rows, plan_rows
from specforge_trim.loss.labels import kept_log_probs, label_loss


@pytest.mark.parametrize("flag", [True, False], ids=["cut", "whole"])
@pytest.mark.parametrize("family", ["qwen3", "qwen2", "llama", "mistral"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_question_in_a_step(family, flag, checkpointing):
    stream = make_stream(["000000111000110", "0001", "00000", "010010010010010"])
    settings = RowSparseSettings(stop_grad_context_tokens=flag)
    model = make_model(family, dtype=torch.float32)
    enable_row_sparse(model, settings)
    if checkpointing:
        model.activation_checkpointing_enable()
    plan = plan_rows(loss_rows([stream.mask], cu_seqlens=stream.cu), cu_seqlens=stream.cu)
    ids, positions, labels = stream.ids, stream.positions, stream.labels
    for fused in (True, False):
        with Trap():
            hidden = hidden_states(model, ids, positions, plan.to("cpu"), settings=settings)
            weight = model.lm_head.weight
            if fused:
                loss, _ = label_loss(hidden, weight, labels, plan.keep, row_scale=torch.ones(()))
            else:
                rows = kept_log_probs(hidden, weight, labels, plan.keep)
                loss = rows.entropy.sum() - rows.log_probs.sum()
            loss.backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad.abs().max() > 0


def test_a_plan_moves_with_its_index_tensors():
    stream = make_stream(["01001000100101", "0011"])
    plan = plan_rows(stream.kept(), cu_seqlens=stream.cu)
    assert any(s.masked_rows is not None for s in plan.segments)
    moved = plan.to("meta")
    assert moved.keep.device.type == "meta"
    assert all(s.masked_rows is None or s.masked_rows.is_meta for s in moved.segments)
    assert moved.documents == plan.documents and moved.num_kept == plan.num_kept
