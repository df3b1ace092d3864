"""What speculative decoding of held-out prompts measured: counts, rates, text and JSON.

It divides counts and lays them out; it decodes nothing. `decode/prompts.py` says what is counted.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from specforge_trim.common.table import table


@dataclass(frozen=True)
class ArmReport:
    """Counts of one draft over one prompt set; tried and accepted are per depth."""

    passes: int
    tokens: int
    tried: tuple[int, ...]
    accepted: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification pass; nan without a pass."""
        return self.tokens / self.passes if self.passes else math.nan

    @property
    def acceptance(self) -> tuple[float, ...]:
        """P(accepted | those before it accepted) per depth; nan where nothing was tried."""
        pairs = zip(self.accepted, self.tried, strict=True)
        return tuple(a / t if t else math.nan for a, t in pairs)


@dataclass(frozen=True)
class SetReport:
    """One prompt set. equal: outputs that are the target's own greedy ones, or first differ
    from them in a near tie of the target's top two logits (near_ties of them); different: indices
    of the prompts that are neither."""

    name: str
    prompts: int
    prompt_tokens: int
    trained: ArmReport
    untrained: ArmReport | None
    equal: int
    near_ties: int
    different: tuple[int, ...]


@dataclass(frozen=True)
class EvalReport:
    """What `evaluate` measured, beside what training reported per TTT step (None = not given)."""

    depth: int
    max_new_tokens: int
    sets: tuple[SetReport, ...]
    training_accuracy: tuple[float, ...] | None = None
    training_acceptance: tuple[float, ...] | None = None

    @property
    def prompts(self) -> int:
        return sum(s.prompts for s in self.sets)

    @property
    def equal(self) -> int:
        return sum(s.equal for s in self.sets)

    def to_dict(self) -> dict[str, Any]:
        """JSON values, derived numbers included; what was not measured is None."""
        out = _without_nan(asdict(self))
        for entry, report in zip(out["sets"], self.sets, strict=True):
            for name in ("trained", "untrained"):
                arm = getattr(report, name)
                if arm is not None:
                    entry[name]["acceptance_length"] = _without_nan(arm.acceptance_length)
                    entry[name]["acceptance"] = _without_nan(arm.acceptance)
        return out | {"prompts": self.prompts, "equal": self.equal}

    def format(self) -> str:
        """The report as text of at most 100 columns."""
        rows: list[tuple[str, ...]] = [
            ("held-out set", "prompts", "passes", "tokens", "acceptance length", "untrained")
        ]
        for s in self.sets:
            length = "" if s.untrained is None else f"{s.untrained.acceptance_length:.2f}"
            counts = (s.name, s.prompts, s.trained.passes, s.trained.tokens)
            rows.append((*map(str, counts), f"{s.trained.acceptance_length:.2f}", length))
        lines = [*table(rows[0], rows[1:]), ""]
        rows = [("acceptance at depth", *map(str, range(1, self.depth + 1)))]
        for s in self.sets:
            pairs = zip(s.trained.acceptance, s.trained.tried, strict=True)
            rows.append((s.name, *(f"{a:.3f} of {t}" if t else "-" for a, t in pairs)))
        for name in ("accuracy", "acceptance"):
            values = getattr(self, f"training_{name}")
            if values is not None:
                cells = [f"{v:.3f}" for v in values[: self.depth]]
                rows.append((f"training {name}", *cells, *["-"] * (self.depth - len(cells))))
        lines += [*table(rows[0], rows[1:]), ""]
        near = sum(s.near_ties for s in self.sets)
        note = f" ({near} with a near tie)" if near else ""
        lines.append(f"greedy output equals target: {self.equal}/{self.prompts}{note}")
        for s in self.sets:
            if s.different:
                lines.append(f"  different in {s.name}: prompts {list(s.different)}")
        return "\n".join(lines)


def _without_nan(value: Any) -> Any:
    """The same value for JSON: tuples become lists, and nan, which JSON has not, None."""
    if isinstance(value, Mapping):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
