"""Read rows from data files, keeping the place of every row.

One job: a line of a data file becomes a row (rows.py) or a BadRow that names file, line and
reason. Nothing is dropped without one of the two. Rows are read with the json module, so nested
values (tool schemas, tool arguments) reach the chat template unchanged.

The forms of a row, told apart by their keys. A row that fits two of them is refused, except that
`prompt` beside messages is taken for a copy of the first question, as some data sets have it:

    {"messages":      [{"role": "user", "content": "..."}, ...], "tools": [...]}
    {"conversations": [{"from": "human", "value": "..."}, ...]}               ShareGPT
    {"prompt": "...", "response": "..."}        or "completion"; each text or a list of messages
    {"text": "<|im_start|>user ...", "spans": [[start, end], ...]}            spans may be absent
    {"input_ids": [...], "loss_mask": [...]}    or "assistant_masks", or "labels" with -100
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from specforge_trim.data.files import read_lines
from specforge_trim.data.messages import parse_messages, parse_tools
from specforge_trim.data.records import (
    BadRow,
    Conversation,
    Row,
    RowError,
    TextRow,
    TokenRow,
    quote,
)

__all__ = [
    "BadRow", "Conversation", "Row", "RowError", "TextRow", "TokenRow", "parse_line", "parse_row",
    "read_conversations",
]  # fmt: skip

_CHATS = ("messages", "conversations")
_FORMS = (*_CHATS, "prompt", "text", "input_ids")
_RESPONSES = ("response", "completion")
_MASKS = ("loss_mask", "assistant_masks", "labels")
_NO_LABEL = -100  # what training code writes into labels where there is no loss


def read_conversations(
    path: str | Path, *, on_bytes: Callable[[int], object] = lambda count: None
) -> Iterator[Row | BadRow]:
    """Yield one row or BadRow per row of a data file, in order; see files.read_lines."""
    for number, raw in read_lines(path, on_bytes=on_bytes):
        yield parse_line(raw, source=f"{path}:{number}")


def parse_line(raw: bytes | RowError, *, source: str) -> Row | BadRow:
    """One line of a data file, as read_lines gives it."""
    try:
        if isinstance(raw, RowError):
            raise raw
        return parse_row(_parse_json(raw), source=source)
    except RowError as error:
        return BadRow(source, error.reason, error.detail)


def parse_row(row: object, *, source: str) -> Row:
    """The row in one decoded JSON value; raises RowError.

    A conversation without an answer is one (the target may be asked to write it); tokenize.py
    refuses it for training.
    """
    if not isinstance(row, dict):
        raise RowError("row is not a JSON object", f"found {type(row).__name__}")
    forms = [key for key in _FORMS if row.get(key) is not None]
    if "prompt" in forms and forms[0] in _CHATS:
        forms.remove("prompt")
    if len(forms) > 1:
        raise RowError(f"row has both {forms[0]!r} and {forms[1]!r}", "leave one of them out")
    form = forms[0] if forms else None
    if form == "input_ids":
        return _parse_tokens(row, source)
    if form == "text":
        return _parse_text(row, source)
    if form == "prompt":
        raw = _pair(row)
    elif form is not None:
        raw = row[form]
    else:
        known = ", ".join(f"'{key}'" for key in _FORMS)
        raise RowError(f"row has none of {known}", f"keys {quote(list(row))}")
    messages = parse_messages(raw, system=row.get("system"))
    return Conversation(messages, parse_tools(row.get("tools")), source)


def _parse_json(raw: bytes) -> object:
    try:
        return json.loads(raw.removeprefix(b"\xef\xbb\xbf").decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RowError("line is not UTF-8", f"byte {error.start}") from None
    except json.JSONDecodeError as error:
        raise RowError("line is not valid JSON", f"{error.msg} at column {error.colno}") from None
    except (RecursionError, ValueError) as error:
        # too deeply nested, or an integer with more digits than Python converts
        raise RowError("line is not valid JSON", type(error).__name__) from None


def _pair(row: dict) -> list:
    """Messages of a prompt and its response, each a text or a list of messages."""
    key = _only_key(row, _RESPONSES, required=False)
    messages = _as_messages(row["prompt"], "user")
    return messages if key is None else messages + _as_messages(row[key], "assistant")


def _as_messages(value: object, role: str) -> list:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _only_key(row: dict, keys: tuple[str, ...], *, required: bool) -> str | None:
    """The one of keys that the row has; RowError for several, or for none where one must be."""
    found = [key for key in keys if row.get(key) is not None]
    if len(found) > 1:
        raise RowError(f"row has both {found[0]!r} and {found[1]!r}", "leave one of them out")
    if not found and required:
        raise RowError(f"row has none of {', '.join(repr(key) for key in keys)}", "")
    return found[0] if found else None


def _parse_text(row: dict, source: str) -> TextRow:
    text, spans = row["text"], row.get("spans")
    if not isinstance(text, str) or not text.strip():
        raise RowError("text is empty or not a string", quote(text))
    if spans is None:
        return TextRow(text, None, source)
    if not isinstance(spans, list) or not all(_is_span(span) for span in spans):
        raise RowError("spans are not a list of [start, end]", quote(spans))
    edges = [0, *(edge for span in spans for edge in span), len(text)]
    if edges != sorted(edges):
        raise RowError("spans are not ascending ranges inside the text", quote(spans))
    return TextRow(text, tuple((start, end) for start, end in spans if start < end), source)


def _is_span(span: object) -> bool:
    return isinstance(span, list) and len(span) == 2 and all(type(edge) is int for edge in span)


def _parse_tokens(row: dict, source: str) -> TokenRow:
    ids = row["input_ids"]
    if not isinstance(ids, list) or not all(type(token) is int and token >= 0 for token in ids):
        raise RowError("input_ids are not a list of token ids", quote(ids))
    key = _only_key(row, _MASKS, required=True)
    mask = row[key]
    if not isinstance(mask, list) or len(mask) != len(ids):
        found = f"{len(mask)} entries" if isinstance(mask, list) else type(mask).__name__
        raise RowError(f"{key} do not fit input_ids", f"{found}, {len(ids)} ids")
    if key == "labels":
        for at, (label, token) in enumerate(zip(mask, ids, strict=True)):
            if type(label) is not int or label not in (_NO_LABEL, token):
                raise RowError("labels differ from input_ids", f"token {at}: {quote(label)}")
        mask = [label != _NO_LABEL for label in mask]
    elif not all(isinstance(kept, int) and kept in (0, 1) for kept in mask):
        raise RowError(f"{key} holds something else than 0 and 1", quote(mask))
    return TokenRow(tuple(ids), tuple(bool(kept) for kept in mask), source)
