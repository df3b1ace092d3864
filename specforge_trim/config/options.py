"""Frozen dataclasses <-> nested YAML <-> flat command-line flags.  Knows no setting by name.

A configuration is a dataclass of section dataclasses; every leaf name is unique, so that
`train.learning_rate` in the file and `--learning-rate` on the command line mean one thing.
Leaf types: str, int, float, bool, tuple[str, ...], tuple[int, ...], each optionally `| None`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml


class ConfigError(ValueError):
    """A setting that the user can correct; the message names it and what is expected."""


def option(
    default: Any,
    help: str,
    *,
    choices: tuple[str, ...] | None = None,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
) -> Any:
    """One leaf of a section: default, one help string (unit and effect), allowed values."""
    limits = {"choices": choices, "at_least": at_least, "above": above, "at_most": at_most}
    return dataclasses.field(default=default, metadata={"help": help, **limits})


def section(cls: type) -> Any:
    """A section of a configuration, at its defaults."""
    return dataclasses.field(default_factory=cls)


def flag_name(key: str) -> str:
    return "--" + key.replace("_", "-")


def nearest(word: str, known: Iterable[str]) -> str:
    """A hint that names the known word nearest to a misspelt one, or all of them."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"did you mean '{close[0]}'?" if close else "known: " + ", ".join(known)


# ---------------------------------------------------------------------- sections and leaves


def sections_of(config_class: type) -> dict[str, type]:
    """Section name -> section dataclass, in declaration order."""
    hints = typing.get_type_hints(config_class)
    return {field.name: hints[field.name] for field in dataclasses.fields(config_class)}


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One setting: where it lives and what it accepts."""

    section: str
    key: str
    kind: type  # str, int, float or bool: the element type of a tuple
    is_tuple: bool
    optional: bool
    default: Any
    meta: Mapping[str, Any]


def leaves_of(config_class: type) -> dict[str, Leaf]:
    """Leaf name -> Leaf over all sections; names are asserted to be unique."""
    leaves: dict[str, Leaf] = {}
    for name, cls in sections_of(config_class).items():
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            assert field.name not in leaves, f"two settings are called {field.name}"
            hint, optional = hints[field.name], False
            if typing.get_origin(hint) in (typing.Union, types.UnionType):
                inner = [a for a in typing.get_args(hint) if a is not type(None)]
                hint, optional = inner[0], True
            is_tuple = typing.get_origin(hint) is tuple
            kind = typing.get_args(hint)[0] if is_tuple else hint
            leaves[field.name] = Leaf(
                name, field.name, kind, is_tuple, optional, field.default, field.metadata
            )
    return leaves


def _expected(leaf: Leaf) -> str:
    noun = {str: "text", int: "an integer", float: "a number", bool: "true or false"}[leaf.kind]
    if leaf.is_tuple:
        noun = "a list, each entry " + noun
    return noun + (" (or null)" if leaf.optional else "")


def _scalar(value: Any, leaf: Leaf, where: str) -> Any:
    """`value` as leaf.kind.  4.0 is no integer and 1 no boolean; `1e-3` is text in YAML 1.1."""
    kind = leaf.kind
    if kind is float and isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            pass
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
        return value
    raise ConfigError(f"{where}: {leaf.key} = {value!r}, expected {_expected(leaf)}")


def convert(value: Any, leaf: Leaf, where: str) -> Any:
    """A value read from a file as the leaf's type; ConfigError names key and place."""
    if value is None:
        if leaf.optional:
            return None
        raise ConfigError(f"{where}: {leaf.key} = null, expected {_expected(leaf)}")
    if not leaf.is_tuple:
        return _scalar(value, leaf, where)
    if isinstance(value, (list, tuple)):
        return tuple(_scalar(item, leaf, where) for item in value)
    return (_scalar(value, leaf, where),)


def check_limits(config: Any) -> None:
    """Each leaf against its own choices and limits; ConfigError names key, value, expectation."""
    for leaf in leaves_of(type(config)).values():
        value = getattr(getattr(config, leaf.section), leaf.key)
        meta = leaf.meta
        if value is None:
            continue
        for item in value if leaf.is_tuple else (value,):
            found = f"{leaf.key} = {item!r}"
            if item is None:
                raise ConfigError(f"{leaf.key} = {list(value)!r}: none stands alone or not at all")
            if isinstance(item, float) and not math.isfinite(item):
                raise ConfigError(f"{found}, expected a finite number")
            if meta["choices"] and item not in meta["choices"]:
                raise ConfigError(f"{found}, expected one of {', '.join(meta['choices'])}")
            if meta["at_least"] is not None and not item >= meta["at_least"]:
                raise ConfigError(f"{found}, expected at least {meta['at_least']}")
            if meta["above"] is not None and not item > meta["above"]:
                raise ConfigError(f"{found}, expected more than {meta['above']}")
            if meta["at_most"] is not None and not item <= meta["at_most"]:
                raise ConfigError(f"{found}, expected at most {meta['at_most']}")


# ---------------------------------------------------------------------- file


