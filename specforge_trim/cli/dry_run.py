"""What a run would do, from configuration files alone: no weights are read, nothing is written.

Sizes, parameters and memory come from the draft's and the target's configuration; where the
target's cannot be reached, from draft_config. Kept work and steps come from data that
`specforge-trim prepare` has made; without it they are left open.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specforge_trim.cli.draft_commands import read_target_config
from specforge_trim.common.table import table
from specforge_trim.config.checks import check_draft, sequence_degrees
from specforge_trim.config.training import RunConfig
from specforge_trim.data.report.stats import Training, document_stats
from specforge_trim.drafts.eagle3.model import Eagle3Draft
from specforge_trim.drafts.eagle3.settings import Config
from specforge_trim.drafts.eagle3.sizes import DraftConfig
from specforge_trim.drafts.eagle3.sizing import draft_config, shares_head, sized_draft
from specforge_trim.plan.memory import DEFAULT_ROW_MEMORY_MB, chunk_rows_for
from specforge_trim.verifier.embedded import EMBEDDED_TARGETS

MB = 1 << 20
ITEM_BYTES = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class DraftSize:
    """Parameters of a draft, counted on the meta device.

    by_part: name of the part -> parameters; frozen: the target's embedding rows.
    """

    by_part: dict[str, int]
    frozen: int

    @property
    def trained(self) -> int:
        return sum(self.by_part.values())


def draft_size(config: DraftConfig) -> DraftSize:
    """Count the parameters of a draft without allocating them."""
    with torch.device("meta"):
        model = Eagle3Draft(config)
    parts = {"fc": 0, "attention": 0, "MLP": 0, "head": 0, "norms": 0}
    frozen = 0
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            frozen += parameter.numel()
            continue
        part = next(
            (
                part
                for part, mark in (
                    ("norms", "norm"), ("attention", "self_attn"), ("MLP", "mlp"), ("fc", "fc."),
                    ("head", "lm_head"),
                )
                if mark in name
            ),
            "norms",
        )  # fmt: skip
        parts[part] += parameter.numel()
    return DraftSize(parts, frozen)


def training_memory(
    config: Config, draft: DraftConfig, *, device: str, world_size: int = 1, tied: bool = False
) -> dict[str, int]:
    """Bytes on one device by what they hold, for one micro-batch of tokens_per_batch tokens.

    tied: the target's head is its embedding.
    """
    size, item = draft_size(draft), ITEM_BYTES[config.train.dtype]
    width = 2 * draft.num_key_value_heads * draft.head_dim
    rows = config.attention.row_memory_mb or DEFAULT_ROW_MEMORY_MB[device]
    context = config.data.tokens_per_batch * draft.num_hidden_layers * width
    aux = config.attention.context_chunk_tokens * draft.num_aux_layers * draft.target_hidden_size
    head = item * draft.vocab_size * draft.target_hidden_size
    return {
        "weights, gradients, Adam (fp32)": weights_memory(config, size.trained, world_size),
        "target's embedding (fp32)": 4 * size.frozen,
        "target's head": 0 if shares_head(config, tied) else head,
        "context keys, values, gradients": int(
            context * (item + 4) * _context_share(config, world_size)
        ),
        "one chunk of features": 2 * item * aux,
        "one row chunk": rows * MB,
    }


def weights_memory(config: RunConfig, trained: int, world_size: int) -> int:
    """Bytes of a rank's weights, their gradients and the two moments of AdamW."""
    if not config.parallel.fsdp:
        return 16 * trained
    # Whole weights and gradients while a step's micro-batches run.
    return 16 * trained // world_size + 8 * trained


def _context_share(config: Config, world_size: int) -> float:
    """How much of a sequence's context keys and gradients one rank holds, in whole sequences."""
    if config.attention.attention_backend != "usp" or world_size == 1:
        return 1.0
    ulysses, ring = sequence_degrees(config, world_size)
    if config.parallel.sp_context == "gathered":
        return 1 + 1 / (ulysses * ring)  # all, and the rank's own part before and after
    # A ring holds its own part, the one it attends to and the one that arrives.
    return (3 if ring > 1 else 2) / (ulysses * ring)


