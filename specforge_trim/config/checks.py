"""Settings that cannot work together, or in this run.  Each refusal names both and a way out."""

import dataclasses
import importlib.util
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specforge_trim.config.objective import Objective, parse_objective
from specforge_trim.config.options import ConfigError
from specforge_trim.config.training import PROFILE_WARM_UP


def check_pairs(config: Any) -> None:
    """Settings that contradict each other or ask for what does not exist yet."""
    trim, attention, aux = config.trim, config.attention, config.model.aux_layers
    check_objective(config.loss)
    _check_features(config)
    if trim.trim_backbone_rows and not trim.trim_loss_positions:
        raise ConfigError(
            "trim_backbone_rows needs trim_loss_positions: rows that are not forwarded cannot "
            "emit a loss; add --trim-loss-positions or drop --trim-backbone-rows"
        )
    if trim.stop_grad_context_tokens and not trim.trim_loss_positions:
        raise ConfigError(
            "stop_grad_context_tokens needs trim_loss_positions: losses at every row would send "
            "gradients into the rows that are cut; add --trim-loss-positions or drop "
            "--stop-grad-context-tokens"
        )
    _check_vocab(config.model)
    if attention.local_attention is not None and attention.attention_backend != "usp":
        raise ConfigError(
            f"local_attention = {attention.local_attention!r} has no effect with "
            f"attention_backend = {attention.attention_backend!r}: it is what usp runs in a rank"
        )
    _check_sequence(config)
    _check_evaluation(config)
    check_run(config, backends=(attention.attention_backend, attention.local_attention))
    if aux is not None and (not aux or list(aux) != sorted(set(aux))):
        raise ConfigError(f"aux_layers = {list(aux)}, expected ascending, distinct layer ids")
    if config.model.draft_config is not None and not Path(config.model.draft_config).is_file():
        raise ConfigError(f"--draft-config {config.model.draft_config}: no such file")
    init = config.model.init_from
    if init is not None and not _expanded("init_from", init).is_dir():
        raise ConfigError(f"init_from = {init!r}: no such folder")


def check_run(config: Any, *, backends: tuple[str | None, ...]) -> None:
    """Settings of a run that both trainers have. backends: of attention, those in use."""
    check_trackers(config)
    profile, steps = config.track.profile, config.train.max_steps
    if profile and steps is not None and steps < profile + PROFILE_WARM_UP:
        raise ConfigError(
            f"profile = {profile} needs {profile + PROFILE_WARM_UP} steps, {PROFILE_WARM_UP} of "
            f"them to warm up, and max_steps = {steps} ends the run before: lower --profile, or "
            "raise --max-steps"
        )
    if "fa" in backends and importlib.util.find_spec("flash_attn") is None:
        raise ConfigError(
            "attention_backend = 'fa' needs the package flash-attn, which is not installed: "
            "install the extra 'flash' or use --attention-backend sdpa"
        )
    for key, folder in (
        ("output_dir", config.train.output_dir), ("cache_dir", config.data.cache_dir)
    ):  # fmt: skip
        path = _expanded(key, folder)
        if not folder.strip() or (path.exists() and not path.is_dir()):
            raise ConfigError(f"{key} = {folder!r}, expected a folder or a name for a new one")


def check_objective(loss: Any) -> None:
    """The objective's terms, and the setting that one of them reads."""
    try:
        objective = parse_objective(loss.objective, lk_eta=loss.lk_eta)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if loss.lk_eta != Objective().lk_eta and not objective.reads_lk_eta:
        raise ConfigError(
            f"lk_eta = {loss.lk_eta:g} has no effect with objective = {loss.objective!r}: it "
            "belongs to lk_lambda; drop it, or add that term"
        )


def _expanded(key: str, folder: str) -> Path:
    try:
        return Path(folder).expanduser()
    except RuntimeError:  # ~name without such a user
        raise ConfigError(f"{key} = {folder!r}: this machine has no such home folder") from None


