"""Sections of a configuration: optimisation, checkpoints, trackers, and evaluation.

Every setting with its default, unit and effect; RunConfig is what both trainers' settings share.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specforge_trim.config import options
from specforge_trim.config.options import ConfigError, option
from specforge_trim.config.sections import DTYPES, DataConfig, ParallelConfig

PROFILE_WARM_UP = 2  # steps before those of a trace: the first ones allocate and compile


@dataclass(frozen=True)
class TrainConfig:
    """Optimisation, logging and checkpoints."""

    output_dir: str = option("runs/draft", "folder for metrics, checkpoints and the export")
    epochs: int = option(1, "passes over the training data", at_least=1, at_most=1000)
    max_steps: int | None = option(
        None, "optimizer steps after which training ends early; none = all epochs", at_least=1
    )
    accumulate: int = option(1, "micro-batches per rank and optimizer step", at_least=1)
    learning_rate: float = option(1e-4, "peak learning rate of AdamW", above=0.0)
    lr_schedule: str = option(
        "cosine",
        "what the rate does after its warm-up: fall to min_lr_ratio along a cosine, or stay at "
        "the peak (constant), which leaves open how long a run will be",
        choices=("cosine", "constant"),
    )
    warmup_ratio: float = option(
        0.02, "share of all steps (0 to 1) over which the rate rises", at_least=0.0, at_most=1.0
    )
    min_lr_ratio: float = option(
        0.0, "rate at the end of the cosine, as a share of the peak", at_least=0.0, at_most=1.0
    )
    weight_decay: float = option(0.0, "decoupled weight decay of matrices", at_least=0.0)
    max_grad_norm: float = option(1.0, "gradients are scaled down to this norm", above=0.0)
    max_non_finite_steps: int = option(
        10,
        "steps of a run that may be left out because a loss or gradient is not finite (all ranks "
        "leave them out, the log names the conversations); one more stops the run",
        at_least=0,
    )
    dtype: str = option(
        "float32", "number format of the computation; weights stay fp32", choices=DTYPES
    )
    device: str = option(
        "auto", "where to train: auto = cuda if there is one", choices=("auto", "cpu", "cuda")
    )
    seed: int = option(
        0, "seeds initial weights and the order of the data", at_least=0, at_most=2**63 - 1
    )
    save_every: int = option(
        200, "optimizer steps between checkpoints; 0 = only at the end", at_least=0
    )
    keep_checkpoints: int = option(
        2, "newest checkpoints kept on disk; the best one stays too", at_least=1
    )
    resume: bool = option(
        True, "continue from the newest whole checkpoint in output_dir; no = remove them"
    )
    log_every: int = option(1, "optimizer steps between lines of metrics.jsonl", at_least=1)

    def __post_init__(self) -> None:
        if self.lr_schedule == "constant" and self.min_lr_ratio:
            raise ConfigError(
                f"min_lr_ratio = {self.min_lr_ratio} is where a cosine ends and lr_schedule = "
                "'constant' has none: drop --min-lr-ratio or use --lr-schedule cosine"
            )


@dataclass(frozen=True)
class TrackConfig:
    """Where metrics go beside output_dir/metrics.jsonl, and a profile."""

    trackers: tuple[str, ...] = option(
        (),
        "services that get every row of metrics.jsonl too (the extra 'track'); tensorboard writes "
        "to output_dir/tensorboard",
        choices=("tensorboard", "wandb"),
    )
    run_name: str | None = option(
        None, "the run's name in Weights & Biases; none = the last part of output_dir"
    )
    wandb_project: str = option("specforge_trim", "project of Weights & Biases that runs go to")
    wandb_mode: str = option(
        "online",
        "online sends metrics as they come; offline keeps them in output_dir/wandb for "
        "`wandb sync`",
        choices=("online", "offline"),
    )
    profile: int = option(
        0,
        f"write a torch profiler trace of this many steps, after {PROFILE_WARM_UP} to warm up, to "
        "output_dir/profile (one file a rank, for chrome://tracing or Perfetto); 0 = none",
        at_least=0,
    )


@dataclass(frozen=True)
class EvaluateConfig:
    """Speculative decoding of held-out prompts."""

    eval_data: tuple[str, ...] = option(
        (), "JSONL files of held-out conversations, one prompt set per file"
    )
    eval_prompts: int = option(8, "prompts decoded per set", at_least=1)
    eval_depth: int = option(5, "tokens drafted per round of decoding", at_least=1)
    eval_max_new_tokens: int = option(64, "tokens decoded per prompt", at_least=1)


@dataclass(frozen=True)
class DraftEvaluateConfig(EvaluateConfig):
    """Speculative decoding of held-out prompts, and what is measured while training."""

    eval_every: int = option(
        0,
        "while training, steps between measurements of loss, accuracy and acceptance on eval_data "
        "(its features are captured first); logged as eval/..., at the last step too; 0 = never",
        at_least=0,
    )
    eval_features: str | None = option(
        None,
        "folder of held-out features another trainer captured, which eval_every measures instead "
        "of eval_data",
    )
    decode_every: int = option(
        0,
        "while training, steps between real decodings of eval_data's prompts, logged as "
        "decode/...; the target stays loaded beside the draft on every rank, and the checkpoint "
        "that decodes best is kept; 0 = never",
        at_least=0,
    )
    eval_temperature: float = option(
        1.0,
        "temperature of the sampled decoding that decode_every does beside the greedy one; "
        "0 = greedy only",
        at_least=0.0,
    )


class RunConfig:
    """The sections that both trainers have, and what is read off them."""

    data: DataConfig
    parallel: ParallelConfig
    train: TrainConfig
    track: TrackConfig
    evaluate: EvaluateConfig

    @property
    def cache_dir(self) -> Path:
        return Path(self.data.cache_dir).expanduser()

    @property
    def output_dir(self) -> Path:
        return Path(self.train.output_dir).expanduser()

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Nested plain values, for provenance and for YAML."""
        return options.to_dict(self)
