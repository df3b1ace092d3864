"""Commands `specforge-trim {prepare,regenerate,capture,verify,inspect,...}`, and training.

Parses, calls the phases of train/run.py and train/results.py, prints.  running.py ends a command.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from specforge_trim.cli import draft_commands, regeneration
from specforge_trim.cli.running import Command, guarded
from specforge_trim.config.options import HelpFormatter, Parser, nearest
from specforge_trim.drafts.eagle3.settings import (
    Config,
    ConfigError,
    check_world,
    config_parser,
    least_ranks,
    resolve_config,
)
from specforge_trim.train.provenance import package_versions

RECIPE = Path(__file__).resolve().parents[2] / "examples" / "quickstart.yaml"


def quiet_transformers() -> None:
    """Loading a target is seconds of work and no news."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()


def add_version(parser: argparse.ArgumentParser) -> None:
    """--version, which shows what is in use."""
    names = ", ".join(f"{name} {version}" for name, version in package_versions().items())
    parser.add_argument(
        "--version", action="version", version=names, help="show the versions in use and end"
    )


# ---------------------------------------------------------------------- training


def train_command(argv: Sequence[str]) -> None:
    """torchrun train_eagle3.py: all phases up to the trained draft; `export` writes it."""
    parser = config_parser(
        "train_eagle3.py",
        "Trains an EAGLE-3 draft. Data, features and checkpoints that are there are reused, so\n"
        "the same command continues an interrupted run. SIGTERM and SIGINT (Ctrl-C) finish the\n"
        "step and save; a second one ends at once. Exit codes: 0 done, 2 error, 130 SIGINT,\n"
        "143 SIGTERM (torchrun turns those into 1).\n\n"
        "example:\n"
        "  torchrun --nproc_per_node 2 train_eagle3.py --config examples/quickstart.yaml \\\n"
        "      --trim-loss-positions --trim-backbone-rows",
    )
    add_version(parser)
    parser.add_argument(
        "--dry-run", action="store_true",
        help="print the plan of the run (sizes, memory, kept work) and stop: loads no weights",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    config = resolve_config(arguments, default_file=RECIPE)
    # A plan needs no torchrun: alone, it is the plan of the fewest ranks that can run this.
    alone = least_ranks(config) if arguments.dry_run else 1
    ranks = int(os.environ.get("WORLD_SIZE", alone))
    check_world(config, ranks)
    if arguments.dry_run:
        from specforge_trim.cli.dry_run import plan_of_run

        quiet_transformers()
        if int(os.environ.get("RANK", 0)) == 0:
            print(plan_of_run(config, world_size=ranks))
        return

    from specforge_trim.ranks import world as distributed
    from specforge_trim.train.run import train_draft

    quiet_transformers()
    logger = logging.getLogger("specforge_trim")
    if arguments.config is None:
        logger.info("no --config: training the quickstart recipe, %s", RECIPE)
    world = distributed.start(
        device=config.train.device, timeout_minutes=config.parallel.timeout_minutes
    )
    try:
        summary = train_draft(config, world)
    except distributed.Stopped:
        distributed.stop(world)
        raise
    logger.info(
        "trained %d steps; state in %s; next, with the same settings: specforge-trim export",
        summary.steps,
        config.output_dir,
    )
    if summary.skipped_steps:
        logger.warning("%d steps had no supervised row and moved no weight", summary.skipped_steps)
    if summary.non_finite_steps:
        logger.warning(
            "%d steps moved no weight: a loss or gradient was not finite (named above)",
            summary.non_finite_steps,
        )
    distributed.stop(world)


# ---------------------------------------------------------------------- commands


def _parser(name: str, description: str, example: str, sections: Sequence[str]) -> Parser:
    text = f"{description}\n\nexample:\n  {example}"
    usage = f"specforge-trim {name} [...] [--config FILE] [--SETTING VALUE ...]"
    return config_parser(f"specforge-trim {name}", text, sections=sections, usage=usage)


def _add_files(parser: Parser) -> None:
    parser.add_argument(
        "files", nargs="*", metavar="DATA",
        help="data files (JSON lines, gzip, Parquet); default: train_data of the config",
    )  # fmt: skip


def _resolve(
    parser: Parser, argv: Sequence[str], default_file: Path | None = None
) -> tuple[argparse.Namespace, Config]:
    arguments = parser.parse_args(argv)
    config = resolve_config(arguments, default_file=default_file)
    quiet_transformers()
    return arguments, config


def prepare_command(argv: Sequence[str]) -> None:
    """Tokenises conversations and their loss masks into the cache."""
    parser = _parser(
        "prepare",
        "Tokenises conversations through the target's chat template and marks what the assistant\n"
        "wrote. Unusable rows are listed with file, line and reason.",
        "specforge-trim prepare chats.jsonl --target meta-llama/Llama-3.1-8B-Instruct",
        ("model", "data"),
    )
    _add_files(parser)
    arguments, config = _resolve(parser, argv)
    from specforge_trim.ranks import world as distributed
    from specforge_trim.train import run as pipeline

    world = distributed.start(device="cpu")
    target = pipeline.open_target(config, world)
    data = pipeline.prepare_data(
        config, target, world, paths=arguments.files or None, announce=False
    )
    pipeline.log_sample(data, target.tokenizer())
    print(f"{data.summary()}\n{data.folder}")
    distributed.stop(world)


def regenerate_command(argv: Sequence[str]) -> None:
    """Has the target write the answers of conversations itself."""
    parser = _parser(
        "regenerate",
        "Replaces the assistant's answers by the target's own, so that the draft learns the\n"
        "voice it will predict: greedily in this process, or by an OpenAI-compatible server such\n"
        "as vLLM or SGLang. Degenerate answers are dropped and counted. Resumable.",
        "specforge-trim regenerate chats.jsonl --out answered.jsonl --server http://localhost:8000",
        ("model", "data"),
    )
    _add_files(parser)
    regeneration.add_flags(parser)
    arguments, config = _resolve(parser, argv)
    regeneration.check_flags(arguments)
    from specforge_trim.ranks import world as distributed
    from specforge_trim.train import run as pipeline
    from specforge_trim.verifier.answers.regenerate import regenerate

    world = distributed.start()
    if arguments.server is None:
        target = pipeline.open_target(config, world)
        source = regeneration.local_source(arguments, config, target.path, world.device)
    else:
        source = regeneration.server_source(arguments)
    files = pipeline.data_files(config, arguments.files)
    share = config.data.max_bad_fraction
    report = regenerate(files, arguments.out, source, max_bad_fraction=share)
    print(regeneration.summary(report, arguments.out))
    distributed.stop(world)
    if not report.written:
        raise ValueError(f"no answer is usable, so {arguments.out} is empty: see the counts above")


def capture_command(argv: Sequence[str]) -> None:
    """Computes and stores the target's hidden states."""
    parser = _parser(
        "capture",
        "Runs the target over the prepared conversations and stores the hidden states the draft\n"
        "trains on. Runs on several ranks under torchrun; an interrupted capture continues.",
        "specforge-trim capture --config examples/quickstart.yaml",
        ("model", "data"),
    )
    _add_files(parser)
    arguments, config = _resolve(parser, argv)
    from specforge_trim.ranks import world as distributed
    from specforge_trim.train import run as pipeline

    world = distributed.start(device=config.train.device)
    target = pipeline.open_target(config, world)
    data = pipeline.prepare_data(config, target, world, paths=arguments.files or None)
    store = pipeline.make_features(config, target, data, world)
    if world.is_main:
        print(f"features of {len(store)} conversations, {store.num_tokens} tokens\n{store.folder}")
    distributed.stop(world)


def verify_command(argv: Sequence[str]) -> None:
    """Reads feature stores from end to end and names what is damaged."""
    parser = Parser(
        prog="specforge-trim verify",
        description="Reads every shard of feature stores, compares its checksum and looks for\n"
        "values that are not finite. Exit code 2 when something is damaged.\n\n"
        "example:\n  specforge-trim verify ~/.cache/specforge_trim/features/*",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("folders", nargs="+", metavar="DIR", help="folders of feature stores")
    parser.add_argument(
        "--remove", action="store_true",
        help="remove damaged shards, so that the next capture makes them again",
    )  # fmt: skip
    arguments = parser.parse_args(argv)
    from specforge_trim.data.verify import verify_store

    damaged = sum(verify_store(folder, remove=arguments.remove) for folder in arguments.folders)
    if damaged:
        raise ValueError(f"{damaged} shards are damaged or missing, named above")


def inspect_command(argv: Sequence[str]) -> None:
    """Shows what would be trained, before any training."""
    parser = _parser(
        "inspect",
        "Shows a conversation's tokens coloured by loss mask, the share of rows kept per length,\n"
        "and the predicted share of work. Trains nothing. Without --config: the quickstart's\n"
        "target. Unusable rows never stop it; they are counted by reason.",
        "specforge-trim inspect examples/data/long_prompt.train.jsonl --index 3",
        ("model", "data", "loss", "trim", "attention", "train"),
    )
    _add_files(parser)
    parser.add_argument(
        "--index", type=int, default=0, metavar="INT",
        help="which conversation to show, counted from 0 (default: 0)",
    )  # fmt: skip
    parser.add_argument(
        "--color", action=argparse.BooleanOptionalAction, default=sys.stdout.isatty(),
        help="colour by escape codes (default: on a terminal)",
    )  # fmt: skip
    parser.add_argument(
        "--paint", choices=("mask", "rows"), default="mask",
        help="what the colours say: mask = which tokens carry loss, rows = how many TTT steps run "
        "each row (default: mask)",
    )  # fmt: skip
    parser.add_argument(
        "--html", metavar="FILE",
        help="write the report as one self-contained page instead, with plots and both paintings",
    )  # fmt: skip
    parser.add_argument(
        "--conversations", type=int, default=8, metavar="INT",
        help="conversations the page shows token by token (default: 8)",
    )  # fmt: skip
    arguments, config = _resolve(parser, argv, RECIPE if RECIPE.is_file() else None)
    config = replace(config, data=replace(config.data, max_bad_fraction=1.0))
    from specforge_trim.cli import reports
    from specforge_trim.ranks import world as distributed
    from specforge_trim.train import run as pipeline

    reports.check_flags(arguments)
    world = distributed.start(device="cpu")
    target = pipeline.open_target(config, world)
    data = pipeline.prepare_data(
        config, target, world, paths=arguments.files or None, announce=False
    )
    if not 0 <= arguments.index < len(data):
        raise ConfigError(f"--index {arguments.index}: expected 0 to {len(data) - 1}")
    if arguments.html is None:
        print(reports.terminal(config, target, data, arguments))
    else:
        print(reports.write_page(config, target, data, arguments))


def export_command(argv: Sequence[str]) -> None:
    """Writes a checkpoint as a serving folder."""
    parser = _parser(
        "export",
        "Writes a checkpoint of a run, newest or best, as safetensors and config.json that\n"
        "SGLang, vLLM and TensorRT-LLM load, with a model card, and checks that equal logits are\n"
        "read back.",
        "specforge-trim export --config examples/quickstart.yaml --out drafts/smollm2",
        ("model", "data", "train"),
    )
    draft_commands.add_export_flags(parser)
    arguments, config = _resolve(parser, argv)
    from specforge_trim.ranks import world as distributed

    print(draft_commands.export(arguments, config, distributed.start(device="cpu")))


def evaluate_command(argv: Sequence[str]) -> None:
    """Measures the acceptance length by real speculative decoding."""
    parser = _parser(
        "evaluate",
        "Decodes held-out prompts with draft and target (greedy, fp32): acceptance length per\n"
        "prompt set beside the untrained draft's, and whether the output is the target's own.",
        "specforge-trim evaluate --config examples/quickstart.yaml",
        ("model", "data", "train", "evaluate"),
    )
    parser.add_argument(
        "--draft", metavar="DIR", help="exported draft to measure (default: output_dir/export)"
    )
    arguments, config = _resolve(parser, argv)
    from specforge_trim.ranks import world as distributed
    from specforge_trim.train import results
    from specforge_trim.train import run as pipeline

    world = distributed.start(device=config.train.device)
    target = pipeline.open_target(config, world)
    draft = None if arguments.draft is None else Path(arguments.draft)
    print(results.evaluate_drafts(config, target, world, draft_dir=draft).format())


def plot_command(argv: Sequence[str]) -> None:
    """Draws the curves of training runs as a PNG."""
    parser = Parser(
        prog="specforge-trim plot",
        description="Draws loss, accuracy, acceptance length, rate, speed, kept work and what\n"
        "was measured on held-out data, from metrics.jsonl of one run, or of several to compare.\n"
        "Needs matplotlib (the extra 'plot').\n\n"
        "example:\n  specforge-trim plot runs/draft runs/wider --out curves.png",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="output folders of runs")
    parser.add_argument(
        "--out", metavar="FILE", help="PNG to write (default: curves.png in the first run)"
    )
    arguments = parser.parse_args(argv)
    from specforge_trim.cli.plot import draw_curves, read_run

    first = Path(arguments.runs[0])
    out = arguments.out or (first if first.is_dir() else first.parent) / "curves.png"
    names = [Path(run).resolve().name for run in arguments.runs]
    names = names if len(set(names)) == len(names) else arguments.runs
    print(draw_curves(dict(zip(names, map(read_run, arguments.runs), strict=True)), out))


COMMANDS: dict[str, Command] = {
    "prepare": prepare_command,
    "regenerate": regenerate_command,
    "capture": capture_command,
    "verify": verify_command,
    "inspect": inspect_command,
    "make-config": draft_commands.make_config_command,
    "export": export_command,
    "evaluate": evaluate_command,
    "plot": plot_command,
}


def _dispatch(argv: Sequence[str]) -> None:
    if argv and argv[0] in COMMANDS:
        COMMANDS[argv[0]](argv[1:])
        return
    if argv and not argv[0].startswith("-"):
        raise ConfigError(f"unknown command {argv[0]}; {nearest(argv[0], COMMANDS)}")
    listing = "\n".join(f"  {name:<13}{run.__doc__}" for name, run in COMMANDS.items())
    parser = Parser(
        prog="specforge-trim",
        usage="specforge-trim COMMAND [...]",
        formatter_class=HelpFormatter,
        description=f"Trains EAGLE-3 drafts on the rows that reach a loss.\n\ncommands:\n{listing}"
        "\n\nEach command explains itself:\n  specforge-trim inspect --help\n"
        "Training: torchrun --nproc_per_node N train_eagle3.py --help",
    )
    add_version(parser)
    parser.parse_args(argv or ["--help"])


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `specforge-trim`."""
    return guarded(_dispatch, sys.argv[1:] if argv is None else argv)


def train_main(argv: Sequence[str] | None = None) -> int:
    """Entry point of train_eagle3.py."""
    return guarded(train_command, sys.argv[1:] if argv is None else argv)
