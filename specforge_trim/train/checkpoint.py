"""Checkpoints in torch.distributed.checkpoint format: written beside, renamed when complete.

    <root>/step-00000200/     .metadata, *.distcp (weights, AdamW state, RNG), meta.json
    <root>/best.json          which of them decoded best, if that was measured
    <root>/.writing-...       a save in progress, or what a killed one left; never read

meta.json holds the step, what must agree on resume (`identity`), provenance, counters, and the
size of every other file: a folder whose sizes differ is not complete.
"""

from __future__ import annotations

import json
import os
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from specforge_trim.distributed import World

_PARTS = {"step", "files", "identity", "progress"}  # of meta.json
_BEST = "best.json"
_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint folder and its meta.json."""

    path: Path
    step: int
    meta: Mapping[str, Any]


# ---------------------------------------------------------------------- what is on disk


def _name(step: int) -> str:
    return f"step-{step:08d}"


def list_complete(root: str | Path) -> list[Checkpoint]:
    """Complete checkpoints under root, oldest first; incomplete folders are passed over."""
    found = []
    for folder in sorted(Path(root).glob("step-*")):
        try:
            meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
            sizes = {name: (folder / name).stat().st_size for name in meta["files"]}
            whole = sizes == meta["files"] and _PARTS <= meta.keys()
            whole = whole and isinstance(meta["identity"], dict)
            whole = whole and "skipped_steps" in meta["progress"]
            step = int(meta["step"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
        if whole:
            found.append(Checkpoint(folder, step, meta))
    return sorted(found, key=lambda c: c.step)


def newest(root: str | Path) -> Checkpoint | None:
    """The complete checkpoint with the highest step, or None."""
    complete = list_complete(root)
    return complete[-1] if complete else None


def remove_all(root: str | Path) -> None:
    """Removes every checkpoint under root: what --no-resume asks for."""
    for folder in Path(root).glob("step-*"):
        shutil.rmtree(folder)
    (Path(root) / _BEST).unlink(missing_ok=True)


# ---------------------------------------------------------------------- the best one


def mark_best(root: str | Path, *, step: int, measured: Mapping[str, Any]) -> None:
    """Names the checkpoint of `step` as the best so far: rotation then spares it.

    measured: what it was chosen by (JSON values), such as its acceptance length.
    The mark is root/best.json and takes the place of the one before whole or not at all.
    """
    root = Path(root)
    beside = root / f".writing-{_BEST}"
    text = json.dumps({"step": step, "measured": dict(measured)}, indent=1)
    beside.write_text(text + "\n", encoding="utf-8")
    _sync(beside)
    os.replace(beside, root / _BEST)
    _sync(root)


def best(root: str | Path) -> tuple[Checkpoint, Mapping[str, Any]] | None:
    """The complete checkpoint marked as best and what it was chosen by; None without one."""
    step, measured = _best_mark(Path(root))
    found = [c for c in list_complete(root) if c.step == step]
    return (found[0], measured) if found else None


def _best_mark(root: Path) -> tuple[int | None, Mapping[str, Any]]:
    try:
        mark = json.loads((root / _BEST).read_text(encoding="utf-8"))
        return int(mark["step"]), dict(mark["measured"])
    except (OSError, ValueError, KeyError, TypeError):
        return None, {}


def _rotate(root: Path, keep: int) -> None:
    """Removes all but the `keep` newest complete checkpoints and the best one."""
    spared, _ = _best_mark(root)
    for old in list_complete(root)[:-keep]:
        if old.step != spared:
            shutil.rmtree(old.path)


def check_identity(checkpoint: Checkpoint, identity: Mapping[str, Any]) -> None:
    """Refuses to continue a run under settings that would make it another run.

    Raises ValueError naming the first setting that differs, both values, and the remedy.
    """
    saved = checkpoint.meta["identity"]
    wanted = json.loads(json.dumps(identity))  # tuples as lists, as they were saved
    for key in sorted(set(saved) | set(wanted)):
        if saved.get(key) != wanted.get(key):
            raise ValueError(
                f"checkpoint {checkpoint.path} was made with {key} = {saved.get(key)!r}, this "
                f"run has {wanted.get(key)!r}: choose another --output-dir (--init-from goes on "
                "from an exported draft there), or start over in this one with --no-resume"
            )


# ---------------------------------------------------------------------- state <-> tensors


def _weights(model: nn.Module) -> dict[str, Tensor]:
    """Trained weights and vocabulary maps; the target's embedding is read from the target."""
    frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
    return {n: t for n, t in model.state_dict().items() if n not in frozen}


