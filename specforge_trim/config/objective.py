"""Which objective trains the draft: the names of its terms, their weights, and their notation.

    soft_ce                      one term
    0.5*soft_ce + 0.5*tv         a weighted sum

Formulas, sources and gradients: loss/divergences.py.  This module only reads the setting, so
that a mistake in it is found before anything is loaded.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass

TERMS = {
    "soft_ce": "cross-entropy against the target's distribution",
    "hard_ce": "cross-entropy against the target's first choice",
    "reverse_kl": "KL(draft || target)",
    "js": "Jensen-Shannon divergence",
    "tv": "total variation, 1 - acceptance",
    "lk_alpha": "-log acceptance",
    "lk_lambda": "KL and total variation, blended by the acceptance",
}

_TERM = re.compile(r"\s*(?:([0-9.]+(?:[eE][-+]?\d+)?)\s*\*)?\s*([A-Za-z_]\w*)\s*")
_PLUS = re.compile(r"(?<![\d.][eE])\+")  # not the sign of an exponent


@dataclass(frozen=True)
class Objective:
    """A weighted sum of terms.

    terms: (name, weight) pairs, names from TERMS and distinct, weights finite and positive.
    lk_eta: lk_lambda's eta; 0 = pure KL, larger = total variation sooner.
    """

    terms: tuple[tuple[str, float], ...] = (("soft_ce", 1.0),)
    lk_eta: float = 3.0

    @property
    def is_soft_ce(self) -> bool:
        return len(self.terms) == 1 and self.terms[0][0] == "soft_ce"

    @property
    def reads_lk_eta(self) -> bool:
        return any(name == "lk_lambda" for name, _ in self.terms)

    @property
    def reads_log_probs(self) -> bool:
        """Whether a term needs the logarithm of teacher probabilities too small for a float."""
        return any(name == "reverse_kl" for name, _ in self.terms)


def parse_objective(text: str, *, lk_eta: float = 3.0) -> Objective:
    """`[weight*]name [+ [weight*]name ...]` -> Objective.

    Raises ValueError for what is no such sum, unknown or repeated names, and weights that are not
    positive numbers.
    """
    terms: dict[str, float] = {}
    for part in _PLUS.split(text):
        match = _TERM.fullmatch(part)
        if match is None:
            raise ValueError(
                f"objective = {text!r}: {part.strip()!r} is no term; expected a name or "
                "weight*name, joined by +, such as 0.5*soft_ce+0.5*tv"
            )
        number, name = match.groups()
        if name not in TERMS:
            near = difflib.get_close_matches(name, TERMS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(
                f"objective = {text!r}: unknown term {name!r}, expected {', '.join(TERMS)}{hint}"
            )
        if name in terms:
            raise ValueError(f"objective = {text!r}: {name} stands there twice; add its weights")
        terms[name] = _weight(text, number)
    return Objective(tuple(terms.items()), lk_eta)


def _weight(text: str, number: str | None) -> float:
    try:
        weight = 1.0 if number is None else float(number)
    except ValueError:
        weight = math.nan
    if not (0 < weight < math.inf):
        raise ValueError(f"objective = {text!r}: weight {number}, expected a number above 0")
    return weight
