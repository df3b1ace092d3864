"""What prepared data was made from, in short values that a person can compare.

The fingerprint says that two preparations differ; this says in what.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DIGITS = 16  # of a checksum that is shown


def made_from(paths: Sequence[str], parts: Mapping[str, Any]) -> dict[str, Any]:
    """JSON values: name and checksum of each data file, of the tokenizer's parts, and settings.

    parts: what the fingerprint is taken of, see dataset.py.
    """
    names = [Path(path).name for path in paths]
    digests = [digest[:DIGITS] for digest in parts["files"]]
    return {
        "files": [list(pair) for pair in zip(names, digests, strict=True)],
        "tokenizer": _digest(parts["tokenizer"]),
        "special tokens": _digest(parts["special_tokens"]),
        "chat template": _digest(parts["chat_template"]),
        "versions of tokenizers and transformers": " and ".join(parts["versions"]),
        **parts["limit"],
        **{f"supervise_{key}": value for key, value in parts["masks"].items()},
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:DIGITS]


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two values of `made_from`; nothing where one of them is empty."""
    if not before or not now:
        return []
    found = _file_changes(before.get("files", []), now.get("files", []))
    for key in dict.fromkeys((*before, *now)):
        old, new = before.get(key), now.get(key)
        if key != "files" and old != new:
            found.append(f"{key} {old} -> {new}")
    return found


def _file_changes(before: list[list[str]], now: list[list[str]]) -> list[str]:
    """before, now: (name, checksum) in the order of train_data."""
    gone = [name for name, digest in before if digest not in {d for _, d in now}]
    come = [name for name, digest in now if digest not in {d for _, d in before}]
    found = [f"{name} has other contents" for name in gone if name in come]
    found += [f"{name} is not read any more" for name in gone if name not in come]
    found += [f"{name} was not read before" for name in come if name not in gone]
    if not found and [digest for _, digest in before] != [digest for _, digest in now]:
        found.append("the same files in another order or number")
    return found
