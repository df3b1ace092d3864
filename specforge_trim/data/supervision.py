"""Which of the assistant's text carries loss: options, and the spans they leave.

One job: spans of whole turns become the parts of them that are asked for. The parts are told by
the template's own tags in the rendered text:

    <|im_start|>assistant\n<think>\nHm.\n</think>\n\nYes.\n<tool_call>\n{...}\n</tool_call><|im_end|>
                          |------ reasoning ------||-----||--------- tool calls ---------------|

Reasoning runs from where the model starts to write through the closing tag and the newlines after
it; tool calls from their opening tag through the end of the turn, the end-of-turn token included.
A turn whose text makes the tags ambiguous raises RowError.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from specforge_trim.data.messages import REASONING_KEYS
from specforge_trim.data.records import RowError

TURNS = ("all", "last")


@dataclass(frozen=True)
class MaskOptions:
    """turns: all of the assistant's or its last only; reasoning, tool_calls: with loss or not."""

    turns: str = "all"
    reasoning: bool = True
    tool_calls: bool = True

    def __post_init__(self):
        if self.turns not in TURNS:
            raise ValueError(f"turns = {self.turns!r}, expected one of {', '.join(TURNS)}")

    @property
    def whole_turns(self) -> bool:
        return self.reasoning and self.tool_calls


@dataclass(frozen=True)
class PartTags:
    """How a template sets reasoning and tool calls apart.

    header:     what stands directly before a turn.
    reasoning:  opening and closing tag.
    calls:      opening text of the tool calls; None when the template writes none of its own.
    specials:   texts of the special tokens.
    """

    header: str
    reasoning: tuple[str, str]
    calls: str | None
    specials: frozenset[str]


def select_spans(
    text: str,
    spans: Sequence[tuple[int, int]],
    turns: Sequence[dict],
    *,
    options: MaskOptions,
    tags: PartTags,
) -> tuple[tuple[int, int], ...]:
    """The parts of the spans that carry loss; turns are the assistant's messages, in order.

    Raises RowError when a part cannot be told from the rest.
    """
    if options.turns == "last":
        spans, turns = spans[-1:], turns[-1:]
    if options.whole_turns:
        return tuple(spans)
    if len(spans) != len(turns):
        raise RowError("the chat template joins assistant turns", f"{len(spans)} spans")
    kept = []
    for (start, end), turn in zip(spans, turns, strict=True):
        stop = end if options.tool_calls else _calls_start(text, start, end, turn, tags)
        if not options.reasoning:
            start = _reasoning_end(text, start, end, tags)
        if start < stop:
            kept.append((start, stop))
    return tuple(kept)


def _reasoning_end(text: str, start: int, end: int, tags: PartTags) -> int:
    """Where the reasoning of the turn [start, end) stops; start when it has none."""
    opening, closing = tags.reasoning
    body = text[start:end]
    for special in tags.specials:
        body = body.removesuffix(special)
    opened = text[:start].rstrip().endswith(opening) or body.lstrip().startswith(opening)
    if not opened:
        if opening in body or (closing in body and closing not in tags.specials):
            raise RowError("reasoning does not stand at the start of the turn", repr(opening))
        return start
    # A special token is never part of the text; an ordinary tag may be quoted in it.
    count = body.count(closing)
    if count == 0 or (count > 1 and closing not in tags.specials):
        raise RowError("reasoning does not end with one closing tag", f"{count} x {closing!r}")
    stop = start + body.index(closing) + len(closing)
    while stop < end and text[stop] == "\n":
        stop += 1
    return stop


def _calls_start(text: str, start: int, end: int, turn: dict, tags: PartTags) -> int:
    """Where the tool calls of the turn [start, end) start; end when it has none."""
    if not turn.get("tool_calls"):
        return end
    written = [turn["content"], *(turn.get(key, "") for key in REASONING_KEYS)]
    if tags.calls is None:
        if any(part.strip() for part in written):
            raise RowError("nothing in the chat template marks where tool calls start")
        return start
    if any(tags.calls in part for part in written):
        raise RowError("the assistant's text contains the tag of tool calls", repr(tags.calls))
    place = text.find(tags.calls, start - len(tags.header), end)
    if place < 0:
        raise RowError("the chat template does not render the tool calls", repr(tags.calls))
    return place if text[start:place].strip() else start
