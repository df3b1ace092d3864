"""Small charts as inline SVG text: bars and points. No script, no font, no file beside them.

One job: numbers in, one <svg> element out. Colours are classes, so that the page's style rules.
"""

import math
from collections.abc import Sequence
from html import escape

_WIDTH, _HEIGHT = 460, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 20, 14, 46
_WIDEST_BAR = 60
_PLOT_W, _PLOT_H = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM


def bars(
    labels: Sequence[str],
    values: Sequence[float],
    *,
    title: str,
    y_label: str,
    x_label: str,
    line: tuple[float, str] | None = None,
    top: float | None = None,
    percent: bool = False,
) -> str:
    """One bar per label, its value above it; line: a level drawn across, with its name.

    top: end of the axis, None = the largest value. percent: values are shares, shown in percent.
    """
    highest = top or max([*values, 1e-9])
    slot = _PLOT_W / max(len(values), 1)
    parts = []
    for k, (label, value) in enumerate(zip(labels, values, strict=True)):
        height = _PLOT_H * min(value / highest, 1)
        width = min(slot * 0.7, _WIDEST_BAR)
        middle, y = _LEFT + slot * (k + 0.5), _TOP + _PLOT_H - height
        shown = f"{100 * value:.0f} %" if percent else f"{value:,.0f}"
        parts.append(
            f'<rect class="bar" x="{middle - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{height:.1f}"><title>{escape(label)}: {shown}</title></rect>'
            f'<text class="value" x="{middle:.1f}" y="{y - 3:.1f}">{shown}</text>'
            f'<text class="tick" x="{middle:.1f}" y="{_TOP + _PLOT_H + 14}">'
            f"{escape(label)}</text>"
        )
    if line is not None:
        y = _TOP + _PLOT_H * (1 - min(line[0] / highest, 1))
        parts.append(_level(y, line[1]))
    return _frame("".join(parts), title, x_label, y_label, highest, percent=percent)


def points(
    xs: Sequence[float],
    ys: Sequence[float],
    marked: Sequence[bool],
    *,
    title: str,
    y_label: str,
    x_label: str,
    line: tuple[float, str] | None = None,
) -> str:
    """A point per pair on a logarithmic x axis and a y axis from 0 to 1; marked: drawn in red."""
    low = math.floor(math.log2(max(min(xs, default=1), 1)))
    high = max(math.ceil(math.log2(max(max(xs, default=2), 2))), low + 1)

    def place(x: float) -> float:
        return _LEFT + _PLOT_W * (math.log2(max(x, 1)) - low) / (high - low)

    parts = []
    for power in range(low, high + 1, max(1, (high - low) // 6)):
        parts.append(
            f'<text class="tick" x="{place(2**power):.1f}" y="{_TOP + _PLOT_H + 14}">'
            f"{2**power:,}</text>"
        )
    for x, y, mark in zip(xs, ys, marked, strict=True):
        kind = "point refused" if mark else "point"
        parts.append(
            f'<circle class="{kind}" cx="{place(x):.1f}" cy="{_TOP + _PLOT_H * (1 - y):.1f}" '
            f'r="2.5"/>'
        )
    if line is not None:
        parts.append(_level(_TOP + _PLOT_H * (1 - line[0]), line[1]))
    return _frame("".join(parts), title, x_label, y_label, 1.0, percent=True)


def _level(y: float, name: str) -> str:
    return (
        f'<line class="level" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        f'<text class="level-name" x="{_WIDTH - _RIGHT}" y="{max(y - 3, 10):.1f}">'
        f"{escape(name)}</text>"
    )


def _frame(
    inside: str, title: str, x_label: str, y_label: str, highest: float, *, percent: bool
) -> str:
    ticks = []
    for share in (0, 0.5, 1):
        y = _TOP + _PLOT_H * (1 - share)
        value = highest * share
        shown = f"{100 * value:.0f} %" if percent else f"{value:,.0f}"
        ticks.append(
            f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="y-tick" x="{_LEFT - 5}" y="{y + 4:.1f}">{shown}</text>'
        )
    middle = _TOP + _PLOT_H / 2
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {_WIDTH} {_HEIGHT}" '
        f'role="img" aria-label="{escape(title)}">{"".join(ticks)}{inside}'
        f'<text class="axis" x="{_LEFT + _PLOT_W / 2}" y="{_HEIGHT - 8}">{escape(x_label)}</text>'
        f'<text class="axis" transform="rotate(-90 12 {middle})" x="12" y="{middle}">'
        f"{escape(y_label)}</text></svg></figure>"
    )
