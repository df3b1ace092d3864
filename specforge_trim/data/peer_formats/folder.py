"""A folder of another trainer's feature files as training documents with features.

Every file is one document. The first pass reads tokens and mask of each and keeps an index of
lengths in the cache; later passes read only files that are new or have changed, so that a folder
may still be filling up. A file that cannot be used is counted with its name and reason.
"""

import hashlib
import json
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from torch import Tensor
from tqdm import tqdm

from specforge_trim.common.atomic import replaced
from specforge_trim.data.conversation import BadRow
from specforge_trim.data.document_features import BadFeatures, check_finite, teacher_positions
from specforge_trim.data.peer_formats.arrow_masks import ArrowMasks
from specforge_trim.data.peer_formats.readers import PeerFile, file_kind, open_peer_file
from specforge_trim.data.tokenize import Document, make_document

logger = logging.getLogger(__name__)

Norm = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class PeerDocument:
    """Features of one document in one file, which is opened when first asked for."""

    data: "PeerData"
    index: int

    @property
    def num_tokens(self) -> int:
        return int(self.data.lengths[self.index])

    @cached_property
    def last_positions(self) -> Tensor:
        return teacher_positions(self.data.document_of(self._file, self.index).loss_mask)

    @cached_property
    def _file(self) -> PeerFile:
        return self.data.open_file(self.index)

    def aux(self, lo: int = 0, hi: int | None = None) -> Tensor:
        return self._file.aux(lo, self.num_tokens if hi is None else min(hi, self.num_tokens))

    def last(self) -> Tensor:
        states = self._file.last()[self.last_positions]
        return states if self._file.normed else self.data.final_norm(states)

    def check(self) -> None:
        path, found = self.data.path(self.index), self._file.input_ids.numel()
        if found != self.num_tokens:
            raise BadFeatures(f"{path}: {found} tokens, {self.num_tokens} when it was indexed")
        try:
            check_finite(self)
        except BadFeatures as error:
            raise BadFeatures(f"{path}: {error}") from error