def plan_of_run(config: Config, *, world_size: int) -> str:
    """The plan as text. Raises ValueError for settings that cannot work."""
    text, note = _target_text(config)
    if text is None:
        draft, source = sized_draft(config, None)
    else:
        draft, source = draft_config(config, text), note
    check_draft(
        config,
        world_size,
        heads=draft.num_attention_heads,
        kv_heads=draft.num_key_value_heads,
        layers=draft.num_hidden_layers,
    )
    device = device_of(config)
    lines = ["plan of the run (nothing is loaded, nothing is written)", ""]
    rows = [
        ("target", config.model.target),
        ("sizes from", source),
        ("draft", _shape(draft)),
        ("positions", f"rope {draft.rope_parameters['rope_type']}, theta "
                      f"{draft.rope_parameters['rope_theta']:g}, "
                      f"up to {draft.max_position_embeddings:,}"),
        ("starts from", config.model.init_from or "new weights"),
        ("output folder", earlier_run(config)),
        ("layers read", _layers(draft)),
        ("steps", f"K = {config.loss.ttt_length}, {config.loss.loss_alignment}, "
                  f"{config.loss.chain}"),
        ("trimming", _trimming(config)),
        ("ranks", f"{world_size} x {device}, {_sharing(config, world_size)}"),
    ]  # fmt: skip
    width = max(len(name) for name, _ in rows)
    lines += [f"{name:<{width}}  {value}" for name, value in rows]
    lines += [f"note: {note}" for note in draft.notes(max_length=config.data.max_length)]
    lines += ["", *_parameter_table(draft_size(draft))]
    tied = text is not None and bool(text.tie_word_embeddings)
    memory = training_memory(config, draft, device=device, world_size=world_size, tied=tied)
    lines += ["", *memory_table(memory)]
    item = draft.num_hidden_layers * 2 * draft.num_key_value_heads * draft.head_dim
    item *= ITEM_BYTES[config.train.dtype] + 4
    lines.append(f"a token of context takes {item / 1024:.1f} KB of it")
    needs = {"online": config.data.online, "decode_every": config.evaluate.decode_every}
    loaded = [key for key, asked in needs.items() if asked]
    if loaded:
        lines.append(f"beside it on every rank: the whole target ({' and '.join(loaded)})")
    lines += ["", *_data_lines(config, draft, world_size)]
    return "\n".join(lines)


def device_of(config: RunConfig) -> str:
    """cpu or cuda, where this would train here."""
    if config.train.device != "auto":
        return config.train.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def earlier_run(config: RunConfig) -> str:
    """What this run would find in output_dir."""
    from specforge_trim.train.checkpoint_files import list_complete

    found = list_complete(config.output_dir / "checkpoints")
    if not found:
        return f"{config.output_dir}, no checkpoint there"
    if not config.train.resume:
        return f"{config.output_dir}, its {len(found)} checkpoints are removed (--no-resume)"
    return f"{config.output_dir}, resumes after step {found[-1].step:,}"


def _target_text(config: Config) -> tuple[Any | None, str]:
    """The target's text config, or None where only the network has it and draft_config says."""
    path = local_target(config, config.model.target)
    has_sizes = config.model.draft_config is not None or config.model.init_from is not None
    try:
        return read_target_config(path, local_only=has_sizes).get_text_config(), "the target"
    except (OSError, ValueError):
        if not has_sizes:
            raise
        return None, ""


def local_target(config: RunConfig, name: str) -> str | Path:
    """Where a model's files lie; an embedded one is not fetched for a plan."""
    embedded = EMBEDDED_TARGETS.get(name.lower())
    if embedded is None or Path(name).is_dir():
        return name
    return config.cache_dir / "targets" / f"{name.lower()}-{embedded.version}"


def _shape(draft: DraftConfig) -> str:
    version = "EAGLE-3.1" if draft.fc_norm and draft.norm_output else "EAGLE-3"
    layers = "" if draft.num_hidden_layers == 1 else f"{draft.num_hidden_layers} layers, "
    return (
        f"{version}, {layers}width {draft.hidden_size}, MLP {draft.intermediate_size}, "
        f"{draft.num_attention_heads}/{draft.num_key_value_heads} heads of {draft.head_dim}, "
        f"vocabulary {draft.draft_vocab_size:,} of {draft.vocab_size:,}"
    )


def _layers(draft: DraftConfig) -> str:
    if draft.aux_layers is None:
        return "2, n//2, n-3 of the target's n"
    return ", ".join(map(str, draft.aux_layers))


def _sharing(config: Config, world_size: int) -> str:
    backend = config.attention.attention_backend
    if config.parallel.fsdp:
        backend += ", fsdp"
    if config.attention.attention_backend != "usp" or world_size == 1:
        return backend
    ulysses, ring = sequence_degrees(config, world_size)
    kind = config.parallel.sp_context
    return f"{backend}: {ulysses * ring} share a sequence, keys {kind}"


