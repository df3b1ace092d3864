"""Flags of `specforge-trim export` and the command `make-config`: drafts as files."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specforge_trim.config.options import HelpFormatter, Parser
from specforge_trim.drafts.eagle3.settings import Config, ConfigError
from specforge_trim.ranks.world import World

LAYOUTS = ("native", "speculators")
EXPORT_DTYPES = ("bfloat16", "float16", "float32")


def add_export_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the export command itself."""
    parser.add_argument(
        "--out", metavar="DIR", help="folder to write (default: output_dir/export)"
    )
    parser.add_argument(
        "--checkpoint", default="newest", metavar="WHICH",
        help="newest; best = the one that decoded best while training (needs --decode-every or "
        "--eval-every then); or a step that is on disk (default: newest)",
    )  # fmt: skip
    parser.add_argument(
        "--layout", choices=LAYOUTS, default="native",
        help="native = what SGLang, vLLM and TensorRT-LLM share; speculators = its own layout, "
        "which vLLM serves too (default: native)",
    )  # fmt: skip
    parser.add_argument(
        "--export-dtype", choices=EXPORT_DTYPES,
        help="number format on disk (default: float16 for a float16 target, else bfloat16)",
    )  # fmt: skip
    parser.add_argument(
        "--prune-vocab", type=int, metavar="INT",
        help="keep only this many of the draft's tokens, the most frequent in train_data: a "
        "cheaper head, fewer tokens it can propose (default: keep all)",
    )  # fmt: skip


def export(arguments: argparse.Namespace, config: Config, world: World) -> Path:
    """Writes a checkpoint as the flags ask; the folder."""
    import torch

    from specforge_trim.drafts.eagle3.vocab import count_supervised_tokens
    from specforge_trim.train import results
    from specforge_trim.train import run as pipeline

    target = pipeline.open_target(config, world)
    counts = None
    if arguments.prune_vocab is not None:
        data = pipeline.prepare_data(config, target, world)
        found = count_supervised_tokens(data, vocab_size=target.draft.vocab_size)
        counts = (found, arguments.prune_vocab)
    name = arguments.export_dtype
    return results.export_trained(
        config,
        target,
        None if arguments.out is None else Path(arguments.out),
        layout=arguments.layout,
        dtype=None if name is None else getattr(torch, name),
        prune_counts=counts,
        which=arguments.checkpoint,
    )


def make_config_command(argv: Sequence[str]) -> None:
    """Writes a draft config from a target's own configuration."""
    parser = Parser(
        prog="specforge-trim make-config",
        usage="specforge-trim make-config TARGET [--draft-vocab-size N] [--out FILE]",
        formatter_class=HelpFormatter,
        description="Writes the sizes of a draft that fits a target: one layer with the target's\n"
        "own heads, norm and positions. For a mixture of experts the MLP is as wide as what one\n"
        "token passes through. No weights are read.\n\nexample:\n"
        "  specforge-trim make-config Qwen/Qwen3-8B --draft-vocab-size 32000 --out draft.json",
    )
    parser.add_argument(
        "target", metavar="TARGET", help="config.json, the folder that holds one, or a hub id"
    )
    parser.add_argument(
        "--draft-vocab-size", type=int, metavar="INT",
        help="tokens the draft can propose (default: the target's whole vocabulary)",
    )  # fmt: skip
    parser.add_argument(
        "--out", metavar="FILE", help="file to write (default: print to the terminal)"
    )
    arguments = parser.parse_args(argv)
    text = json.dumps(
        draft_json(arguments.target, draft_vocab_size=arguments.draft_vocab_size), indent=2
    )
    if arguments.out is None:
        print(text)
        return
    out = Path(arguments.out)
    if out.exists():
        raise ConfigError(f"--out {out} exists; name a new file or remove it first")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(text + "\n", encoding="utf-8")
    print(out)


def draft_json(target: str | Path, *, draft_vocab_size: int | None) -> dict[str, Any]:
    """The draft config of a target as JSON values. Raises ValueError for what cannot be read."""
    from specforge_trim.drafts.eagle3.for_target import draft_for_target
    from specforge_trim.drafts.eagle3.vocab import check_vocab_sizes

    config = read_target_config(target)
    if draft_vocab_size is not None:
        vocab_size = config.get_text_config().vocab_size
        check_vocab_sizes(vocab_size=vocab_size, draft_vocab_size=draft_vocab_size)
    return draft_for_target(config, draft_vocab_size=draft_vocab_size).to_dict()


def read_target_config(target: str | Path, *, local_only: bool = False) -> Any:
    """The transformers configuration at a config.json, in a folder, or of a hub id."""
    from transformers import AutoConfig

    from specforge_trim.verifier.embedded import EMBEDDED_TARGETS, HUB_ID, resolve_target
    from specforge_trim.verifier.hub import check_hub

    path = Path(target).expanduser()
    if path.is_file():
        raw = json.loads(path.read_text(encoding="utf-8"))
        kind = raw.get("model_type") if isinstance(raw, dict) else None
        if kind is None:
            raise ConfigError(f"{target}: no model_type; expected a target's config.json")
        try:
            # Keys that start with _ are notes, such as the source of a file in configs/targets.
            values = {k: v for k, v in raw.items() if k != "model_type" and k[0] != "_"}
            return AutoConfig.for_model(kind, **values)
        except (ValueError, KeyError) as error:
            raise ConfigError(f"{target}: {error}") from None
    name = str(target)
    if not path.is_dir() and name.lower() not in EMBEDDED_TARGETS and not HUB_ID.fullmatch(name):
        raise ConfigError(
            f"target {name!r}: no such file or folder. Give a config.json, the folder that holds "
            "one, or a hub id (owner/name)"
        )
    found = resolve_target(name)
    if isinstance(found, str) and not local_only:
        check_hub(found)
    try:
        return AutoConfig.from_pretrained(found, local_files_only=local_only)
    except ValueError as error:
        raise ConfigError(f"target {name!r}: {str(error).splitlines()[0]}") from None
