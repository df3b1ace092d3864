"""From a configuration to a trained draft: the phases, each of which reuses its result.

    open_target    the target's files, its configuration, the draft's sizes
    prepare_data   conversations -> tokenised documents
    training_data  documents and their features: captured, online, or another trainer's
    build_draft    the untrained draft with its vocabulary, and the teacher
    train_draft    all of these, then the training loop

The commands, the training script and the quickstart are sequences of these calls; what comes
after training is in train/results.py.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from specforge_trim.config.checks import check_draft, naming_folders, sequence_degrees
from specforge_trim.config.training import RunConfig
from specforge_trim.data.dataset import PreparedData, prepare
from specforge_trim.data.peer_formats.folder import PeerData
from specforge_trim.data.report.terminal import show_sample
from specforge_trim.data.sources import Source, document_weights, parse_source
from specforge_trim.data.supervision import MaskOptions
from specforge_trim.decode.prompts import check_prompt, last_prompt
from specforge_trim.decode.while_training import PromptDecoder
from specforge_trim.drafts.eagle3.features import (
    OnlineDocuments,
    Target,
    TrainingDocuments,
    load_target,
    make_features,
    online_documents,
    open_peer_data,
)
from specforge_trim.drafts.eagle3.model import Eagle3Draft
from specforge_trim.drafts.eagle3.settings import Config, ConfigError
from specforge_trim.drafts.eagle3.sizing import draft_config
from specforge_trim.drafts.eagle3.start import build_draft, named_vocab
from specforge_trim.ranks.world import World
from specforge_trim.train.evaluation import HeldOut
from specforge_trim.train.loader import Documents
from specforge_trim.train.loop import TrainSummary, train
from specforge_trim.train.provenance import provenance
from specforge_trim.train.run_lock import only_run
from specforge_trim.verifier.aux_layers import resolve_aux_layers
from specforge_trim.verifier.embedded import resolve_target
from specforge_trim.verifier.hf import HFTarget, target_fingerprint
from specforge_trim.verifier.hub import check_hub

logger = logging.getLogger(__name__)

# ---------------------------------------------------------------------- target and data


def open_target(config: Config, world: World) -> Target:
    """Finds (fetches, converts) the target and settles the draft's sizes.

    Raises ValueError for a target that cannot be found, sizes that do not fit it, and aux layers
    it does not have.
    """
    from transformers import AutoConfig

    with naming_folders(config):
        path = world.first(lambda: resolve_target(config.model.target, cache_dir=config.cache_dir))

    def settle() -> Target:
        if isinstance(path, str):
            check_hub(path)
        text = AutoConfig.from_pretrained(path).get_text_config()
        draft = draft_config(config, text)
        check_draft(
            config,
            world.size,
            heads=draft.num_attention_heads,
            kv_heads=draft.num_key_value_heads,
            layers=draft.num_hidden_layers,
        )
        return Target(path, text, draft)

    return world.together(settle)


def data_files(config: RunConfig, paths: Sequence[str] | None = None) -> list[str]:
    """`paths` or, without any, train_data; ConfigError when there is none or one is missing."""
    return [source.path for source in data_sources(config, paths)]


def data_sources(config: RunConfig, paths: Sequence[str] | None = None) -> list[Source]:
    """The same with their weights."""
    sources = [parse_source(entry) for entry in paths or config.data.train_data]
    if not sources:
        raise ConfigError(
            "train_data names no file: pass --train-data FILE or set data.train_data"
        )
    for source in sources:
        if Path(source.path).is_dir():
            raise ConfigError(f"data file {source.path}: is a folder, expected a file")
        if not Path(source.path).exists():
            raise ConfigError(f"data file {source.path}: no such file")
        if not Path(source.path).is_file():
            raise ConfigError(
                f"data file {source.path}: a pipe or device; expected a file: it is read twice"
            )
    return sources


def mask_options(config: RunConfig) -> MaskOptions:
    """Which of the assistant's text carries loss."""
    return MaskOptions(
        turns=config.data.supervise_turns,
        reasoning=config.data.supervise_reasoning,
        tool_calls=config.data.supervise_tool_calls,
    )


def drawn(config: RunConfig, data: PreparedData) -> PreparedData:
    """The conversations that max_conversations leaves."""
    count = config.data.max_conversations
    return data if count is None else data.sample(count, seed=config.train.seed)


class TargetFiles(Protocol):
    """A target that is not loaded, of either trainer."""

    @property
    def text_config(self) -> Any: ...

    def tokenizer(self) -> Any: ...


