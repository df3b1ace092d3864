"""Show prepared data before any training: whose tokens carry loss, and what work that leaves.

One job: PreparedData in, a text for the terminal out. Nothing is trained or written.
"""

import statistics
import unicodedata
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from specforge_trim.data.prepared import PreparedData
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
from specforge_trim.data.tokenize import Document
from specforge_trim.plan.cost import STAGES
from specforge_trim.plan.pack import TrimPack

_GREEN, _DIM, _BOLD, _OFF = "\x1b[1;32m", "\x1b[2m", "\x1b[1m", "\x1b[0m"
_EDGE_WITHOUT_LOSS = 60  # tokens shown at each end of a long stretch without loss
_EDGE_WITH_LOSS = 400
_SAMPLE_AROUND = 40  # tokens of a sample before its answer, and at each end of a long answer


def inspect_terminal(
    data: PreparedData,
    tokenizer,
    training: Training,
    *,
    index: int = 0,
    color: bool = True,
    paint: str = "mask",
    memory: Mapping[str, int] | None = None,
    max_documents: int = 2000,
) -> str:
    """The report `specforge-trim inspect` prints.

    index       the conversation to show token by token
    color       ANSI colours; without them supervised text stands between [[ and ]]
    paint       what the colours say: "mask", which tokens carry loss, or "rows", how many TTT
                steps run each row
    memory      bytes of the largest training step by what they hold; shown when given
    max_documents  statistics rest on this many documents at most, evenly spaced

    Raises ValueError for an index that does not exist.
    """
    if not -len(data) <= index < len(data):
        raise ValueError(
            f"index {index}: expected 0 to {len(data) - 1}, the prepared conversations"
        )
    ttt_length, max_density = training.ttt_length, training.max_density
    stats = sampled_stats(data, training, max_documents=max_documents)
    pack = document_pack(data[index], training)
    shown = pack if paint == "rows" else None
    blocks = [
        f"DATA   {', '.join(data.paths)}\n{data.summary()}",
        show_document(data, tokenizer, index=index, color=color, pack=shown),
        _rows_table(pack),
        _bucket_table(stats, sampled=len(data) if len(stats) < len(data) else None),
        _work_table(stats),
        *([] if memory is None else [_memory_table(memory)]),
        _reading(stats, ttt_length=ttt_length, max_density=max_density),
        _not_used(data),
    ]
    if color:
        blocks = [_bold_title(block) for block in blocks]
    return "\n\n".join(blocks) + "\n"


def show_document(
    data: PreparedData, tokenizer, *, index: int, color: bool, pack: TrimPack | None = None
) -> str:
    """One document's text, painted; the middle of long stretches is left out.

    Without a pack by loss mask. With one by rows: a stretch's shade, or in plain text its number,
    is how many TTT steps run its rows.
    """
    document = data[index]
    count, supervised = len(document.input_ids), int(document.loss_mask.sum())
    if pack is None:
        kinds, paints = document.loss_mask.long(), [_DIM, _GREEN]
        legend = "text with loss is " + (
            f"{_GREEN}green{_OFF}" if color else "[[between brackets]]"
        )
    else:
        kinds = last_steps(pack) + 1
        paints = [
            _DIM,
            *(f"\x1b[38;5;{_shade(i, pack.ttt_length)}m" for i in range(pack.ttt_length)),
        ]
        legend = "rows by the number of TTT steps that run them: " + "  ".join(
            _mark(f"{k}", kind=k, paints=paints, color=color) for k in range(pack.ttt_length + 1)
        )
    head = (
        f"CONVERSATION {index % len(data)}   {document.source}\n"
        f"{count:,} tokens, {supervised:,} of them with loss ({percent(supervised / count)}); "
        f"{legend}\n\n"
    )
    text = "".join(
        _mark(_stretch(tokenizer, ids, kind=kind), kind=kind, paints=paints, color=color)
        for ids, kind in _runs(document.input_ids, kinds)
    )
    return head + text.rstrip("\n")


