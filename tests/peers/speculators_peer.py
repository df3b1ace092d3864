"""speculators 0.9.0 on a CPU: its draft class and its forward, as they are."""

from __future__ import annotations

from pathlib import Path

import torch
from our_side import K, Problem, with_layers
from speculators import SpeculatorModel
from speculators.losses import resolve_loss_config
from torch import Tensor


def load(folder: Path) -> torch.nn.Module:
    """Its own loader, on a folder in the speculators layout."""
    return SpeculatorModel.from_pretrained(folder, dtype=torch.float32)


def save(model: torch.nn.Module, folder: Path) -> None:
    model.save_pretrained(folder)


@torch.no_grad()
def losses(problem: Problem, draft: torch.nn.Module, name: str) -> Tensor:
    """Its per-step losses [K] of the loss function `name`, unweighted."""
    ids, mask = problem.doc.input_ids[None, 1:], problem.doc.loss_mask[None, 1:]
    before_norm = with_layers(problem, (1, 2, problem.target.num_layers)).aux.chunk(3, -1)[-1]
    _, _, metrics = draft(
        hidden_states=problem.aux[None, :-1],
        input_ids=ids,
        document_ids=torch.zeros_like(ids),
        loss_mask=mask,
        verifier_last_hidden_states=before_norm[None, 1:],
        ttt_steps=K,
        loss_config=resolve_loss_config(name, "eager"),
    )
    return torch.stack([metrics[f"loss_{i}_sum"] for i in range(K)])


@torch.no_grad()
def run(problem: Problem, draft: torch.nn.Module) -> list[Tensor]:
    """Logits of every step [T-1, Vd]. Its loader pairs (x_1, g_0); so does this."""
    ids = problem.doc.input_ids[None, 1:]
    logits: list[Tensor] = []
    handle = draft.lm_head.register_forward_hook(lambda m, a, out: logits.append(out[0].clone()))
    try:
        draft(
            hidden_states=problem.aux[None, :-1],
            input_ids=ids,
            document_ids=torch.zeros_like(ids),
            ttt_steps=K,
        )
    finally:
        handle.remove()
    return logits