class PeerData:
    """Documents and features of a folder, in the natural order of the file names.

    len() and [i] give Documents, tokens(i) and features(i) are what a batch is made of. lengths,
    num_tokens, num_supervised, skipped, bad_rows, fingerprint and made_from are as in
    PreparedData.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        num_aux: int,
        hidden_size: int,
        final_norm: Norm,
        cache_dir: str | Path,
        max_length: int,
        max_bad_fraction: float = 0.1,
        progress: bool = True,
    ):
        """Index the folder (or take over its index).

        Raises ValueError when it holds no feature file, when none can be used, or when more than
        max_bad_fraction of them cannot. Documents of more than max_length tokens are left out.
        final_norm is the target's, for states that were stored before it.
        """
        self.folder = Path(folder)
        self.final_norm = final_norm
        self._num_aux, self._hidden_size = num_aux, hidden_size
        names = _feature_files(self.folder)
        kinds = {file_kind(Path(name)) for name in names}
        self._masks = _arrow_masks(self.folder) if "speculators" in kinds else None
        known = self._index(names, Path(cache_dir), progress)
        self.bad_rows = tuple(
            BadRow(str(self.folder / name), known[name]["bad"])
            for name in names
            if "bad" in known[name]
        )
        usable = [name for name in names if "bad" not in known[name]]
        self._files = [name for name in usable if known[name]["length"] <= max_length]
        self.skipped = Counter({"cannot be used": len(self.bad_rows)})
        self.skipped["longer than max_length"] = len(usable) - len(self._files)
        self.skipped = +self.skipped
        self.num_rows = len(names)
        self.lengths = np.array([known[name]["length"] for name in self._files], dtype=np.int64)
        self.num_tokens = int(self.lengths.sum())
        self.num_supervised = sum(known[name]["supervised"] for name in self._files)
        ids = "\n".join(known[name]["doc_id"] for name in self._files)
        self.fingerprint = hashlib.sha256(ids.encode()).hexdigest()
        self.made_from = {"feature files": len(self._files), "max_length": max_length}
        self._check_usable(max_bad_fraction)

    def _check_usable(self, max_bad_fraction: float) -> None:
        shown = "".join(f"\n  {row}" for row in self.bad_rows[:3])
        if not self._files:
            raise ValueError(f"no usable feature file in {self.folder}{shown}")
        if len(self.bad_rows) > max_bad_fraction * self.num_rows:
            raise ValueError(
                f"{len(self.bad_rows)} of {self.num_rows} feature files in {self.folder} cannot "
                f"be used, more than max_bad_fraction {max_bad_fraction:g}{shown}"
            )
        for row in self.bad_rows:
            logger.warning("left out: %s", row)
        logger.info("%s", self.summary())

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, i: int) -> Document:
        return self.document_of(self.open_file(i), i)

    def document_of(self, file: PeerFile, i: int) -> Document:
        """Tokens and mask of document i out of its open file."""
        return self._document(file, self.path(i))

    def __iter__(self) -> Iterator[Document]:
        return (self[i] for i in range(len(self)))

    def tokens(self, number: int) -> Document:
        return self[number]

    def features(self, number: int) -> PeerDocument:
        return PeerDocument(self, number)

    def path(self, i: int) -> Path:
        return self.folder / self._files[i]

    def open_file(self, i: int) -> PeerFile:
        """The file of document i. Raises BadFeatures naming it."""
        return self._open(self.path(i))

    def summary(self) -> str:
        """One line: files used and not used, tokens, supervised share."""
        share = 100 * self.num_supervised / max(1, self.num_tokens)
        text = (
            f"{len(self)} of {self.num_rows} feature files, {self.num_tokens} tokens, "
            f"{self.num_supervised} supervised ({share:.1f} %)"
        )
        reasons = ", ".join(f"{count} x {reason}" for reason, count in self.skipped.items())
        return f"{text}; not used: {reasons}" if reasons else text

    def _open(self, path: Path) -> PeerFile:
        try:
            return open_peer_file(path, num_aux=self._num_aux, hidden_size=self._hidden_size)
        except BadFeatures as error:
            raise BadFeatures(f"{path}: {error}") from error

    def _document(self, file: PeerFile, path: Path) -> Document:
        mask = file.loss_mask
        if mask is None:
            assert self._masks is not None, path
            number = int(path.name.removeprefix("hs_").partition(".")[0])
            mask = self._masks.mask(number, file.input_ids)
        return make_document(file.input_ids.numpy(), mask.numpy(), source=str(path))

    def _entry(self, path: Path) -> dict:
        """What the index keeps of a file."""
        try:
            document = self._document(self._open(path), path)
        except (BadFeatures, ValueError) as error:
            return {"bad": str(error).removeprefix(f"{path}: ")}
        if not bool(document.loss_mask.any()):
            return {"bad": "no supervised token"}
        return {
            "length": document.input_ids.numel(),
            "supervised": int(document.loss_mask.sum()),
            "doc_id": document.doc_id,
        }

    def _index(self, names: list[str], cache_dir: Path, progress: bool) -> dict[str, dict]:
        """File name -> entry, from the cache where size and time of the file are the same."""
        place = f"{self.folder.resolve()} {self._num_aux} {self._hidden_size}"
        name = hashlib.sha256(place.encode()).hexdigest()[:16]
        path = cache_dir / "feature_index" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        old = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        found = {}
        bar = tqdm(names, desc="index", unit="file", file=sys.stderr, disable=not progress)
        for name in bar:
            status = (self.folder / name).stat()
            stamp = [status.st_size, status.st_mtime_ns]
            entry = old.get(name)
            if entry is None or entry["stamp"] != stamp:
                entry = {"stamp": stamp, **self._entry(self.folder / name)}
            found[name] = entry
        if found != old:
            with replaced(path) as temporary:
                temporary.write_text(json.dumps(found), encoding="utf-8")
        return found


def _feature_files(folder: Path) -> list[str]:
    """Names of feature files below `folder`, relative to it, data_2 before data_10."""
    if not folder.is_dir():
        raise ValueError(f"{folder}: no such folder of target features")
    paths = [path for path in folder.rglob("*") if file_kind(path) and path.is_file()]
    maps = {"vocab_mapping.pt", "token_freq.pt"}
    names = [str(path.relative_to(folder)) for path in paths if path.name not in maps]
    if not names:
        raise ValueError(
            f"{folder} holds no feature file: expected data_*.ckpt or .ckpt.gz (SpecForge), "
            "hs_*.safetensors (speculators) or *.pt (ModelOpt)"
        )
    return sorted(names, key=lambda name: [(len(p), p) for p in re.split(r"(\d+)", name)])


def _arrow_masks(folder: Path) -> ArrowMasks:
    """The data set of hidden states in `folder`: there, or in the folder above."""
    for place in (folder, folder.parent):
        if any(place.glob("*.arrow")):
            return ArrowMasks(place)
    return ArrowMasks(folder)
