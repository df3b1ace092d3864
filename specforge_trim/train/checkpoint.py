"""A run's state in torch.distributed.checkpoint format: saved beside, renamed when complete.

checkpoint_files.py says what lies where.  meta.json holds

    step, world_size      optimizer steps done, and the ranks that wrote it
    identity              what a resumed run must share (pipeline.run_identity): fingerprints of
                          target and data among it
    provenance            commit, versions, arguments, resolved configuration
    progress              counters and the sampler's place
    plan                  how batches were planned, as resolved
    random                generators whose state each rank saved
    files, meta_crc32     sizes and checksums
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from specforge_trim.ranks.world import PeerLost, World, lost_reason
from specforge_trim.train.checkpoint_files import (
    Checkpoint,
    best,
    checksum,
    folder_name,
    list_complete,
    mark_best,
    newest,
    publish,
    remove_all,
    remove_remains,
    rotate,
    write_meta,
)

__all__ = [
    "Checkpoint",
    "best",
    "check_identity",
    "list_complete",
    "mark_best",
    "newest",
    "remove_all",
    "restore",
    "restore_weights",
    "save",
]

_MOMENTS = ("exp_avg", "exp_avg_sq", "step")


def check_identity(
    checkpoint: Checkpoint,
    identity: Mapping[str, Any],
    explain: Callable[[str], Sequence[str]] = lambda key: (),
) -> None:
    """Refuses to continue a run under settings that would make it another run.

    explain: what is known of a difference whose values are checksums.
    Raises ValueError naming the first setting that differs, both values, and the remedy.
    """
    saved = checkpoint.meta["identity"]
    wanted = json.loads(json.dumps(identity))  # tuples as lists, as they were saved
    kinds = [
        "an EAGLE draft" if "aux_layers" in one else "a dense draft" for one in (saved, wanted)
    ]
    if kinds[0] != kinds[1]:
        raise ValueError(
            f"checkpoint {checkpoint.path} is of {kinds[0]}, this run trains {kinds[1]}: choose "
            "another --output-dir, or start over in this one with --no-resume"
        )
    start = "--init-from" if "aux_layers" in wanted else "--draft"
    for key in sorted(set(saved) | set(wanted)):
        if saved.get(key) != wanted.get(key):
            known = "; ".join(explain(key))
            raise ValueError(
                f"checkpoint {checkpoint.path} was made with {key} = {_short(saved.get(key))}, "
                f"this run has {_short(wanted.get(key))}{known and f' ({known})'}: choose another "
                f"--output-dir ({start} goes on from an exported draft there), or start over "
                "in this one with --no-resume"
            )


def _short(value: Any) -> str:
    """A setting's value as it is shown; of a checksum its first digits."""
    if isinstance(value, str) and re.fullmatch("[0-9a-f]{24,}", value):
        return value[:12] + "..."
    return repr(value)


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
    """State of torch's generators, the only ones that training could draw from."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


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
    plan: Mapping[str, Any],
    keep: int,
) -> Path:
    """Writes the state after `step` optimizer steps; reached by every rank.

    identity: must agree on resume; provenance: how it was made; progress: counters to continue;
    plan: how batches are planned.
    The folder appears under its name only when every byte is on disk.  Then all but the `keep`
    newest complete checkpoints and the best one are removed, and remains of interrupted saves.
    Raises OSError naming the folder; earlier checkpoints stay as they were.
    """
    root = Path(root)
    final, writing = root / folder_name(step), root / f".writing-{folder_name(step)}"
    random = _random_state()
    state = {
        "model": _weights(model),
        "optimizer": _moments(model, optimizer),
        f"random_{world.rank}": random,
    }
    meta = {
        "step": step,
        "world_size": world.size,
        "identity": dict(identity),
        "provenance": dict(provenance),
        "progress": dict(progress),
        "plan": dict(plan),
        "random": sorted(random),
    }

    def finish(sums: Mapping[str, str]) -> None:
        write_meta(writing, meta, sums)
        publish(writing, final)

    try:
        _on_main(world, lambda: _make_room(root))
        world.together(lambda: _dcp(dcp.save, state, writing, world))
        sums = _checksums(writing, world)
        _on_main(world, lambda: finish(sums))
    except OSError as error:
        # What was written of it would keep a full disk full.
        shutil.rmtree(writing, ignore_errors=True)
        reason = error.strerror or str(error)
        raise OSError(
            f"checkpoint {final} could not be written: {reason}; what was saved before is "
            "untouched, and the same command continues from there"
        ) from error
    _on_main(world, lambda: rotate(root, step=step, keep=keep))
    return final


def _on_main(world: World, work: Callable[[], None]) -> None:
    """Runs `work` on rank 0; a failure ends every rank."""
    world.together(lambda: work() if world.is_main else None)


def _make_room(root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    remove_remains(root)


def _checksums(folder: Path, world: World) -> dict[str, str]:
    """File name -> checksum; every rank reads what it has written itself."""
    names = world.share(sorted(p.name for p in folder.iterdir()) if world.is_main else [])
    own = f"__{world.rank}_"  # how dcp names the files of a rank; .metadata is rank 0's

    def mine(name: str) -> bool:
        return name.startswith(own) or (world.is_main and not name.startswith("__"))

    sums = world.together(lambda: {n: checksum(folder / n) for n in names if mine(n)})
    merged = {name: crc for part in world.gather(sums) for name, crc in part.items()}
    assert sorted(merged) == names, (sorted(merged), names)
    return merged


def _dcp(call: Any, state: dict[str, Any], folder: Path, world: World | None) -> None:
    """A call of torch.distributed.checkpoint; raises OSError saying what went wrong.

    Without a group it is this process's alone, also in one whose peers do something else: dcp
    would wait for them. Its notice that a single process is a single process is left out.
    """
    group = None if world is None else world.group
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            call(state, checkpoint_id=folder, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        reason = next(iter(error.failures.values()))[0]
        raise OSError(_why(reason)) from error
    except RuntimeError as error:
        raise PeerLost(f"contact with another rank was lost: {lost_reason(error)}") from error


def _why(reason: BaseException) -> str:
    """One line of the library's account of a failure."""
    if isinstance(reason, OSError) and reason.strerror:
        return reason.strerror
    return (str(reason).strip() or type(reason).__name__).splitlines()[0]


