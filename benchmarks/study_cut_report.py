"""Tables and curves of the two studies of stop_grad_context_tokens. Trains and measures nothing.

Arms are compared within a seed: same batches in the same order, same initial weights. Differences
are flag on minus flag off. Needs the extra `bench`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent.parent / "docs"
Row = Mapping[str, Any]
Arms = Mapping[tuple[int, bool], Row]  # (seed, cut) -> row
OFF, ON = "#1f77b4", "#d9541a"
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


def read_arms(path: Path) -> dict[tuple[int, bool], Row]:
    """The last row of every arm. Raises ValueError for arms of a seed that saw other batches."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    arms = {(row["seed"], row["cut"]): row for row in rows}
    for seed in {seed for seed, _ in arms}:
        pair = [arms[seed, cut] for cut in (False, True) if (seed, cut) in arms]
        seen = {(r["steps"], r["order"], *(h["step"] for h in r["held_out"])) for r in pair}
        if len(seen) > 1:
            raise ValueError(f"{path}: the two arms of seed {seed} saw other batches: {seen}")
    return dict(sorted(arms.items()))


def pairs(arms: Arms) -> list[tuple[int, Row, Row]]:
    """(seed, row without the flag, row with it) of every seed that has both."""
    seeds = [seed for seed, cut in arms if not cut and (seed, True) in arms]
    return [(seed, arms[seed, False], arms[seed, True]) for seed in seeds]


def table(study: Study, arms: Arms) -> str:
    """Markdown: a line per arm, then the differences: mean over seeds (lowest to highest)."""
    lines = [["seed", "steps", "flag", *(c.title for c in study.columns)]]
    lines.append(["---"] * len(lines[0]))
    for (seed, cut), row in arms.items():
        cells = [f"{c.value(row):.{c.digits}f}" for c in study.columns]
        lines.append([str(seed), str(row["steps"]), "on" if cut else "off", *cells])
    last = ["", "", "on - off"]
    for column in study.columns:
        found = [column.value(on) - column.value(off) for _, off, on in pairs(arms)]
        show = f"+.{column.digits}f"
        last.append(
            f"{sum(found) / len(found):{show}} ({min(found):{show}} to {max(found):{show}})"
        )
    lines.append(last)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def curve(row: Row, key: str) -> tuple[list[int], list[float]]:
    return [h["step"] for h in row["held_out"]], [h[key] for h in row["held_out"]]


def picture(study: Study, arms: Arms, out: Path) -> None:
    """Loss and share of every arm, and their differences within each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10.5, 7.5), sharex=True)
    seeds = sorted({seed for seed, _ in arms})
    for (seed, cut), row in arms.items():
        for axis, (key, _) in zip(axes[0], (study.loss, study.share), strict=True):
            label = f"flag {'on' if cut else 'off'}, seed {seed}"
            line, mark = SEED_LINES[seeds.index(seed)], SEED_MARKS[seeds.index(seed)]
            style = {"color": ON if cut else OFF, "linestyle": line, "marker": mark}
            axis.plot(*curve(row, key), **style, markersize=4, linewidth=1.3, label=label)
    for seed, off, on in pairs(arms):
        for axis, (key, _) in zip(axes[1], (study.loss, study.share), strict=True):
            steps, without = curve(off, key)
            gaps = [a - b for a, b in zip(curve(on, key)[1], without, strict=True)]
            line, mark = SEED_LINES[seeds.index(seed)], SEED_MARKS[seeds.index(seed)]
            style = {"color": "#444444", "linestyle": line, "marker": mark}
            axis.plot(steps, gaps, **style, markersize=4, linewidth=1.3, label=f"seed {seed}")
    if study.log:
        axes[0, 0].set_yscale("log")
        ticks: Sequence[float] = (5, 6, 8, 10, 12, 15, 20)
        axes[0, 0].set_yticks(ticks, [str(tick) for tick in ticks])
        axes[0, 0].minorticks_off()
    for axis, (_, label) in zip(axes[0], (study.loss, study.share), strict=True):
        axis.set_ylabel(label)
    axes[1, 0].set_ylabel("its difference, on - off (nats)")
    axes[1, 1].set_ylabel("its difference, on - off")
    for axis in axes.flat:
        axis.grid(alpha=0.3)
        axis.legend(fontsize=8)
    for axis in axes[1]:
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
        for (seed, cut), row in arms.items():
            print(
                f"seed {seed} {'on' if cut else 'off':3}: mean gradient norm "
                f"{row['grad_norm']:.2f}, {row['clipped_steps']} of {row['steps']} steps clipped"
            )
        picture(study, arms, DOCS / study.picture)
