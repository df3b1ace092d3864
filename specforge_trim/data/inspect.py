"""Show prepared data before any training: whose tokens carry loss, and what work that leaves.

One job: PreparedData in, a text for the terminal out. Nothing is trained or written.
"""

import statistics
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specforge_trim.data.dataset import PreparedData
from specforge_trim.data.tokenize import Document
from specforge_trim.plan.cost import STAGES, DraftDims, PackCost, pack_cost
from specforge_trim.plan.guard import documents_in_budget
from specforge_trim.plan.pack import TrimPack, build_trim_pack, dense_pack
from specforge_trim.plan.rows import row_mask

_GREEN, _DIM, _BOLD, _OFF = "\x1b[1;32m", "\x1b[2m", "\x1b[1m", "\x1b[0m"
_EDGE_WITHOUT_LOSS = 60  # tokens shown at each end of a long stretch without loss
_EDGE_WITH_LOSS = 400
_FIRST_BUCKET = 256


@dataclass(frozen=True)
class DocumentStats:
    """One document's numbers.

    tokens; supervised share of tokens; density, the share of rows that steps >= 1 run (what the
    guard compares with its limit); refused, whether the guard gives it all rows; cost of the pack
    that training would use, None when the document has no row that can reach a loss.
    """

    tokens: int
    supervised: float
    density: float
    refused: bool
    cost: PackCost | None


