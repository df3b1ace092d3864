"""An object full of small tensors as two blocks of bytes, for the way between two processes.

A plan holds a hundred index tensors.  Handed over one by one, each costs a shared-memory file;
through torch.save, each costs the reader an archive entry.  Here all of their values lie in one
block, and the reader makes views of it.
"""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_ALIGN = 16  # bytes: every dtype starts at a multiple of its size


@dataclass(frozen=True)
class Packed:
    """outline: the pickled object without its tensors' values; values: those, end to end."""

    outline: bytes
    values: bytearray


def pack(item: Any) -> Packed:
    """`item`, picklable, with CPU tensors anywhere inside."""
    outline, values = io.BytesIO(), bytearray()
    _Pickler(outline, values).dump(item)
    return Packed(outline.getvalue(), values)


def unpack(packed: Packed) -> Any:
    """The object; its tensors are views of one buffer.  Only for bytes of our own making."""
    return _Unpickler(io.BytesIO(packed.outline), packed.values).load()


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO, values: bytearray) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._values = values

    def persistent_id(self, item: Any) -> Any:
        if not isinstance(item, Tensor):
            return None
        self._values.extend(bytes(-len(self._values) % _ALIGN))
        start = len(self._values)
        # Bytes, since numpy has no bfloat16.
        self._values.extend(item.contiguous().view(-1).view(torch.uint8).numpy().data)
        return item.dtype, tuple(item.shape), start, item.numel()


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, values: bytearray) -> None:
        super().__init__(file)
        self._values = values

    def persistent_load(self, key: Any) -> Tensor:
        dtype, shape, start, count = key
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        flat = torch.frombuffer(self._values, dtype=dtype, count=count, offset=start)
        return flat if len(shape) == 1 else flat.view(shape)
