"""The report of `specforge-trim inspect --html`: one page that needs nothing but itself.

One job: PreparedData in, HTML text out. Plots are inline SVG, the switch between the two paintings
of a conversation is a radio button and CSS; there is no script and no request to anywhere.
"""

from collections.abc import Mapping, Sequence
from html import escape

from specforge_trim.data.prepared import PreparedData
from specforge_trim.data.report import charts
from specforge_trim.data.report.page import STYLE
from specforge_trim.data.report.stats import (
    DocumentStats,
    Training,
    by_length,
    document_pack,
    last_steps,
    median_density,
    median_supervised,
    sampled_stats,
    total_cost,
)
from specforge_trim.data.report.terminal import memory_rows, percent, printable
from specforge_trim.data.token_bytes import TokenBytes
from specforge_trim.plan.cost import STAGES
from specforge_trim.plan.pack import TrimPack

_EDGE = 40  # tokens shown at each end of a long stretch that no row and no loss touches
_MOST_TOKENS = 6000  # of one conversation
_MOST_POINTS = 1500
_RUN_BUCKETS = ((0, 0), (1, 1), (2, 2), (3, 4), (5, 8), (9, 16), (17, 10**9))


def inspect_html(
    data: PreparedData,
    tokenizer,
    training: Training,
    *,
    index: int = 0,
    conversations: int = 8,
    memory: Mapping[str, int] | None = None,
    max_documents: int = 2000,
) -> str:
    """The page; arguments as inspect_terminal's.

    conversations: how many are shown token by token: the one at index first, then others evenly
    spaced over the data.
    """
    ttt_length, max_density = training.ttt_length, training.max_density
    stats = sampled_stats(data, training, max_documents=max_documents)
    spread = [k * len(data) // max(conversations, 1) for k in range(conversations)]
    shown = list(dict.fromkeys([index % len(data), *spread]))[:conversations]
    spell = TokenBytes(tokenizer).spelling
    sections = [
        _head(data, stats, ttt_length=ttt_length, max_density=max_density),
        _plots(stats, max_density),
        _length_table(stats, total=len(data)),
        _work(stats, memory),
        _not_used(data),
        _legend(ttt_length),
        *(_conversation(data, i, document_pack(data[i], training), spell) for i in shown),
    ]
    title = escape(printable(", ".join(data.paths), keep=""))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>Data report: {title}</title>"
        # An empty icon, or browsers ask the server for one.
        '<link rel="icon" href="data:,"><style>'
        f"{STYLE}{_row_colours(ttt_length)}</style></head><body><main>{''.join(sections)}"
        "</main></body></html>\n"
    )


def _row_colours(ttt_length: int) -> str:
    """From pale (one step runs the row) to deep (all of them)."""
    rules = []
    for count in range(1, ttt_length + 1):
        share = count / ttt_length
        rules.append(f".k{count}{{--row:hsl({215 - 175 * share:.0f} 85% {84 - 24 * share:.0f}%)}}")
    return "".join(rules)


def _head(
    data: PreparedData, stats: Sequence[DocumentStats], *, ttt_length: int, max_density: float
) -> str:
    cost = total_cost(stats)
    refused = sum(item.refused for item in stats)
    cards = [
        ("conversations", f"{len(data):,}", f"of {data.num_rows:,} rows"),
        ("tokens", f"{data.num_tokens:,}", f"longest {int(data.lengths.max(initial=0)):,}"),
        ("with loss", percent(data.num_supervised / max(data.num_tokens, 1)), "of the tokens"),
        ("rows kept", percent(median_density(stats)), "median; steps after the first"),
        ("work kept", percent(cost.fraction) if cost else "none", "of running every row"),
        ("guard refuses", percent(refused / len(stats)), f"above {percent(max_density)} of rows"),
    ]
    boxes = "".join(
        f'<div class="card"><b>{value}</b>{name}<small>{note}</small></div>'
        for name, value, note in cards
    )
    title = escape(printable(", ".join(data.paths), keep=""))
    return (
        f'<h1>Data report</h1><p class="sub">{title}<br>{escape(data.summary())}<br>'
        f'{ttt_length} TTT steps</p><div class="cards">{boxes}</div>'
    )


