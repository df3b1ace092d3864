"""Prepare data files once: conversations in, tokenised documents on disk, bad rows accounted for.

One job: files -> PreparedData, kept in a cache folder under a name made of the content it depends
on: the bytes of the data files, the tokenizer, the text of its chat template, the options. A file
path is not part of the name; places of rows are stored as file number and line.

    <cache_dir>/prepared/<fingerprint>/        written under a temporary name, renamed when whole
        input_ids.bin    int32  [tokens]
        loss_mask.bin    bool   [tokens]
        index.bin        int64  [documents, 3]    end in tokens, file number, line
        doc_ids.bin      bytes  [documents, 32]   sha256
        manifest.json    counts, bad rows, options
    <cache_dir>/prepared/<fingerprint>.bad_rows.jsonl    source, reason, detail per row not used
"""

import dataclasses
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from tqdm import tqdm

from specforge_trim.data.conversation import BadRow, RowError, read_conversations
from specforge_trim.data.supervision import MaskOptions
from specforge_trim.data.tokenize import ChatTokenizer, Document

_FORMAT = 2  # raise when the stored layout or the meaning of a mask changes

TOO_LONG = "longer than max_length"


@dataclass(frozen=True, eq=False, repr=False)
class PreparedData:
    """Tokenised documents, read lazily from their folder.

    len() and [i] give Documents in file order. folder holds the files; paths are the data files in
    the caller's order, for the places of rows. skipped counts every row not used by reason,
    bad_rows lists them; num_rows = len() + the sum of skipped.
    """

    folder: Path
    paths: tuple[str, ...]
    fingerprint: str
    num_rows: int
    num_tokens: int
    num_supervised: int
    skipped: Counter
    bad_rows: tuple[BadRow, ...]
    _ids: np.ndarray
    _mask: np.ndarray
    _index: np.ndarray
    _doc_ids: np.ndarray

    @classmethod
    def load(cls, folder: str | Path, paths: Sequence[str | Path]) -> "PreparedData":
        """Open a prepared folder; ValueError when it is not one, or its files are not whole."""
        folder, paths = Path(folder), tuple(str(path) for path in paths)
        try:
            manifest = json.loads((folder / "manifest.json").read_text())
        except FileNotFoundError:
            raise ValueError(f"{folder} holds no prepared data (no manifest.json)") from None
        documents, tokens = manifest["num_documents"], manifest["num_tokens"]
        return cls(
            folder=folder,
            paths=paths,
            fingerprint=manifest["fingerprint"],
            num_rows=manifest["num_rows"],
            num_tokens=tokens,
            num_supervised=manifest["num_supervised"],
            skipped=Counter(manifest["skipped"]),
            bad_rows=tuple(
                BadRow(f"{paths[file]}:{line}", reason, detail)
                for file, line, reason, detail in manifest["bad_rows"]
            ),
            _ids=_map(folder / "input_ids.bin", np.dtype("<i4"), (tokens,)),
            _mask=_map(folder / "loss_mask.bin", np.dtype(bool), (tokens,)),
            _index=_map(folder / "index.bin", np.dtype("<i8"), (documents, 3)),
            _doc_ids=_map(folder / "doc_ids.bin", np.dtype(np.uint8), (documents, 32)),
        )

    def __reduce__(self):
        return PreparedData.load, (self.folder, self.paths)

    def __repr__(self) -> str:
        return f"PreparedData({self.folder}: {self.summary()})"

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, i: int) -> Document:
        if not -len(self) <= i < len(self):
            raise IndexError(f"document {i} of {len(self)}")
        i %= len(self)
        start = int(self._index[i - 1, 0]) if i else 0
        end, file, line = (int(value) for value in self._index[i])
        return Document(
            torch.from_numpy(self._ids[start:end].astype(np.int64)),
            torch.from_numpy(np.array(self._mask[start:end])),
            f"{self.paths[file]}:{line}",
            self._doc_ids[i].tobytes().hex(),
        )

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per document, int64 [documents]."""
        return np.diff(self._index[:, 0], prepend=0)

    def summary(self) -> str:
        """One line: rows used and not used, tokens, supervised share."""
        share = 100 * self.num_supervised / max(1, self.num_tokens)
        text = (
            f"{len(self)} of {self.num_rows} conversations, {self.num_tokens} tokens, "
            f"{self.num_supervised} supervised ({share:.1f} %)"
        )
        if self.skipped:
            text += f"; not used: {_reasons(self.skipped)}"
        return text


def prepare(
    paths: str | Path | Sequence[str | Path],
    tokenizer,
    *,
    cache_dir: str | Path,
    max_length: int,
    masks: MaskOptions | None = None,
    max_bad_fraction: float = 0.1,
    progress: bool = True,
) -> PreparedData:
    """Tokenise data files with their loss masks, or open the cached result.

    Documents of more than max_length tokens are left out and counted, as are bad rows (unreadable,
    refused by the chat template, without an exact mask). masks says which of the assistant's text
    carries loss. Raises ValueError when nothing is left or
    when more than max_bad_fraction of the rows are bad (too long ones do not count as bad), and
    OSError when a file cannot be read or written. A progress bar goes to stderr.
    """
    paths = [paths] if isinstance(paths, (str, Path)) else list(paths)
    if not paths:
        raise ValueError("no data file given; name at least one JSON-lines file")
    if isinstance(max_length, bool) or not isinstance(max_length, int) or max_length < 2:
        raise ValueError(f"max_length must be an integer of at least 2, got {max_length!r}")
    if not 0 <= max_bad_fraction <= 1:
        raise ValueError(f"max_bad_fraction must be in [0, 1], got {max_bad_fraction!r}")
    masks = masks or MaskOptions()
    fingerprint = data_fingerprint(paths, tokenizer, max_length=max_length, masks=masks)
    root = Path(cache_dir) / "prepared"
    root.mkdir(parents=True, exist_ok=True)
    folder = root / fingerprint[:24]
    if not folder.exists():
        chat = ChatTokenizer(tokenizer, masks=masks)
        _write(folder, fingerprint, paths, chat, max_length=max_length, progress=progress)
    data = PreparedData.load(folder, paths)
    report = _write_bad_rows(folder.with_suffix(".bad_rows.jsonl"), data.bad_rows)
    _check_usable(data, max_bad_fraction, report)
    return data


def data_fingerprint(
    paths: Sequence[str | Path], tokenizer, *, max_length: int, masks: MaskOptions
) -> str:
    """sha256 (hex) of everything prepared data depends on, see the module's first lines."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    # padding and truncation are settings of the last call, not of the tokenizer
    state.pop("padding", None), state.pop("truncation", None)
    parts = {
        "format": _FORMAT,
        "files": [_file_digest(path) for path in paths],
        "tokenizer": state,
        "special_tokens": {k: str(v) for k, v in tokenizer.special_tokens_map.items()},
        "chat_template": tokenizer.chat_template,
        "versions": [tokenizers.__version__, transformers.__version__],
        "max_length": max_length,
        "masks": dataclasses.asdict(masks),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _file_digest(path: str | Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write(folder: Path, fingerprint: str, paths, chat, *, max_length, progress) -> None:
    """Tokenise into a temporary folder and rename it; another process may get there first."""
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        manifest = {"fingerprint": fingerprint, "max_length": max_length}
        manifest |= _tokenize_files(work, paths, chat, max_length=max_length, progress=progress)
        (work / "manifest.json").write_text(json.dumps(manifest, indent=1))
        try:
            work.rename(folder)
        except OSError:
            if not (folder / "manifest.json").exists():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _tokenize_files(work: Path, paths, chat: ChatTokenizer, *, max_length, progress) -> dict:
    """Write the .bin files; returns the manifest's counts and bad rows."""
    total, supervised, rows = 0, 0, 0
    index: list[tuple[int, int, int]] = []
    bad: list[tuple[int, int, str, str]] = []
    size = sum(os.path.getsize(path) for path in paths)
    with (
        open(work / "input_ids.bin", "wb") as ids_file,
        open(work / "loss_mask.bin", "wb") as mask_file,
        open(work / "doc_ids.bin", "wb") as doc_file,
        tqdm(
            total=size, unit="B", unit_scale=True, desc="tokenize", file=sys.stderr,
            disable=not progress,
        ) as bar,
    ):  # fmt: skip
        for file_number, path in enumerate(paths):
            for row in read_conversations(path, on_bytes=bar.update):
                rows += 1
                line = int(row.source.rpartition(":")[2])
                if isinstance(row, BadRow):
                    bad.append((file_number, line, row.reason, row.detail))
                    continue
                try:
                    document = chat.document(row)
                    _check_length(document, max_length)
                except RowError as error:
                    bad.append((file_number, line, error.reason, error.detail))
                    continue
                ids_file.write(document.input_ids.numpy().astype("<i4").tobytes())
                mask_file.write(document.loss_mask.numpy().tobytes())
                doc_file.write(bytes.fromhex(document.doc_id))
                total += len(document.input_ids)
                supervised += int(document.loss_mask.sum())
                index.append((total, file_number, line))
    (work / "index.bin").write_bytes(np.array(index, dtype="<i8").tobytes())
    return {
        "num_rows": rows,
        "num_documents": len(index),
        "num_tokens": total,
        "num_supervised": supervised,
        "skipped": dict(Counter(reason for _, _, reason, _ in bad).most_common()),
        "bad_rows": bad,
    }


def _check_length(document: Document, max_length: int) -> None:
    if len(document.input_ids) > max_length:
        raise RowError(TOO_LONG, f"{len(document.input_ids)} tokens, max_length {max_length}")


def _map(path: Path, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
    """A read-only view of a .bin file, which must have exactly the size its manifest says."""
    expected = dtype.itemsize * int(np.prod(shape))
    found = path.stat().st_size if path.exists() else 0
    if found != expected:
        raise ValueError(f"{path} has {found} bytes, expected {expected}; delete {path.parent}")
    return np.memmap(path, dtype, "r", shape=shape) if expected else np.zeros(shape, dtype)


def _write_bad_rows(path: Path, rows: Sequence[BadRow]) -> Path | None:
    """The rows not used, beside the cache; no file when there are none."""
    if not rows:
        path.unlink(missing_ok=True)
        return None
    lines = [
        json.dumps({"source": row.source, "reason": row.reason, "detail": row.detail})
        for row in rows
    ]
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    with os.fdopen(handle, "w") as file:
        file.write("\n".join(lines) + "\n")
    os.replace(name, path)
    return path


def _check_usable(data: PreparedData, max_bad_fraction: float, report: Path | None) -> None:
    names = ", ".join(data.paths)
    bad = [row for row in data.bad_rows if row.reason != TOO_LONG]
    shown = "".join(f"\n  {row}" for row in (bad or data.bad_rows)[:3])
    where = f"{shown}\nall of them: {report}" if report else ""
    if not len(data):
        reasons = _reasons(data.skipped) or "no rows"
        raise ValueError(f"no usable conversation in {names} ({reasons}){where}")
    if len(bad) > max_bad_fraction * data.num_rows:
        raise ValueError(
            f"{len(bad)} of {data.num_rows} rows in {names} cannot be used, more than "
            f"max_bad_fraction {max_bad_fraction:g} ({_reasons(data.skipped)}){where}"
        )


def _reasons(skipped: Counter) -> str:
    return ", ".join(f"{count} x {reason}" for reason, count in skipped.most_common())
