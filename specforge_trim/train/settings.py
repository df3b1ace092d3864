"""What a configuration means for a run's steps, the ranks' groups, batches, and a step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specforge_trim.config.objective import parse_objective
from specforge_trim.config.training import RunConfig, TrainConfig
from specforge_trim.drafts.eagle3.batch import PlanSettings
from specforge_trim.drafts.eagle3.model import Eagle3Draft
from specforge_trim.drafts.eagle3.settings import Config, sequence_degrees
from specforge_trim.drafts.eagle3.step import StepSettings
from specforge_trim.plan.memory import DEFAULT_ROW_MEMORY_MB, chunk_rows_for
from specforge_trim.plan.shard import SequenceSplit
from specforge_trim.ranks.layout import Layout, make_layout
from specforge_trim.ranks.world import World
from specforge_trim.train.optimizer import learning_rate
from specforge_trim.train.sampler import Schedule


def make_schedule(
    config: RunConfig, lengths: Sequence[int], weights: Sequence[float] | None, *, ranks: int
) -> Schedule:
    """Which documents of these lengths and turns per epoch each step of a run trains on.

    ranks: how many, or how many groups of them, train on different documents.
    """
    return Schedule(
        lengths=tuple(lengths),
        weights=None if weights is None else tuple(weights),
        tokens_per_batch=config.data.tokens_per_batch,
        seed=config.train.seed,
        epochs=config.train.epochs,
        world_size=ranks,
        accumulate=config.train.accumulate,
        max_steps=config.train.max_steps,
    )


def rate_of(options: TrainConfig, step: int, *, total_steps: int) -> float:
    """The learning rate of optimizer step `step`, counted from 1."""
    return learning_rate(
        step - 1,
        total_steps=total_steps,
        peak=options.learning_rate,
        warmup_ratio=options.warmup_ratio,
        min_ratio=options.min_lr_ratio,
        schedule=options.lr_schedule,
    )


def sequence_layout(config: Config, world: World) -> Layout:
    """The ranks' groups under this configuration; collective."""
    if config.attention.attention_backend != "usp":
        return make_layout(world)
    ulysses, ring = sequence_degrees(config, world.size)
    splits = config.parallel.sp_context != "gathered"
    return make_layout(world, ulysses=ulysses, ring=ring, splits_context=splits)


def _sequence_split(config: Config, layout: Layout) -> SequenceSplit | None:
    if layout.sequence is None:
        return None
    return SequenceSplit(
        rank=layout.sequence.rank,
        size=layout.sequence.size,
        rows=config.parallel.sp_rows,
        gathered=not layout.splits_context,
        ulysses=1 if layout.ulysses is None else layout.ulysses.size,
    )


def plan_settings(config: Config, model: Eagle3Draft, layout: Layout) -> PlanSettings:
    """How batches are planned under this configuration."""
    return PlanSettings(
        ttt_length=config.loss.ttt_length,
        alignment=config.loss.loss_alignment,
        chain=config.loss.chain,
        trim_loss_positions=config.trim.trim_loss_positions,
        trim_backbone_rows=config.trim.trim_backbone_rows,
        max_density=config.max_density,
        chunk_rows=_chunk_rows(config, model),
        stop_grad=config.trim.stop_grad_context_tokens,
        dims=model.config.dims,
        sequence=_sequence_split(config, layout),
    )


def _chunk_rows(config: Config, model: Eagle3Draft) -> int:
    if config.attention.chunk_rows is not None:
        return config.attention.chunk_rows
    megabytes = config.attention.row_memory_mb
    if megabytes is None:
        megabytes = DEFAULT_ROW_MEMORY_MB[model.fc.weight.device.type]
    return chunk_rows_for(
        model.config.dims,
        config.loss.ttt_length,
        itemsize=getattr(torch, config.train.dtype).itemsize,
        budget=megabytes << 20,
    )


def step_settings(config: Config) -> StepSettings:
    """How a training step computes under this configuration."""
    return StepSettings(
        backend=config.local_attention,  # type: ignore[arg-type]
        decay=config.loss.loss_decay,
        objective=parse_objective(config.loss.objective, lk_eta=config.loss.lk_eta),
        compute_dtype=getattr(torch, config.train.dtype),
        context_chunk=config.attention.context_chunk_tokens,
        max_keys=config.attention.max_keys_per_call,
    )