class _StrictLoader(yaml.SafeLoader):
    """Plain YAML in which a key that stands twice is an error, not a quiet override."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key '{key}' stands twice", node.start_mark
                )
        return super().construct_mapping(node, deep)


def read_yaml(path: str | Path, config_class: type) -> dict[str, Any]:
    """Leaf name -> value of one nested YAML file.

    Raises ConfigError for a missing or unreadable file and for an unknown section or key: the
    message names the key, the file and the nearest key that exists.
    """
    path = Path(path)
    try:
        data = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except FileNotFoundError:
        raise ConfigError(f"--config {path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--config {path}: cannot be read: {error}") from None
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"--config {path}: not valid YAML: {reason}") from None
    except (ValueError, RecursionError) as error:  # a date that does not exist; nesting too deep
        raise ConfigError(f"--config {path}: not readable as YAML: {error}") from None
    if not isinstance(data or {}, dict):
        raise ConfigError(f"--config {path}: expected sections with keys, got {data!r:.60}")

    leaves, names = leaves_of(config_class), sections_of(config_class)
    values: dict[str, Any] = {}
    for name, body in (data or {}).items():
        if name not in names:
            if name in leaves:
                hint = f"'{name}' belongs into section '{leaves[name].section}'"
            else:
                hint = nearest(str(name), names)
            raise ConfigError(f"{path}: unknown section '{name}'; {hint}")
        if not isinstance(body or {}, dict):
            raise ConfigError(f"{path}: section '{name}' holds {body!r:.60}, expected keys")
        own = {key for key, leaf in leaves.items() if leaf.section == name}
        for key, value in (body or {}).items():
            if key not in own:
                if key in leaves:
                    hint = f"it belongs into section '{leaves[key].section}'"
                else:
                    hint = nearest(str(key), own)
                raise ConfigError(f"{path}: unknown key '{name}.{key}'; {hint}")
            values[key] = convert(value, leaves[key], str(path))
    return values


def build(config_class: type, values: Mapping[str, Any]) -> Any:
    """A configuration from flat leaf values; what is not given keeps its default."""
    leaves, parts = leaves_of(config_class), {}
    for name, cls in sections_of(config_class).items():
        own = {k: v for k, v in values.items() if leaves[k].section == name}
        parts[name] = cls(**own)
    return config_class(**parts)


def to_dict(config: Any) -> dict[str, dict[str, Any]]:
    """Nested plain dicts, tuples as lists: what is written into checkpoints."""

    def plain(value: Any) -> Any:
        return list(value) if isinstance(value, tuple) else value

    nested = dataclasses.asdict(config)
    return {name: {k: plain(v) for k, v in body.items()} for name, body in nested.items()}


# ---------------------------------------------------------------------- flags


class Parser(argparse.ArgumentParser):
    """argparse whose errors are ConfigError, so that one place prints them, as one line."""

    def error(self, message: str) -> typing.NoReturn:
        prefix = "unrecognized arguments: "
        if message.startswith(prefix):
            unknown = message.removeprefix(prefix).split()[0]
            known = [s for a in self._actions for s in a.option_strings]
            if unknown.startswith("-"):
                hint = nearest(unknown.split("=")[0], known)
                message = f"unknown argument {unknown}; {hint}"
            else:
                message = _stray(unknown)
        elif found := re.fullmatch("argument ([^ ]+): ignored explicit argument (.*)", message):
            message = f"{found[1].split('/')[0]} takes no value, got {found[2]}; write " + (
                found[1].replace("/", " or ")
            )
        raise ConfigError(message)


def _stray(word: str) -> str:
    """A word that belongs to no flag: what it may have been meant for."""
    if word.lower() in ("true", "false", "yes", "no", "on", "off", "0", "1"):
        return f"unexpected {word!r}: switches take no value, write --name or --no-name"
    return f"unexpected {word!r}: it belongs to no flag (--help lists them)"


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps the layout of the description and its example."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=99)


def _from_text(leaf: Leaf) -> Any:
    def parse(text: str) -> Any:
        if leaf.optional and text.lower() in ("none", "null"):
            return None
        try:
            return leaf.kind(text)
        except ValueError:
            found = f"{text!r}, expected {_expected(leaf).replace('null', 'none')}"
            raise argparse.ArgumentTypeError(found) from None

    return parse


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value)


def add_flags(
    parser: argparse.ArgumentParser, config_class: type, sections: Sequence[str] | None = None
) -> None:
    """One flag per leaf of the named sections (default: all); only given flags are set."""
    for name, cls in sections_of(config_class).items():
        if sections is not None and name not in sections:
            continue
        group = parser.add_argument_group(name, (cls.__doc__ or "").strip().split("\n")[0])
        for leaf in leaves_of(config_class).values():
            if leaf.section != name:
                continue
            flag = flag_name(leaf.key)
            text = f"{leaf.meta['help']} (default: {_shown(leaf.default)})".replace("%", "%%")
            common: dict[str, Any] = {"default": argparse.SUPPRESS, "help": text}
            if leaf.kind is bool and not leaf.is_tuple:
                group.add_argument(flag, action=argparse.BooleanOptionalAction, **common)
                continue
            if leaf.is_tuple:
                common["nargs"] = "+"
            if leaf.meta["choices"]:
                common["metavar"] = "{" + ",".join(leaf.meta["choices"]) + "}"
            else:
                common["metavar"] = {str: "TEXT", int: "INT", float: "NUM"}[leaf.kind]
            group.add_argument(flag, type=_from_text(leaf), **common)


def given_flags(arguments: argparse.Namespace, config_class: type) -> dict[str, Any]:
    """Leaf name -> value of the flags that stood on the command line."""
    given = {}
    for key, leaf in leaves_of(config_class).items():
        if hasattr(arguments, key):
            value = getattr(arguments, key)
            if leaf.is_tuple:
                value = None if value == [None] else tuple(value)
            given[key] = value
    return given
