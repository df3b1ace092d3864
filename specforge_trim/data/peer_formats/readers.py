"""One file of target features in another trainer's layout, opened without copying its states.

    writer        file                          states
    SpecForge     data_{i}.ckpt, .ckpt.gz       hidden_state [1, L, Dt] after the final norm,
                                                aux_hidden_state [1, L, A*Dt]
    speculators   hs_{i}.safetensors            hidden_states [L, A+1, Dt], the last slot before
                                                the final norm
    ModelOpt      {id}.pt                       hidden_states [L, Dt] after the final norm,
                                                aux_hidden_states [L, A*Dt]

Tokens and loss mask lie in the file too (input_ids, loss_mask [L]); speculators has token_ids
only, its mask is in the data set beside it. Nothing but tensors is ever unpickled.

Letters: L tokens, A aux layers, Dt target hidden.
"""

import gzip
import pickle
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specforge_trim.data.document_features import BadFeatures

_UNREADABLE = (
    OSError,
    EOFError,
    RuntimeError,
    KeyError,
    ValueError,
    TypeError,
    AttributeError,
    SafetensorError,
    pickle.UnpicklingError,
    zipfile.BadZipFile,
    zlib.error,
)


@dataclass(frozen=True)
class PeerFile:
    """An open file. loss_mask is None where the file has none; normed: last is after the final
    norm; aux(lo, hi) -> [hi-lo, A*Dt] and last() -> [L, Dt] read when called."""

    input_ids: Tensor  # int64 [L]
    loss_mask: Tensor | None  # bool [L]
    aux: Callable[[int, int], Tensor]
    last: Callable[[], Tensor]
    shapes: tuple[tuple[int, ...], tuple[int, ...]]  # of all aux and of last
    normed: bool


def open_peer_file(path: Path, *, num_aux: int, hidden_size: int) -> PeerFile:
    """Open a file of any of the layouts; BadFeatures when it is cut off, of another layout, or
    its states do not have the target's sizes."""
    reader = READERS[file_kind(path)]
    try:
        found = reader(path)
    except BadFeatures:
        raise
    except _UNREADABLE as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise BadFeatures(f"cannot be read, cut off or no feature file ({reason})") from error
    length = found.input_ids.numel()
    expected = ((length, num_aux * hidden_size), (length, hidden_size))
    if found.shapes != expected or length == 0:
        raise BadFeatures(
            f"aux and last states have shapes {[list(s) for s in found.shapes]}, expected "
            f"{[list(s) for s in expected]} for {length} tokens"
        )
    if found.loss_mask is not None and found.loss_mask.shape != found.input_ids.shape:
        raise BadFeatures(f"{found.loss_mask.numel()} mask values for {length} tokens")
    return found


def file_kind(path: Path) -> str | None:
    """Whose layout a file name is of: "specforge", "speculators", "modelopt", or None."""
    name = path.name
    if name.startswith("."):
        return None
    if name.endswith((".ckpt", ".ckpt.gz")):
        return "specforge"
    if name.startswith("hs_") and name.endswith(".safetensors"):
        return "speculators"
    return "modelopt" if name.endswith(".pt") else None


def read_tensors(path: Path) -> dict[str, Tensor]:
    """A torch.save file of a dict of tensors, mapped where it is not compressed."""
    if path.name.endswith(".gz"):
        with gzip.open(path) as file:
            found = torch.load(cast(IO[bytes], file), weights_only=True, map_location="cpu")
    else:
        mapped = zipfile.is_zipfile(path)
        found = torch.load(path, weights_only=True, map_location="cpu", mmap=mapped)
    if not isinstance(found, dict):
        raise BadFeatures(f"holds a {type(found).__name__}, expected a dict of tensors")
    return found


def _one(found: dict[str, Tensor], key: str, dims: int) -> Tensor:
    """found[key] without a leading batch axis of 1."""
    if key not in found:
        raise BadFeatures(f"has no {key}; it holds {', '.join(map(str, sorted(found)))}"[:300])
    tensor = found[key]
    return tensor[0] if tensor.dim() == dims + 1 and tensor.shape[0] == 1 else tensor


def _from_dict(found: dict[str, Tensor], *, aux_key: str, last_key: str) -> PeerFile:
    aux, last = _one(found, aux_key, 2), _one(found, last_key, 2)
    return PeerFile(
        input_ids=_one(found, "input_ids", 1).long(),
        loss_mask=_one(found, "loss_mask", 1).bool(),
        aux=lambda lo, hi: aux[lo:hi],
        last=lambda: last,
        shapes=(tuple(aux.shape), tuple(last.shape)),
        normed=True,
    )


def _specforge(path: Path) -> PeerFile:
    keys = {"aux_key": "aux_hidden_state", "last_key": "hidden_state"}
    return _from_dict(read_tensors(path), **keys)


def _modelopt(path: Path) -> PeerFile:
    found = read_tensors(path)
    if isinstance(found.get("hidden_states"), list):
        raise BadFeatures(
            "is of speculators' old layout (hidden_states is a list of layers), which does not "
            "say whether the last one is normed: capture again with a version that writes "
            "hs_*.safetensors"
        )
    keys = {"aux_key": "aux_hidden_states", "last_key": "hidden_states"}
    return _from_dict(found, **keys)


def _speculators(path: Path) -> PeerFile:
    file = safe_open(path, framework="pt").__enter__()
    missing = {"token_ids", "hidden_states"} - set(file.keys())
    if missing:
        raise BadFeatures(f"has no {', '.join(sorted(missing))}")
    states = file.get_slice("hidden_states")
    length, slots, width = states.get_shape()
    return PeerFile(
        input_ids=file.get_tensor("token_ids").long().flatten(),
        loss_mask=None,
        aux=lambda lo, hi: states[lo:hi, : slots - 1].flatten(1),
        last=lambda: states[:, slots - 1],
        shapes=((length, (slots - 1) * width), (length, width)),
        normed=False,
    )


READERS: dict[str | None, Callable[[Path], PeerFile]] = {
    "specforge": _specforge,
    "speculators": _speculators,
    "modelopt": _modelopt,
}
