"""speculators 0.9.0 on a CPU: its draft class and its forward, as they are."""

from __future__ import annotations

from pathlib import Path

import torch
from our_side import K, Problem
from speculators import SpeculatorModel
from torch import Tensor


def load(folder: Path) -> torch.nn.Module:
    """Its own loader, on a folder in the speculators layout."""
    return SpeculatorModel.from_pretrained(folder, dtype=torch.float32)


def save(model: torch.nn.Module, folder: Path) -> None:
    model.save_pretrained(folder)


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
