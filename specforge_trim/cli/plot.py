"""The curves of training runs as one picture, from their metrics.jsonl.  Trains nothing.

One run: a line per TTT step where a metric has one. Several runs: a line per run, their means over
TTT steps, so that they can be compared. Held-out values are dots on the same axes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Panel:
    """One pair of axes.

    key: of metrics.jsonl; with per_step it is `key/0`, `key/1`, ... held_out: keys drawn as dots,
    with what they are called. noisy: long lines are smoothed.
    """

    title: str
    key: str
    per_step: bool = False
    held_out: tuple[tuple[str, str], ...] = ()
    noisy: bool = True


PANELS = (
    Panel("loss in nats per TTT step", "loss", True, (("eval/loss", "held out"),)),
    Panel("accuracy per TTT step", "accuracy", True, (("eval/accuracy", "held out"),)),
    Panel("conditional accuracy per TTT step", "conditional_accuracy", True,
          (("eval/conditional_accuracy", "held out"),)),
    Panel("acceptance length (tokens per pass)", "acceptance_length", False,
          (("eval/acceptance_length", "held out, simulated"),
           ("decode/acceptance_length", "decoded, greedy"),
           ("decode/sampled_acceptance_length", "decoded, sampled"))),
    Panel("gradient norm before clipping", "grad_norm"),
    Panel("learning rate", "lr", noisy=False),
    Panel("tokens per second", "perf/tokens_per_second"),
    Panel("kept work (share of the full step's FLOPs)", "perf/kept_flops_fraction"),
)  # fmt: skip
COLUMNS = 2
SMOOTHED = 60  # from so many points on, lines are means over a window, the points a shade


def read_run(folder: str | Path) -> list[Row]:
    """Rows of a run's metrics.jsonl by step; folder: an output_dir, or the file itself.

    Raises ValueError when there is none, or no row in it.
    """
    path = Path(folder)
    path = path / "metrics.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(f"{path}: no such file; name a run's output folder")
    rows = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
            rows[int(row["step"])] = row
        except (ValueError, KeyError, TypeError):
            continue  # cut off by a kill, or no row
    if not rows:
        raise ValueError(f"{path}: holds no row of metrics")
    return [rows[step] for step in sorted(rows)]


def series(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    """Steps and values of one key, without steps that have none."""
    pairs = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    return [step for step, _ in pairs], [float(value) for _, value in pairs]


def step_keys(rows: Sequence[Row], key: str) -> list[str]:
    """`key/0`, `key/1`, ... as far as any row has them."""
    found: list[str] = []
    while any(f"{key}/{len(found)}" in row for row in rows):
        found.append(f"{key}/{len(found)}")
    return found


def mean_over_steps(rows: Sequence[Row], key: str) -> tuple[list[int], list[float]]:
    """Steps and, of each, the mean of `key/i` over those TTT steps i that have a value."""
    keys, steps, values = step_keys(rows, key), [], []
    for row in rows:
        known = [row[k] for k in keys if row.get(k) is not None]
        if known:
            steps.append(row["step"])
            values.append(sum(known) / len(known))
    return steps, values


def smoothed(values: Sequence[float], window: int) -> list[float]:
    """Means over `window` neighbours, fewer at the ends: centred, so that nothing is late."""
    half, out = window // 2, []
    for i in range(len(values)):
        near = values[max(0, i - half) : i + half + 1]
        out.append(sum(near) / len(near))
    return out


def draw_curves(runs: Mapping[str, Sequence[Row]], path: str | Path) -> Path:
    """Writes a PNG of every panel that any run has values for; returns its path.

    runs: name -> rows of `read_run`. Raises ValueError when matplotlib is not installed.
    """
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise ValueError(
            "plot needs the package matplotlib, which is not installed: "
            "pip install 'specforge_trim[plot]'"
        ) from error
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    panels = [p for p in PANELS if any(_has(rows, p) for rows in runs.values())]
    lines = -(-len(panels) // COLUMNS)
    figure = Figure(figsize=(6.4 * COLUMNS, 3.3 * lines + 0.5), layout="constrained", dpi=110)
    for axes, panel in zip(
        figure.subplots(lines, COLUMNS, squeeze=False).flat, panels, strict=False
    ):
        _draw_panel(axes, panel, runs)
    for axes in figure.axes[len(panels) :]:
        axes.remove()
    figure.suptitle(" and ".join(runs) if len(runs) < 4 else f"{len(runs)} runs", fontsize=12)
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, format="png")
    return path


def _has(rows: Sequence[Row], panel: Panel) -> bool:
    keys = [panel.key, *step_keys(rows, panel.key)]
    return any(series(rows, key)[0] for key in keys)


def _draw_panel(axes: Any, panel: Panel, runs: Mapping[str, Sequence[Row]]) -> None:
    import matplotlib

    alone = len(runs) == 1
    title = panel.title if alone else panel.title.replace("per TTT step", "(mean of TTT steps)")
    axes.set_title(title, fontsize=10, loc="left")
    axes.set_xlabel("optimizer step", fontsize=8)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.tick_params(labelsize=8)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    for number, (name, rows) in enumerate(runs.items()):
        color = f"C{number}"
        keys = step_keys(rows, panel.key) if panel.per_step and alone else []
        shades = matplotlib.colormaps["viridis"]
        for i, key in enumerate(keys):
            shade = shades(0.9 * i / max(1, len(keys) - 1))
            _line(axes, *series(rows, key), color=shade, label=f"step {i}", raw=False)
            _dots(axes, rows, panel, shade, suffix=f"/{i}", labelled=i == 0)
        if not keys:
            read = mean_over_steps if panel.per_step else series
            # A run without TTT steps of a metric has the metric itself.
            _line(
                axes,
                *read(rows, panel.key),
                color=color,
                label="" if alone else name,
                smooth=panel.noisy,
            )
            colors = [f"C{1 + i}" if alone and not panel.per_step else color for i in range(3)]
            _dots(axes, rows, panel, *colors, mean=panel.per_step, labelled=number == 0)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=7, ncols=2, frameon=False)
    if math.isclose(*axes.get_xlim()):
        axes.margins(x=0.5)


def _line(
    axes: Any,
    steps: list[int],
    values: list[float],
    *,
    color: Any,
    label: str,
    raw: bool = True,
    smooth: bool = True,
) -> None:
    """raw: the values themselves as a shade behind a smoothed line."""
    label = label or "_nolegend_"
    if len(values) < SMOOTHED or not smooth:
        marker = "." if len(values) == 1 else None
        axes.plot(steps, values, color=color, label=label, linewidth=1.4, marker=marker)
        return
    if raw:
        axes.plot(steps, values, color=color, alpha=0.18, linewidth=0.7, label="_nolegend_")
    window = max(5, len(values) // 40)
    axes.plot(steps, smoothed(values, window), color=color, label=label, linewidth=1.5)


def _dots(
    axes: Any,
    rows: Sequence[Row],
    panel: Panel,
    *colors: Any,
    suffix: str = "",
    mean: bool = False,
    labelled: bool,
) -> None:
    """Held-out values; colors: of each kind, the last one of those that are left."""
    for number, (key, name) in enumerate(panel.held_out):
        steps, values = mean_over_steps(rows, key) if mean else series(rows, key + suffix)
        if not steps:
            continue
        axes.plot(
            steps,
            values,
            linestyle=":",
            linewidth=1.0,
            marker="os^"[number % 3],
            markersize=4,
            markerfacecolor="white",
            color=colors[min(number, len(colors) - 1)],
            label=name if labelled else "_nolegend_",
        )
