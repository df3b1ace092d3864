"""train_draft_lm.py with some training conversations without loss, as a script for torchrun.

`prepare` leaves such conversations out; a recipe whose masks come out empty on one rank only is
made here instead. Each rank notes the loss rows of its steps in LOSS_ROWS/rank-R, where that
variable names a folder.
"""

import os
import sys
from pathlib import Path
from types import SimpleNamespace

from specforge_trim.cli.lm import train_lm_main
from specforge_trim.train import lm_loop
from specforge_trim.train import lm_run as lm_pipeline

EMPTY = (0, 1, 2)  # numbers of the conversations without loss


class Blanked:
    """Prepared data, those conversations' masks cleared."""

    def __init__(self, data):
        self._data = data

    def __getattr__(self, name):
        return getattr(self._data, name)

    def __len__(self):
        return len(self._data)

    def __getitem__(self, number):
        found = self._data[number]
        mask = found.loss_mask & (number not in EMPTY)
        return SimpleNamespace(
            input_ids=found.input_ids, loss_mask=mask, source=found.source, doc_id=found.doc_id
        )


def patches():
    """(object, name, replacement) of what has to be another function."""
    prepare, count = lm_pipeline.prepare_data, lm_loop._count

    def prepare_data(config, models, world, *, paths=None, announce=True):
        data = prepare(config, models, world, paths=paths, announce=announce)
        return Blanked(data) if paths is None else data

    def counted(batches, world):
        folder = os.environ.get("LOSS_ROWS")
        if folder:
            with (Path(folder) / f"rank-{world.rank}").open("a") as file:
                file.write(f"{sum(b.num_loss_rows for b in batches)}\n")
        return count(batches, world)

    return [(lm_pipeline, "prepare_data", prepare_data), (lm_loop, "_count", counted)]


if __name__ == "__main__":
    for place, name, other in patches():
        setattr(place, name, other)
    sys.exit(train_lm_main())
