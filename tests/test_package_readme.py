"""The README says what is so.

Bugs caught: a picture of kept rows that the planner does not produce, a make target in the text
that does not exist. Flags, commands and links: test_package_docs.py.
"""

import re
from pathlib import Path

import torch

from specforge_trim import build_trim_pack, row_mask

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def picture_line(start: str) -> str:
    (line,) = [line for line in README.splitlines() if line.strip().startswith(start)]
    return line


def marked_columns(start: str, mark: str) -> list[int]:
    """Token numbers under which a line of the picture holds the mark."""
    numbers = {m.start(): int(m.group()) for m in re.finditer(r"\d+", picture_line("token  "))}
    hits = [m.start() for m in re.finditer(rf"\b{mark}\b", picture_line(start)[20:])]
    return [numbers[min(numbers, key=lambda c, at=at: abs(c - at - 20))] for at in hits]


def test_the_picture_shows_the_planned_rows():
    loss_mask = torch.tensor([0] * 7 + [1] * 3)
    pack = build_trim_pack(row_mask(loss_mask), ttt_length=3)
    assert marked_columns("row stage, step 0", "row") == pack.steps[0].rows.tolist()
    assert marked_columns("step 1", "row") == pack.steps[1].rows.tolist()
    assert marked_columns("step 2", "row") == pack.steps[2].rows.tolist()
    assert marked_columns("context stage", "kv") == list(range(int(pack.context_len[0])))


def test_named_make_targets_exist():
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"make ([a-z][a-z-]*)", README))
    assert {"quickstart", "test"} <= named <= targets, named - targets
