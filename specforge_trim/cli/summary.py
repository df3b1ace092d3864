"""The table a quickstart ends with, as plain text of at most 80 columns. Computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from specforge_trim.common.table import table

WIDTH = 80


@dataclass(frozen=True)
class DataLine:
    """One training file: counts, the share of rows kept at steps >= 1, and of FLOPs."""

    name: str
    conversations: int
    tokens: int
    supervised: int
    density: float
    kept_work: float


@dataclass(frozen=True)
class TrainLine:
    """What training ended with; loss and accuracy hold one entry per TTT step."""

    epochs: int
    steps: int
    tokens_per_second: float
    loss: tuple[float, ...]
    accuracy: tuple[float, ...]


@dataclass(frozen=True)
class EvaluateLine:
    """One held-out set: decoded prompts and tokens, tokens per target pass, equal outputs."""

    name: str
    prompts: int
    tokens: int
    acceptance_length: float
    untrained_length: float
    equal: int


def render_summary(
    *,
    title: str,
    data: Sequence[DataLine],
    train: TrainLine,
    evaluate: Sequence[EvaluateLine],
    minutes: Sequence[tuple[str, float]],
) -> str:
    """The whole report; `data` ends with the line of all files together."""
    equal, prompts = sum(e.equal for e in evaluate), sum(e.prompts for e in evaluate)
    sections = (
        [title, "=" * min(WIDTH, len(title))],
        _data_section(data),
        [
            f"training: {train.epochs} epochs, {train.steps} steps, "
            f"{train.tokens_per_second:,.0f} tokens/s"
        ],
        table(
            ("TTT step", *(str(i + 1) for i in range(len(train.loss)))),
            [
                ("loss", *(f"{value:.3f}" for value in train.loss)),
                ("accuracy", *(f"{value:.3f}" for value in train.accuracy)),
            ],
        ),
        _evaluate_section(evaluate),
        [f"greedy output equals target: {equal}/{prompts}"],
        [render_minutes(minutes)],
    )
    return "\n\n".join("\n".join(lines) for lines in sections)


def _data_section(data: Sequence[DataLine]) -> list[str]:
    rows = [
        (
            line.name,
            f"{line.conversations:,}",
            f"{line.tokens:,}",
            f"{line.supervised:,}",
            f"{line.density:.1%}",
            f"{line.kept_work:.1%}",
        )
        for line in data
    ]
    header = ("training data", "conversations", "tokens", "supervised", "density", "kept work")
    return [
        *table(header, rows),
        "density: rows the draft runs at steps after the first, of all rows",
        "kept work: FLOPs of the trimmed computation, of the full one",
    ]


def _evaluate_section(evaluate: Sequence[EvaluateLine]) -> list[str]:
    rows = [
        (
            line.name,
            str(line.prompts),
            f"{line.tokens:,}",
            f"{line.acceptance_length:.2f}",
            f"{line.untrained_length:.2f}",
            f"{line.equal}/{line.prompts}",
        )
        for line in evaluate
    ]
    header = ("held out", "prompts", "tokens", "acceptance length", "untrained", "greedy = target")
    return [
        *table(header, rows),
        "acceptance length: tokens per pass of the target; 1.00 = no help from the draft",
    ]


def render_minutes(minutes: Sequence[tuple[str, float]]) -> str:
    """`minutes: target 0.3, ..., all 9.1` in lines of at most 80 columns."""
    parts = [f"{name} {value:.1f}" for name, value in minutes]
    parts.append(f"all {sum(value for _, value in minutes):.1f}")
    lines = ["minutes:"]
    for i, part in enumerate(parts):
        piece = f" {part}" + ("," if i + 1 < len(parts) else "")
        if len(lines[-1]) + len(piece) > WIDTH:
            lines.append("        ")
        lines[-1] += piece
    return "\n".join(lines)
