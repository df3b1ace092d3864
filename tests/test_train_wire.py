"""What crosses from a loader process: every dtype and shape, unchanged, as one block.

Catches: bfloat16 that numpy cannot hold, empty tensors, views sent with the storage behind them,
a zero-dimensional tensor that gains a dimension.
"""

from dataclasses import dataclass

import torch

from specforge_trim.train import wire


@dataclass(frozen=True)
class Item:
    name: str
    tensors: tuple[torch.Tensor, ...]
    nested: dict


def test_every_kind_of_tensor_comes_back_as_it_was():
    wide = torch.arange(10_000)
    tensors = (
        torch.tensor([True, False, True]),
        torch.randn(3, 5).bfloat16(),
        torch.tensor(7),
        torch.zeros(0, dtype=torch.int64),
        torch.zeros(0, 4),
        torch.arange(6).view(2, 3).T,
        wide[::2500],
        torch.randn(2, 2, dtype=torch.float64),
    )
    item = Item("a", tensors, {"x": [torch.arange(3, dtype=torch.int32), None, 1.5]})
    packed = wire.pack(item)
    assert len(packed.values) < 600  # four values of `wide`, not ten thousand
    found = wire.unpack(packed)
    assert (found.name, found.nested["x"][1:]) == ("a", [None, 1.5])
    sent = (*item.tensors, item.nested["x"][0])
    for a, b in zip(sent, (*found.tensors, found.nested["x"][0]), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


def test_what_comes_back_can_be_written_to():
    """A read-only buffer warns, and the warning is an error here."""
    found = wire.unpack(wire.pack(torch.arange(4)))
    found += 1
    assert found.tolist() == [1, 2, 3, 4]
