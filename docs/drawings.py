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
    page = box(0, 0, width, height, "white")  # readable on a dark page too
    return "\n".join([head, page, *body, "</svg>"]) + "\n"


def box(x: float, y: float, w: float, h: float, fill: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{w}" height="{h}" fill="{fill}" stroke="white"/>'


def label(
    x: float, y: float, text: str, anchor: str = "start", *, size: int = 13, on: str = OFF
) -> str:
    """Text that is read on the colour `on`."""
    ink = "white" if on == ROW else INK
    return (
        f'<text x="{x}" y="{y}" text-anchor="{anchor}" font-size="{size}" fill="{ink}">'
        f"{escape(text)}</text>"
    )


def legend(y: float, entries: tuple[tuple[str, str], ...]) -> list[str]:
    body, x = [], 20.0
    for text, colour in entries:
        body += [box(x, y, 18, 18, colour), label(x + 24, y + 14, text)]
        x += 44 + 7.4 * len(text)
    return body


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
    body += legend(y, (("prompt", PROMPT), ("answer", ANSWER), ("keys and values only", KV),
                       ("the whole draft layer", ROW), ("nothing", OFF)))  # fmt: skip
    return svg(LEFT + len(MASK) * CELL + 20, y + 36, body)


def row_keys() -> str:
    """The keys that one row attends to at a later step: row 6 at step 2, of 10 tokens."""
    row, step, tokens = 6, 2, 10
    body = [label(LEFT + t * CELL + CELL / 2, TOP - 10, str(t), "middle") for t in range(tokens)]
    for i in range(step + 1):
        y = TOP + i * (CELL + 6)
        body.append(label(LEFT - 12, y + CELL / 2 + 4, f"keys of step {i}", "end"))
        for t in range(tokens):
            # Step 0: every token up to the row.  Later steps: the row's own key only.
            colour = OFF if (t > row if i == 0 else t != row) else KV if i == 0 else ROW
            body.append(box(LEFT + t * CELL, y, CELL, CELL, colour))
    y = TOP + (step + 1) * (CELL + 6) + 10
    body += legend(y, (("read, of the context", KV), ("read, the row's own", ROW),
                       ("not read", OFF)))  # fmt: skip
    return svg(LEFT + tokens * CELL + 20, y + 36, body)


def stages() -> str:
    """The order of one training step, and what is alive when."""
    steps = (
        ("context stage", "all tokens up to the last kept row", "fc, norms, k, v", KV),
        ("row chunk 1", "K steps, losses, backward at once", "freed", ROW),
        ("row chunk 2", "K steps, losses, backward at once", "freed", ROW),
        ("context backward", "from the gradients of K0, V0", "recomputed in chunks", KV),
        ("optimizer", "one reduction over ranks", "", PROMPT),
    )
    body, x, wide, gap = [], 20, 190, 18
    for n, (name, what, note, colour) in enumerate(steps):
        body.append(box(x, 12, wide, 44, colour))
        body.append(label(x + wide / 2, 39, name, "middle", on=colour))
        body.append(label(x + wide / 2, 76, what, "middle", size=11))
        body.append(label(x + wide / 2, 93, note, "middle", size=11))
        if n + 1 < len(steps):
            body.append(
                f'<path d="M{x + wide + 2} 34 h14 m-5 -4 l5 4 l-5 4" stroke="{INK}" fill="none"/>'
            )
        x += wide + gap
    first, second = 20 + wide + gap, 20 + 2 * (wide + gap)
    body.append(box(20, 116, 4 * wide + 3 * gap, 24, KV))
    body.append(
        label(30, 132, "in memory: K0, V0 and their gradients, which grow with the context")
    )
    for left, text in ((first, "chunk 1's activations"), (second, "chunk 2's, in their place")):
        body.append(box(left, 146, wide, 24, ROW))
        body.append(label(left + 10, 162, text, on=ROW))
    return svg(x, 182, body)


DRAWINGS = {"kept_rows.svg": kept_rows, "row_keys.svg": row_keys, "stages.svg": stages}
