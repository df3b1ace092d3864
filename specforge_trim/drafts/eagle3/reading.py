"""Read a draft from a folder that this package, SpecForge, speculators or EAGLE wrote.

Tensors are taken from model.safetensors (one file or shards) or pytorch_model.bin, and kept
exactly as they are: reading and writing again changes no bit.

Letters: V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from specforge_trim.drafts.eagle3.formats import format_of, own_names, read_config
from specforge_trim.drafts.eagle3.model import Eagle3Draft
from specforge_trim.drafts.eagle3.sizes import DraftConfig
from specforge_trim.verifier.head import shard_names

WEIGHTS, CONFIG = "model.safetensors", "config.json"
MAPS = ("d2t", "t2d")
EMBEDDING = "embed_tokens.weight"


def load_draft(
    folder: str | Path,
    *,
    config: DraftConfig | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> Eagle3Draft:
    """Read a draft in any of the formats of draft_formats.py.

    config: what to take the tensors for, instead of the folder's own config.json. `dtype` None
    keeps the file's float format. A file without embed_tokens leaves its rows not a number, and
    `Eagle3Draft.lacks_embedding` true until `load_target`.

    Raises ValueError naming the folder and the file, key or tensor that is missing, unknown or
    of another shape.
    """
    folder = Path(folder)
    tensors = _read_tensors(folder)
    own_config = read_draft_config(folder)
    config = config or own_config
    is_native = folder_format(folder) == "native"
    if not is_native:  # ours is exact: another name in it is one that engines do not know
        try:
            tensors = own_names(tensors)
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
        _complete_maps(tensors, config, folder)
    # Construction draws initial weights; the caller's random state must not notice.
    with torch.random.fork_rng(devices=[]):
        model = Eagle3Draft(config)
    expected = model.state_dict()
    is_full = config.draft_vocab_size == config.vocab_size
    optional = {EMBEDDING, *(MAPS if is_full else ())}
    unknown = sorted(set(tensors) - set(expected))
    missing = sorted(set(expected) - set(tensors) - optional)
    if unknown or missing:
        raise ValueError(f"{folder}: unknown tensors {unknown}, missing tensors {missing}")
    for name, value in tensors.items():
        if value.shape != expected[name].shape:
            raise ValueError(
                f"{folder}: {name} has shape {list(value.shape)}; the config says "
                f"{list(expected[name].shape)}"
            )
    saved = next(v.dtype for k, v in tensors.items() if k not in MAPS)
    model.to(dtype or saved)
    model.load_state_dict(tensors, strict=False)
    if EMBEDDING not in tensors:  # what is drafted without them would be noise, and look like it
        model.embed_tokens.weight.fill_(torch.nan)
    model.set_vocab(tensors.get("d2t", model.d2t), tensors.get("t2d", model.t2d))
    return model.to(device)


def read_draft_config(folder: str | Path) -> DraftConfig:
    """The configuration of a draft folder in any format; ValueError names folder and key."""
    path = Path(folder) / CONFIG
    raw = _read_json(path)
    try:
        if format_of(raw) != "native":
            return read_config(raw)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return DraftConfig.from_json(path)


def folder_format(folder: str | Path) -> str:
    """native, speculators or eagle (draft_formats.py)."""
    return format_of(_read_json(Path(folder).expanduser() / CONFIG))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"no draft in {path.parent}: {path.name} is missing") from None
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not readable as UTF-8 JSON: {error}") from None
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: expected a JSON object")
    return raw


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    index, single = folder / f"{WEIGHTS}.index.json", folder / WEIGHTS
    pickled = folder / "pytorch_model.bin"
    try:
        if single.is_file():
            raw = load_file(single)
        elif index.is_file():
            raw = {}
            for name in sorted(set(shard_names(index).values())):
                if not (folder / name).is_file():
                    raise ValueError(f"{folder}: {name}, which {index.name} names, is missing")
                raw |= load_file(folder / name)
        elif pickled.is_file():
            raw = torch.load(pickled, map_location="cpu", weights_only=True)
        else:
            raise ValueError(f"no draft in {folder}: {WEIGHTS} is missing")
        return raw
    except (SafetensorError, pickle.UnpicklingError, EOFError) as error:
        raise ValueError(
            f"{folder}: its weights are no complete safetensors file or tensors: {error}"
        ) from None


def _complete_maps(tensors: dict[str, Tensor], config: DraftConfig, folder: Path) -> None:
    """Bring d2t and t2d to int64 and bool, and the one that is missing from the other."""
    if config.draft_vocab_size == config.vocab_size:
        return
    d2t: Any = tensors.get("d2t")
    t2d: Any = tensors.get("t2d")
    if d2t is None and t2d is None:
        raise ValueError(
            f"{folder}: unknown tensors [], missing tensors ['d2t', 't2d']: without them the "
            f"{config.draft_vocab_size} draft ids have no meaning"
        )
    if t2d is None:
        t2d = torch.zeros(config.vocab_size, dtype=torch.bool)
        kept = d2t.long() + torch.arange(len(d2t))
        if not 0 <= int(kept.min()) <= int(kept.max()) < config.vocab_size:
            raise ValueError(f"{folder}: d2t names ids outside 0..{config.vocab_size - 1}")
        t2d[kept] = True
    elif d2t is None:
        d2t = t2d.bool().nonzero().flatten()
        d2t = d2t - torch.arange(len(d2t))
    tensors["d2t"], tensors["t2d"] = d2t.to(torch.int64), t2d.to(torch.bool)