def inspect_terminal(
    data: PreparedData,
    tokenizer,
    *,
    ttt_length: int,
    alignment: str,
    chain: str,
    dims: DraftDims,
    max_density: float,
    index: int = 0,
    color: bool = True,
    max_documents: int = 2000,
) -> str:
    """The report `specforge-trim inspect` prints.

    index       the conversation to show token by token
    color       ANSI colours; without them supervised text stands between [[ and ]]
    max_density the guard's limit
    max_documents  statistics rest on this many documents at most, evenly spaced

    Raises ValueError for an index that does not exist.
    """
    if not -len(data) <= index < len(data):
        raise ValueError(
            f"index {index}: expected 0 to {len(data) - 1}, the prepared conversations"
        )
    settings = dict(ttt_length=ttt_length, alignment=alignment, chain=chain)
    every = -(-len(data) // max_documents)
    stats = [
        document_stats(data[i], dims=dims, max_density=max_density, **settings)
        for i in range(0, len(data), every)
    ]
    blocks = [
        f"DATA   {', '.join(data.paths)}\n{data.summary()}",
        show_document(data, tokenizer, index=index, color=color),
        _rows_table(document_pack(data[index], **settings)),
        _bucket_table(stats, sampled=len(data) if every > 1 else None),
        _work_table(stats),
        _reading(stats, ttt_length=ttt_length, max_density=max_density),
        _not_used(data),
    ]
    if color:
        blocks = [_bold_title(block) for block in blocks]
    return "\n\n".join(blocks) + "\n"


def document_pack(document: Document, *, ttt_length: int, alignment: str, chain: str) -> TrimPack:
    """The trimmed pack of one document on its own."""
    rows = row_mask(document.loss_mask, alignment=alignment)
    return build_trim_pack(rows, ttt_length=ttt_length, chain=chain)


def document_stats(
    document: Document,
    *,
    ttt_length: int,
    alignment: str,
    chain: str,
    dims: DraftDims,
    max_density: float,
) -> DocumentStats:
    """What training would run of one document, and what it would cost."""
    pack = document_pack(document, ttt_length=ttt_length, alignment=alignment, chain=chain)
    refused = not bool(documents_in_budget(pack, max_density).all())
    density, live = pack.density, bool(pack.supervised.numel())
    if refused:
        rows = row_mask(document.loss_mask, alignment=alignment)
        pack = dense_pack(rows, ttt_length=ttt_length, chain=chain)
    return DocumentStats(
        tokens=len(document.input_ids),
        supervised=float(document.loss_mask.float().mean()),
        density=density,
        refused=refused,
        cost=pack_cost(pack, dims) if live else None,
    )


def show_document(data: PreparedData, tokenizer, *, index: int, color: bool) -> str:
    """One document's text, marked by loss mask; the middle of long stretches is left out."""
    document = data[index]
    count, supervised = len(document.input_ids), int(document.loss_mask.sum())
    legend = f"{_GREEN}green{_OFF}" if color else "[[between brackets]]"
    lines = [
        f"CONVERSATION {index % len(data)}   {document.source}",
        f"{count:,} tokens, {supervised:,} of them with loss ({_percent(supervised / count)}); "
        f"text with loss is {legend}",
        "",
    ]
    text = "".join(
        _mark(_stretch(tokenizer, ids, has_loss=has_loss), has_loss=has_loss, color=color)
        for ids, has_loss in _runs(document.input_ids, document.loss_mask)
    )
    return "\n".join(lines) + text.rstrip("\n")


def _runs(ids: Tensor, mask: Tensor) -> Iterator[tuple[list[int], bool]]:
    """Maximal stretches of equal mask: token ids, and whether they carry loss."""
    cuts = [0, *(torch.nonzero(mask[1:] != mask[:-1]).flatten() + 1).tolist(), len(ids)]
    for start, end in zip(cuts, cuts[1:], strict=False):
        yield ids[start:end].tolist(), bool(mask[start])


def _stretch(tokenizer, ids: list[int], *, has_loss: bool) -> str:
    edge = _EDGE_WITH_LOSS if has_loss else _EDGE_WITHOUT_LOSS
    if len(ids) <= 2 * edge + edge // 2:
        return _decode(tokenizer, ids)
    kind = "with" if has_loss else "without"
    hidden = f"\n    ... {len(ids) - 2 * edge:,} tokens {kind} loss ...\n"
    return _decode(tokenizer, ids[:edge]) + hidden + _decode(tokenizer, ids[-edge:])


def _decode(tokenizer, ids: list[int]) -> str:
    """Text of the ids, safe to print."""
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return _printable(text, keep="\n\t\u200d")  # U+200D joins the parts of an emoji


def _printable(text: str, *, keep: str) -> str:
    """Control and format characters spelled out: data must not steer a terminal."""
    return "".join(
        char
        if char in keep or unicodedata.category(char)[0] != "C"
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def _mark(text: str, *, has_loss: bool, color: bool) -> str:
    if not color:
        return f"[[{text}]]" if has_loss else text
    paint = _GREEN if has_loss else _DIM
    # Pagers drop colours at line ends, so every line is painted on its own.
    return "\n".join(f"{paint}{line}{_OFF}" if line else "" for line in text.split("\n"))


def _rows_table(pack: TrimPack) -> str:
    steps = range(pack.ttt_length)
    lines = [
        f"ROWS OF THIS CONVERSATION   of {pack.num_tokens:,} at each TTT step",
        "step         " + "".join(f"{i:>8}" for i in steps),
        "rows run     " + "".join(f"{pack.steps[i].num_rows:>8,}" for i in steps),
        "with a loss  " + "".join(f"{pack.steps[i].num_loss_rows:>8,}" for i in steps),
    ]
    return "\n".join(lines)


def _bucket_table(stats: list[DocumentStats], *, sampled: int | None) -> str:
    """Medians by length, in buckets that double."""
    buckets: dict[int, list[DocumentStats]] = {}
    for item in stats:
        low = 0
        while item.tokens >= max(_FIRST_BUCKET, 2 * low):
            low = max(_FIRST_BUCKET, 2 * low)
        buckets.setdefault(low, []).append(item)
    title = "LENGTH AND DENSITY   medians per length bucket"
    if sampled is not None:
        title += f", from {len(stats):,} of {sampled:,} conversations, evenly spaced"
    lines = [
        title,
        f"{'tokens':>15} {'conversations':>14} {'supervised':>11} {'rows kept':>10} "
        f"{'work kept':>10} {'guard refuses':>14}",
    ]
    for low in sorted(buckets):
        name = f"{low:,} - {max(_FIRST_BUCKET, 2 * low) - 1:,}"
        lines.append(_bucket_line(name, buckets[low]))
    lines.append(_bucket_line("all", stats))
    return "\n".join(lines)


def _bucket_line(name: str, stats: list[DocumentStats]) -> str:
    refused = sum(item.refused for item in stats)
    cost = _total(stats)
    return (
        f"{name:>15} {len(stats):>14,} "
        f"{_percent(statistics.median(item.supervised for item in stats)):>11} "
        f"{_percent(statistics.median(item.density for item in stats)):>10} "
        f"{_percent(cost.fraction) if cost else 'none':>10} {refused:>14,}"
    )


def _work_table(stats: list[DocumentStats]) -> str:
    cost = _total(stats)
    if cost is None:
        return "PREDICTED WORK   none: no conversation has a row that can reach a loss"
    lines = [
        "PREDICTED WORK   floating-point operations of training on each conversation once",
        f"{'':>15} {'trimmed':>11} {'every row':>11} {'kept':>8}",
    ]
    for name in STAGES:
        stage = cost.by_stage[name]
        lines.append(_work_line(name, stage.kept, stage.full))
    lines.append(_work_line("all", cost.kept, cost.full))
    lines.append(
        f"least possible for these losses: {_percent(cost.floor / cost.full)}; "
        f"against no trimming at all: {_percent(cost.kept / cost.full_untrimmed)}"
    )
    return "\n".join(lines)


def _work_line(name: str, kept: int, full: int) -> str:
    return f"{name:>15} {kept:>11.2e} {full:>11.2e} {_percent(kept / full) if full else '-':>8}"


def _reading(stats: list[DocumentStats], *, ttt_length: int, max_density: float) -> str:
    cost = _total(stats)
    lines = ["HOW TO READ THIS"]
    if cost is not None:
        lines.append(
            f"Training with both trim flags does about {_percent(cost.fraction)} of the "
            "arithmetic of running every row, with the same losses and gradients."
        )
    lines += [
        "supervised: tokens the assistant wrote, the only ones that can carry loss. Near 0 % or "
        "100 % on chat data, look at the conversation above: the mask may be wrong.",
        f"rows kept: rows that TTT steps 1 to {ttt_length - 1} still run, since some loss depends "
        f"on them. The guard runs all rows of a conversation above {_percent(max_density)}.",
        "work kept: predicted operations, guard included. It is more than the rows' share because "
        "keys and values of the prompt before them are needed too. Time falls less than "
        "operations do on short conversations.",
    ]
    without = sum(item.cost is None for item in stats)
    if without:
        lines.append(
            f"{without:,} conversations have supervised tokens but no row that reaches a loss "
            "(an answer too short for this alignment); they cost nothing and teach nothing."
        )
    return "\n".join(lines)


def _not_used(data: PreparedData) -> str:
    if not data.skipped:
        return "NOT USED   nothing: every row became a conversation"
    lines = [f"NOT USED   {sum(data.skipped.values()):,} of {data.num_rows:,} rows"]
    for reason, count in data.skipped.most_common():
        first = next(row for row in data.bad_rows if row.reason == reason)
        lines.append(f"{count:>8,} x {reason}   first: {_printable(str(first), keep='')}")
    return "\n".join(lines)


def _total(stats: list[DocumentStats]) -> PackCost | None:
    costs = [item.cost for item in stats if item.cost is not None]
    return sum(costs[1:], costs[0]) if costs else None


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _bold_title(block: str) -> str:
    title, newline, rest = block.partition("\n")
    return f"{_BOLD}{title}{_OFF}{newline}{rest}"
