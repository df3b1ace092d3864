"""Sections of a configuration: what is trained on what, how, and where it runs.

Every setting with its default, unit and effect; config/training.py has the run's own sections.
"""

from __future__ import annotations

from dataclasses import dataclass

from specforge_trim.config.objective import TERMS
from specforge_trim.config.options import option

DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True)
class ModelConfig:
    """The target model and the draft that learns from it."""

    target: str = option(
        "smollm2-135m-instruct",
        "target model: a folder, a hub id, or the embedded smollm2-135m-instruct",
    )
    aux_layers: tuple[int, ...] | None = option(
        None,
        "target layers whose outputs feed the draft, as 'output after k layers', ascending; "
        "none = 2, n//2, n-3",
        at_least=1,
    )
    draft_config: str | None = option(
        None, "JSON file with the draft's sizes; none = one layer shaped like the target's"
    )
    draft_vocab_size: int | None = option(
        None,
        "tokens the draft can propose, the most frequent supervised ones; fewer = a cheaper head; "
        "none = what the draft config says, else the target's whole vocabulary",
        at_least=1,
    )
    vocab_map: str | None = option(
        None,
        "draft vocabulary another trainer chose: vocab_mapping.pt, a folder with d2t.npy and "
        "t2d.npy, or token_freq.pt; none = counted in the training data",
    )
    init_head_from_target: bool = option(
        True, "start the draft's head from the target's rows (needs equal hidden sizes)"
    )
    init_from: str | None = option(
        None,
        "folder of a draft to go on from, as this package, SpecForge, speculators or EAGLE wrote "
        "it: its weights, vocabulary and (without draft_config) sizes; none = a new draft",
    )
    rebuild_vocab: bool = option(
        False,
        "with init_from: choose the vocabulary anew; tokens in both keep their head rows",
    )
    target_dtype: str = option(
        "bfloat16", "number format the target runs in while features are made", choices=DTYPES
    )
    target_device_map: str | None = option(
        None,
        "spread a large target over all devices of one process, as transformers' device_map does; "
        "none = the whole target on each rank's device",
        choices=("auto", "balanced", "balanced_low_0", "sequential"),
    )
    target_tensor_parallel: bool = option(
        False,
        "split a large target over all ranks while features are made (transformers' tp_plan); "
        "every rank then runs the same documents",
    )


@dataclass(frozen=True)
class DataConfig:
    """Conversations, and how they are packed into batches."""

    train_data: tuple[str, ...] = option(
        (),
        "files of conversations to train on: JSON lines (also gzip) or Parquet; FILE@W is passed "
        "over W times an epoch (0.5 = half of it, another half in the next)",
    )
    cache_dir: str = option(
        "~/.cache/specforge_trim",
        "folder for converted targets, tokenised data and features; all of it can be remade",
    )
    max_length: int = option(
        8192, "longest conversation in tokens; what becomes of longer ones: too_long", at_least=4
    )
    too_long: str = option(
        "drop",
        "conversations beyond max_length: drop them, cut them off there, or split into pieces",
        choices=("drop", "cut", "split"),
    )
    max_conversations: int | None = option(
        None,
        "train on this many conversations, drawn over all files by the seed; none = all",
        at_least=1,
    )
    prepare_processes: int | None = option(
        None, "processes that tokenise; none = one a core and 8 MB, at most 8", at_least=1
    )
    max_bad_fraction: float = option(
        0.1,
        "share of conversations (0 to 1) that may be unusable before the run stops",
        at_least=0.0,
        at_most=1.0,
    )
    supervise_turns: str = option(
        "all",
        "assistant turns that carry loss: all of a conversation, or its last one only",
        choices=("all", "last"),
    )
    supervise_reasoning: bool = option(
        True, "the assistant's reasoning carries loss, empty think blocks included"
    )
    supervise_tool_calls: bool = option(
        True, "the assistant's tool calls carry loss, with the token that ends their turn"
    )
    tokens_per_batch: int = option(
        8192,
        "token budget of one micro-batch of one rank; a longer conversation is a batch alone",
        at_least=1,
    )
    num_workers: int = option(
        1,
        "loader processes per rank that read and plan batches; 0 = in the main process",
        at_least=0,
    )


@dataclass(frozen=True)
class FeatureDataConfig(DataConfig):
    """Conversations, their features, and how they are packed into batches."""

    train_features: str | None = option(
        None,
        "folder of target features another trainer captured (SpecForge .ckpt, speculators "
        "hs_*.safetensors, ModelOpt .pt), trained on instead of train_data",
    )
    feature_dtype: str = option(
        "bfloat16", "number format of the features on disk", choices=DTYPES
    )
    check_disk: bool = option(
        True, "refuse to capture features when the disk is too small for them"
    )
    online: bool = option(
        False,
        "run the target while training and store nothing: each rank holds the whole target, makes "
        "its batches in the main process (num_workers has no effect), and computes the features "
        "again every epoch",
    )


