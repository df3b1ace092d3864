"""Capture the target's hidden states: into a store for offline use, or one document online."""

import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from specforge_trim.data.document_features import BadFeatures, MemoryDocument, teacher_positions
from specforge_trim.data.store import FeatureStore, StoreSpec, StoreWriter
from specforge_trim.verifier.aux_layers import resolve_aux_layers
from specforge_trim.verifier.hf import HFTarget, load_embedding_and_head, target_fingerprint

if TYPE_CHECKING:
    from specforge_trim.data.dataset import PreparedData

logger = logging.getLogger(__name__)

PROBE_TOKENS = 16


class HasIdsAndMask(Protocol):
    """A tokenised document (`data/tokenize.py`)."""

    @property
    def input_ids(self) -> Tensor:
        """int64 [L]"""

    @property
    def loss_mask(self) -> Tensor:
        """bool [L]"""

    @property
    def source(self) -> str: ...
    @property
    def doc_id(self) -> str: ...


def store_spec(
    target_path: str | Path,
    *,
    aux_layers: Sequence[int] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> StoreSpec:
    """What features of this target are, read from its files without loading the model."""
    from transformers import AutoConfig

    text = AutoConfig.from_pretrained(target_path).get_text_config()
    return StoreSpec(
        target_fingerprint=target_fingerprint(target_path),
        aux_layers=resolve_aux_layers(text.num_hidden_layers, aux_layers),
        hidden_size=text.hidden_size,
        dtype=str(dtype).removeprefix("torch."),
        target_name=str(target_path),
    )


def is_captured(data: "PreparedData", spec: StoreSpec, store_dir: str | Path) -> bool:
    """True when `store_dir` holds all features of `data`.

    Raises ValueError when it holds those of another target or of other documents.
    """
    if not (Path(store_dir) / "manifest.json").exists():
        return False
    doc_ids = [data[i].doc_id for i in range(len(data))]
    return FeatureStore.open(store_dir, expect=spec, doc_ids=doc_ids).is_complete


def capture(
    data: "PreparedData",
    target: HFTarget,
    store_dir: str | Path,
    *,
    rank: int = 0,
    world_size: int = 1,
    dtype: torch.dtype | None = None,
    shard_tokens: int = 16384,
    max_bad_fraction: float = 0.1,
    check_disk: bool = True,
    write: bool = True,
    progress: bool = True,
) -> None:
    """Write this rank's shards of the features of `data` into `store_dir`.

    Every world_size-th shard is this rank's. Shards that are there stay; an interrupted run loses
    the shard it was at. A progress bar over tokens goes to stderr on rank 0. A document whose
    states are not finite is stored as it is, named in the log; training leaves it out.

    Args:
        dtype: of the stored tensors; None = the target's own.
        max_bad_fraction: share of `data` whose states may be not finite before this stops.
        check_disk: refuse to start when the disk is too small.
        write: False on ranks that only compute their part of a target split over ranks.

    Raises ValueError when the folder holds other features, when the target's logits are not
    head(last hidden), or when too many states are not finite; OSError when the disk is too small
    or cannot be written.
    """
    spec = StoreSpec(
        target_fingerprint=target.fingerprint,
        aux_layers=target.aux_layers,
        hidden_size=target.hidden_size,
        dtype=str(dtype or target.dtype).removeprefix("torch."),
        target_name=target.name,
    )
    documents = [data[i] for i in range(len(data))]
    writer = StoreWriter(
        store_dir,
        spec,
        doc_ids=[document.doc_id for document in documents],
        lengths=[len(document.input_ids) for document in documents],
        shard_tokens=shard_tokens,
    )
    shards = writer.missing(rank=rank, world_size=world_size)
    if not shards:
        return
    head = load_embedding_and_head(target.name)
    target.check_head(head, documents[0].input_ids[:PROBE_TOKENS])
    todo = [documents[i] for shard in shards for i in writer.documents(shard)]
    _report_space(Path(store_dir), spec, todo, ranks=world_size, refuse=check_disk)
    limit = max_bad_fraction * len(documents)
    total = sum(len(document.input_ids) for document in todo)
    silent = not progress or rank != 0
    with tqdm(total=total, desc="capture", unit="tok", unit_scale=True, disable=silent) as bar:
        for shard, features in _shards(target, writer, documents, shards, bar, limit=limit):
            if write:
                writer.write(shard, features)


def _shards(
    target: HFTarget,
    writer: StoreWriter,
    documents: Sequence[HasIdsAndMask],
    shards: Sequence[int],
    bar: tqdm,
    *,
    limit: float,
) -> Iterator[tuple[int, list[MemoryDocument]]]:
    """Each shard with its documents' features; ValueError when more than `limit` are bad."""
    bad = 0
    for shard in shards:
        features = []
        for i in writer.documents(shard):
            features.append(capture_document(target, documents[i]))
            bar.update(len(documents[i].input_ids))
            bad += _is_bad(target, documents[i], features[-1])
            if bad > limit:
                raise ValueError(
                    f"{bad} of {len(documents)} documents have target states that are not finite, "
                    "more than max_bad_fraction allows: is target_dtype too narrow?"
                )
        yield shard, features


def capture_document(target: HFTarget, document: HasIdsAndMask) -> MemoryDocument:
    """Features of one document in memory, on the CPU, as a store would give them."""
    aux, last = target.features(document.input_ids)
    positions = teacher_positions(document.loss_mask)
    return MemoryDocument(aux.cpu(), last[positions.to(last.device)].cpu(), positions)


def _is_bad(target: HFTarget, document: HasIdsAndMask, features: MemoryDocument) -> bool:
    """True, and a line in the log that names the document, when a state is not finite."""
    try:
        features.check()
    except BadFeatures as error:
        logger.warning("%s: %s in %s", document.source, error, target.dtype)
        return True
    return False


def _report_space(
    folder: Path,
    spec: StoreSpec,
    documents: Sequence[HasIdsAndMask],
    *,
    ranks: int,
    refuse: bool,
) -> None:
    """Say how much disk the capture takes; where there is less, raise OSError if `refuse`."""
    width = len(spec.aux_layers) * spec.hidden_size
    values = sum(
        len(document.input_ids) * width
        + len(teacher_positions(document.loss_mask)) * spec.hidden_size
        for document in documents
    )
    needed = values * spec.torch_dtype.itemsize * ranks
    free = shutil.disk_usage(folder).free
    logger.info("capture writes %.2f GB into %s (%.1f GB free)", needed / 1e9, folder, free / 1e9)
    if refuse and needed > free:
        raise OSError(
            f"target features need {needed / 1e9:.1f} GB in {folder}, {free / 1e9:.1f} GB are "
            "free: make room, choose another --cache-dir, or train with --online, which stores "
            "nothing; --no-check-disk captures all the same"
        )
