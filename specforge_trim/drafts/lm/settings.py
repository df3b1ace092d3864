"""Settings of train_draft_lm.py: a dense language model as the draft of a larger one.

The same YAML and flags as the EAGLE trainer's, and its sections where they say the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specforge_trim.config import options
from specforge_trim.config.checks import check_objective, check_run
from specforge_trim.config.objective import TERMS
from specforge_trim.config.options import ConfigError, option, section
from specforge_trim.config.sections import DTYPES, DataConfig, ParallelConfig
from specforge_trim.config.training import EvaluateConfig, RunConfig, TrackConfig, TrainConfig


@dataclass(frozen=True)
class LmModelConfig:
    """The target, and the dense model that drafts for it."""

    target: str = option(
        "smollm2-135m-instruct",
        "model to be speeded up, whose tokenizer and chat template are used: a folder, a hub id, "
        "or the embedded smollm2-135m-instruct",
    )
    draft: str | None = option(
        None,
        "model to train, a folder or hub id of a dense Qwen3, Qwen2, Llama or Mistral with the "
        "target's vocabulary; none = the target itself (with draft_layers: a part of it)",
    )
    draft_layers: int | None = option(
        None, "keep the draft's first so many layers, with its head; none = all", at_least=1
    )
    target_dtype: str = option(
        "bfloat16", "number format the target runs in for soft targets", choices=DTYPES
    )


@dataclass(frozen=True)
class LmLossConfig:
    """What the draft learns from: the data's tokens, the target's distribution, or both."""

    label_weight: float = option(
        1.0, "weight of the cross-entropy against the data's own tokens; 0 = none", at_least=0.0
    )
    distill_weight: float = option(
        0.0,
        "weight of the objective against the target's distribution; 0 = fine-tuning, the target "
        "is not run",
        at_least=0.0,
    )
    objective: str = option(
        "soft_ce",
        "what distill_weight weighs: " + ", ".join(TERMS) + ", or a weighted sum such as "
        "0.5*soft_ce+0.5*tv",
    )
    lk_eta: float = option(
        3.0, "lk_lambda's eta: KL weighs exp(-eta * acceptance); 0 = KL alone", at_least=0.0
    )


@dataclass(frozen=True)
class LmTrimConfig:
    """What is left out of the computation."""

    skip_masked_lm_head_tokens: bool = option(
        True, "run head and losses only on rows that a loss reads; results do not change"
    )
    stop_grad_context_tokens: bool = option(
        False,
        "gradients through rows that a loss reads only, keys and values apart: faster, another "
        "gradient (needs --skip-masked-lm-head-tokens)",
    )
    head_chunk_tokens: int = option(
        8192, "most rows whose logits exist at once; fewer = less memory", at_least=1
    )
    activation_checkpointing: bool = option(
        False, "keep layer inputs only and compute layers again in the backward; less memory"
    )
    attention_backend: str = option(
        "sdpa", "sdpa = torch's flash kernels; fa = flash-attn", choices=("sdpa", "fa")
    )


@dataclass(frozen=True)
class LmEvaluateConfig(EvaluateConfig):
    """Held-out conversations: loss while training, speculative decoding at the end."""

    held_out_every: int = option(
        0,
        "optimizer steps between lines of heldout.jsonl, logged as eval/... too; 0 = only before "
        "the first step and after the last",
        at_least=0,
    )


@dataclass(frozen=True)
class LmConfig(RunConfig):
    """All settings of a run; construction refuses values and pairs that cannot work."""

    model: LmModelConfig = section(LmModelConfig)
    data: DataConfig = section(DataConfig)
    loss: LmLossConfig = section(LmLossConfig)
    trim: LmTrimConfig = section(LmTrimConfig)
    parallel: ParallelConfig = section(ParallelConfig)
    train: TrainConfig = section(TrainConfig)
    track: TrackConfig = section(TrackConfig)
    evaluate: LmEvaluateConfig = section(LmEvaluateConfig)

    def __post_init__(self) -> None:
        options.check_limits(self)
        check_run(self, backends=(self.trim.attention_backend,))
        check_objective(self.loss)
        if not self.loss.label_weight and not self.loss.distill_weight:
            raise ConfigError(
                "label_weight = 0 and distill_weight = 0 leave nothing to learn: raise one of them"
            )
        if self.trim.stop_grad_context_tokens and not self.trim.skip_masked_lm_head_tokens:
            raise ConfigError(
                "stop_grad_context_tokens needs skip_masked_lm_head_tokens: a head that reads "
                "every row would send gradients into rows that are cut; drop one of the two flags"
            )


def resolve(arguments: Any) -> LmConfig:
    """The configuration of parsed arguments: defaults, the file, the flags given."""
    values = options.read_yaml(arguments.config, LmConfig) if arguments.config else {}
    return options.build(LmConfig, values | options.given_flags(arguments, LmConfig))