@dataclass(frozen=True)
class LossConfig:
    """Training-time test: what is predicted, and how it is weighted."""

    ttt_length: int = option(
        7,
        "training-time-test steps K; step i trains the draft's (i+1)-th token",
        at_least=1,
        at_most=64,
    )
    objective: str = option(
        "soft_ce",
        "what the draft minimises: " + ", ".join(TERMS) + ", or a weighted sum such as "
        "0.5*soft_ce+0.5*tv",
    )
    lk_eta: float = option(
        3.0,
        "lk_lambda's eta: KL weighs exp(-eta * acceptance), total variation the rest; "
        "0 = KL alone",
        at_least=0.0,
    )
    loss_alignment: str = option(
        "served",
        "which rows count: served = those an engine asks, teacher, or token (as SpecForge 0.2)",
        choices=("served", "teacher", "token"),
    )
    chain: str = option(
        "shift",
        "what step i asks of row t: shift = a target at t+i; run = targets at all of t..t+i",
        choices=("shift", "run"),
    )
    loss_denominator: str = option(
        "rows",
        "what scales a step's gradient: 1 / all rows, or 1 / its loss rows (supervised), summed "
        "over ranks and accumulated micro-batches; the logged loss is per loss row either way",
        choices=("rows", "supervised"),
    )
    loss_decay: float = option(
        0.8,
        "weight of step i is decay^i; smaller = later steps matter less",
        above=0.0,
        at_most=1.0,
    )


@dataclass(frozen=True)
class TrimConfig:
    """What is left out of the computation; results do not change, except where said."""

    trim_loss_positions: bool = option(
        False, "run head, teacher and loss only on rows that carry loss"
    )
    trim_backbone_rows: bool = option(
        False, "run the draft layer only on rows that reach a loss (needs --trim-loss-positions)"
    )
    trim_backbone_rows_max_density: float | None = option(
        None,
        "a conversation keeping more than this share of its rows runs all of them; "
        "none = 0.35 for reference, 1.0 for the other backends",
        at_least=0.0,
        at_most=1.0,
    )
    stop_grad_context_tokens: bool = option(
        False,
        "fc learns from rows that reach a loss only; keys and values still learn from all "
        "(changes the gradient; needs --trim-loss-positions)",
    )


@dataclass(frozen=True)
class AttentionConfig:
    """How the kept rows attend to their context."""

    attention_backend: str = option(
        "sdpa",
        "reference = plain masked softmax, the specification; sdpa = torch's flash kernels; "
        "fa = flash-attn; usp = sequence parallel over ranks",
        choices=("reference", "sdpa", "fa", "usp"),
    )
    local_attention: str | None = option(
        None,
        "what usp runs inside a rank (only with --attention-backend usp); none = sdpa",
        choices=("reference", "sdpa", "fa"),
    )
    chunk_rows: int | None = option(
        None,
        "kept rows per chunk of the row stage; fewer = less memory, more calls; none = as many as "
        "row_memory_mb allows",
        at_least=1,
    )
    row_memory_mb: int | None = option(
        None,
        "MB for the activations of one row chunk over all steps, when chunk_rows is none; "
        "none = 256 on a CPU, 4096 on a GPU",
        at_least=1,
    )
    max_keys_per_call: int | None = option(
        65536,
        "most context tokens of one attention kernel call; caps the kernels' working space on "
        "long contexts; none = no limit",
        at_least=1,
    )
    context_chunk_tokens: int = option(
        4096, "tokens per chunk of the context stage; fewer = less memory", at_least=1
    )


@dataclass(frozen=True)
class ParallelConfig:
    """Several ranks: documents are spread over them."""

    fsdp: bool = option(
        False, "split weights, gradients and optimizer state over all ranks (FSDP2)"
    )
    timeout_minutes: float = option(
        30.0, "how long a rank waits for another before the run ends with an error", above=0.0
    )


@dataclass(frozen=True)
class SequenceParallelConfig(ParallelConfig):
    """Several ranks: sequences shared with --attention-backend usp, weights split with --fsdp."""

    sp_context: str = option(
        "gathered",
        "where a shared sequence's context keys are while rows run: gathered = all on every rank; "
        "ulysses = some heads of all tokens; ring = all heads of some tokens",
        choices=("gathered", "ulysses", "ring"),
    )
    sp_ulysses: int | None = option(
        None,
        "ranks that split heads; sp_ulysses * sp_ring ranks share a sequence, the rest of the "
        "world is data parallel; none = all ranks that sp_ring leaves (1 for ring)",
        at_least=1,
    )
    sp_ring: int | None = option(
        None,
        "ranks that split positions; with sp_ulysses > 1 both are combined; none = 1 (ring: all "
        "ranks that sp_ulysses leaves)",
        at_least=1,
    )
    sp_rows: str = option(
        "dealt",
        "which rank computes a shared sequence's kept rows: dealt = equal cost on all; owner = "
        "the rank that holds the row's token",
        choices=("dealt", "owner"),
    )
