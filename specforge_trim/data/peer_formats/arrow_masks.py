"""Tokens and loss masks of speculators' data set: Arrow files saved beside the hidden states."""

import bisect
import json
from pathlib import Path

import torch
from torch import Tensor

from specforge_trim.data.document_features import BadFeatures


class ArrowMasks:
    """Row i of a saved data set belongs to hs_{i}.safetensors. Files are mapped, not read."""

    def __init__(self, folder: Path):
        """Open `folder`/*.arrow. Raises ValueError without such files or without pyarrow."""
        try:
            import pyarrow
        except ImportError:
            raise ValueError(
                f"the loss masks of {folder} lie in Arrow files: install pyarrow"
            ) from None
        self._tables = []
        self._ends: list[int] = []
        for path in _arrow_files(folder):
            with pyarrow.memory_map(str(path)) as source:
                table = pyarrow.ipc.open_stream(source).read_all()
            for key in ("input_ids", "loss_mask"):
                if key not in table.column_names:
                    raise ValueError(f"{path} has no column {key}: {table.column_names}")
            self._tables.append(table)
            self._ends.append((self._ends[-1] if self._ends else 0) + table.num_rows)

    def mask(self, row: int, token_ids: Tensor) -> Tensor:
        """The loss mask bool [L] of a row; BadFeatures unless its tokens are `token_ids` [L]."""
        ids = self._row(row, "input_ids")
        if ids.shape != token_ids.shape or not torch.equal(ids, token_ids):
            raise BadFeatures(
                f"holds {token_ids.numel()} tokens that are not the {ids.numel()} of row {row} "
                "of its data set: states of another request"
            )
        return self._row(row, "loss_mask").bool()

    def _row(self, row: int, key: str) -> Tensor:
        table = bisect.bisect_right(self._ends, row)
        if row < 0 or table == len(self._ends):
            count = self._ends[-1] if self._ends else 0
            raise BadFeatures(f"belongs to row {row} of a data set of {count} rows")
        first = self._ends[table - 1] if table else 0
        return torch.tensor(self._tables[table][key][row - first].as_py(), dtype=torch.int64)


def _arrow_files(folder: Path) -> list[Path]:
    """The data set's files in their order, from its state.json where there is one."""
    state = folder / "state.json"
    if state.exists():
        files = json.loads(state.read_text(encoding="utf-8")).get("_data_files", [])
        return [folder / entry["filename"] for entry in files]
    found = sorted(folder.glob("*.arrow"))
    if not found:
        raise ValueError(
            f"no Arrow files in {folder}: speculators' loss masks lie in the folder of its "
            "prepared data, of which hidden_states is a subfolder"
        )
    return found
