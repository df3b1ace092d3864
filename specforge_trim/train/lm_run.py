"""From an LmConfig to a trained draft model: the phases, each of which reuses its result.

open_lm        the target's and the draft's configurations
build_lm       the draft to train, the target as a source of soft targets
train_lm_draft all of these, the training loop, the export
evaluate_lm_draft  speculative decoding of held-out prompts
"""

from __future__ import annotations

import dataclasses
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from specforge_trim.config.checks import naming_folders
from specforge_trim.config.objective import parse_objective
from specforge_trim.data.prepared import PreparedData
from specforge_trim.data.sources import document_weights, parse_source
from specforge_trim.decode.lm import evaluate_lm
from specforge_trim.decode.report import EvalReport
from specforge_trim.drafts.eagle3.settings import ConfigError
from specforge_trim.drafts.lm.families import check_model_type, check_window
from specforge_trim.drafts.lm.functions import PackedAttention
from specforge_trim.drafts.lm.layers import RowSparseSettings, enable_row_sparse
from specforge_trim.drafts.lm.settings import LmConfig
from specforge_trim.drafts.lm.vocabulary import check_vocabulary, fit_vocabulary
from specforge_trim.loss.teacher import Teacher
from specforge_trim.ranks.world import World
from specforge_trim.train import checkpoint as checkpoints
from specforge_trim.train.lm_batch import LmPlan
from specforge_trim.train.lm_loop import HeldOut, LmSummary, train_lm
from specforge_trim.train.lm_step import LmStepSettings, SoftTargets
from specforge_trim.train.provenance import provenance
from specforge_trim.train.run import data_files, data_sources, held_out_prompts, prepare_data
from specforge_trim.train.run_lock import only_run
from specforge_trim.train.settings import make_schedule
from specforge_trim.verifier.embedded import resolve_target
from specforge_trim.verifier.head import load_embedding_and_head
from specforge_trim.verifier.hf import HFTarget, target_fingerprint
from specforge_trim.verifier.hub import check_hub

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LmModels:
    """Target and draft on disk, not loaded.

    draft_config: with draft_layers and the target's vocabulary size; refitted: it had another.
    """

    path: str | Path
    draft_path: str | Path
    text_config: Any
    draft_config: Any
    refitted: bool = False

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path)


def open_lm(config: LmConfig, world: World) -> LmModels:
    """Finds (fetches, converts) both models. Raises ValueError where they do not fit."""

    def place(name: str, role: str) -> str | Path:
        with naming_folders(config):
            return world.first(lambda: resolve_target(name, cache_dir=config.cache_dir, role=role))

    path = place(config.model.target, "target")
    draft_path = path if config.model.draft is None else place(config.model.draft, "draft")

    return world.together(lambda: settle_lm(config, path, draft_path))


def settle_lm(config: LmConfig, path: str | Path, draft_path: str | Path) -> LmModels:
    """Target and draft of two folders or hub ids. Raises ValueError where they do not fit."""
    from transformers import AutoConfig

    for found in {path, draft_path}:
        if isinstance(found, str) and not Path(found).is_dir():
            check_hub(found)
    text = AutoConfig.from_pretrained(path).get_text_config()
    draft = AutoConfig.from_pretrained(draft_path)
    check_model_type(draft.model_type)
    own, rows = draft.vocab_size, text.vocab_size
    if draft_path != path:
        check_vocabulary(draft_path, path, draft_rows=own, target_rows=rows)
        draft.vocab_size = rows
    cut = _cut(draft, config.model.draft_layers)
    return LmModels(path, draft_path, text, cut, refitted=own != rows)


def _cut(draft: Any, layers: int | None) -> Any:
    """The draft's configuration with its first `layers` layers."""
    if layers is None:
        return draft
    if layers > draft.num_hidden_layers:
        raise ConfigError(
            f"draft_layers = {layers}: the draft has {draft.num_hidden_layers} layers"
        )
    draft.num_hidden_layers = layers
    if getattr(draft, "layer_types", None):
        draft.layer_types = draft.layer_types[:layers]
    return draft