def _trimming(config: Config) -> str:
    trim = config.trim
    if not trim.trim_loss_positions:
        return "off: every row, every position"
    if not trim.trim_backbone_rows:
        return "loss positions only: every row runs the draft"
    return f"loss positions and rows (up to density {config.max_density:g})"


def _parameter_table(size: DraftSize) -> list[str]:
    cells = [(name, f"{count / 1e6:,.2f}") for name, count in size.by_part.items()]
    cells.append(("trained", f"{size.trained / 1e6:,.2f}"))
    cells.append(("frozen: target's embedding", f"{size.frozen / 1e6:,.2f}"))
    return table(("parameters", "millions"), cells)


def training_of(config: Config, draft: DraftConfig) -> Training:
    """What of a run decides which rows of a document it runs."""
    return Training(
        ttt_length=config.loss.ttt_length,
        alignment=config.loss.loss_alignment,
        chain=config.loss.chain,
        dims=draft.dims,
        max_density=config.max_density,
    )


def memory_table(memory: Mapping[str, int]) -> list[str]:
    """Bytes on one rank by what they hold, and their sum."""
    cells = [(name, f"{value / MB:,.0f}") for name, value in memory.items()]
    cells.append(("all, per rank", f"{sum(memory.values()) / MB:,.0f}"))
    return table(("memory of training", "MB"), cells)


def _data_lines(config: Config, draft: DraftConfig, world_size: int) -> list[str]:
    """Steps and kept work of prepared data; else what would tell them."""
    data = prepared(config, config.model.target)
    per_token = draft.num_aux_layers * draft.target_hidden_size * 2
    lines = [f"features on disk: {per_token / 1024:.1f} KB per token"]
    rows = _chunk_rows(config, draft)
    lines.append(f"kept rows per chunk: {rows:,}")
    if data is None:
        lines.append("kept work, steps: unknown until `specforge-trim prepare` has run")
        return lines
    tokens = int(sum(int(n) for n in data.lengths))
    step = max(1, len(data) // 200)
    stats = [
        document_stats(data[i], training_of(config, draft)) for i in range(0, len(data), step)
    ]
    costs = [item.cost for item in stats if item.cost is not None]
    lines.append(f"data: {len(data):,} conversations, {tokens:,} tokens")
    if costs:
        total = sum(costs[1:], costs[0])
        lines.append(
            f"kept work with both trim flags: {total.fraction:.1%} of the full computation "
            f"({len(stats)} conversations looked at)"
        )
    sharing = 1
    if config.attention.attention_backend == "usp":
        sharing = math.prod(sequence_degrees(config, world_size))
    lines.append(steps_line(config, tokens, world_size // sharing))
    return lines


def steps_line(config: RunConfig, tokens: int, data_ranks: int) -> str:
    """Optimizer steps over all epochs. data_ranks: those that train on different documents."""
    batches = math.ceil(tokens / config.data.tokens_per_batch)
    steps = math.ceil(batches / (data_ranks * config.train.accumulate)) * config.train.epochs
    most = config.train.max_steps
    return f"steps: about {steps:,}" + ("" if most is None else f", at most {most:,}")


def _chunk_rows(config: Config, draft: DraftConfig) -> int:
    if config.attention.chunk_rows is not None:
        return config.attention.chunk_rows
    megabytes = config.attention.row_memory_mb or DEFAULT_ROW_MEMORY_MB[device_of(config)]
    return chunk_rows_for(
        draft.dims,
        config.loss.ttt_length,
        itemsize=ITEM_BYTES[config.train.dtype],
        budget=megabytes * MB,
    )


def prepared(config: RunConfig, target: str) -> Any | None:
    """The prepared data of this configuration when it lies in the cache, else None."""
    from transformers import AutoTokenizer

    from specforge_trim.data.dataset import find_prepared
    from specforge_trim.data.sources import parse_source
    from specforge_trim.train.run import drawn, mask_options

    files = [Path(parse_source(entry).path) for entry in config.data.train_data]
    if not files or not all(file.is_file() for file in files):
        return None
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            local_target(config, target), local_files_only=True
        )
    except (OSError, ValueError):
        return None
    found = find_prepared(
        files,
        tokenizer,
        cache_dir=config.cache_dir,
        max_length=config.data.max_length,
        too_long=config.data.too_long,
        masks=mask_options(config),
    )
    return None if found is None else drawn(config, found)
