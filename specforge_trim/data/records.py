"""The kinds of rows a data file may hold, and the error for a row that cannot be used.

One job: types. Reading them is conversation.py's, turning them into tokens tokenize.py's.
"""

from dataclasses import dataclass

# Keys a row is read from (conversation.py); whatever else a file holds is left alone.
ROW_KEYS = frozenset(
    ("messages", "conversations", "prompt", "response", "completion", "text", "spans", "input_ids")
    + ("loss_mask", "assistant_masks", "labels", "tools", "system")
)
_SHOWN = 120  # characters of a user's text that a message may quote


class RowError(ValueError):
    """A row that cannot be used.

    reason: short and free of the row's own text, so that equal faults count together.
    detail: what was found in this row; may be empty.
    """

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail


@dataclass(frozen=True)
class Conversation:
    """Messages in the chat template's form, with the place they come from.

    messages: dicts with role and content (a string), other keys as in the file.
    tools:    tuple of JSON schemas, None when the row has none.
    source:   "file:line", lines counted from 1.
    """

    messages: tuple[dict, ...]
    tools: tuple[dict, ...] | None
    source: str


@dataclass(frozen=True)
class TextRow:
    """A conversation that is rendered already, special tokens written out.

    spans: ascending character ranges [start, end) that the assistant wrote; None = they are found
    by the chat template's generation prompt and end-of-turn token.
    """

    text: str
    spans: tuple[tuple[int, int], ...] | None
    source: str


@dataclass(frozen=True)
class TokenRow:
    """A conversation that is tokenised already: L ids, and for each whether it carries loss."""

    input_ids: tuple[int, ...]
    loss_mask: tuple[bool, ...]
    source: str


Row = Conversation | TextRow | TokenRow


@dataclass(frozen=True)
class BadRow:
    """A row that was not used: its place, the countable reason and this row's detail."""

    source: str
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}" + (f": {self.detail}" if self.detail else "")


def quote(value: object) -> str:
    """repr of a row's value, short enough for a message."""
    try:
        text = repr(value[: 2 * _SHOWN] if isinstance(value, (str, list)) else value)
    except RecursionError:
        text = f"{type(value).__name__}, nested too deeply to show"
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
