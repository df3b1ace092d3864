"""The names in docs/flags.md, looked up in the peers' own settings."""

from __future__ import annotations

import re
from pathlib import Path

from pydantic import BaseModel

PAGE = Path(__file__).parents[2] / "docs" / "flags.md"


def cells(column: int) -> list[str]:
    rows = PAGE.read_text(encoding="utf-8").splitlines()
    return [row.split("|")[column] for row in rows if row.startswith("| `")]


def fields(model: type[BaseModel], prefix: str = "") -> set[str]:
    """Dotted names of a pydantic model's leaves."""
    found = set()
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found |= fields(kind, f"{prefix}{name}.")
        else:
            found.add(prefix + name)
    return found


def unknown_in_specforge() -> set[str]:
    from specforge.config.schema import Config

    sections = "model|data|training|tracking|profiling"
    named = set(re.findall(rf"`((?:{sections})\.\w+|output_dir)`", " ".join(cells(2))))
    assert len(named) > 25, named
    return named - fields(Config)


def unknown_in_speculators() -> set[str]:
    from speculators.train.config.schema import TrainConfig

    named = set(re.findall(r"--([a-z][\w-]+)", " ".join(cells(3))))
    assert len(named) > 20, named
    known = {name.rsplit(".", 1)[-1].replace("_", "-") for name in fields(TrainConfig)}
    return named - known
