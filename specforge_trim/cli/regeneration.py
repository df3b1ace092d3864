"""Flags of `specforge-trim regenerate`, and who writes the answers they ask for."""

from __future__ import annotations

import argparse
import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specforge_trim.drafts.eagle3.settings import Config, ConfigError

if TYPE_CHECKING:
    from specforge_trim.verifier.answers.regenerate import RegenerateReport
    from specforge_trim.verifier.answers.source import AnswerSource

API_KEY = "OPENAI_API_KEY"


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the command itself."""

    def add(flag: str, kind: type, default: Any, text: str) -> None:
        shown = {str: "TEXT", int: "INT", float: "NUM"}[kind]
        parser.add_argument(
            flag, type=kind, default=default, metavar=shown, help=f"{text} (default: {default})"
        )

    parser.add_argument("--out", required=True, metavar="FILE", help="JSONL file to write")
    add("--max-new-tokens", int, 256, "longest answer in tokens; longer ones are dropped")
    add("--batch-size", int, 16, "conversations answered at once in this process")
    parser.add_argument(
        "--server", metavar="URL",
        help="an OpenAI-compatible server, http://host:port: it writes the answers, no model is "
        f"loaded here. A key is read from ${API_KEY}",
    )  # fmt: skip
    parser.add_argument(
        "--server-model", metavar="NAME",
        help="the model's name on the server (default: the only one it has)",
    )  # fmt: skip
    add("--concurrency", int, 32, "requests to the server at once")
    add("--temperature", float, 0.0, "sampling temperature of the server; 0 = greedy")
    add("--retries", int, 5, "how often a request that failed is sent again, after growing pauses")
    add("--timeout", float, 600.0, "seconds that one request may take")


def check_flags(arguments: argparse.Namespace) -> None:
    """Raises ConfigError for flags that have no effect."""
    if arguments.server is None and (arguments.server_model or arguments.temperature != 0.0):
        raise ConfigError("--server-model and --temperature need --server: without, it is greedy")


def local_source(
    arguments: argparse.Namespace, config: Config, target_path: str | Path, device: Any
) -> AnswerSource:
    """The target in this process."""
    import torch

    from specforge_trim.verifier.answers.local import LocalAnswers

    return LocalAnswers(
        target_path,
        max_new_tokens=arguments.max_new_tokens,
        batch_size=arguments.batch_size,
        max_length=config.data.max_length,
        dtype=getattr(torch, config.model.target_dtype),
        device=str(device),
    )


def server_source(arguments: argparse.Namespace) -> AnswerSource:
    """The server that --server names, with the one model it has unless --server-model says."""
    from specforge_trim.verifier.answers.server import ServerAnswers, served_model

    key = os.environ.get(API_KEY)
    name = arguments.server_model
    if not name:
        # Whether the server is there is known after few tries: no long wait on a wrong address.
        tries = min(2, arguments.retries)
        name = served_model(arguments.server, api_key=key, retries=tries)
    return ServerAnswers(
        arguments.server,
        name,
        max_new_tokens=arguments.max_new_tokens,
        temperature=arguments.temperature,
        concurrency=arguments.concurrency,
        retries=arguments.retries,
        timeout=arguments.timeout,
        api_key=key,
    )


def summary(report: RegenerateReport, out: str) -> str:
    """What was written, what was dropped and why."""
    lines = [f"{report.written} conversations written to {out}"]
    lines += [f"  dropped {count} x {reason}" for reason, count in report.dropped.most_common()]
    if report.bad_rows:
        counts = Counter(row.reason for row in report.bad_rows)
        lines += [f"  not used {count} x {reason}" for reason, count in counts.most_common()]
        lines.append(f"  rows not used, with file and line: {out}.bad_rows.jsonl")
    return "\n".join(lines)
