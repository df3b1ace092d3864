"""What of a run is recorded, how it is shortened for the repository, and how two are compared.

A number stands as float.hex(), a tensor as a checksum of its bytes.
"""

from __future__ import annotations

import hashlib
import json
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

TIMED = ("perf/", "time/")
KEPT = {"perf/backbone_row_fraction", "perf/lm_head_token_fraction", "perf/kept_flops_fraction"}


def exact(value: Any) -> Any:
    """The same JSON value, its floats spelled to the last bit."""
    if isinstance(value, float):
        return value.hex()
    if isinstance(value, Mapping):
        return {key: exact(item) for key, item in value.items()}
    return [exact(item) for item in value] if isinstance(value, list | tuple) else value


def _sum(value: Any, digits: int = 16) -> str:
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def _rows(path: Path) -> list[dict[str, Any]]:
    """A file of JSON lines without what a clock has a part in."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [
        {k: exact(v) for k, v in row.items() if k in KEPT or not k.startswith(TIMED)}
        for row in map(json.loads, lines)
    ]


def _tensor(value: Any) -> str:
    import torch

    data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    about = f"{value.dtype} {tuple(value.shape)} ".encode()
    return hashlib.sha256(about + data).hexdigest()[:16]


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    import torch

    found: dict[str, str] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            found |= _flat(item, f"{prefix}{key}/")
        else:
            found[prefix + key] = _tensor(item) if torch.is_tensor(item) else _sum(exact(item))
    return found


def _checkpoint(folder: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """(tensor -> checksum, identity) of a checkpoint, read without the package."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    with tempfile.TemporaryDirectory() as place, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_to_torch_save(folder, f"{place}/state.pt")
        tensors = _flat(torch.load(f"{place}/state.pt", weights_only=False))
    meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
    identity = {k: exact(v) for k, v in meta["identity"].items() if "/" not in str(v)}
    return tensors, identity


def of_run(out: Path) -> dict[str, Any]:
    """All that is recorded of a run in the output folder `out`."""
    steps = sorted((out / "checkpoints").glob("step-*"))
    tensors, identity = _checkpoint(steps[-1])
    best = out / "checkpoints" / "best.json"
    return {
        "rows": _rows(out / "metrics.jsonl"),
        "held out": _rows(out / "heldout.jsonl"),
        "tensors": tensors,
        "identity": identity,
        "best": exact(json.loads(best.read_text())) if best.exists() else None,
    }


def of_export(folder: Path) -> dict[str, str]:
    """Checksums of an exported draft."""
    from safetensors.torch import load_file

    config = (folder / "config.json").read_text(encoding="utf-8")
    return {"config.json": _sum(config)} | _flat(load_file(folder / "model.safetensors"))


def of_evaluation(file: Path) -> Any:
    """The report of decoding; it holds counts, and rates made of them."""
    return exact(json.loads(file.read_text(encoding="utf-8")))


# ---------------------------------------------------------------------- for the repository


def shorten(run: Mapping[str, Any]) -> dict[str, Any]:
    """A run as it is kept: a checksum per row and one per key, those of a tensor together."""
    small = dict(run)
    for name in ("rows", "held out"):
        rows = run[name]
        keys = sorted({key for row in rows for key in row})
        small[name] = [f"{row.get('step')} {_sum(row)} {row.get('loss')}" for row in rows]
        small[f"{name} by key"] = {k: _sum([row.get(k) for row in rows], 8) for k in keys}
    grouped: dict[str, dict[str, str]] = {}
    for key, sha in sorted(run["tensors"].items()):
        part, _, rest = key.partition("/")  # model/fc.weight, optimizer/fc.weight/exp_avg
        tensor, _, moment = rest.partition("/")
        grouped.setdefault(tensor or part, {})[moment or part] = sha
    small["tensors"] = {t: " ".join(f"{k}:{s}" for k, s in g.items()) for t, g in grouped.items()}
    for name in ("export", "evaluation"):
        if name in run:
            small[name] = run[name] if name == "export" else _sum(run[name])
    return {key: value for key, value in small.items() if value not in ([], {}, None)}


def difference(kept: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """The first difference of two runs of one form, in words; None where they are equal.

    Of shortened runs too: where a row's checksum differs, the checksums by key say which.
    """
    for name in dict.fromkeys((*kept, *now)):
        old, new = kept.get(name), now.get(name)
        if old == new or name.endswith("by key"):
            continue
        if isinstance(old, list) and isinstance(new, list):
            return _row_difference(name, old, new) + _keys(name, kept, now)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            return f"{name}: {', '.join(_changed(old, new))}"
        return f"{name}: {_brief(old)} -> {_brief(new)}"
    return None


def _row_difference(name: str, old: list, new: list) -> str:
    if len(old) != len(new):
        return f"{name}: {len(old)} -> {len(new)}"
    before, after = next((a, b) for a, b in zip(old, new, strict=True) if a != b)
    if isinstance(before, Mapping):
        keys = [f"{k} {before.get(k)} -> {after.get(k)}" for k in _changed(before, after)]
        return f"{name}, step {before.get('step')}: {'; '.join(keys)}"
    (step, _, loss), (_, _, other) = before.split(), after.split()
    found = "loss the same" if loss == other else f"loss {loss} -> {other}"
    return f"{name}, step {step}: {found}"


def _keys(name: str, kept: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    old, new = kept.get(f"{name} by key"), now.get(f"{name} by key")
    return f"; keys {', '.join(_changed(old, new))}" if old and new else ""


def _changed(old: Mapping[str, Any], new: Mapping[str, Any], most: int = 4) -> list[str]:
    found = [key for key in dict.fromkeys((*old, *new)) if old.get(key) != new.get(key)]
    return found[:most] + ([f"{len(found) - most} more"] if len(found) > most else [])


def _brief(value: Any) -> str:
    text = str(value)
    return text if len(text) < 60 else text[:57] + "..."


def differing(kept: Mapping[str, Any], now: Mapping[str, Any], names: Iterable[str]) -> list[str]:
    """Of these runs, those that are not equal."""
    return [name for name in names if difference(kept[name], now[name])]
