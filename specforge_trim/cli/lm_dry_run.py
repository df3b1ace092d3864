"""What a run of train_draft_lm.py would do, from configuration files alone; writes nothing.

Letters: T tokens of a batch, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch

from specforge_trim.cli.dry_run import (
    ITEM_BYTES,
    MB,
    device_of,
    earlier_run,
    local_target,
    memory_table,
    prepared,
    steps_line,
    weights_memory,
)
from specforge_trim.common.table import table
from specforge_trim.drafts.eagle3.settings import ConfigError
from specforge_trim.drafts.lm.settings import LmConfig
from specforge_trim.loss.labels import BLOCK_ELEMENTS
from specforge_trim.plan.cost import DraftDims
from specforge_trim.plan.memory import row_bytes
from specforge_trim.train.lm_run import LmModels, settle_lm
from specforge_trim.train.lm_step import TABLE_ELEMENTS
from specforge_trim.verifier.embedded import EMBEDDED_TARGETS


def plan_of_lm_run(config: LmConfig, *, world_size: int) -> str:
    """The plan as text. Raises ValueError for models that cannot be found or do not fit."""
    models = _models(config)
    draft, trim = models.draft_config, config.trim
    cut = ", backward of kept rows only" if trim.stop_grad_context_tokens else ""
    rows = [
        ("target", config.model.target),
        ("draft", f"{config.model.draft or config.model.target}: {_shape(draft)}"),
        ("learns from", _losses(config)),
        ("output folder", earlier_run(config)),
        ("head", "rows with loss" if trim.skip_masked_lm_head_tokens else "every row"),
        ("layers", f"forward of every row{cut}"),
        ("ranks", f"{world_size} x {device_of(config)}, {trim.attention_backend}"
                  + (", fsdp" if config.parallel.fsdp else "")),
    ]  # fmt: skip
    width = max(len(name) for name, _ in rows)
    parts = lm_size(draft)
    cells = [(name, f"{count / 1e6:,.2f}") for name, count in parts.items()]
    cells.append(("trained", f"{sum(parts.values()) / 1e6:,.2f}"))
    return "\n".join(
        [
            "plan of the run (nothing is loaded, nothing is written)",
            "",
            *(f"{name:<{width}}  {value}" for name, value in rows),
            "",
            *table(("parameters", "millions"), cells),
            "",
            *memory_table(lm_memory(config, models, world_size=world_size)),
            *_decoding_line(config, models),
            "",
            *_data_lines(config, world_size),
        ]
    )


def lm_size(config: Any) -> dict[str, int]:
    """Parameters of a transformers model by part, counted without allocating them."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    marks = {
        "self_attn": "attention",
        "mlp": "MLP",
        "embed_tokens": "embedding",
        "lm_head": "head",
    }
    parts = dict.fromkeys((*marks.values(), "norms"), 0)
    for name, parameter in model.named_parameters():  # a tied head counts once, as embedding
        found = (part for mark, part in marks.items() if mark in name and "norm" not in name)
        parts[next(found, "norms")] += parameter.numel()
    return {part: count for part, count in parts.items() if count}


def lm_memory(config: LmConfig, models: LmModels, *, world_size: int) -> dict[str, int]:
    """Bytes on one device by what they hold, for one micro-batch of tokens_per_batch tokens."""
    draft, trim = models.draft_config, config.trim
    item, tokens = ITEM_BYTES[config.train.dtype], config.data.tokens_per_batch
    vocab, device = draft.vocab_size, device_of(config)
    layers = draft.num_hidden_layers
    if trim.activation_checkpointing:
        inputs = layers * draft.hidden_size * item
        kept = inputs + row_bytes(_dims(draft, layers=1), 1, itemsize=item)
    else:
        kept = row_bytes(_dims(draft, layers=layers), 1, itemsize=item)
    # Three fp32 tables of a block: logits, their logarithms, probabilities.
    block = max(16, min(BLOCK_ELEMENTS[device] // vocab, trim.head_chunk_tokens, tokens))
    found = {
        "weights, gradients, Adam (fp32)": weights_memory(
            config, sum(lm_size(draft).values()), world_size
        ),
        "activations of a batch": tokens * kept,
        "head: logits of a block": 3 * 4 * block * vocab,
    }
    if config.loss.distill_weight:
        low = ITEM_BYTES[config.model.target_dtype]
        text = models.text_config
        head = text.vocab_size * text.hidden_size
        found["the target and its head"] = low * (sum(lm_size(text).values()) + head)
        table_rows = max(16, min(TABLE_ELEMENTS[device] // vocab, tokens))
        found["target's distributions of a block"] = 2 * 4 * table_rows * vocab
    return found


def _models(config: LmConfig) -> LmModels:
    names = [config.model.target, config.model.draft or config.model.target]
    places = [local_target(config, name) for name in names]
    for name, place in zip(names, places, strict=True):
        if name.lower() in EMBEDDED_TARGETS and not place.is_dir():  # type: ignore[union-attr]
            raise ConfigError(
                f"{name} is not in {config.cache_dir} yet, and a plan fetches nothing: run "
                f"`specforge-trim prepare --target {name}` on the data first"
            )
    return settle_lm(config, *places)


def _dims(config: Any, *, layers: int) -> DraftDims:
    """The layers as the row plan's memory formula reads them; the head is counted apart."""
    heads = config.num_attention_heads
    return DraftDims(
        hidden=config.hidden_size,
        heads=heads,
        kv_heads=config.num_key_value_heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate=config.intermediate_size,
        draft_vocab=1,
        aux_width=1,
        layers=layers,
    )


def _shape(config: Any) -> str:
    dims = _dims(config, layers=config.num_hidden_layers)
    return (
        f"{config.model_type}, {dims.layers} layers, width {dims.hidden}, MLP "
        f"{dims.intermediate}, {dims.heads}/{dims.kv_heads} heads of {dims.head_dim}, vocabulary "
        f"{config.vocab_size:,}, up to {config.max_position_embeddings:,} positions"
    )


def _losses(config: LmConfig) -> str:
    loss = config.loss
    found = [f"{loss.label_weight:g} x the data's tokens"] if loss.label_weight else []
    if loss.distill_weight:
        found.append(f"{loss.distill_weight:g} x {loss.objective} against the target")
    return " + ".join(found)


def _decoding_line(config: LmConfig, models: LmModels) -> list[str]:
    if not config.evaluate.eval_data:
        return []
    target, draft = (sum(lm_size(c).values()) for c in (models.text_config, models.draft_config))
    size = 4 * (target + 2 * draft) / MB
    return [f"after training, rank 0 decodes: target and draft, old and new, in fp32: {size:,.0f}"]


def _data_lines(config: LmConfig, world_size: int) -> list[str]:
    """Steps and kept rows of prepared data; else what would tell them."""
    data = prepared(config, config.model.target)
    if data is None:
        return ["kept rows, steps: unknown until `specforge-trim prepare` has run"]
    tokens = int(sum(int(n) for n in data.lengths))
    looked = [data[i] for i in range(0, len(data), max(1, len(data) // 200))]
    supervised = sum(int(d.loss_mask[1:].sum()) for d in looked)
    share = supervised / max(1, sum(len(d.loss_mask) for d in looked))
    return [
        f"data: {len(data):,} conversations, {tokens:,} tokens",
        f"rows with loss: {share:.1%} ({len(looked)} conversations looked at)",
        steps_line(config, tokens, world_size),
    ]
