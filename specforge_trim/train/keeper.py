"""A run's checkpoints: where it goes on from, and what it keeps in output_dir/checkpoints."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from specforge_trim.config import Config
from specforge_trim.distributed import World
from specforge_trim.model.draft import Eagle3Draft
from specforge_trim.train import checkpoint as checkpoints

logger = logging.getLogger(__name__)


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`key old -> new` for every setting of two resolved configurations that differs."""
    return [
        f"{key} {before[section][key]} -> {value}"
        for section, values in now.items()
        for key, value in values.items()
        if section in before and before[section].get(key, value) != value
    ]


class Keeper:
    """Saves and restores this run's state in output_dir/checkpoints."""

    def __init__(
        self,
        config: Config,
        model: Eagle3Draft,
        optimizer: torch.optim.Optimizer,
        world: World,
        identity: Mapping[str, Any],
        provenance: Mapping[str, Any],
    ) -> None:
        self._root = config.output_dir / "checkpoints"
        self._config, self._model, self._optimizer = config, model, optimizer
        self._world, self._identity, self._provenance = world, identity, provenance
        self.skipped = 0

    def resume(self) -> int:
        """Optimizer steps done before: 0, or those of the newest complete checkpoint."""
        found = checkpoints.newest(self._root)
        if found is None:
            return 0
        if not self._config.train.resume:
            self._world.barrier()  # every rank has looked before anything is removed
            if self._world.is_main:
                checkpoints.remove_all(self._root)
            self._world.barrier()
            return 0
        checkpoints.check_identity(found, self._identity)
        checkpoints.restore(found, model=self._model, optimizer=self._optimizer, world=self._world)
        self.skipped = found.meta["progress"]["skipped_steps"]
        logger.info("resuming after step %d from %s", found.step, found.path)
        changed = _changes(found.meta["provenance"].get("config", {}), self._config.to_dict())
        if changed:
            logger.warning("settings changed since that checkpoint: %s", ", ".join(changed))
        return found.step

    def save(self, step: int) -> None:
        checkpoints.save(
            self._root,
            step=step,
            model=self._model,
            optimizer=self._optimizer,
            world=self._world,
            identity=self._identity,
            provenance=self._provenance,
            progress={"skipped_steps": self.skipped},
            keep=self._config.train.keep_checkpoints,
        )

    def mark_best(self, step: int, measured: Mapping[str, Any]) -> None:
        """Spares the checkpoint of `step`, which is on disk, from rotation; rank 0 acts.

        measured: why it is the best, kept beside it; JSON values.
        """
        if self._world.is_main:
            checkpoints.mark_best(self._root, step=step, measured=measured)