def load_draft_lm(models: LmModels) -> Any:
    """The draft before training, fp32 on the CPU."""
    from transformers import AutoModelForCausalLM

    whole = AutoModelForCausalLM.from_pretrained(models.draft_path, dtype=torch.float32)
    count = models.draft_config.num_hidden_layers
    if len(whole.model.layers) > count:
        whole.model.layers = nn.ModuleList(whole.model.layers[:count])
        _cut(whole.config, count)
    fit_vocabulary(whole, models.draft_config.vocab_size, models.draft_path)
    return whole


def row_sparse_settings(config: LmConfig) -> RowSparseSettings:
    return RowSparseSettings(
        skip_masked_lm_head_tokens=config.trim.skip_masked_lm_head_tokens,
        stop_grad_context_tokens=config.trim.stop_grad_context_tokens,
        attention=PackedAttention(config.trim.attention_backend),
    )


def step_settings(config: LmConfig) -> LmStepSettings:
    """How a training step computes under this configuration."""
    return LmStepSettings(
        row_sparse=row_sparse_settings(config),
        label_weight=config.loss.label_weight,
        distill_weight=config.loss.distill_weight,
        objective=parse_objective(config.loss.objective, lk_eta=config.loss.lk_eta),
        chunk_tokens=config.trim.head_chunk_tokens,
        compute_dtype=getattr(torch, config.train.dtype),
    )


def build_lm(config: LmConfig, models: LmModels, world: World) -> tuple[Any, SoftTargets | None]:
    """The draft on its device, set up for packed streams, and the target where it is needed."""
    torch.manual_seed(config.train.seed)
    model = load_draft_lm(models).to(world.device)
    enable_row_sparse(model, row_sparse_settings(config))
    if config.trim.activation_checkpointing:
        model.activation_checkpointing_enable()
    model.train()
    return model, soft_targets(config, models, world) if config.loss.distill_weight else None


def soft_targets(config: LmConfig, models: LmModels, world: World) -> SoftTargets:
    """The target, loaded, as a source of distributions."""
    dtype = getattr(torch, config.model.target_dtype)
    target = HFTarget.load(models.path, dtype=dtype, device=world.device, aux_layers=(1,))
    head = load_embedding_and_head(models.path)
    vocab = head.vocab_size
    teacher = Teacher(
        head.head.to(world.device, dtype),
        torch.arange(vocab, device=world.device),
        torch.ones(vocab, dtype=torch.bool, device=world.device),
        head.logit_post,
    )
    return SoftTargets(target.decoder, teacher)


# ---------------------------------------------------------------------- training


def train_lm_draft(config: LmConfig, world: World) -> LmSummary:
    """All phases up to the trained draft, exported to output_dir/export."""
    world.together(lambda: _check_files(config))  # before the models are fetched
    with naming_folders(config), only_run(config.output_dir, world):
        models = open_lm(config, world)
        if config.evaluate.eval_data:  # decoded at the end: refused before hours of training
            held_out_prompts(config, models, world)
        data = prepare_data(config, models, world)
        held_out = _held_out(config, models, world)
        every = config.evaluate.held_out_every
        longest = max(n for part in (data, held_out) if part is not None for n in part.lengths)
        _check_lengths(models, longest)
        model, targets = world.together(lambda: build_lm(config, models, world))
        world.together(lambda: check_window(model, longest))
        weights = document_weights(data_sources(config), data.file_numbers)
        lengths = [int(n) for n in data.lengths]
        schedule = make_schedule(config, lengths, weights, ranks=world.size)
        summary = train_lm(
            config,
            model=model,
            settings=step_settings(config),
            targets=targets,
            documents=data,
            schedule=schedule,
            plan=LmPlan(config.trim.skip_masked_lm_head_tokens),
            held_out=None if held_out is None else HeldOut(held_out, every),
            world=world,
            identity=_identity(config, models, data.fingerprint, world),
            provenance=provenance(config, data.made_from),
        )
        world.together(lambda: export_lm(config, models) if world.is_main else None)
        return summary


