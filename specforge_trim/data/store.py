"""Target features on disk: safetensors shards and a manifest, written whole, read lazily.

    manifest.json              what the features are, and which documents lie in which shard
    shard-00000.safetensors    aux [tokens, A*Dt]; last [n, Dt]; last_positions int64 [n], counted
                               from the start of the document; last_ends int64 [documents]

A file appears under its name only when it is complete. Shards do not depend on the number of
writers, so any number of ranks may write, stop and go on. Reading works while others write. A
shard's header carries its checksum and whose it is: the manifest is written once, before any
shard, so that no two writers ever share a file.
Letters: A aux layers, Dt target hidden, n positions whose last hidden state is kept.
"""

import hashlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from specforge_trim.common.atomic import remove_stale, replaced
from specforge_trim.data.document_features import BadFeatures, DocumentFeatures, check_finite
from specforge_trim.data.read_ahead import read_ahead

FORMAT = 2
HEADER = "specforge_trim"  # the entry of a shard's header that is ours
AFTER_FINAL_NORM = "after final norm"


@dataclass(frozen=True)
class StoreSpec:
    """What features are of; two stores mix only when all of it is equal."""

    target_fingerprint: str
    aux_layers: tuple[int, ...]  # Hugging Face numbering
    hidden_size: int
    dtype: str  # of the stored tensors, e.g. "bfloat16"
    target_name: str = ""  # for people; not compared
    last_state: str = AFTER_FINAL_NORM

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class _Manifest:
    spec: StoreSpec
    doc_ids: tuple[str, ...]
    lengths: tuple[int, ...]
    shard_ends: tuple[int, ...]  # documents of shard s: shard_ends[s-1] <= i < shard_ends[s]

    @classmethod
    def read(cls, folder: Path) -> "_Manifest":
        path = folder / "manifest.json"
        if not path.exists():
            raise ValueError(f"{folder} holds no target features (no manifest.json)")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            found = data.get("format")
        except (ValueError, AttributeError):
            raise ValueError(f"{path} is damaged: remove the folder and capture again") from None
        if found != FORMAT:
            raise ValueError(
                f"{path}: format is {found}, expected {FORMAT}: remove the folder "
                "and capture again"
            )
        spec = StoreSpec(**{**data["spec"], "aux_layers": tuple(data["spec"]["aux_layers"])})
        lists = (tuple(data[key]) for key in ("doc_ids", "lengths", "shard_ends"))
        return cls(spec, *lists)

    def header(self, shard: int) -> dict[str, str]:
        """What a shard's file says about itself, its checksum apart."""
        spec = self.spec
        layers = " ".join(map(str, spec.aux_layers))
        return {
            "content": content_hash(self.doc_ids),
            "features": f"{spec.target_fingerprint} layers {layers} {spec.dtype}",
            "shard": str(shard),
        }

    def documents(self, shard: int) -> range:
        """The documents of a shard."""
        ends = (0, *self.shard_ends)
        return range(ends[shard], ends[shard + 1])

    def write(self, folder: Path) -> None:
        data = {
            "format": FORMAT,
            "spec": asdict(self.spec),
            "content": content_hash(self.doc_ids),
            "num_tokens": sum(self.lengths),
            "shard_ends": self.shard_ends,
            "lengths": self.lengths,
            "doc_ids": self.doc_ids,
        }
        with replaced(folder / "manifest.json") as temporary:
            temporary.write_text(json.dumps(data), encoding="utf-8")

    def check(self, folder: Path, spec: StoreSpec | None, doc_ids: Sequence[str] | None) -> None:
        """Raise ValueError naming the first key that differs."""
        for key in asdict(spec) if spec else ():
            found, expected = getattr(self.spec, key), getattr(spec, key)
            if key != "target_name" and found != expected:
                raise ValueError(
                    f"features in {folder} do not fit: {key} is {found!r}, expected {expected!r}. "
                    "Capture into another folder, or remove this one"
                )
        if doc_ids is not None and tuple(doc_ids) != self.doc_ids:
            pairs = zip(doc_ids, self.doc_ids, strict=False)  # lengths may differ too
            different = (i for i, (one, other) in enumerate(pairs) if one != other)
            first = next(different, min(len(doc_ids), len(self.doc_ids)))
            raise ValueError(
                f"features in {folder} do not fit: doc_ids are of other documents "
                f"({len(self.doc_ids)} there, {len(doc_ids)} expected, first difference at "
                f"document {first}). Capture into another folder, or remove this one"
            )


def content_hash(doc_ids: Sequence[str]) -> str:
    """One hash for a list of documents in order."""
    return hashlib.sha256("\n".join(doc_ids).encode()).hexdigest()[:24]


