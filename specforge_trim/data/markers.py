"""Replace what the assistant wrote by markers, to see in a render where it goes.

One job: messages in, marked messages out. A marker is a string of digits: it survives trimming,
case changes and escaping, and stands in no row. Blank strings stay, since templates ask for them.
"""

from collections.abc import Iterator
from typing import Any

from specforge_trim.data.rows import Conversation

_KEPT_KEYS = frozenset({"role", "type", "id", "tool_call_id", "name"})


def markers(avoid: str, count: int) -> list[str]:
    """`count` distinct digit strings absent in `avoid`."""
    salt = 7305
    while f"{salt}90251" in avoid:
        salt += 1
    return [f"{salt}90251{index:05d}{salt}" for index in range(count)]


def mark_assistant(conversation: Conversation) -> tuple[list[dict], list[list[str]]]:
    """The messages with each string the assistant wrote replaced, and the markers per turn."""
    total = sum(_count(m) for m in conversation.messages if m["role"] == "assistant")
    supply = iter(markers(repr(conversation.messages) + repr(conversation.tools), total))
    marked, turns = [], []
    for message in conversation.messages:
        if message["role"] == "assistant":
            used: list[str] = []
            message = _replace(message, supply, used)
            turns.append(used)
        marked.append(message)
    return marked, turns


def strings(value: Any) -> list[str]:
    """Every string inside a decoded JSON value, keys included."""
    found, stack = [], [value]
    while stack:
        value = stack.pop()
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, dict):
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            stack += value
    return found


def _bare_arguments(key: str, value: Any) -> bool:
    """Arguments without a string to mark get one, or a call without any would leave no trace."""
    return key == "arguments" and isinstance(value, dict) and not _count(value)


def _replace(value: Any, supply: Iterator[str], used: list[str]) -> Any:
    if isinstance(value, str) and value.strip():
        used.append(next(supply))
        return used[-1]
    if isinstance(value, list):
        return [_replace(item, supply, used) for item in value]
    if not isinstance(value, dict):
        return value
    replaced = {}
    for key, item in value.items():
        if _bare_arguments(key, item):
            item = {"value": "-"}
        replaced[key] = item if key in _KEPT_KEYS else _replace(item, supply, used)
    return replaced


def _count(value: Any) -> int:
    """How many markers _replace takes."""
    if isinstance(value, dict):
        return sum(
            1 if _bare_arguments(key, item) else _count(item)
            for key, item in value.items()
            if key not in _KEPT_KEYS
        )
    if isinstance(value, list):
        return sum(_count(item) for item in value)
    return int(isinstance(value, str) and bool(value.strip()))