@contextmanager
def naming_folders(config: Any) -> Iterator[None]:
    """Has an OSError about a file below output_dir or cache_dir name that setting."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            raise
        file = Path(os.fsdecode(error.filename)).absolute()
        for key, folder in (("output_dir", config.output_dir), ("cache_dir", config.cache_dir)):
            if file.is_relative_to(folder.absolute()):
                raise OSError(
                    f"{key} = {str(folder)!r} cannot be used ({error.strerror}: {file}): choose "
                    f"another --{key.replace('_', '-')}"
                ) from error
        raise


def _check_vocab(model: Any) -> None:
    """Where the draft vocabulary comes from."""
    if model.rebuild_vocab and model.init_from is None:
        raise ConfigError(
            "rebuild_vocab has no effect without init_from: a new draft's vocabulary is chosen "
            "from its data anyway; drop --rebuild-vocab or name a draft with --init-from"
        )
    if model.vocab_map is not None and model.init_from is not None and not model.rebuild_vocab:
        raise ConfigError(
            f"init_from keeps the vocabulary of its draft and vocab_map = {model.vocab_map!r} "
            "names another: drop one of them, or add --rebuild-vocab"
        )


def _check_features(config: Any) -> None:
    """Where the target lies, and where its features come from."""
    data, device_map = config.data, config.model.target_device_map
    split = config.model.target_tensor_parallel
    if device_map is not None and split:
        raise ConfigError(
            "target_device_map and target_tensor_parallel both say where the target lies: choose "
            "one"
        )
    if device_map is not None and importlib.util.find_spec("accelerate") is None:
        raise ConfigError(
            f"target_device_map = {device_map!r} needs the package accelerate, which is not "
            "installed: pip install accelerate"
        )
    if data.online and data.train_features is not None:
        raise ConfigError(
            "train_features are read from disk, online computes features: drop one of the two"
        )
    if data.online and split:
        raise ConfigError(
            "online needs the whole target on every rank, target_tensor_parallel splits it: "
            "capture features first (drop --online), or drop --target-tensor-parallel"
        )


def check_trackers(config: Any) -> None:
    """The packages of the trackers that are named, and settings that only one of them reads."""
    track = config.track
    for field in dataclasses.fields(track) if "wandb" not in track.trackers else ():
        value = getattr(track, field.name)
        if field.name in ("run_name", "wandb_project", "wandb_mode") and value != field.default:
            raise ConfigError(
                f"{field.name} = {value!r} has no effect without Weights & Biases: add --trackers "
                f"wandb, or drop --{field.name.replace('_', '-')}"
            )
    for name in config.track.trackers:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"trackers = {name!r} needs the package {name}, which is not installed: "
                "pip install 'specforge_trim[track]', or drop it (metrics.jsonl is always written)"
            )


def _check_evaluation(config: Any) -> None:
    """What training measures needs data to measure on, and decoding the target itself."""
    evaluate = config.evaluate
    if evaluate.eval_every and not (evaluate.eval_data or evaluate.eval_features):
        raise ConfigError(
            f"eval_every = {evaluate.eval_every} has nothing to measure on: name held-out "
            "conversations with --eval-data or captured features with --eval-features"
        )
    if evaluate.eval_features is not None and not evaluate.eval_every:
        raise ConfigError(
            "eval_features has no effect without eval_every: add --eval-every STEPS or drop it"
        )
    if evaluate.decode_every and not evaluate.eval_data:
        raise ConfigError(
            f"decode_every = {evaluate.decode_every} has no prompts to decode: name conversations "
            "with --eval-data"
        )
    if evaluate.decode_every and config.model.target_tensor_parallel:
        raise ConfigError(
            "decode_every needs the whole target on every rank, target_tensor_parallel splits it: "
            "drop one of the two (eval_every measures without the target)"
        )


def _check_sequence(config: Any) -> None:
    attention, parallel = config.attention, config.parallel
    if attention.attention_backend != "usp":
        for key, unset in (
            ("sp_context", "gathered"), ("sp_ulysses", None), ("sp_ring", None),
            ("sp_rows", "dealt"),
        ):  # fmt: skip
            value = getattr(parallel, key)
            if value != unset:
                raise ConfigError(
                    f"{key} = {value!r} has no effect with attention_backend = "
                    f"{attention.attention_backend!r}: add --attention-backend usp"
                )
    elif parallel.sp_context != "gathered" and attention.local_attention == "reference":
        raise ConfigError(
            f"sp_context = {parallel.sp_context!r} needs a backend that works in segments, and "
            "local_attention is 'reference': use --local-attention sdpa or --sp-context gathered"
        )


def sequence_degrees(config: Any, world_size: int) -> tuple[int, int]:
    """(ranks that split heads, ranks that split positions) of a shared sequence.

    Raises ConfigError when the world cannot be cut so.
    """
    parallel = config.parallel
    ulysses, ring = parallel.sp_ulysses, parallel.sp_ring
    if parallel.sp_context == "ring":
        ulysses = ulysses or 1
        ring = ring or max(1, world_size // ulysses)
    else:
        ring = ring or 1
        ulysses = ulysses or max(1, world_size // ring)
    if world_size % (ulysses * ring):
        raise ConfigError(
            f"sp_ulysses = {ulysses} times sp_ring = {ring} does not divide the {world_size} "
            f"ranks of this run: lower one of them, or start a multiple of {ulysses * ring} ranks"
        )
    return ulysses, ring


def least_ranks(config: Any) -> int:
    """The fewest ranks that the settings can run on."""
    if config.attention.attention_backend == "usp":
        parallel = config.parallel
        ulysses = parallel.sp_ulysses or (2 if parallel.sp_context == "ulysses" else 1)
        ring = parallel.sp_ring or (2 if parallel.sp_context == "ring" else 1)
        return max(2, ulysses * ring)
    return 2 if config.parallel.fsdp else 1


def check_fsdp(config: Any, world_size: int, *, least: int = 2) -> None:
    """Refuses to split the weights of one rank; least: ranks that the other settings need."""
    if config.parallel.fsdp and world_size == 1:
        raise ConfigError(
            "fsdp = True splits the weights over ranks and this run has one: start it with "
            f"torchrun --nproc_per_node {least} or use --no-fsdp"
        )


def check_world(config: Any, world_size: int) -> None:
    """Refuses settings that do not fit the number of ranks."""
    check_fsdp(config, world_size, least=least_ranks(config))
    if config.attention.attention_backend != "usp":
        return
    if world_size == 1:
        raise ConfigError(
            "attention_backend = 'usp' shards sequences over ranks and this run has one: "
            f"start it with torchrun --nproc_per_node {least_ranks(config)} or use "
            "--attention-backend sdpa"
        )
    ulysses, ring = sequence_degrees(config, world_size)
    if ulysses * ring == 1:
        raise ConfigError(
            "attention_backend = 'usp' with sp_ulysses = 1 and sp_ring = 1 shares nothing: raise "
            "one of them or use --attention-backend sdpa"
        )
    context = config.parallel.sp_context
    for kind, degree, split, other in (
        ("ulysses", ulysses, "heads", "ring"),
        ("ring", ring, "positions", "ulysses"),
    ):
        if context == kind and degree == 1:
            raise ConfigError(
                f"sp_context = {kind!r} splits {split}, but sp_ulysses = {ulysses} and sp_ring = "
                f"{ring} on {world_size} ranks split none, which is {other} alone: ask for that "
                f"with --sp-context {other}, or raise --sp-{kind} to 2 or more (their product "
                "must divide the ranks)"
            )


def check_draft(config: Any, world_size: int, *, heads: int, kv_heads: int, layers: int) -> None:
    """Refuses a split of context keys that the draft's shape does not allow."""
    if config.attention.attention_backend != "usp" or config.parallel.sp_context == "gathered":
        return
    if world_size == 1:  # export and evaluation share no sequence
        return
    ulysses, ring = sequence_degrees(config, world_size)
    if heads % ulysses or kv_heads % ulysses:
        fits = math.gcd(ulysses * ring, heads, kv_heads)
        context = "ring" if fits == 1 else config.parallel.sp_context
        raise ConfigError(
            f"sp_ulysses = {ulysses} splits heads, and the draft's {heads} heads and {kv_heads} "
            f"key/value heads do not split into {ulysses}: use --sp-context {context} "
            f"--sp-ulysses {fits} --sp-ring {ulysses * ring // fits}, or --sp-context gathered, "
            "which splits none"
        )
    if layers > 1:
        raise ConfigError(
            f"sp_context = {config.parallel.sp_context!r} works for drafts of one layer, this "
            f"one has {layers}: use --sp-context gathered"
        )