class StoreWriter:
    """Write shards of a store. Several processes may do so at once, each its own shards."""

    def __init__(
        self,
        folder: str | Path,
        spec: StoreSpec,
        *,
        doc_ids: Sequence[str],
        lengths: Sequence[int],
        shard_tokens: int = 16384,
    ):
        """Make the store or go on with it; a store of other features or documents is an error.

        A shard holds consecutive documents and is full at `shard_tokens` tokens; a store that
        exists keeps the cut it has.
        """
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / "manifest.json").exists():
            ends = tuple(_shard_ends(lengths, shard_tokens))
            lengths = tuple(int(length) for length in lengths)
            _Manifest(spec, tuple(doc_ids), lengths, ends).write(self.folder)
        self._manifest = _Manifest.read(self.folder)
        self._manifest.check(self.folder, spec, doc_ids)
        remove_stale(self.folder)

    @property
    def num_shards(self) -> int:
        return len(self._manifest.shard_ends)

    def documents(self, shard: int) -> range:
        """The documents of a shard."""
        return self._manifest.documents(shard)

    def missing(self, *, rank: int = 0, world_size: int = 1) -> list[int]:
        """Shards of this rank (every world_size-th) that are not there or not whole."""
        mine = range(rank, self.num_shards, world_size)
        return [shard for shard in mine if not _is_whole(_shard_path(self.folder, shard))]

    def write(self, shard: int, features: Sequence[DocumentFeatures]) -> None:
        """Write one shard whole. Raises ValueError when a document's features do not fit."""
        spec = self._manifest.spec
        documents = self.documents(shard)
        assert len(features) == len(documents), (len(features), len(documents))
        for i, document in zip(documents, features, strict=True):
            expected = (self._manifest.lengths[i], len(spec.aux_layers) * spec.hidden_size)
            if tuple(document.aux().shape) != expected:
                raise ValueError(
                    f"document {i}: aux features of shape {list(document.aux().shape)}, "
                    f"expected {list(expected)}"
                )
        counts = torch.tensor([len(document.last_positions) for document in features])
        tensors = {
            "aux": torch.cat([document.aux().to(spec.torch_dtype) for document in features]),
            "last": torch.cat([document.last().to(spec.torch_dtype) for document in features]),
            "last_positions": torch.cat([document.last_positions for document in features]),
            "last_ends": counts.cumsum(0),
        }
        tensors = {key: value.contiguous() for key, value in tensors.items()}
        header = self._manifest.header(shard) | {"crc32": _crc32(tensors)}
        with replaced(_shard_path(self.folder, shard)) as temporary:
            # One entry: several are written in no fixed order, and equal shards are equal files.
            save_file(tensors, temporary, metadata={HEADER: json.dumps(header)})


@dataclass(frozen=True)
class StoredDocument:
    """Features of one document in a store; tensors are read when asked for."""

    store: "FeatureStore"
    index: int
    num_tokens: int
    start: int  # of its tokens inside its shard
    shard: int

    def aux(self, lo: int = 0, hi: int | None = None) -> Tensor:
        hi = self.num_tokens if hi is None else min(hi, self.num_tokens)
        return self.store._file(self.shard).get_slice("aux")[self.start + lo : self.start + hi]

    def last(self) -> Tensor:
        return self.store._file(self.shard).get_slice("last")[slice(*self._last_range)]

    @cached_property
    def last_positions(self) -> Tensor:
        return self.store._file(self.shard).get_slice("last_positions")[slice(*self._last_range)]

    @cached_property
    def _last_range(self) -> tuple[int, int]:
        ends = self.store._file(self.shard).get_tensor("last_ends").tolist()
        nth = self.index - self.store._manifest.documents(self.shard).start
        return (ends[nth - 1] if nth else 0, ends[nth])

    def check(self) -> None:
        """Raise BadFeatures when the shard is damaged; have the aux states read ahead."""
        path = self.store.shard_path(self.shard)
        problem = self.store.problems(self.shard).get(self.index)
        if problem is not None:
            raise BadFeatures(f"{path}: {problem}")
        read_ahead(path, "aux", self.start, self.start + self.num_tokens)


