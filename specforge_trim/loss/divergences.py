"""The objectives: value and gradient of each per row, from the draft's logits.

p: the teacher's distribution over the draft vocabulary (ttt-math's P_s, sums to 1), q: the
draft's softmax, y: the draft id of the teacher's argmax, acceptance a = sum_v min(p_v, q_v).

    soft_ce      - sum_v p_v log q_v                     EAGLE-3; its gradient is KL(p || q)'s
    hard_ce      - log q_y
    reverse_kl   sum_v q_v log(q_v / p_v)
    js           KL(p || m) / 2 + KL(q || m) / 2,        m = (p + q) / 2; Lin 1991
    tv           sum_v |p_v - q_v| / 2 = 1 - a           Leviathan et al., arXiv 2211.17192
    lk_alpha     - log a                                 LK^alpha
    lk_lambda    l KL(p || q) + (1 - l) tv,              LK^lambda; l = exp(-eta a) is a constant
                                                         for the gradient, eta = 3
    LK losses: Samarin et al., "LK Losses: Direct Acceptance Rate Optimization for Speculative
    Decoding", arXiv 2602.23881.  Here l and a are those of each row, so that any chunking,
    packing or split over ranks gives one result; so does speculators, while SpecForge and
    ModelOpt take one l for all rows of a step.  a is the overlap with p, which sums to 1 over the
    draft vocabulary; SpecForge takes the target's full-vocabulary probabilities there.

Gradients by the logits z: a loss with dL/dq = g has dL/dz = q (g - sum_v q_v g_v), and

    soft_ce, KL  q - p              hard_ce  q - onehot(y)
    reverse_kl   g = log(q / p)     js       g = log(q / m) / 2
    tv           g = sign(q - p)/2  lk_alpha the same, divided by a

All in at least fp32 from logits that were never rounded below it: where draft and teacher nearly
agree, g is a small difference of logarithms that each err by their last bit.  KL-like values are
summed as q log(q/p) - q + p, whose terms are all positive, so that a small sum is exact too.

Letters: b rows of a block, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specforge_trim.config.objective import Objective


@dataclass(frozen=True)
class Rows:
    """A block of rows: q, log_q, p [b, Vd]; choice int64 [b], y (any valid id where unused).

    log_p [b, Vd] or None: needed by reverse_kl alone, since p may underflow.
    """

    q: Tensor
    log_q: Tensor
    p: Tensor
    choice: Tensor
    log_p: Tensor | None = None


def evaluate(objective: Objective, rows: Rows) -> tuple[Tensor, Tensor]:
    """Value [b] of each row and its gradient by the logits [b, Vd]."""
    value = torch.zeros_like(rows.q[:, 0])
    gradient = torch.zeros_like(rows.q)
    for name, weight in objective.terms:
        if name == "lk_lambda":
            term = _lk_lambda(rows, objective.lk_eta)
        else:
            term = _TERMS[name](rows)
        value += weight * term[0]
        gradient.add_(term[1], alpha=weight)
    return value, gradient


def _soft_ce(r: Rows) -> tuple[Tensor, Tensor]:
    return -(r.p * r.log_q).sum(-1), r.q - r.p


def _hard_ce(r: Rows) -> tuple[Tensor, Tensor]:
    y = r.choice[:, None]
    value = -r.log_q.gather(1, y)
    return value[:, 0], r.q.scatter_add(1, y, -torch.ones_like(value))


def _reverse_kl(r: Rows) -> tuple[Tensor, Tensor]:
    assert r.log_p is not None
    ratio = r.log_q - r.log_p
    value = torch.addcmul(r.p - r.q, r.q, ratio).sum(-1)
    return value, _through_softmax(r.q, ratio)


def _js(r: Rows) -> tuple[Tensor, Tensor]:
    mean = (r.p + r.q).div_(2)
    # Where both underflow log_q - log_mean is not a number otherwise; it is multiplied by q = 0.
    log_mean = mean.clamp(min=torch.finfo(mean.dtype).tiny).log_()
    from_mean = r.log_q - log_mean
    value = torch.xlogy(r.p, r.p).sub_(r.p * log_mean).addcmul_(r.q, from_mean).sum(-1) / 2
    return value, _through_softmax(r.q, from_mean.div_(2))


def _tv(r: Rows) -> tuple[Tensor, Tensor]:
    gap = r.q - r.p
    value = gap.abs().sum(-1) / 2
    return value, _through_softmax(r.q, gap.sign_().div_(2))


def _lk_alpha(r: Rows) -> tuple[Tensor, Tensor]:
    # A floor far below any draft's: 1e-38 in fp32. The gradient above it would be zero anyway.
    accept = _acceptance(r).clamp(min=torch.finfo(r.q.dtype).tiny)
    return -accept.log(), _tv(r)[1].div_(accept[:, None])


def _lk_lambda(r: Rows, eta: float) -> tuple[Tensor, Tensor]:
    blend = (-eta * _acceptance(r)).exp_()
    gap = r.q - r.p
    kl = torch.xlogy(r.p, r.p).sub_(r.p * r.log_q).add_(gap).sum(-1)
    tv, tv_gradient = _tv(r)
    gradient = gap.mul_(blend[:, None]).addcmul_(tv_gradient, (1 - blend)[:, None])
    return blend * kl + (1 - blend) * tv, gradient


def _acceptance(r: Rows) -> Tensor:
    return torch.minimum(r.p, r.q).sum(-1)


def _through_softmax(q: Tensor, slope: Tensor) -> Tensor:
    """dL/dz = q (g - sum_v q_v g_v) of g = dL/dq; consumes `slope`."""
    return slope.sub_((q * slope).sum(-1, keepdim=True)).mul_(q)


_TERMS = {
    "soft_ce": _soft_ce,
    "hard_ce": _hard_ce,
    "reverse_kl": _reverse_kl,
    "js": _js,
    "tv": _tv,
    "lk_alpha": _lk_alpha,
}
