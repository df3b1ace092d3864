"""Replace what the assistant wrote by markers, to see in a render where it goes.

One job: messages in, marked messages out. A marker is a string of digits: it survives trimming,
case changes and escaping, and stands in no row. Blank strings stay, since templates ask for them.
"""

from collections.abc import Iterator
from itertools import count, islice
from typing import Any

from specforge_trim.data.records import Conversation

_KEPT_KEYS = frozenset({"role", "type", "id", "tool_call_id", "name"})


def markers(avoid: str, number: int) -> list[str]:
    """`number` distinct digit strings absent in `avoid`."""
    return list(islice(_supply(avoid), number))


def mark_assistant(conversation: Conversation) -> tuple[list[dict], list[list[str]]]:
    """The messages with each string the assistant wrote replaced, and the markers per turn."""
    supply = _supply(repr(conversation.messages) + repr(conversation.tools))
    marked, turns = [], []
    for message in conversation.messages:
        if message["role"] == "assistant":
            used: list[str] = []
            message = _replace(message, supply, used)
            turns.append(used)
        marked.append(message)
    return marked, turns


def _supply(avoid: str) -> Iterator[str]:
    salt = 7305
    while f"{salt}90251" in avoid:
        salt += 1
    return (f"{salt}90251{index:05d}{salt}" for index in count())


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
    return key == "arguments" and isinstance(value, dict) and not _has_text(value)


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


def _has_text(value: Any) -> bool:
    """Whether _replace takes a marker."""
    if isinstance(value, dict):
        return any(
            _bare_arguments(key, item) or _has_text(item)
            for key, item in value.items()
            if key not in _KEPT_KEYS
        )
    if isinstance(value, list):
        return any(map(_has_text, value))
    return isinstance(value, str) and bool(value.strip())
