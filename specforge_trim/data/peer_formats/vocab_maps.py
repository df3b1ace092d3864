"""Draft vocabularies that other trainers chose, as d2t offsets and a t2d mask.

    SpecForge     vocab_mapping/vocab_mapping.pt    {d2t, t2d}
    speculators   d2t.npy and t2d.npy               the maps
                  token_freq.pt                     {token id: count}, from which to choose

Letters: V target vocabulary, Vd draft vocabulary.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

MAP_FILES = ("vocab_mapping.pt", "vocab_mapping/vocab_mapping.pt")


def read_vocab_maps(path: str | Path, *, vocab_size: int) -> tuple[Tensor, Tensor] | Tensor:
    """(d2t int64 [Vd] offsets, t2d bool [V]), or counts int64 [V] to choose from.

    path: one of the files above or the folder that holds them. A t2d of the tokenizer's size is
    filled up to the target's padded vocabulary; a d2t of ids instead of offsets is turned into
    offsets. Raises ValueError when nothing is found, or maps that do not describe one vocabulary.
    """
    file = _find(Path(path))
    if file.name.endswith("token_freq.pt"):
        return _counts(_load(file), file, vocab_size)
    if file.suffix == ".npy":
        folder = file.parent
        d2t, t2d = (_array(folder / name) for name in ("d2t.npy", "t2d.npy"))
    else:
        found = _load(file)
        if not isinstance(found, dict) or not {"d2t", "t2d"} <= set(found):
            raise ValueError(f"{file} does not hold d2t and t2d")
        d2t, t2d = found["d2t"], found["t2d"]
        if not (isinstance(d2t, Tensor) and isinstance(t2d, Tensor)):
            raise ValueError(f"{file}: d2t and t2d are no tensors")
    return _offsets(d2t.long(), t2d.bool(), file, vocab_size)


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    names = (*MAP_FILES, "d2t.npy", "token_freq.pt")
    for name in names:
        if (path / name).is_file():
            return path / name
    raise ValueError(f"no vocabulary map at {path}: expected one of {', '.join(names)}")


def _array(file: Path) -> Tensor:
    try:
        return torch.from_numpy(np.load(file, allow_pickle=False))
    except FileNotFoundError:
        raise ValueError(f"no vocabulary map at {file}: d2t.npy and t2d.npy go together") from None
    except (OSError, ValueError, EOFError, TypeError) as error:
        raise ValueError(f"{file} cannot be read as a vocabulary map: {error}") from error


def _load(file: Path) -> object:
    try:
        return torch.load(file, weights_only=True, map_location="cpu")
    except Exception as error:  # torch raises many kinds for a file that is not its own
        raise ValueError(
            f"{file} cannot be read as a vocabulary map: expected tensors d2t and t2d, or token "
            "counts, as torch.save writes them (nothing else is unpickled)"
        ) from error


def _counts(found: object, file: Path, vocab_size: int) -> Tensor:
    if isinstance(found, Tensor):
        found = dict(enumerate(found.tolist()))
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no token counts")
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for token, count in found.items():
        try:
            at, number = int(token), int(count)
        except (TypeError, ValueError, OverflowError):  # text, or a count that is not finite
            raise ValueError(
                f"{file} holds {token!r}: {count!r}; expected a token id and how often it occurs"
            ) from None
        if not 0 <= at < vocab_size:
            raise ValueError(f"{file} counts token {token}, the target has ids below {vocab_size}")
        counts[at] = number
    return counts


def _offsets(d2t: Tensor, t2d: Tensor, file: Path, vocab_size: int) -> tuple[Tensor, Tensor]:
    kept = t2d.nonzero().flatten()
    if kept.numel() and int(kept[-1]) >= vocab_size:
        raise ValueError(
            f"{file} keeps token {int(kept[-1])}, the target has ids below {vocab_size}: it is "
            "another target's map"
        )
    whole = torch.zeros(vocab_size, dtype=torch.bool)
    whole[kept] = True
    places = torch.arange(d2t.numel())
    if d2t.shape == kept.shape and torch.equal(d2t, kept) and not torch.equal(kept, places):
        d2t = d2t - places
    if d2t.shape != kept.shape or not torch.equal(d2t + places, kept):
        raise ValueError(
            f"{file}: d2t ({d2t.numel()} entries) and t2d ({kept.numel()} kept) do not describe "
            "one vocabulary in ascending order"
        )
    return d2t, whole
