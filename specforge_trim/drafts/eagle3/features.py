"""Where a run's target features come from: a store, the target itself, or another trainer's files.

make_features     a store of the features of prepared data, captured where it is not complete
online_documents  nothing stored: the target computes a batch's features when it is needed
open_peer_data    files that SpecForge, speculators or ModelOpt captured
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from specforge_trim.config.checks import naming_folders
from specforge_trim.data.dataset import PreparedData
from specforge_trim.data.document_features import MemoryDocument
from specforge_trim.data.peer_formats.folder import PeerData
from specforge_trim.data.store import FORMAT, FeatureStore, StoredDocument
from specforge_trim.data.tokenize import Document
from specforge_trim.drafts.eagle3.settings import Config
from specforge_trim.drafts.eagle3.sizes import DraftConfig
from specforge_trim.ranks.world import World
from specforge_trim.verifier.aux_layers import resolve_aux_layers
from specforge_trim.verifier.capture import (
    PROBE_TOKENS,
    capture,
    capture_document,
    is_captured,
    store_spec,
)
from specforge_trim.verifier.final_norm import load_final_norm
from specforge_trim.verifier.hf import HFTarget, load_embedding_and_head

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Target:
    """A target that is on disk, not loaded, and the draft that fits it.

    path: what transformers loads; text_config: of its language part; draft: sizes in force.
    """

    path: str | Path
    text_config: Any
    draft: DraftConfig

    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(self.path)


@dataclass(frozen=True)
class TrainingDocuments:
    """Tokens and features of the training documents, as the batch loader reads them."""

    data: PreparedData
    store: FeatureStore

    def tokens(self, number: int) -> Document:
        return self.data[number]

    def features(self, number: int) -> StoredDocument:
        return self.store.document(number)


@dataclass(frozen=True)
class OnlineDocuments:
    """Tokens of the training documents, and features that the target computes when asked.

    dtype: what features are rounded to, as they would be in a store.
    """

    data: PreparedData
    target: HFTarget
    dtype: torch.dtype

    def tokens(self, number: int) -> Document:
        return self.data[number]

    def features(self, number: int) -> MemoryDocument:
        made = capture_document(self.target, self.data[number])
        return MemoryDocument(
            made.aux_states.to(self.dtype), made.last_states.to(self.dtype), made.last_positions
        )


def make_features(
    config: Config, target: Target, data: PreparedData, world: World
) -> FeatureStore:
    """The feature store of `data`: opened where it is complete, else (or further) captured.

    Every rank captures its share of the missing shards.
    """
    dtype = getattr(torch, config.data.feature_dtype)
    spec = store_spec(target.path, aux_layers=target.draft.aux_layers, dtype=dtype)
    layers = "-".join(map(str, spec.aux_layers))
    parts = (data.fingerprint[:16], spec.target_fingerprint[:12], layers, spec.dtype, f"v{FORMAT}")
    name = "-".join(parts)
    folder = config.cache_dir / "features" / name
    # Every rank looks before any writes, so all of them decide alike.
    with naming_folders(config):
        if not world.together(lambda: is_captured(data, spec, folder)):
            world.together(lambda: _capture(config, target, data, folder, world))
    doc_ids = [document.doc_id for document in data]
    return FeatureStore.open(folder, expect=spec, doc_ids=doc_ids)


def load_target(config: Config, target: Target, world: World) -> HFTarget:
    """The target itself, where the settings put it."""
    return HFTarget.load(
        target.path,
        dtype=getattr(torch, config.model.target_dtype),
        device=world.device,
        aux_layers=target.draft.aux_layers,
        device_map=config.model.target_device_map,
        tensor_parallel=config.model.target_tensor_parallel,
    )


def _capture(
    config: Config, target: Target, data: PreparedData, folder: Path, world: World
) -> None:
    model = load_target(config, target, world)
    split = config.model.target_tensor_parallel  # then all ranks run one document together
    capture(
        data,
        model,
        folder,
        rank=0 if split else world.rank,
        world_size=1 if split else world.size,
        write=world.is_main or not split,
        dtype=getattr(torch, config.data.feature_dtype),
        max_bad_fraction=config.data.max_bad_fraction,
        check_disk=config.data.check_disk,
        progress=world.is_main,
    )


def open_peer_data(config: Config, target: Target, world: World) -> PeerData:
    """Documents and features of train_features, another trainer's folder.

    Such files do not say which layers they are of: aux_layers must.
    """
    assert config.data.train_features is not None
    if config.data.train_data and world.is_main:
        logger.warning("train_features is set: train_data is not read")
    layers = resolve_aux_layers(target.text_config.num_hidden_layers, target.draft.aux_layers)
    if world.is_main:
        logger.info("features are taken to be of layers %s (aux_layers)", list(layers))
    return world.first(
        lambda: PeerData(
            str(config.data.train_features),
            num_aux=len(layers),
            hidden_size=target.text_config.hidden_size,
            final_norm=load_final_norm(target.path),
            cache_dir=config.cache_dir,
            max_length=config.data.max_length,
            max_bad_fraction=config.data.max_bad_fraction,
            progress=world.is_main,
        )
    )


def online_documents(
    config: Config, target: Target, data: PreparedData, world: World
) -> OnlineDocuments:
    """The target, loaded and probed, as the source of features; one replica on each rank."""
    model = world.together(lambda: load_target(config, target, world))
    head = load_embedding_and_head(target.path)
    world.together(lambda: model.check_head(head, data[0].input_ids[:PROBE_TOKENS]))
    return OnlineDocuments(data, model, getattr(torch, config.data.feature_dtype))
