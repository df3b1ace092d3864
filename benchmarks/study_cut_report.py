"""Tables and curves of the two studies of stop_grad_context_tokens. Trains and measures nothing.

Arms are compared within a seed: same batches in the same order, same initial weights. Differences
are to the arm with the flag off. Needs the extra `bench`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
Row = Mapping[str, Any]
Arms = Mapping[tuple[int, str], Row]  # (seed, arm) -> row
ARMS = {"off": "flag off", "on": "flag on", "again": "off, other rounding"}
COLOURS = {"off": "#1f77b4", "on": "#d9541a", "again": "#888888"}
SEED_LINES, SEED_MARKS = ("-", "--", ":"), ("o", "s", "^")


@dataclass(frozen=True)
class Column:
    """A value of an arm in the table: its title, how it is read from a row, digits shown."""

    title: str
    value: Callable[[Row], float]
    digits: int = 3


@dataclass(frozen=True)
class Study:
    """columns of its table; loss and share: keys of held-out rows that are drawn, with labels."""

    title: str
    picture: str
    columns: tuple[Column, ...]
    loss: tuple[str, str]
    share: tuple[str, str]
    log: bool = False


def at_end(key: str) -> Callable[[Row], float]:
    return lambda row: row["held_out"][-1][key]


def length(name: str = "") -> Callable[[Row], float]:
    """Tokens per verification pass over the prompt sets whose name starts so."""

    def of(row: Row) -> float:
        counts = [found for key, found in row["sets"].items() if key.startswith(name)]
        return sum(tokens for tokens, _ in counts) / sum(passes for _, passes in counts)

    return of


DENSE = Study(
    "Dense draft: 8 layers of SmolLM2-135M, distilled from all 30",
    "row_sparse.png",
    (
        Column("held-out loss", at_end("distill_loss")),
        Column("acceptance of a token", at_end("acceptance")),
        Column("acceptance length", lambda r: r["decoded"]["tokens"] / r["decoded"]["passes"]),
    ),
    loss=("distill_loss", "held-out soft cross-entropy (nats a row)"),
    share=("acceptance", "held-out acceptance of a token"),
    log=True,
)
EAGLE = Study(
    "EAGLE draft of the quickstart",
    "row_sparse_eagle.png",
    (
        Column("held-out loss", at_end("loss")),
        Column("accuracy, step 0", at_end("accuracy/0")),
        Column("accuracy, step 6", at_end("accuracy/6")),
        Column("acceptance length, all", length()),
        Column("long_prompt", length("long_prompt")),
        Column("humaneval", length("humaneval")),
    ),
    loss=("loss", "held-out loss (nats, sum of 0.8^i loss/i)"),
    share=("accuracy/0", "held-out accuracy of step 0"),
)


def read_arms(path: Path) -> dict[tuple[int, str], Row]:
    """The last row of every arm. Raises ValueError for arms of a seed that saw other batches."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    arms = {(row["seed"], row["arm"]): row for row in rows}
    for seed in {seed for seed, _ in arms}:
        own = [row for (other, _), row in arms.items() if other == seed]
        seen = {(r["steps"], r["order"], *(h["step"] for h in r["held_out"])) for r in own}
        if len(seen) > 1:
            raise ValueError(f"{path}: the arms of seed {seed} saw other batches: {seen}")
    return {key: arms[key] for key in sorted(arms, key=lambda k: (k[0], list(ARMS).index(k[1])))}


def pairs(arms: Arms, arm: str) -> list[tuple[int, Row, Row]]:
    """(seed, row without the flag, row of `arm`) of every seed that has both."""
    return [(s, arms[s, "off"], row) for (s, name), row in arms.items() if name == arm]


def table(study: Study, arms: Arms) -> str:
    """Markdown: a line per arm, then the differences: mean over seeds (lowest to highest)."""
    lines = [["seed", "steps", "flag", *(c.title for c in study.columns)]]
    lines.append(["---"] * len(lines[0]))
    for (seed, arm), row in arms.items():
        cells = [f"{c.value(row):.{c.digits}f}" for c in study.columns]
        lines.append([str(seed), str(row["steps"]), ARMS[arm].removeprefix("flag "), *cells])
    for arm in ("on", "again"):
        found = [
            [c.value(row) - c.value(off) for c in study.columns]
            for _, off, row in pairs(arms, arm)
        ]
        if found:
            gaps = zip(study.columns, zip(*found, strict=True), strict=True)
            cells = [gap(values, column.digits) for column, values in gaps]
            lines.append(["", "", f"{ARMS[arm].removeprefix('flag ')} - off", *cells])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def gap(values: Sequence[float], digits: int) -> str:
    """The mean (lowest to highest)."""
    parts = [f"{v:+.{digits}f}" for v in (sum(values) / len(values), min(values), max(values))]
    return f"{parts[0]} ({parts[1]} to {parts[2]})"


def curve(row: Row, key: str) -> tuple[list[int], list[float]]:
    return [h["step"] for h in row["held_out"]], [h[key] for h in row["held_out"]]


def picture(study: Study, arms: Arms, out: Path) -> None:
    """Loss and share of every arm, and their differences within each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10.5, 7.5), sharex=True)
    seeds = sorted({seed for seed, _ in arms})
    for column, (key, _) in enumerate((study.loss, study.share)):
        for (seed, arm), row in arms.items():
            place = seeds.index(seed)
            style = {"linestyle": SEED_LINES[place], "marker": SEED_MARKS[place]}
            style |= {"color": COLOURS[arm], "label": f"{ARMS[arm]}, seed {seed}"}
            steps, values = curve(row, key)
            if arm != "again":
                axes[0, column].plot(steps, values, markersize=4, linewidth=1.2, **style)
            if arm != "off":
                without = curve(arms[seed, "off"], key)[1]
                gaps = [a - b for a, b in zip(values, without, strict=True)]
                axes[1, column].plot(steps, gaps, markersize=4, linewidth=1.2, **style)
    if study.log:
        axes[0, 0].set_yscale("log")
        ticks: Sequence[float] = (5, 6, 8, 10, 12, 15, 20)
        axes[0, 0].set_yticks(ticks, [str(tick) for tick in ticks])
        axes[0, 0].minorticks_off()
    for axis, (_, label) in zip(axes[0], (study.loss, study.share), strict=True):
        axis.set_ylabel(label)
    axes[1, 0].set_ylabel("difference to flag off, same seed (nats)")
    axes[1, 1].set_ylabel("difference to flag off, same seed")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
    for axis, where in zip(axes[0], ("upper right", "lower right"), strict=True):
        axis.legend(fontsize=8, loc=where)
    for axis in axes[1]:
        low, high = axis.get_ylim()
        axis.set_ylim(low, high + 0.35 * (high - low))  # room for the legend above the curves
        axis.legend(fontsize=8, ncols=2, loc="upper right")
        axis.axhline(0, color="black", linewidth=0.8)
        axis.set_xlabel("optimizer step")
    figure.suptitle(f"{study.title}; flag = stop_grad_context_tokens")
    figure.tight_layout()
    figure.savefig(out, dpi=110)
    plt.close(figure)


def report(dense: Path, eagle: Path) -> None:
    for study, path in ((DENSE, dense), (EAGLE, eagle)):
        arms = read_arms(path)
        print(f"\n{study.title}\n\n{table(study, arms)}\n")
        for (seed, arm), row in arms.items():
            print(
                f"seed {seed}, {ARMS[arm]}: mean gradient norm "
                f"{row['grad_norm']:.2f}, {row['clipped_steps']} of {row['steps']} steps clipped"
            )
        picture(study, arms, DOCS / study.picture)
