"""Joining attention over disjoint key sets by their log-sum-exp.

With part p giving (o_p, l_p):  L = logsumexp_p l_p,  o = sum_p exp(l_p - L) o_p.
"""

from __future__ import annotations

import torch
from torch import Tensor


def merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Merge two parts (o [R, N, H], lse [R, N]); o keeps its dtype, the sums run in lse's."""
    (o_a, l_a), (o_b, l_b) = a, b
    lse = torch.logaddexp(l_a, l_b)
    weight_a, weight_b = (l_a - lse).exp_()[..., None], (l_b - lse).exp_()[..., None]
    return (o_a * weight_a + o_b * weight_b).to(o_a.dtype), lse