def _plots(stats: Sequence[DocumentStats], max_density: float) -> str:
    buckets = by_length(stats)
    names = [_short(low) + "+" for low, _, _ in buckets]
    limit = (max_density, f"guard: {percent(max_density)}")
    some = stats[:: -(-len(stats) // _MOST_POINTS)]
    spans = [
        (low, high) for low, high in _RUN_BUCKETS if any(low <= s.runs <= high for s in stats)
    ]
    run_names = [
        str(low) if low == high else f"{low}+" if high == 10**9 else f"{low}-{high}"
        for low, high in spans
    ]
    plots = [
        charts.bars(
            names, [len(inside) for _, _, inside in buckets], title="Length",
            x_label="tokens of a conversation", y_label="conversations",
        ),
        charts.bars(
            names, [median_density(inside) for _, _, inside in buckets], top=1.0, percent=True,
            title="Density by length (medians)", x_label="tokens of a conversation",
            y_label="rows kept", line=limit,
        ),
        charts.points(
            [s.tokens for s in some], [s.density for s in some], [s.refused for s in some],
            title="Density of each (red: the guard runs all rows)",
            x_label="tokens of a conversation (logarithmic)", y_label="rows kept", line=limit,
        ),
        charts.bars(
            run_names, [sum(low <= s.runs <= high for s in stats) for low, high in spans],
            title="Runs of kept rows", x_label="runs in a conversation", y_label="conversations",
        ),
    ]  # fmt: skip
    return f'<section><h2>Distributions</h2><div class="plots">{"".join(plots)}</div></section>'


def _short(tokens: int) -> str:
    return f"{tokens // 1024}k" if tokens >= 1024 else str(tokens)


def _length_table(stats: Sequence[DocumentStats], *, total: int) -> str:
    rows = [(f"{low:,} - {high:,}", inside) for low, high, inside in by_length(stats)]
    body = []
    for name, inside in [*rows, ("all", list(stats))]:
        cost = total_cost(inside)
        body.append(
            [
                name,
                f"{len(inside):,}",
                percent(median_supervised(inside)),
                percent(median_density(inside)),
                percent(cost.fraction) if cost else "none",
                percent(sum(s.refused for s in inside) / len(inside)),
            ]
        )
    note = ""
    if len(stats) < total:
        note = f"<p>From {len(stats):,} of {total:,} conversations, evenly spaced.</p>"
    heads = ["tokens", "conversations", "with loss", "rows kept", "work kept", "guard refuses"]
    return f"<section><h2>By length (medians)</h2>{note}{_table(heads, body)}</section>"


def _work(stats: Sequence[DocumentStats], memory: Mapping[str, int] | None) -> str:
    cost = total_cost(stats)
    if cost is None:
        return "<section><h2>Expected work</h2><p>No row can reach a loss.</p></section>"
    body = [
        [name, f"{kept:.2e}", f"{full:.2e}", percent(kept / full) if full else "-"]
        for name, kept, full in (
            *((s, cost.by_stage[s].kept, cost.by_stage[s].full) for s in STAGES),
            ("all", cost.kept, cost.full),
        )
    ]
    text = _table(["operations", "trimmed", "every row", "kept"], body)
    text += (
        f"<p>Least possible for these losses: {percent(cost.floor / cost.full)}. Against no "
        f"trimming at all: {percent(cost.kept / cost.full_untrimmed)}.</p>"
    )
    if memory is not None:
        rows = [list(row) for row in memory_rows(memory)]
        text += f"<h2>Expected memory of the largest step</h2>{_table(['part', 'MB'], rows)}"
    return f"<section><h2>Expected work of one pass</h2>{text}</section>"


def _not_used(data: PreparedData) -> str:
    if not data.skipped:
        return (
            "<section><h2>Not used</h2><p>Nothing: every row became a conversation.</p></section>"
        )
    first: dict[str, str] = {}
    for row in data.read_bad_rows():
        first.setdefault(row.reason, str(row))
        if len(first) == len(data.skipped):
            break
    body = [
        [f"{count:,}", reason, printable(first[reason], keep="")]
        for reason, count in data.skipped.most_common()
    ]
    table = _table(["rows", "reason", "first"], body)
    return f"<section><h2>Not used</h2>{table}</section>"


def _table(heads: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{escape(cell)}</th>" for cell in heads)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


# ---------------------------------------------------------------------- conversations


def _legend(ttt_length: int) -> str:
    steps = "".join(
        f'<span class="t k{count}">{count}</span>' for count in range(1, ttt_length + 1)
    )
    return (
        '<h2>Conversations</h2><input type="radio" name="paint" id="paint-mask" checked>'
        '<label for="paint-mask">loss mask</label>'
        '<input type="radio" name="paint" id="paint-rows">'
        '<label for="paint-rows">rows by TTT steps</label>'
        '<p class="legend mask">Tokens the assistant wrote carry loss: '
        '<span class="t loss">with loss</span> <span class="t">without</span></p>'
        '<p class="legend rows">How many TTT steps run a row: <span class="t">none</span> '
        f"{steps}. Point at a token for its number.</p>"
    )


def _conversation(data: PreparedData, index: int, pack: TrimPack, spell) -> str:
    document = data[index]
    count, supervised = len(document.input_ids), int(document.loss_mask.sum())
    steps = (last_steps(pack) + 1).tolist()
    mask, ids = document.loss_mask.tolist(), document.input_ids.tolist()
    rows = ", ".join(f"{step.num_rows:,}" for step in pack.steps)
    parts, place = [], 0
    for start, end in _quiet_stretches(mask, steps):
        parts.append(_tokens(ids, mask, steps, place, start, spell))
        parts.append(f'<span class="gap">{end - start:,} tokens without loss</span>')
        place = end
    stop = min(count, place + _MOST_TOKENS)
    parts.append(_tokens(ids, mask, steps, place, stop, spell))
    if stop < count:
        parts.append(f'<span class="gap">{count - stop:,} more tokens</span>')
    source = escape(printable(document.source, keep=""))
    return (
        f'<article><h3>{index}<small>{source}</small></h3><p class="sub">{count:,} tokens, '
        f"{supervised:,} with loss ({percent(supervised / count)}), density "
        f"{percent(pack.density)}; rows per step: {rows}</p>"
        f'<div class="text">{"".join(parts)}</div></article>'
    )


def _quiet_stretches(mask: Sequence[bool], steps: Sequence[int]) -> list[tuple[int, int]]:
    """Middles of long stretches in which no token carries loss and no row runs."""
    found, start = [], 0
    for i in range(len(mask) + 1):
        if i == len(mask) or mask[i] or steps[i]:
            if i - start > 3 * _EDGE:
                found.append((start + _EDGE, i - _EDGE))
            start = i + 1
    return found


def _tokens(ids, mask, steps, start: int, end: int, spell) -> str:
    """Tokens as spans; those that share a character (one of several bytes) share a span."""
    parts, held, first = [], b"", start
    for i in range(start, end):
        held += spell(ids[i])
        try:
            text = held.decode("utf-8")
        except UnicodeDecodeError:
            if i + 1 < end and len(held) < 16:
                continue
            text = held.decode("utf-8", "replace")
        kind = " loss" if mask[first] else ""
        kind += f" k{steps[first]}" if steps[first] else ""
        numbers = str(first) if first == i else f"{first}-{i}"
        shown = escape(printable(text, keep="\n\t\u200d"))
        parts.append(f'<span class="t{kind}" title="{numbers}">{shown}</span>')
        held, first = b"", i + 1
    return "".join(parts)
