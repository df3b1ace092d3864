"""Messages and tools of one row, in the form chat templates expect.

One job: the decoded JSON of `messages` (or ShareGPT's `conversations`) and `tools` becomes
messages with role and content, everything else unchanged, or a RowError that names the message.
"""

import json
from typing import TypeGuard

from specforge_trim.data.records import RowError, quote

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
    "function_call": "assistant",
}
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


def parse_messages(raw: object, *, system: object = None) -> tuple[dict, ...]:
    """Messages of one row; raises RowError.

    system: text of a system turn that stands beside the messages, put before them.
    """
    if not isinstance(raw, list):
        raise RowError("messages are not a list", f"found {type(raw).__name__}")
    messages = [_parse_message(message, i) for i, message in enumerate(raw)]
    if system is not None:
        if any(message["role"] == "system" for message in messages):
            raise RowError("row has 'system' and a system message")
        content = _parse_content(system, "system")
        messages = ([{"role": "system", "content": content}] if content else []) + messages
    if not any(message["role"] == "user" for message in messages):
        raise RowError("no user message", f"{len(messages)} messages")
    return tuple(messages)


def parse_tools(tools: object) -> tuple[dict, ...] | None:
    """Tools as a list, as a string holding a JSON list, null or absent; raises RowError."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else None
        except (ValueError, RecursionError):
            raise RowError("tools are a string that is not valid JSON", quote(tools)) from None
    if tools is None:
        return None
    if not _objects(tools):
        raise RowError("tools are not a list of objects", quote(tools))
    return tuple(tools) or None


def _parse_message(message: object, index: int) -> dict:
    where = f"message {index}"
    if not isinstance(message, dict):
        raise RowError("message is not an object", f"{where} is {type(message).__name__}")
    role_key, content_key = ("from", "value") if "from" in message else ("role", "content")
    role = message.get(role_key)
    if not isinstance(role, str):
        raise RowError("message has no role", where)
    if role not in ROLES:
        raise RowError(f"unknown role {quote(role)}", f"{where}; known: {', '.join(ROLES)}")
    content = _parse_content(message.get(content_key), where)
    if len(message) == 2 and role != "function_call" and content_key in message:
        if not content.strip() and ROLES[role] in ("user", "assistant"):
            raise RowError(f"empty {ROLES[role]} message", where)
        return {"role": ROLES[role], "content": content}
    rest = {
        key: value
        for key, value in message.items()
        if key not in (role_key, content_key) and value is not None
    }
    if role == "function_call":
        content, rest["tool_calls"] = "", _calls_from_text(content, where)
    role = ROLES[role]
    _check_extras(rest, where)
    written = [content, *(rest.get(key, "") for key in REASONING_KEYS)]
    if role != "assistant":
        written = [content] if role == "user" else ["-"]
    if not any(text.strip() for text in written) and not rest.get("tool_calls"):
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
            raise RowError("content has a part that is not text", f"{where}: {quote(part)}")
        texts.append(text)
    return "".join(texts)


def _check_extras(rest: dict, where: str) -> None:
    """Reasoning is text and tool calls are objects, or the mask of the turn means nothing."""
    for key in REASONING_KEYS:
        if not isinstance(rest.get(key, ""), str):
            raise RowError(f"{key} is not text", f"{where} has {type(rest[key]).__name__}")
    if not _objects(rest.get("tool_calls", [])):
        raise RowError("tool_calls are not a list of objects", f"{where}: {quote(rest)}")


def _calls_from_text(text: str, where: str) -> list[dict]:
    """ShareGPT's function_call turns: a JSON object (or a list of them) with name, arguments."""
    try:
        calls = json.loads(text)
    except (ValueError, RecursionError):
        raise RowError("function_call is not valid JSON", f"{where}: {quote(text)}") from None
    calls = [calls] if isinstance(calls, dict) else calls
    if not calls or not _objects(calls) or not all(isinstance(c.get("name"), str) for c in calls):
        raise RowError("function_call has no name", f"{where}: {quote(text)}")
    return [{"type": "function", "function": call} for call in calls]


def _objects(value: object) -> TypeGuard[list[dict]]:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)