def prepare_data(
    config: RunConfig,
    target: TargetFiles,
    world: World,
    *,
    paths: Sequence[str] | None = None,
    announce: bool = True,
) -> PreparedData:
    """Tokenised documents of `paths` (default: train_data), made once and read from then on.

    announce: log what was found, for commands that do not print it themselves.
    """
    files, tokenizer = world.together(lambda: (data_files(config, paths), target.tokenizer()))
    with naming_folders(config):
        data = world.first(
            lambda: prepare(
                files,
                tokenizer,
                cache_dir=config.cache_dir,
                max_length=config.data.max_length,
                too_long=config.data.too_long,
                processes=config.data.prepare_processes,
                masks=mask_options(config),
                max_bad_fraction=config.data.max_bad_fraction,
                progress=world.is_main,
            )
        )
    data = drawn(config, data)
    if announce:
        logger.log(logging.WARNING if data.skipped else logging.INFO, "%s", data.summary())
        log_sample(data, tokenizer)
    return data


def log_sample(data: PreparedData | PeerData, tokenizer: Any) -> None:
    """What to look at before anything is trained: which text of one conversation has loss."""
    color = sys.stderr.isatty() and "NO_COLOR" not in os.environ
    marked = "in green" if color else "between [[ and ]]"
    document = data[0]
    shown = show_sample(document, tokenizer, color=color)
    logger.info("a sample, text with loss %s: %s: %s", marked, document.source, shown)


def training_data(
    config: Config, target: Target, world: World
) -> tuple[PreparedData | PeerData, Documents]:
    """What is trained on, and where a batch gets its tokens and features from."""
    if config.data.train_features is not None:
        peer = open_peer_data(config, target, world)
        if world.is_main:
            _log_peer_sample(peer, target)
        return peer, peer
    data = prepare_data(config, target, world)
    if config.data.online:
        return data, online_documents(config, target, data, world)
    return data, TrainingDocuments(data, make_features(config, target, data, world))


def _log_peer_sample(data: PeerData, target: Target) -> None:
    """Their masks were made elsewhere: all the more reason to look at one. It stops no run."""
    try:
        log_sample(data, target.tokenizer())
    except (OSError, ValueError) as error:
        logger.warning("no sample of the loss masks is shown: %s", error)


# ---------------------------------------------------------------------- training


def train_draft(config: Config, world: World) -> TrainSummary:
    """All phases up to the trained draft; its state lies in output_dir/checkpoints."""
    world.together(lambda: _check_files(config))  # before the target is fetched
    with naming_folders(config), only_run(config.output_dir, world):
        target = open_target(config, world)
        # What may be refused goes before hours of capturing features.
        world.together(lambda: named_vocab(config, target))
        decodes = config.evaluate.decode_every > 0
        prompts = held_out_prompts(config, target, world) if decodes else {}
        data, documents = training_data(config, target, world)
        model, teacher = world.together(
            lambda: build_draft(config, target, data, device=world.device)
        )
        return train(
            config,
            model=model,
            teacher=teacher,
            documents=documents,
            lengths=[int(length) for length in data.lengths],
            weights=_weights(config, data),
            held_out=held_out(config, target, documents, model, prompts, world),
            world=world,
            identity=run_identity(config, target, data, model, world),
            provenance=provenance(config, data.made_from),
        )


def held_out_prompts(
    config: RunConfig, target: TargetFiles, world: World
) -> dict[str, list[Tensor]]:
    """Prompts of each eval_data file: the tokens before the last answer, eval_prompts of each.

    Raises ConfigError for files that cannot be told apart, and when no prompt or one of them
    leaves no room for eval_max_new_tokens in the target's positions.
    """
    settings, sets = config.evaluate, {}
    world.together(lambda: _check_prompt_files(config, target.text_config))
    for path in settings.eval_data:
        data = prepare_data(config, target, world, paths=[path])
        count = min(settings.eval_prompts, len(data))
        documents = [data[i] for i in range(count)]
        sets[Path(path).stem] = [last_prompt(d.input_ids, d.loss_mask) for d in documents]

    def check() -> None:
        for ids in itertools.chain(*sets.values()):
            check_prompt(target.text_config, ids, settings.eval_max_new_tokens)

    world.together(check)
    return sets


def _check_prompt_files(config: RunConfig, text_config: Any) -> None:
    """What can be said of eval_data before it is prepared."""
    settings, positions = config.evaluate, text_config.max_position_embeddings
    if not settings.eval_data:
        raise ConfigError(
            "eval_data names no file: pass --eval-data FILE or set evaluate.eval_data"
        )
    names = [Path(file).stem for file in data_files(config, settings.eval_data)]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(
                f"eval_data names {names.count(name)} files called {name!r}, and a prompt set is "
                "called as its file: rename one of them"
            )
    if settings.eval_max_new_tokens >= positions:
        raise ConfigError(
            f"eval_max_new_tokens = {settings.eval_max_new_tokens} leaves no room for a prompt in "
            f"the target's {positions} positions: lower --eval-max-new-tokens"
        )


