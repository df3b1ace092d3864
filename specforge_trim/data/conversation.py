"""Read conversations from JSON lines, keeping the place of every row.

One job: a line of a data file becomes a Conversation or a BadRow that names file, line and reason.
Nothing is dropped without one of the two. Rows are read with the json module, so nested values
(tool schemas, tool arguments) reach the chat template unchanged. Tokens are not known here.

Two layouts are understood, told apart by their keys:

    {"messages":      [{"role": "user", "content": "..."}, ...], "tools": [...]}
    {"conversations": [{"from": "human", "value": "..."}, ...]}               ShareGPT
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
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
class BadRow:
    """A row that was not used: its place, the countable reason and this row's detail."""

    source: str
    reason: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.source}: {self.reason}" + (f": {self.detail}" if self.detail else "")


def read_conversations(
    path: str | Path, *, on_bytes: Callable[[int], object] = lambda count: None
) -> Iterator[Conversation | BadRow]:
    """Yield one Conversation or BadRow per non-blank line of a JSON-lines file, in order.

    on_bytes is called with the size of each line read, for a progress bar.
    Raises FileNotFoundError or another OSError when the file cannot be read, ValueError when the
    file as a whole is something else than JSON lines (a JSON array, a compressed file).
    """
    path = Path(path)
    with path.open("rb") as file:
        _check_file_kind(path, file.read(64))
        file.seek(0)
        for number, raw in enumerate(file, start=1):
            on_bytes(len(raw))
            if not raw.strip():
                continue
            source = f"{path}:{number}"
            try:
                yield parse_row(_parse_json(raw), source=source)
            except RowError as error:
                yield BadRow(source, error.reason, error.detail)


def parse_row(row: object, *, source: str) -> Conversation:
    """The Conversation in one decoded JSON row; raises RowError.

    A conversation without an answer is one (the target may be asked to write it); tokenize.py
    refuses it for training.
    """
    if not isinstance(row, dict):
        raise RowError("row is not a JSON object", f"found {type(row).__name__}")
    raw_messages = row.get("messages")
    if raw_messages is None:
        raw_messages = row.get("conversations")
    if raw_messages is None:
        raise RowError(
            "row has neither 'messages' nor 'conversations'", f"keys {_quote(list(row))}"
        )
    if not isinstance(raw_messages, list):
        raise RowError("messages are not a list", f"found {type(raw_messages).__name__}")
    messages = tuple(_parse_message(message, i) for i, message in enumerate(raw_messages))
    if not any(message["role"] == "user" for message in messages):
        raise RowError("no user message", f"{len(messages)} messages")
    return Conversation(messages, _parse_tools(row.get("tools")), source)


def _check_file_kind(path: Path, head: bytes) -> None:
    """Files that are not JSON lines at all get one message, not one per line."""
    if head[:2] == b"\x1f\x8b":
        raise ValueError(f"{path} is gzip-compressed; expected JSON lines as plain text")
    if head.removeprefix(b"\xef\xbb\xbf").lstrip()[:1] == b"[":
        raise ValueError(f"{path} is one JSON array; expected JSON lines, one object per line")


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


def _parse_message(message: object, index: int) -> dict:
    where = f"message {index}"
    if not isinstance(message, dict):
        raise RowError("message is not an object", f"{where} is {type(message).__name__}")
    role_key, content_key = ("from", "value") if "from" in message else ("role", "content")
    role = message.get(role_key)
    if not isinstance(role, str):
        raise RowError("message has no role", where)
    if role not in ROLES:
        raise RowError(f"unknown role {_quote(role)}", f"{where}; known: {', '.join(ROLES)}")
    rest = {
        key: value
        for key, value in message.items()
        if key not in (role_key, content_key) and value is not None
    }
    calls = rest.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise RowError("tool_calls are not a list of objects", f"{where}: {_quote(calls)}")
    content = _parse_content(message.get(content_key), where)
    role = ROLES[role]
    if not content.strip() and role in ("user", "assistant") and not rest.get("tool_calls"):
        raise RowError(f"empty {role} message", where)
    return {"role": role, "content": content, **rest}


def _parse_content(content: object, where: str) -> str:
    """Content as text: a string, null (no text), or a list of text parts, which are joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RowError("content is not text", f"{where} has {type(content).__name__}")
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
        if not isinstance(text, str):
            raise RowError("content has a part that is not text", f"{where}: {_quote(part)}")
        texts.append(text)
    return "".join(texts)


def _parse_tools(tools: object) -> tuple[dict, ...] | None:
    """Tools as a list, as a string holding a JSON list, null or absent."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError):
            raise RowError("tools are a string that is not valid JSON", _quote(tools)) from None
    if tools is None:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RowError("tools are not a list of objects", _quote(tools))
    return tuple(tools) or None


def _quote(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
