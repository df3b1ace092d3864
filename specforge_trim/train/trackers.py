"""Where metrics go: JSON lines on disk, and a progress bar.  Rank 0 only; divides nothing."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm


class JsonLines:
    """metrics.jsonl: one flat object per logged step, written at once.

    A resumed run first drops the lines past its step, so that a replayed step stands once.
    """

    def __init__(self, path: str | Path, *, resume_step: int, write: bool = True) -> None:
        """write False: this rank keeps no file and drops every row."""
        self.path = Path(path)
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
                early = json.loads(line)["step"] <= step
            except (ValueError, KeyError, TypeError):
                continue  # no row of ours, or one cut off
            if early:
                kept.append(line + "\n")
        beside = self.path.with_suffix(".tmp")
        beside.write_text("".join(kept), encoding="utf-8")
        os.replace(beside, self.path)

    def write(self, row: Mapping[str, Any]) -> None:
        if self._writes:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


class Progress:
    """A tqdm bar over optimizer steps with loss, accuracy, tokens/s and kept work."""

    def __init__(self, *, total: int, done: int, show: bool) -> None:
        self._bar = tqdm(
            total=total, initial=done, desc="train", unit="step", disable=not show, smoothing=0.1
        )

    def update(self, row: Mapping[str, Any] | None) -> None:
        """Advances by one step; `row` is the newest metrics row."""
        if row is not None and row["loss"] is not None:
            self._bar.set_postfix_str(
                f"loss {row['loss']:.3f}, acc {row['accuracy/0'] or 0.0:.2f}, "
                f"accept {row['acceptance_length']:.2f}, "
                f"{row['perf/tokens_per_second']:.0f} tok/s, "
                f"kept work {row['perf/kept_flops_fraction']:.0%}",
                refresh=False,
            )
        self._bar.update()

    def close(self) -> None:
        self._bar.close()
