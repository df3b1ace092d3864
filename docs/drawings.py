"""The drawings of docs/trimming.md as SVG, from the planner's own row sets."""

from __future__ import annotations

from html import escape

import torch

from specforge_trim import build_trim_pack, row_mask

PROMPT, ANSWER, ROW, KV, OFF, INK = "#dfe6ee", "#f7c873", "#4878a8", "#a8c4e0", "#f4f4f4", "#333"
# Two turns: who wrote each of the 18 tokens (1 = the assistant).
MASK = [0] * 7 + [1] * 4 + [0] * 4 + [1] * 3
CELL, LEFT, TOP = 30, 170, 40


def svg(width: int, height: int, body: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        f'viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="13" fill="{INK}">'
    )
    return "\n".join([head, *body, "</svg>"]) + "\n"


def box(x: float, y: float, w: float, h: float, fill: str, label: str = "") -> str:
    text = (
        f'<text x="{x + w / 2}" y="{y + h / 2 + 4}" text-anchor="middle">{escape(label)}</text>'
        if label
        else ""
    )
    return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{fill}" stroke="white"/>{text}'


def label(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>'


def kept_rows() -> str:
    """Which rows each step runs, token by token."""
    pack = build_trim_pack(row_mask(torch.tensor(MASK)), ttt_length=4)
    lines: list[tuple[str, list[str]]] = [
        ("written by", [ANSWER if m else PROMPT for m in MASK]),
        ("step-0 keys, values", [KV if t < int(pack.context_len[0]) else OFF
                                 for t in range(len(MASK))]),
    ]  # fmt: skip
    for i, step in enumerate(pack.steps):
        rows = set() if step.is_dead else set(step.rows.tolist())
        lines.append((f"rows of step {i}", [ROW if t in rows else OFF for t in range(len(MASK))]))
    body = [label(LEFT + t * CELL + CELL / 2, TOP - 10, str(t), "middle")
            for t in range(len(MASK))]  # fmt: skip
    for n, (name, colours) in enumerate(lines):
        y = TOP + n * (CELL + 6)
        body.append(label(LEFT - 12, y + CELL / 2 + 4, name, "end"))
        body += [box(LEFT + t * CELL, y, CELL, CELL, colour) for t, colour in enumerate(colours)]
    y = TOP + len(lines) * (CELL + 6) + 10
    legend = (("prompt", PROMPT), ("answer", ANSWER), ("keys and values only", KV),
              ("the whole draft layer", ROW), ("nothing", OFF))  # fmt: skip
    x = 20
    for text, colour in legend:
        body += [box(x, y, 18, 18, colour), label(x + 24, y + 14, text)]
        x += 40 + 8 * len(text)
    return svg(LEFT + len(MASK) * CELL + 20, y + 36, body)


def stages() -> str:
    """The order of one training step, and what is alive when."""
    steps = (
        ("context stage", "all tokens up to the last kept row", "fc, norms, k, v", KV),
        ("row chunk 1", "K steps, losses, backward at once", "freed", ROW),
        ("row chunk 2", "K steps, losses, backward at once", "freed", ROW),
        ("context backward", "from the gradients of K0, V0", "recomputed in chunks", KV),
        ("optimizer", "one reduction over ranks", "", PROMPT),
    )
    body, x, wide = [], 20, 176
    for n, (name, what, note, colour) in enumerate(steps):
        body.append(box(x, 30, wide, 44, colour))
        body.append(label(x + wide / 2, 57, name, "middle"))
        body.append(
            label(x + wide / 2, 96, what, "middle").replace("<text", '<text font-size="10"')
        )
        body.append(
            label(x + wide / 2, 114, note, "middle").replace("<text", '<text font-size="10"')
        )
        if n + 1 < len(steps):
            body.append(
                f'<path d="M{x + wide + 2} 52 h14 m-5 -4 l5 4 l-5 4" stroke="{INK}" fill="none"/>'
            )
        x += wide + 18
    body.append(box(20, 138, x - 38 - wide - 18, 20, KV))
    body.append(label(30, 152, "K0, V0 and their gradients: what grows with the context"))
    body.append(box(20 + wide + 18, 166, wide, 20, ROW))
    body.append(label(30 + wide + 18, 180, "one chunk's activations"))
    body.append(box(20 + 2 * (wide + 18), 166, wide, 20, ROW))
    return svg(x, 200, body)


DRAWINGS = {"kept_rows.svg": kept_rows, "stages.svg": stages}
