"""Command line of train_draft_lm.py: parses, calls the phases of drafts/lm/pipeline.py, prints."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from specforge_trim.cli.main import add_version, quiet_transformers
from specforge_trim.cli.running import guarded
from specforge_trim.config.checks import check_fsdp
from specforge_trim.config.options import ConfigError
from specforge_trim.drafts.eagle3.settings import config_parser
from specforge_trim.drafts.lm.settings import LmConfig, resolve

if TYPE_CHECKING:
    from specforge_trim.ranks.world import World

DESCRIPTION = """\
Trains a dense language model (Qwen3, Qwen2, Llama, Mistral) as the draft of a larger one, by
fine-tuning on the data's tokens (label_weight), by distillation from the target
(distill_weight), or both. Head and losses run on supervised rows only; with
--stop-grad-context-tokens the backward runs these rows only, which changes the gradient:
docs/draft_lm.md says what that gains and costs. Then the draft is exported and, with
--eval-data, its acceptance length measured by speculative decoding. The same command
continues an interrupted run; SIGTERM and SIGINT (Ctrl-C) finish the step and save.

example:
  torchrun --nproc_per_node 1 train_draft_lm.py --config examples/draft_lm/smollm2.yaml \\
      --stop-grad-context-tokens"""


def train_lm_command(argv: Sequence[str]) -> None:
    """torchrun train_draft_lm.py: data, training, export, evaluation."""
    parser = config_parser("train_draft_lm.py", DESCRIPTION, config_class=LmConfig)
    parser.add_argument(
        "--evaluate-only", action="store_true",
        help="measure the exported draft of output_dir again; trains nothing",
    )  # fmt: skip
    parser.add_argument(
        "--dry-run", action="store_true",
        help="print the plan of the run (sizes, memory, steps) and stop: loads no weights",
    )  # fmt: skip
    add_version(parser)
    arguments = parser.parse_args(argv)
    config = resolve(arguments)
    # A plan needs no torchrun: alone, it is the plan of the fewest ranks that can run this.
    alone = 2 if arguments.dry_run and config.parallel.fsdp else 1
    ranks = int(os.environ.get("WORLD_SIZE", alone))
    check_fsdp(config, ranks)
    if arguments.dry_run:
        from specforge_trim.cli.lm_dry_run import plan_of_lm_run

        quiet_transformers()
        if int(os.environ.get("RANK", 0)) == 0:
            print(plan_of_lm_run(config, world_size=ranks))
        return
    if arguments.evaluate_only and not config.evaluate.eval_data:
        raise ConfigError("--evaluate-only has nothing to measure on: pass --eval-data FILE")

    from specforge_trim.ranks import world as distributed
    from specforge_trim.train.lm_run import evaluate_lm_draft, train_lm_draft

    quiet_transformers()
    logger = logging.getLogger("specforge_trim")
    world = distributed.start(
        device=config.train.device, timeout_minutes=config.parallel.timeout_minutes
    )
    if not arguments.evaluate_only:
        try:
            summary = train_lm_draft(config, world)
        except distributed.Stopped:
            distributed.stop(world)
            raise
        logger.info("trained %d steps; draft in %s", summary.steps, config.output_dir / "export")
        if summary.skipped_steps:
            logger.warning(
                "%d steps had no supervised row and moved no weight", summary.skipped_steps
            )
        if summary.non_finite_steps:
            logger.warning(
                "%d steps moved no weight: a loss or gradient was not finite (named above)",
                summary.non_finite_steps,
            )
    if config.evaluate.eval_data:
        report = world.together(
            lambda: evaluate_lm_draft(config, _alone(world)) if world.is_main else None
        )
        if report is not None:
            print(report.format())
    distributed.stop(world)


def _alone(world: World) -> World:
    """The same device without peers: one rank decodes."""
    from specforge_trim.ranks.world import World

    return World(rank=0, size=1, device=world.device)


def train_lm_main(argv: Sequence[str] | None = None) -> int:
    """Entry point of train_draft_lm.py."""
    return guarded(train_lm_command, sys.argv[1:] if argv is None else argv)
