"""The objectives as plain autograd of one row: p and log_q [Vd], best the draft id of p's argmax.

Written from the definitions with torch.distributions where it has them; shares nothing with the
package.
"""

import torch
from torch.distributions import Categorical, kl_divergence


def soft_ce(p, log_q, best):
    return -(p * log_q).sum()


def hard_ce(p, log_q, best):
    return torch.nn.functional.nll_loss(log_q[None], torch.tensor([best]))


def reverse_kl(p, log_q, best):
    return kl_divergence(Categorical(logits=log_q), Categorical(probs=p))


def js(p, log_q, best):
    q = log_q.exp()
    mean = Categorical(probs=(p + q) / 2)
    return 0.5 * (
        kl_divergence(Categorical(probs=p), mean) + kl_divergence(Categorical(logits=log_q), mean)
    )


def tv(p, log_q, best):
    return 1 - torch.minimum(p, log_q.exp()).sum()


def lk_alpha(p, log_q, best):
    return -torch.log(torch.minimum(p, log_q.exp()).sum())


def lk_lambda(p, log_q, best, eta=3.0):
    q = log_q.exp()
    blend = torch.exp(-eta * torch.minimum(p, q).sum()).detach()
    kl = kl_divergence(Categorical(probs=p), Categorical(logits=log_q))
    return blend * kl + (1 - blend) * 0.5 * (p - q).abs().sum()


DENSE = {f.__name__: f for f in (soft_ce, hard_ce, reverse_kl, js, tv, lk_alpha, lk_lambda)}


def dense_objective(text):
    """`0.5*tv+js` -> row function, for sums written without spaces and exponents."""
    terms = [part.split("*") if "*" in part else ["1", part] for part in text.split("+")]
    return lambda p, log_q, best: sum(float(w) * DENSE[name](p, log_q, best) for w, name in terms)


# Every term, and a sum of several.
OBJECTIVES = [*DENSE, "0.5*soft_ce+2*tv", "0.25*js+hard_ce+0.1*lk_lambda+3*reverse_kl"]
