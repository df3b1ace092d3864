"""What `specforge-trim inspect` shows of prepared data under a configuration."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from specforge_trim.cli.dry_run import training_memory, training_of
from specforge_trim.common.atomic import replaced
from specforge_trim.data.dataset import PreparedData
from specforge_trim.data.report.html import inspect_html
from specforge_trim.data.report.terminal import inspect_terminal
from specforge_trim.drafts.eagle3.features import Target
from specforge_trim.drafts.eagle3.settings import Config, ConfigError

_PAGE_STARTS = b"<!DOCTYPE html>"


def check_flags(arguments: argparse.Namespace) -> None:
    """ConfigError before any work: a page is written over a page only, never over data."""
    if arguments.conversations < 0:
        raise ConfigError(f"--conversations {arguments.conversations}: expected at least 0")
    if arguments.html is None or not (path := Path(arguments.html)).exists():
        return
    if not path.is_file():
        raise ConfigError(f"--html {path}: is a folder or a device; expected a file to write")
    with path.open("rb") as file:
        if file.read(len(_PAGE_STARTS)) not in (b"", _PAGE_STARTS):
            raise ConfigError(f"--html {path}: exists and is no HTML page; name another file")


def terminal(
    config: Config, target: Target, data: PreparedData, arguments: argparse.Namespace
) -> str:
    """The text for the terminal; arguments: index, color, paint."""
    return inspect_terminal(
        data,
        target.tokenizer(),
        training_of(config, target.draft),
        memory=_memory(config, target, data),
        index=arguments.index,
        color=arguments.color,
        paint=arguments.paint,
    )


def write_page(
    config: Config, target: Target, data: PreparedData, arguments: argparse.Namespace
) -> Path:
    """Writes the page to arguments.html, whole or not at all; returns its path."""
    page = inspect_html(
        data,
        target.tokenizer(),
        training_of(config, target.draft),
        memory=_memory(config, target, data),
        index=arguments.index,
        conversations=arguments.conversations,
    )
    path = Path(arguments.html)
    path.parent.mkdir(parents=True, exist_ok=True)
    with replaced(path) as temporary:
        temporary.write_text(page, encoding="utf-8")
    return path


def _memory(config: Config, target: Target, data: PreparedData) -> dict[str, int]:
    """Of a step with the longest conversation, where that is more than the token budget."""
    tokens = max(config.data.tokens_per_batch, int(data.lengths.max(initial=0)))
    largest = replace(config, data=replace(config.data, tokens_per_batch=tokens))
    device = config.train.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    tied = bool(target.text_config.tie_word_embeddings)
    return training_memory(largest, target.draft, device=device, tied=tied)
