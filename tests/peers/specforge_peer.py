"""SpecForge 0.2.0 on a CPU: its draft class and its EAGLE-3 training model, as they are."""

from __future__ import annotations

from pathlib import Path

import torch
from our_side import DECAY, K, Problem
from specforge.algorithms.eagle3.data import normalize_offline_sample
from specforge.algorithms.eagle3.model import OnlineEagle3Model
from specforge.core import loss as specforge_loss
from specforge.modeling.auto import AutoDraftModel
from specforge.modeling.target.target_head import TargetHead
from torch import Tensor


def load(folder: Path) -> torch.nn.Module:
    """Its own loader, on a folder in the native layout."""
    draft = AutoDraftModel.from_pretrained(folder, dtype=torch.float32)
    # transformers 5 leaves tables that no file holds unset (in 0.2.0 whatever memory held).
    draft.midlayer.self_attn._init_rope()
    return draft


def save(model: torch.nn.Module, folder: Path) -> None:
    model.save_pretrained(folder)


class _Logits(list):
    """Collects what the draft's head gives, one entry per TTT step."""

    def __call__(self, module: torch.nn.Module, args: tuple, output: Tensor) -> None:
        self.append(output[0].detach().clone())


def run(
    problem: Problem, draft: torch.nn.Module, *, kernel: str = "triton"
) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
    """Logits of every step [T, Vd], per-step losses [K], gradients of the trained parameters.

    kernel: triton, its own loss under Triton's interpreter; eager, the twin in the same file.
    """
    sample = normalize_offline_sample(
        {
            "aux_hidden_state": problem.aux[None],
            "hidden_state": problem.last[None],
            "input_ids": problem.doc.input_ids,
            "loss_mask": problem.doc.loss_mask.long(),
        },
        max_len=len(problem.doc.input_ids),
    )
    ids, last, mask = TargetHead.preprocess(
        None, sample["input_ids"], sample["target"], sample["loss_mask"]
    )
    draft.freeze_embedding()
    draft.zero_grad(set_to_none=True)
    logits = _Logits()
    handle = draft.lm_head.register_forward_hook(logits)
    model = OnlineEagle3Model(draft, length=K, attention_backend="sdpa")
    own = specforge_loss.LogSoftmaxLoss.apply
    if kernel == "eager":
        specforge_loss.LogSoftmaxLoss.apply = specforge_loss._compute_loss
    try:
        losses, *_ = model(
            input_ids=ids,
            attention_mask=sample["attention_mask"],
            target=problem.target.model.lm_head(last),
            loss_mask=mask,
            hidden_states=sample["hidden_state"],
        )
        sum(DECAY**i * loss for i, loss in enumerate(losses)).backward()
    finally:
        handle.remove()
        specforge_loss.LogSoftmaxLoss.apply = own
    gradients = {n: p.grad for n, p in draft.named_parameters() if p.requires_grad}
    return list(logits), torch.stack([loss.detach() for loss in losses]), gradients