def show_sample(document: Document, tokenizer, *, color: bool) -> str:
    """The first stretch with loss and what stands around it, in one line for a log.

    Newlines are written as \\n; supervised text is green, without colours between [[ and ]].
    """
    mask = document.loss_mask.long()
    start = int(mask.argmax())
    end = start + int(torch.cat([mask[start:], torch.zeros(1)]).argmin())
    ids = document.input_ids.tolist()
    before, inside = ids[max(0, start - _SAMPLE_AROUND) : start], ids[start:end]
    cut = len(inside) - 2 * _SAMPLE_AROUND
    parts = [_one_line(tokenizer, inside)]
    if cut > 0:
        first, last = inside[:_SAMPLE_AROUND], inside[-_SAMPLE_AROUND:]
        parts = [_one_line(tokenizer, first), f" ... {cut:,} tokens ... "]
        parts.append(_one_line(tokenizer, last))
    paints = [_DIM, _GREEN]
    shown = _mark("".join(parts), kind=1, paints=paints, color=color)
    left = _mark(_one_line(tokenizer, before), kind=0, paints=paints, color=color)
    rest = ids[end : end + _SAMPLE_AROUND // 4]
    right = _mark(_one_line(tokenizer, rest), kind=0, paints=paints, color=color)
    dots = "..." if start > len(before) else "", "..." if end + len(rest) < len(ids) else ""
    return f"{dots[0]}{left}{shown}{right}{dots[1]}"


def _shade(step: int, ttt_length: int) -> int:
    """A colour of the 256-colour palette: blue for one step, through green, to red for all."""
    ramp = (27, 33, 39, 44, 42, 76, 148, 214, 203)
    return ramp[step * (len(ramp) - 1) // max(ttt_length - 1, 1)]


def _runs(ids: Tensor, kinds: Tensor) -> Iterator[tuple[list[int], int]]:
    """Maximal stretches of equal kind: token ids, and the kind."""
    cuts = [0, *(torch.nonzero(kinds[1:] != kinds[:-1]).flatten() + 1).tolist(), len(ids)]
    for start, end in zip(cuts, cuts[1:], strict=False):
        yield ids[start:end].tolist(), int(kinds[start])


def _stretch(tokenizer, ids: list[int], *, kind: int) -> str:
    edge = _EDGE_WITH_LOSS if kind else _EDGE_WITHOUT_LOSS
    if len(ids) <= 2 * edge + edge // 2:
        return _decode(tokenizer, ids)
    hidden = f"\n    ... {len(ids) - 2 * edge:,} tokens {'with' if kind else 'without'} loss ...\n"
    return _decode(tokenizer, ids[:edge]) + hidden + _decode(tokenizer, ids[-edge:])


def _one_line(tokenizer, ids: list[int]) -> str:
    return _decode(tokenizer, ids).replace("\n", "\\n").replace("\t", "\\t")


def _decode(tokenizer, ids: list[int]) -> str:
    """Text of the ids, safe to print."""
    text = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return printable(text, keep="\n\t\u200d")  # U+200D joins the parts of an emoji


def printable(text: str, *, keep: str) -> str:
    """Control and format characters spelled out: data must not steer a terminal."""
    return "".join(
        char
        if char in keep or unicodedata.category(char)[0] != "C"
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )


def _mark(text: str, *, kind: int, paints: list[str], color: bool) -> str:
    if not color:
        number = "" if len(paints) == 2 else f"{kind}:"
        return f"[[{number}{text}]]" if kind else text
    # Pagers drop colours at line ends, so every line is painted on its own.
    return "\n".join(f"{paints[kind]}{line}{_OFF}" if line else "" for line in text.split("\n"))


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
    title = "LENGTH AND DENSITY   medians per length bucket"
    if sampled is not None:
        title += f", from {len(stats):,} of {sampled:,} conversations, evenly spaced"
    lines = [
        title,
        f"{'tokens':>15} {'conversations':>14} {'supervised':>11} {'rows kept':>10} "
        f"{'runs':>5} {'work kept':>10} {'guard refuses':>14}",
    ]
    for low, high, inside in by_length(stats):
        lines.append(_bucket_line(f"{low:,} - {high:,}", inside))
    lines.append(_bucket_line("all", stats))
    return "\n".join(lines)


def _bucket_line(name: str, stats: list[DocumentStats]) -> str:
    refused = sum(item.refused for item in stats)
    cost = total_cost(stats)
    return (
        f"{name:>15} {len(stats):>14,} "
        f"{percent(median_supervised(stats)):>11} {percent(median_density(stats)):>10} "
        f"{statistics.median(item.runs for item in stats):>5g} "
        f"{percent(cost.fraction) if cost else 'none':>10} {refused:>14,}"
    )


def _work_table(stats: list[DocumentStats]) -> str:
    cost = total_cost(stats)
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
        f"least possible for these losses: {percent(cost.floor / cost.full)}; "
        f"against no trimming at all: {percent(cost.kept / cost.full_untrimmed)}"
    )
    return "\n".join(lines)


def _memory_table(memory: Mapping[str, int]) -> str:
    lines = ["EXPECTED MEMORY   of the largest training step on one device"]
    lines += [f"{size:>10} MB  {name}" for name, size in memory_rows(memory)]
    return "\n".join(lines)


def memory_rows(memory: Mapping[str, int]) -> list[tuple[str, str]]:
    """(what, MB) of every part and of all of them."""
    parts = [*memory.items(), ("all of it", sum(memory.values()))]
    return [(name, f"{size / 1e6:,.0f}") for name, size in parts]


def _work_line(name: str, kept: int, full: int) -> str:
    return f"{name:>15} {kept:>11.2e} {full:>11.2e} {percent(kept / full) if full else '-':>8}"


def _reading(stats: list[DocumentStats], *, ttt_length: int, max_density: float) -> str:
    cost = total_cost(stats)
    lines = ["HOW TO READ THIS"]
    if cost is not None:
        lines.append(
            f"Training with both trim flags does about {percent(cost.fraction)} of the "
            "arithmetic of running every row, with the same losses and gradients."
        )
    lines += [
        "supervised: tokens the assistant wrote, the only ones that can carry loss. Near 0 % or "
        "100 % on chat data, look at the conversation above: the mask may be wrong.",
        f"rows kept: rows that TTT steps 1 to {ttt_length - 1} still run, since some loss depends "
        f"on them. The guard runs all rows of a conversation above {percent(max_density)}.",
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
        first = next(row for row in data.read_bad_rows() if row.reason == reason)
        lines.append(f"{count:>8,} x {reason}   first: {printable(str(first), keep='')}")
    return "\n".join(lines)


def percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _bold_title(block: str) -> str:
    title, newline, rest = block.partition("\n")
    return f"{_BOLD}{title}{_OFF}{newline}{rest}"
