"""A run's checkpoints: where it goes on from, and what it keeps in output_dir/checkpoints."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from specforge_trim.config.training import RunConfig
from specforge_trim.data.made_from import changes as data_changes
from specforge_trim.drafts.eagle3.batch import PlanSettings
from specforge_trim.ranks.world import World
from specforge_trim.train import checkpoint as checkpoints
from specforge_trim.train.lm_batch import LmPlan
from specforge_trim.train.sampler import Schedule

logger = logging.getLogger(__name__)


def _changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """`key old -> new` for every setting of two resolved configurations that differs."""
    return [
        f"{key} {before[section][key]} -> {value}"
        for section, values in now.items()
        for key, value in values.items()
        if section in before and before[section].get(key, value) != value
    ]


@dataclass(frozen=True)
class About:
    """What stands beside the state.

    identity: settings that a resumed run must share; provenance: how it was made; plan: how
    batches are planned.
    """

    identity: Mapping[str, Any]
    provenance: Mapping[str, Any]
    plan: PlanSettings | LmPlan


class Keeper:
    """Saves and restores this run's state in output_dir/checkpoints."""

    def __init__(
        self,
        config: RunConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        schedule: Schedule,
        about: About,
    ) -> None:
        self._root = config.output_dir / "checkpoints"
        self._config, self._model, self._optimizer = config, model, optimizer
        self._world, self._schedule, self._about = world, schedule, about
        self._saved = 0  # the step that is on disk, where any is
        self.skipped = self.non_finite = 0

    def resume(self) -> int:
        """Optimizer steps done before: 0, or those of the newest sound checkpoint.

        Raises ValueError where every checkpoint is damaged, or the newest is another run's.
        """
        if not self._config.train.resume:
            self._world.together(
                lambda: checkpoints.remove_all(self._root) if self._world.is_main else None
            )
            return 0
        found = checkpoints.newest(self._root, self._world)
        if found is None:
            return 0
        self._world.together(lambda: self._check(found))
        checkpoints.restore(found, model=self._model, optimizer=self._optimizer, world=self._world)
        self.skipped = found.meta["progress"]["skipped_steps"]
        self.non_finite = found.meta["progress"].get("non_finite_steps", 0)
        logger.info("resuming after step %d from %s", found.step, found.path)
        changed = _changes(found.meta["provenance"].get("config", {}), self._config.to_dict())
        if changed:
            logger.warning("settings changed since that checkpoint: %s", ", ".join(changed))
        self._saved = found.step
        return found.step

    def _check(self, found: checkpoints.Checkpoint) -> None:
        """It is this run's, and has seen the documents that this run would have seen."""
        checkpoints.check_identity(
            found, self._about.identity, lambda key: self._explain(found.meta["provenance"], key)
        )
        saved = found.meta["progress"].get("order")
        if found.step > self._schedule.total_steps:
            return  # fewer steps are asked for than are done: nothing will be trained
        if saved is not None and saved != self._schedule.order_digest(found.step):
            raise ValueError(
                f"checkpoint {found.path} has seen other documents in its {found.step} steps than "
                "this version of the package would have chosen: continue with the version it was "
                "made with (meta.json names it), or start over with --no-resume"
            )

    def _explain(self, before: Mapping[str, Any], key: str) -> list[str]:
        """What is known of a difference in `key`, whose values are checksums."""
        if key not in ("data", "target", "draft"):
            return []
        found = []
        if key == "data":
            found = data_changes(before.get("data", {}), self._about.provenance.get("data", {}))
        settings = _changes(before.get("config", {}), self._config.to_dict())
        named = "train_data" if key == "data" else key
        found = found or [text for text in settings if text.split()[0] == named]
        if not found and key != "data":
            found = ["under the same name, but its files are others"]
        return found

    def save(self, step: int) -> None:
        """Writes the state after `step` steps, unless it is there already."""
        if step == self._saved:
            return
        checkpoints.save(
            self._root,
            step=step,
            model=self._model,
            optimizer=self._optimizer,
            world=self._world,
            identity=self._about.identity,
            provenance=self._about.provenance,
            progress={
                "skipped_steps": self.skipped,
                "non_finite_steps": self.non_finite,
                **self._schedule.place(step),
            },
            plan=dataclasses.asdict(self._about.plan),
            keep=self._config.train.keep_checkpoints,
        )
        self._saved = step

    def best(self) -> Mapping[str, Any]:
        """What the best checkpoint on disk was chosen by; {} without one."""
        found = self._world.together(lambda: checkpoints.best(self._root))
        return {} if found is None else found[1]

    def mark_best(self, step: int, measured: Mapping[str, Any]) -> None:
        """Spares the checkpoint of `step`, which is on disk, from rotation; every rank calls it.

        measured: why it is the best, kept beside it; JSON values.
        """
        root, main = self._root, self._world.is_main
        self._world.together(
            lambda: checkpoints.mark_best(root, step=step, measured=measured) if main else None
        )
