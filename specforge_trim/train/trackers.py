"""Where metrics go: JSON lines always, services that a run names, and a progress bar.

Rank 0 only; divides nothing. Every tracker gets the same rows, and a resumed run continues each
series: a step that is done again stands once.
"""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tqdm import tqdm

from specforge_trim.config.training import RunConfig
from specforge_trim.ranks.world import World


class Tracker(Protocol):
    """Takes rows of metrics, each with its `step`, in ascending order."""

    def write(self, row: Mapping[str, Any]) -> None: ...
    def close(self) -> None: ...


class Trackers:
    """Hands each row to every tracker."""

    def __init__(self, trackers: Sequence[Tracker]) -> None:
        self._trackers = tuple(trackers)

    def write(self, row: Mapping[str, Any]) -> None:
        """JSON has no value that is not finite: it is written as null, and not charted."""
        plain = {key: _finite_or_none(value) for key, value in row.items()}
        for tracker in self._trackers:
            tracker.write(plain)

    def close(self) -> None:
        for tracker in self._trackers:
            tracker.close()


def open_trackers(config: RunConfig, *, done: int, world: World) -> Trackers:
    """metrics.jsonl and the trackers that the settings name, after `done` steps; on rank 0.

    Every rank calls this. Raises OSError for a file or a service that cannot be opened.
    """
    return world.together(lambda: _opened(config, done) if world.is_main else Trackers(()))


def _opened(config: RunConfig, done: int) -> Trackers:
    lines = JsonLines(config.output_dir / "metrics.jsonl", resume_step=done)
    found: list[Tracker] = [lines]
    if "tensorboard" in config.track.trackers:
        found.append(TensorBoard(config.output_dir / "tensorboard", resume_step=done))
    if "wandb" in config.track.trackers:
        found.append(WeightsAndBiases(config, done=done, reported=lines.reported))
    return Trackers(found)


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


class JsonLines:
    """metrics.jsonl: one flat object per logged step, written at once.

    A resumed run first drops the lines past its step, so that a replayed step stands once.
    """

    def __init__(self, path: str | Path, *, resume_step: int, write: bool = True) -> None:
        """write False: this rank keeps no file and drops every row.

        reported: the last step that a line was written for before, 0 without any.
        """
        self.path = Path(path)
        self.reported = 0
        self._writes = write
        if write:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._keep_until(resume_step)

    def _keep_until(self, step: int) -> None:
        """Rewrites the file without later steps and without a line cut off by a kill."""
        if not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                found = json.loads(line)["step"]
                early = found <= step
            except (ValueError, KeyError, TypeError):
                continue  # no row of ours, or one cut off
            self.reported = max(self.reported, found)
            if early:
                kept.append(line + "\n")
        beside = self.path.with_suffix(".tmp")
        beside.write_text("".join(kept), encoding="utf-8")
        os.replace(beside, self.path)

    def write(self, row: Mapping[str, Any]) -> None:
        if not self._writes:
            return
        text = json.dumps(row, allow_nan=False) + "\n"
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:  # a full disk gives no file's name
            raise OSError(f"{self.path} could not be written: {error.strerror}") from error

    def close(self) -> None:
        """Nothing is held open."""


class TensorBoard:
    """Scalars under the names of metrics.jsonl, as float32: what TensorBoard keeps."""

    def __init__(self, folder: Path, *, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Readers drop what an earlier process wrote at purge_step and later.
        self._writer = SummaryWriter(str(folder), purge_step=resume_step + 1)

    def write(self, row: Mapping[str, Any]) -> None:
        for key, value in row.items():
            if key != "step" and value is not None:
                self._writer.add_scalar(key, value, global_step=row["step"])
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases whose id is kept in output_dir/wandb_run, for the next process.

    The service keeps no second value of a step: rows up to the last step reported before are
    left out, and they would be the same.
    """

    def __init__(self, config: RunConfig, *, done: int, reported: int) -> None:
        import wandb

        file = config.output_dir / "wandb_run"
        fresh = done == 0 or not file.is_file()
        if fresh:
            file.write_text(secrets.token_hex(8) + "\n", encoding="utf-8")
        self._reported = 0 if fresh else reported
        track = config.track
        try:
            self._run = wandb.init(
                project=track.wandb_project,
                name=track.run_name or config.output_dir.name,
                id=file.read_text(encoding="utf-8").strip(),
                resume="never" if fresh else "allow",
                mode=track.wandb_mode,
                dir=str(config.output_dir),
                config=config.to_dict(),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise OSError(
                f"Weights & Biases refuses the run: {error}; log in with `wandb login`, or keep "
                "metrics here with --wandb-mode offline"
            ) from error

    def write(self, row: Mapping[str, Any]) -> None:
        if row["step"] > self._reported:
            values = {key: value for key, value in row.items() if value is not None}
            self._run.log(values, step=row["step"])

    def close(self) -> None:
        self._run.finish()


class Progress:
    """A tqdm bar over optimizer steps: loss, acceptance, speed, kept work, ETA."""

    def __init__(self, *, total: int, done: int, show: bool) -> None:
        self._bar = tqdm(
            total=total, initial=done, desc="train", unit="step", disable=not show, smoothing=0.1
        )

    def update(self, row: Mapping[str, Any] | None) -> None:
        """Advances by one step; `row` is the newest metrics row."""
        if row is not None and row["loss"] is not None:
            self._bar.set_postfix_str(_described(row), refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


def _described(row: Mapping[str, Any]) -> str:
    """A row in brief: of an EAGLE draft, whose values are per TTT step, or of a dense model."""
    speed = f"{row['perf/tokens_per_second']:.0f} tok/s"
    if "acceptance_length" not in row:
        accept = f"accept {row['acceptance']:.2f}, " if "acceptance" in row else ""
        head = f"head rows {row['perf/lm_head_token_fraction']:.0%}"
        return f"loss {row['loss']:.3f}, acc {row['accuracy']:.2f}, {accept}{speed}, {head}"
    steps = [f"{row[k]:.2f}" for k in acceptance_keys(row) if row[k] is not None]
    return (
        f"loss {row['loss']:.3f}, acc {row['accuracy/0'] or 0.0:.2f}, "
        f"accept {' '.join(steps)} = {row['acceptance_length']:.2f}, {speed}, "
        f"kept work {row['perf/kept_flops_fraction']:.0%}"
    )


def acceptance_keys(row: Mapping[str, Any]) -> list[str]:
    """acceptance/0, acceptance/1, ... as far as a row has them."""
    keys: list[str] = []
    while f"acceptance/{len(keys)}" in row:
        keys.append(f"acceptance/{len(keys)}")
    return keys