def _moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """AdamW's state by parameter name, created as zeros where no step was taken yet."""
    tensors = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        state = optimizer.state[p]
        if not state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(p)
            state["exp_avg_sq"] = torch.zeros_like(p)
        tensors.update({f"{name}/{kind}": state[kind] for kind in _MOMENTS})
    return tensors


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _quiet(call: Any, *args: Any, **kwargs: Any) -> None:
    """Runs a DCP call without its notice that a single process is a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        call(*args, **kwargs)


# ---------------------------------------------------------------------- save


def save(
    root: str | Path,
    *,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    world: World,
    identity: Mapping[str, Any],
    provenance: Mapping[str, Any],
    progress: Mapping[str, Any],
    keep: int,
) -> Path:
    """Writes the state after `step` optimizer steps; reached by every rank.

    identity: must agree on resume; provenance: how it was made; progress: counters to continue.
    The folder appears under its name only when every byte is on disk.  Then all but the `keep`
    newest complete checkpoints and the best one are removed, and remains of interrupted saves.
    Raises OSError naming the folder; earlier checkpoints stay as they were.
    """
    root = Path(root)
    final, writing = root / _name(step), root / f".writing-{_name(step)}"
    if world.is_main:
        root.mkdir(parents=True, exist_ok=True)
        for stale in root.glob(".writing-step-*"):
            shutil.rmtree(stale)
    world.barrier()
    state: dict[str, Any] = {
        "model": _weights(model),
        "optimizer": _moments(model, optimizer),
        f"random_{world.rank}": _random_state(),
    }
    try:
        _quiet(dcp.save, state, checkpoint_id=writing, process_group=world.group)
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise OSError(f"checkpoint {final} could not be written: {reason}") from error
    if world.is_main:
        meta = {
            "step": step,
            "world_size": world.size,
            "identity": dict(identity),
            "provenance": dict(provenance),
            "progress": dict(progress),
            "files": {p.name: p.stat().st_size for p in sorted(writing.iterdir())},
        }
        (writing / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
        for file in writing.iterdir():
            _sync(file)
        _sync(writing)
        if final.exists():
            shutil.rmtree(final)
        os.replace(writing, final)
        _sync(root)
        _rotate(root, keep)
    world.barrier()
    return final


def _sync(path: Path) -> None:
    """Asks the disk to hold what was written; a folder's entries count too."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ---------------------------------------------------------------------- load


def restore(
    checkpoint: Checkpoint, *, model: nn.Module, optimizer: torch.optim.Optimizer, world: World
) -> int:
    """Loads weights, AdamW state and this rank's RNG in place; returns the steps done."""
    state: dict[str, Any] = {
        "model": _weights(model),
        "optimizer": _moments(model, optimizer),
    }
    if checkpoint.meta["world_size"] == world.size:
        state[f"random_{world.rank}"] = _random_state()
    _load(checkpoint, state, world)
    random = state.get(f"random_{world.rank}")
    if random is not None:
        torch.set_rng_state(random["cpu"].cpu())
        if "cuda" in random:
            torch.cuda.set_rng_state(random["cuda"].cpu())
    return checkpoint.step


def restore_weights(checkpoint: Checkpoint, *, model: nn.Module) -> None:
    """Loads weights and vocabulary maps only, in one process: what export needs."""
    _load(checkpoint, {"model": _weights(model)}, None)


def _load(checkpoint: Checkpoint, state: dict[str, Any], world: World | None) -> None:
    group = None if world is None else world.group
    try:
        _quiet(dcp.load, state, checkpoint_id=checkpoint.path, process_group=group)
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise ValueError(f"checkpoint {checkpoint.path} cannot be read: {reason}") from error