class FeatureStore:
    """Read a store. Shards that others are still writing are simply not there yet."""

    def __init__(self, folder: Path, manifest: _Manifest):
        self.folder = folder
        self._manifest = manifest
        self._place = list(_places(manifest))
        self._files: dict[int, object] = {}
        self._problems: dict[int, dict[int, str]] = {}
        self._pid = os.getpid()

    @classmethod
    def open(
        cls,
        folder: str | Path,
        *,
        expect: StoreSpec | None = None,
        doc_ids: Sequence[str] | None = None,
    ) -> "FeatureStore":
        """Open a store; raise ValueError naming the key that differs from what is expected."""
        manifest = _Manifest.read(Path(folder))
        manifest.check(Path(folder), expect, doc_ids)
        return cls(Path(folder), manifest)

    @property
    def spec(self) -> StoreSpec:
        return self._manifest.spec

    @property
    def num_tokens(self) -> int:
        return sum(self._manifest.lengths)

    def __len__(self) -> int:
        """Documents, present or not."""
        return len(self._manifest.lengths)

    def missing_shards(self) -> list[int]:
        """Shards that are not there or not whole."""
        shards = range(len(self._manifest.shard_ends))
        return [shard for shard in shards if not _is_whole(_shard_path(self.folder, shard))]

    @property
    def is_complete(self) -> bool:
        return not self.missing_shards()

    @property
    def num_shards(self) -> int:
        return len(self._manifest.shard_ends)

    def shard_path(self, shard: int) -> Path:
        return _shard_path(self.folder, shard)

    def names(self, documents: Sequence[int]) -> str:
        """Documents by the start of their ids, for messages."""
        return ", ".join(self._manifest.doc_ids[i][:12] for i in documents)

    def problems(self, shard: int) -> dict[int, str]:
        """Documents of a shard that cannot be trained on, with the reason; {} = none.

        The first call in a process reads the shard from end to end and compares its checksum,
        which also brings it into the page cache; later calls give what was found then.
        """
        if shard not in self._problems:
            documents = self._manifest.documents(shard)
            try:
                found = self._find_problems(shard)
            except (BadFeatures, OSError, SafetensorError) as error:
                found = dict.fromkeys(documents, str(error))
            self._problems[shard] = found
        return self._problems[shard]

    def _find_problems(self, shard: int) -> dict[int, str]:
        file, documents = self._file(shard), self._manifest.documents(shard)
        lengths = self._manifest.lengths
        header = json.loads((file.metadata() or {}).get(HEADER, "{}"))
        for key, expected in self._manifest.header(shard).items():
            if header.get(key) != expected:
                raise BadFeatures(f"{key} is {header.get(key)}, expected {expected}: foreign file")
        tokens = sum(lengths[i] for i in documents)
        shape = file.get_slice("aux").get_shape()
        width = len(self.spec.aux_layers) * self.spec.hidden_size
        if list(shape) != [tokens, width]:
            raise BadFeatures(f"aux has shape {list(shape)}, expected {[tokens, width]}")
        if header.get("crc32") != _crc32({key: file.get_tensor(key) for key in file.keys()}):
            raise BadFeatures("the checksum differs: the file is damaged")
        found = {}
        for i in documents:
            document = StoredDocument(self, i, lengths[i], self._place[i][1], shard)
            try:
                check_finite(document)
            except BadFeatures as error:
                found[i] = str(error)
        return found

    def document(self, i: int) -> StoredDocument:
        """Features of document i. Raises BadFeatures when its shard is not (wholly) there."""
        shard, start = self._place[i]
        self._file(shard)
        return StoredDocument(self, i, self._manifest.lengths[i], start, shard)

    def _file(self, shard: int):
        if self._pid != os.getpid():  # file handles are not shared with a forked worker
            self._files, self._pid = {}, os.getpid()
        if shard not in self._files:
            path = _shard_path(self.folder, shard)
            try:
                self._files[shard] = safe_open(path, framework="pt").__enter__()
            except (OSError, SafetensorError) as error:
                raise BadFeatures(
                    f"{path} is not there or not whole ({error}): run the capture again, it goes "
                    "on where it stopped"
                ) from error
        return self._files[shard]

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_files": {}}


def _crc32(tensors: dict[str, Tensor]) -> str:
    """A checksum of names and bytes, in the order of the names."""
    total = 0
    for name, tensor in sorted(tensors.items()):
        total = zlib.crc32(name.encode(), total)
        total = zlib.crc32(tensor.contiguous().flatten().view(torch.uint8).numpy().data, total)
    return f"{total:08x}"


def _places(manifest: _Manifest) -> Iterator[tuple[int, int]]:
    """(shard, start of the document's tokens inside it) per document."""
    first = 0
    for shard, end in enumerate(manifest.shard_ends):
        start = 0
        for i in range(first, end):
            yield shard, start
            start += manifest.lengths[i]
        first = end


def _shard_ends(lengths: Sequence[int], shard_tokens: int) -> Iterator[int]:
    tokens = 0
    for i, length in enumerate(lengths):
        tokens += int(length)
        if tokens >= shard_tokens or i == len(lengths) - 1:
            yield i + 1
            tokens = 0


def _shard_path(folder: Path, shard: int) -> Path:
    return folder / f"shard-{shard:05d}.safetensors"


def _is_whole(path: Path) -> bool:
    """safetensors refuses a file whose size differs from what its header says."""
    try:
        with safe_open(path, framework="pt"):
            return True
    except (OSError, SafetensorError):
        return False
