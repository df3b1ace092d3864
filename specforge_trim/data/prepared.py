"""Prepared data as it lies on disk: tokenised documents, each read when it is asked for.

One job: PreparedData; memory does not grow with its size. How it is made is dataset.py's. The
folder's files:

    input_ids.bin    int32  [tokens]
    loss_mask.bin    bool   [tokens]
    index.bin        int64  [documents, 6]    see COLUMNS
    doc_ids.bin      bytes  [documents, 32]   sha256
    bad_rows.jsonl   file number, line, reason, detail of each row not used
    manifest.json    counts and options
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specforge_trim.data.records import BadRow
from specforge_trim.data.tokenize import Document

_REMAKE = "remove the folder and prepare again"
# first: place of the document's first token in its row, not 0 only for pieces of a split row
COLUMNS = ("start", "end", "supervised", "file", "line", "first")
_START, _END, _SUPERVISED, _FILE, _LINE, _FIRST = range(len(COLUMNS))


@dataclass(frozen=True)
class TooLong:
    """What became of rows beyond max_length: the policy, how many, supervised tokens lost."""

    policy: str
    rows: int
    lost: int


@dataclass(frozen=True, eq=False, repr=False)
class PreparedData:
    """Tokenised documents, read lazily from their folder.

    len() and [i] give Documents in file order. folder holds the files; paths are the data files in
    the caller's order, for the places of rows. num_rows counts every row of the files, skipped
    those not used by reason, bad_rows lists them. made_from: see made_from.py; empty in a copy
    that another process opens.
    """

    folder: Path
    paths: tuple[str, ...]
    fingerprint: str
    num_rows: int
    skipped: Counter
    too_long: TooLong
    _ids: np.ndarray
    _mask: np.ndarray
    _index: np.ndarray
    _doc_ids: np.ndarray
    _sampled: tuple[int, int] | None = None
    made_from: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def load(
        cls,
        folder: str | Path,
        paths: Sequence[str | Path],
        sampled: tuple[int, int] | None = None,
    ) -> "PreparedData":
        """Open a prepared folder; ValueError when it is not one, or its files are not whole.

        sampled: (count, seed), see sample().
        """
        folder, names = Path(folder), tuple(str(path) for path in paths)
        try:
            manifest = json.loads((folder / "manifest.json").read_text())
        except FileNotFoundError:
            raise ValueError(f"{folder} holds no prepared data (no manifest.json)") from None
        except ValueError:
            raise ValueError(f"{folder / 'manifest.json'} is damaged: {_REMAKE}") from None
        try:
            documents, tokens = manifest["num_documents"], manifest["num_tokens"]
        except (KeyError, TypeError):
            raise ValueError(f"{folder / 'manifest.json'} is damaged: {_REMAKE}") from None
        index_shape = (documents, len(COLUMNS))
        data = cls(
            folder=folder,
            paths=names,
            fingerprint=manifest["fingerprint"],
            num_rows=manifest["num_rows"],
            skipped=Counter(manifest["skipped"]),
            too_long=TooLong(**manifest["too_long"]),
            _ids=_map(folder / "input_ids.bin", np.dtype("<i4"), (tokens,)),
            _mask=_map(folder / "loss_mask.bin", np.dtype(bool), (tokens,)),
            _index=_map(folder / "index.bin", np.dtype("<i8"), index_shape),
            _doc_ids=_map(folder / "doc_ids.bin", np.dtype(np.uint8), (documents, 32)),
        )
        return data if sampled is None else data.sample(*sampled)

    def __reduce__(self):
        return PreparedData.load, (self.folder, self.paths, self._sampled)

    def __repr__(self) -> str:
        return f"PreparedData({self.folder}: {self.summary()})"

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, i: int) -> Document:
        if not -len(self) <= i < len(self):
            raise IndexError(f"document {i} of {len(self)}")
        row = self._index[i].tolist()
        span = slice(row[_START], row[_END])
        source = f"{self.paths[row[_FILE]]}:{row[_LINE]}"
        if row[_FIRST]:
            source += f", from token {row[_FIRST]} on"
        return Document(
            torch.from_numpy(self._ids[span].astype(np.int64)),
            torch.from_numpy(np.array(self._mask[span])),
            source,
            self._doc_ids[i].tobytes().hex(),
        )

    def __iter__(self) -> Iterator[Document]:
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per document, int64 [documents]."""
        return np.asarray(self._index[:, _END] - self._index[:, _START])

    @property
    def supervised(self) -> np.ndarray:
        """Tokens with loss per document, int64 [documents]."""
        return np.array(self._index[:, _SUPERVISED])

    @property
    def file_numbers(self) -> np.ndarray:
        """Which of paths each document comes from, int64 [documents]."""
        return np.array(self._index[:, _FILE])

    @property
    def num_tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def num_supervised(self) -> int:
        return int(self._index[:, _SUPERVISED].sum())

    @property
    def bad_rows(self) -> tuple[BadRow, ...]:
        """Every row not used, in file order."""
        return tuple(self.read_bad_rows())

    def read_bad_rows(self) -> Iterator[BadRow]:
        """The same, one at a time from disk."""
        with open(self.folder / "bad_rows.jsonl") as file:
            for line in file:
                number, place, reason, detail = json.loads(line)
                yield BadRow(f"{self.paths[number]}:{place}", reason, detail)

    def sample(self, count: int, seed: int) -> "PreparedData":
        """`count` of the documents (all when fewer), drawn over all files, in file order.

        Which ones depends on seed and on their content, not on where they stand.
        """
        if count >= len(self):
            return self
        salt = f"{seed}/".encode()
        keys = [hashlib.sha256(salt + doc_id.tobytes()).digest() for doc_id in self._doc_ids]
        chosen = np.sort(np.array(sorted(range(len(self)), key=lambda i: keys[i])[:count]))
        name = f"{self.fingerprint} {count} of seed {seed}"
        return replace(
            self,
            fingerprint=hashlib.sha256(name.encode()).hexdigest(),
            _index=self._index[chosen],
            _doc_ids=self._doc_ids[chosen],
            _sampled=(count, seed),
            made_from={**self.made_from, "max_conversations": count, "seed": seed},
        )

    def summary(self) -> str:
        """One line: rows used and not used, tokens, supervised share."""
        share = 100 * self.num_supervised / max(1, self.num_tokens)
        text = (
            f"{len(self)} of {self.num_rows} conversations, {self.num_tokens} tokens, "
            f"{self.num_supervised} supervised ({share:.1f} %)"
        )
        if self.skipped:
            text += f"; not used: {reasons(self.skipped)}"
        if self.too_long.rows:
            text += f"; {self.too_long.rows} beyond max_length ({self.too_long.policy})"
            text += f" cost {self.too_long.lost} supervised tokens"
        return text


def reasons(skipped: Counter) -> str:
    """`3 x reason, 1 x another`, most frequent first."""
    return ", ".join(f"{count} x {reason}" for reason, count in skipped.most_common())


def _map(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """A read-only view of a .bin file, which must have exactly the size its manifest says."""
    expected = dtype.itemsize * int(np.prod(shape))
    found = path.stat().st_size if path.exists() else 0
    if found != expected:
        raise ValueError(f"{path} has {found} bytes, expected {expected}; delete {path.parent}")
    return np.memmap(path, dtype, "r", shape=shape) if expected else np.zeros(shape, dtype)