def _check_files(config: Config) -> None:
    """Files and folders that this run reads are there."""
    evaluate = config.evaluate
    for key, folder in (
        ("train_features", config.data.train_features), ("eval_features", evaluate.eval_features)
    ):  # fmt: skip
        if folder is not None and not Path(folder).is_dir():
            raise ConfigError(f"{key} = {folder!r}: no such folder")
    if config.data.train_features is None:
        data_files(config)
    if evaluate.decode_every or (evaluate.eval_every and evaluate.eval_features is None):
        data_files(config, evaluate.eval_data)


def held_out(
    config: Config,
    target: Target,
    training: Documents,
    model: Eagle3Draft,
    prompts: Mapping[str, Sequence[Tensor]],
    world: World,
) -> HeldOut:
    """What training measures: held-out documents with their features, and a decoder.

    training: the training documents; an online run lends its target. prompts: what is decoded.
    Raises ConfigError when decode_every asks for a target that cannot be loaded.
    """
    found = HeldOut()
    if config.evaluate.eval_every:
        data, documents = _eval_documents(config, target, training, world)
        lengths = [int(length) for length in data.lengths]
        found = HeldOut(documents, lengths)
    if config.evaluate.decode_every:
        if isinstance(training, OnlineDocuments):
            loaded = training.target
        else:
            loaded = world.together(lambda: _decoding_target(config, target, world))
        decoder = world.together(
            lambda: PromptDecoder(config, loaded, prompts, draft=model, world=world)
        )
        found = dataclasses.replace(found, decoder=decoder)
    return found


def _decoding_target(config: Config, target: Target, world: World) -> HFTarget:
    try:
        return load_target(config, target, world)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"decode_every = {config.evaluate.decode_every} decodes with the target itself, and "
            f"{target.path} cannot be loaded: {str(error).splitlines()[0]}; with --decode-every 0 "
            "the target's features are enough (--eval-every measures on them)"
        ) from error


def _eval_documents(
    config: Config, target: Target, training: Documents, world: World
) -> tuple[PreparedData | PeerData, Documents]:
    """Held-out documents with features: another trainer's, online ones, or captured ones."""
    if config.evaluate.eval_features is not None:
        features = dataclasses.replace(
            config.data, train_features=config.evaluate.eval_features, train_data=()
        )
        peer = open_peer_data(dataclasses.replace(config, data=features), target, world)
        return peer, peer
    data = prepare_data(config, target, world, paths=config.evaluate.eval_data)
    if isinstance(training, OnlineDocuments):
        return data, dataclasses.replace(training, data=data)
    return data, TrainingDocuments(data, make_features(config, target, data, world))


def _data_ranks(config: Config, world: World) -> int:
    """Ranks, or groups of ranks, that train on different documents."""
    if config.attention.attention_backend != "usp":
        return world.size
    ulysses, ring = sequence_degrees(config, world.size)
    return world.size // (ulysses * ring)


def _weights(config: Config, data: PreparedData | PeerData) -> tuple[float, ...] | None:
    """How often an epoch holds each document; None = once."""
    if isinstance(data, PeerData):
        return None
    return document_weights(data_sources(config), data.file_numbers)


def run_identity(
    config: Config, target: Target, data: PreparedData | PeerData, model: Eagle3Draft, world: World
) -> dict[str, Any]:
    """What a resumed run must share with its checkpoint: meaning of weights, order of data."""
    cut = config.trim.stop_grad_context_tokens  # named only where it is on, as older runs do
    kept = hashlib.sha256(model.d2t.cpu().numpy().tobytes()).hexdigest()[:16]
    layers = resolve_aux_layers(target.text_config.num_hidden_layers, target.draft.aux_layers)
    return {
        "target": target_fingerprint(target.path),
        "aux_layers": layers,
        **{f"draft.{key}": value for key, value in dataclasses.asdict(target.draft).items()},
        "draft_vocab_tokens": kept,
        "data": data.fingerprint,
        "feature_dtype": config.data.feature_dtype,
        "train_data weights": [parse_source(s).weight for s in config.data.train_data],
        "tokens_per_batch": config.data.tokens_per_batch,
        "ranks x accumulate": _data_ranks(config, world) * config.train.accumulate,
        "seed": config.train.seed,
        **dataclasses.asdict(config.loss),
        **({"stop_grad_context_tokens": True} if cut else {}),
    }