def _check_files(config: LmConfig) -> None:
    data_files(config)
    if config.evaluate.eval_data:
        data_files(config, config.evaluate.eval_data)


def _check_lengths(models: LmModels, longest: int) -> None:
    limit = models.draft_config.max_position_embeddings
    if longest > limit:
        raise ConfigError(
            f"a conversation of {longest} tokens exceeds the draft's {limit} positions: lower "
            "max_length, or set too_long to cut or split"
        )


def _held_out(config: LmConfig, models: LmModels, world: World) -> PreparedData | None:
    if not config.evaluate.eval_data:
        return None
    files = list(config.evaluate.eval_data)
    return prepare_data(config, models, world, paths=files, announce=False)


def _identity(config: LmConfig, models: LmModels, data: str, world: World) -> dict[str, Any]:
    """What a resumed run must share with its checkpoint: meaning of weights, order of data."""
    distills = config.loss.distill_weight > 0
    return {
        "draft": target_fingerprint(models.draft_path),
        "draft_layers": models.draft_config.num_hidden_layers,
        "target": target_fingerprint(models.path) if distills else None,
        "data": data,
        "train_data weights": [parse_source(s).weight for s in config.data.train_data],
        "tokens_per_batch": config.data.tokens_per_batch,
        "ranks x accumulate": world.size * config.train.accumulate,
        "seed": config.train.seed,
        "stop_grad_context_tokens": config.trim.stop_grad_context_tokens,
        # Named only where a table was padded or cut, as older runs do.
        **({"vocabulary rows": models.draft_config.vocab_size} if models.refitted else {}),
        **dataclasses.asdict(config.loss),
    }


def export_lm(config: LmConfig, models: LmModels) -> Path:
    """Writes the newest checkpoint as a transformers folder with the target's tokenizer."""
    found = checkpoints.newest(config.output_dir / "checkpoints")
    if found is None:
        raise ValueError(f"no complete checkpoint in {config.output_dir / 'checkpoints'}")
    model = load_draft_lm(models)
    checkpoints.restore_weights(found, model=model)
    folder = config.output_dir / "export"
    model.save_pretrained(folder)
    for file in folder.glob(
        "*.safetensors"
    ):  # readable by their writer alone, as they are written
        file.chmod((folder / "config.json").stat().st_mode & 0o777)
    models.tokenizer().save_pretrained(folder)
    text = json.dumps({"step": found.step, **dict(found.meta["provenance"])}, indent=1)
    (folder / "training.json").write_text(text + "\n", encoding="utf-8")
    return folder


# ---------------------------------------------------------------------- evaluation


def evaluate_lm_draft(config: LmConfig, world: World) -> EvalReport:
    """Decodes held-out prompts with the exported draft and with the draft before training.

    The report also goes to output_dir/evaluation.json.
    """
    from transformers import AutoModelForCausalLM

    folder = config.output_dir / "export"
    if not (folder / "config.json").exists():
        raise ConfigError(
            f"no exported draft in {folder}: train one first, or name its output_dir"
        )
    models = open_lm(config, world)
    sets = held_out_prompts(config, models, world)
    target = HFTarget.load(models.path, dtype=torch.float32, device=world.device, aux_layers=(1,))
    draft: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    report = evaluate_lm(
        target,
        draft.to(world.device).eval(),
        sets,
        untrained=load_draft_lm(models).to(world.device).eval(),
        depth=config.evaluate.eval_depth,
        max_new_tokens=config.evaluate.eval_max_new_tokens,
    )
    text = json.dumps(report.to_dict(), indent=1)
    (config.output_dir / "evaluation.json").write_text(text + "\n", encoding="utf-8")
    return report