# ---------------------------------------------------------------------- load


def restore(
    checkpoint: Checkpoint, *, model: nn.Module, optimizer: torch.optim.Optimizer, world: World
) -> int:
    """Loads weights, AdamW state and this rank's RNG in place; returns the steps done.

    With another number of ranks than it was saved with, generators stay as they were seeded.
    """
    state: dict[str, Any] = {
        "model": _weights(model),
        "optimizer": _moments(model, optimizer),
    }
    if checkpoint.meta["world_size"] == world.size:
        saved = checkpoint.meta.get("random", ["cpu"])
        here = {kind: s for kind, s in _random_state().items() if kind in saved}
        state[f"random_{world.rank}"] = here
    world.together(lambda: _check_readable(checkpoint))
    world.together(lambda: _load(checkpoint, state, world))
    random = state.get(f"random_{world.rank}", {})
    if "cpu" in random:
        torch.set_rng_state(random["cpu"].cpu())
    if "cuda" in random:
        torch.cuda.set_rng_state(random["cuda"].cpu())
    return checkpoint.step


def restore_weights(checkpoint: Checkpoint, *, model: nn.Module) -> None:
    """Loads weights and vocabulary maps only, in one process: what export needs."""
    _check_readable(checkpoint)
    _load(checkpoint, {"model": _weights(model)}, None)


def _check_readable(checkpoint: Checkpoint) -> None:
    """Reads .metadata first: dcp would log a traceback of its own for one that it cannot read."""
    try:
        dcp.FileSystemReader(checkpoint.path).read_metadata()
    except Exception as error:  # a damaged pickle raises whatever its bytes spell
        raise _unreadable(checkpoint, f".metadata: {error}") from error


def _load(checkpoint: Checkpoint, state: dict[str, Any], world: World | None) -> None:
    try:
        _dcp(dcp.load, state, checkpoint.path, world)
    except OSError as error:
        raise _unreadable(checkpoint, str(error)) from error


def _unreadable(checkpoint: Checkpoint, reason: str) -> ValueError:
    return ValueError(
        f"checkpoint {checkpoint.path} cannot be read ({reason}): remove that folder to go on "
        "from the one before"
    )
