"""AdamW on fp32 master weights, warm-up, then constant or cosine, gradient clipping.

The model's parameters ARE the fp32 masters: lower precision is a matter of the computation
(drafts/eagle3/step.py), never of what the optimizer holds.  The learning rate is a function of the
step alone, so a resumed run needs no scheduler state.
"""

from __future__ import annotations

import math

import torch
from torch import nn
from torch.distributed.tensor import DTensor


def learning_rate(
    step: int,
    *,
    total_steps: int,
    peak: float,
    warmup_ratio: float,
    min_ratio: float,
    schedule: str = "cosine",
) -> float:
    """Rate of optimizer step `step` (0-based) out of total_steps.

    With w = ceil(warmup_ratio * total_steps):
        step < w   peak * (step + 1) / w
        constant   peak
        cosine     peak * (m + (1 - m) * (1 + cos(pi * x)) / 2),  x = (step - w) / (total - w)
    """
    warmup = math.ceil(warmup_ratio * total_steps)
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule == "constant":
        return peak
    assert schedule == "cosine", schedule
    x = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    return peak * (min_ratio + (1.0 - min_ratio) * 0.5 * (1.0 + math.cos(math.pi * x)))


def build_optimizer(
    model: nn.Module, *, weight_decay: float, betas: tuple[float, float] = (0.9, 0.95)
) -> torch.optim.AdamW:
    """AdamW over the trainable parameters; decay on matrices only, not on norm weights.

    The rate is set per step with `set_learning_rate`.
    """
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for name, p in trainable.items():
        assert p.dtype in (torch.float32, torch.float64), f"{name} is {p.dtype}, no fp32 master"
    matrices = [p for p in trainable.values() if p.dim() >= 2]
    vectors = [p for p in trainable.values() if p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=betas)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> torch.Tensor:
    """Scales all gradients down to a joint L2 norm of max_norm; returns the norm before it."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    if isinstance(norm, DTensor):  # of weights that ranks share
        norm = norm.full_tensor()
    nn.utils.clip_grads_with_norm_(
        [p for p in model.parameters() if p.grad is not None], max_norm, norm
    )
    return norm
