"""Every setting of a run: frozen dataclasses, one YAML file, flags that override it.

The sections below are the YAML's sections; each leaf is also a flag (`train.learning_rate` is
`--learning-rate`).  What contradicts itself is refused here, before anything is loaded.  What
needs the target or the data to be judged is refused where they are read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specforge_trim.config import options
from specforge_trim.config.checks import check_pairs, check_world, least_ranks, sequence_degrees
from specforge_trim.config.options import ConfigError, Parser, section
from specforge_trim.config.sections import (
    AttentionConfig,
    FeatureDataConfig,
    LossConfig,
    ModelConfig,
    SequenceParallelConfig,
    TrimConfig,
)
from specforge_trim.config.training import DraftEvaluateConfig, RunConfig, TrackConfig, TrainConfig

__all__ = [
    "Config",
    "ConfigError",
    "check_world",
    "least_ranks",
    "config_parser",
    "load_config",
    "resolve_config",
    "sequence_degrees",
]

_PATHS = (
    "draft_config",
    "init_from",
    "vocab_map",
    "train_data",
    "train_features",
    "cache_dir",
    "output_dir",
    "eval_data",
    "eval_features",
)


@dataclass(frozen=True)
class Config(RunConfig):
    """All settings of a run; construction refuses values and pairs that cannot work."""

    model: ModelConfig = section(ModelConfig)
    data: FeatureDataConfig = section(FeatureDataConfig)
    loss: LossConfig = section(LossConfig)
    trim: TrimConfig = section(TrimConfig)
    attention: AttentionConfig = section(AttentionConfig)
    parallel: SequenceParallelConfig = section(SequenceParallelConfig)
    train: TrainConfig = section(TrainConfig)
    track: TrackConfig = section(TrackConfig)
    evaluate: DraftEvaluateConfig = section(DraftEvaluateConfig)

    def __post_init__(self) -> None:
        options.check_limits(self)
        check_pairs(self)

    @property
    def max_density(self) -> float:
        """The guard's tau in force."""
        if self.trim.trim_backbone_rows_max_density is not None:
            return self.trim.trim_backbone_rows_max_density
        return 0.35 if self.local_attention == "reference" else 1.0

    @property
    def local_attention(self) -> str:
        """The backend that runs inside a rank."""
        if self.attention.attention_backend == "usp":
            return self.attention.local_attention or "sdpa"
        return self.attention.attention_backend


def config_parser(
    prog: str,
    description: str,
    *,
    sections: Sequence[str] | None = None,
    usage: str | None = None,
    config_class: type = Config,
) -> Parser:
    """A parser with --config and a flag per setting of the named sections (default: all)."""
    parser = Parser(
        prog=prog,
        description=description,
        usage="%(prog)s [--config FILE] [--SETTING VALUE ...]" if usage is None else usage,
        formatter_class=options.HelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file with the settings below; flags override it"
    )
    options.add_flags(parser, config_class, sections)
    return parser


def resolve_config(arguments: Any, *, default_file: Path | None = None) -> Config:
    """The Config of parsed arguments: defaults, then the file, then the flags given.

    Paths in a file are relative to the working directory.  default_file, read when --config is
    absent, is a recipe of the source tree (root/examples/...): its paths are relative to root.
    Raises ConfigError.
    """
    path = arguments.config or default_file
    values = options.read_yaml(path, Config) if path is not None else {}
    if arguments.config is None and default_file is not None:
        root = Path(default_file).resolve().parents[1]
        if root != Path.cwd():
            values |= {key: _below(root, values[key]) for key in _PATHS if values.get(key)}
    return options.build(Config, values | options.given_flags(arguments, Config))


def _below(root: Path, value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_below(root, entry) for entry in value)
    return str(root / Path(value).expanduser())


def load_config(
    argv: Sequence[str] | None = None,
    *,
    prog: str,
    description: str,
    default_file: Path | None = None,
) -> Config:
    """Parses a command line into a Config.  Raises ConfigError; --help prints and exits 0."""
    parser = config_parser(prog, description)
    return resolve_config(parser.parse_args(argv), default_file=default_file)
