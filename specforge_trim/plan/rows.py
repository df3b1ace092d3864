"""Loss mask to row mask: the one place that aligns supervision with draft rows.

Also home of the two input checks every planner entry shares. Chooses no rows; see pack.py.

Letters: T positions of the packed token stream.
"""

import operator

import torch
from torch import Tensor

ALIGNMENTS = ("served", "teacher", "token")


def row_mask(loss_mask, alignment: str = "served", cu_seqlens=None) -> Tensor:
    """Which rows are supervised at TTT step 0, from which tokens carry loss.

    Row t predicts token t+2 from a teacher computed at token t+1. With mask = loss_mask:

        served    m[t] = mask[t+1] and mask[t+2]   the rows a serving engine asks the draft for
        teacher   m[t] = mask[t+1]
        token     m[t] = mask[t]

        tokens    0 1 2 3 4 5        served    . 1 1 . . .
        mask      . . 1 1 1 .        teacher   . 1 1 1 . .
                                     token     . . 1 1 1 .

    Tokens of other documents read as 0, and the last row of every document is 0: it has no
    teacher. Make the row mask before cutting a stream into shards.

    Args:
        loss_mask: [T] bool or 0/1 integers (tensor, array or sequence); 1 = the assistant wrote
            the token.
        alignment: "served", "teacher" or "token".
        cu_seqlens: [docs+1] document boundaries, 0 first and T last; None = one document.

    Returns:
        bool Tensor [T].

    Raises:
        ValueError: a mask, boundary list or alignment that is none of the above.
    """
    mask = check_mask(loss_mask, name="loss_mask")
    bounds = check_boundaries(cu_seqlens, mask.numel())
    if alignment not in ALIGNMENTS:
        raise ValueError(f"alignment={alignment!r}: expected one of {', '.join(ALIGNMENTS)}")
    if alignment == "token":
        rows = mask.clone()
    else:
        rows = _read_ahead(mask, bounds, 1)
        if alignment == "served":
            rows &= _read_ahead(mask, bounds, 2)
    last = bounds[1:][bounds.diff() > 0] - 1
    rows[last] = False
    return rows


def _read_ahead(mask: Tensor, bounds: Tensor, shift: int) -> Tensor:
    """mask[t + shift] inside the document of t, else False: bool [T]."""
    ahead = torch.zeros_like(mask)
    ahead[: max(mask.numel() - shift, 0)] = mask[shift:]
    for back in range(1, shift + 1):
        edge = bounds[1:] - back
        ahead[edge[edge >= bounds[:-1]]] = False
    return ahead


def check_mask(values, *, name: str) -> Tensor:
    """`values` as a bool CPU tensor [T], or ValueError naming `name`."""
    try:
        mask = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"{name}: expected a 1-D mask of 0 and 1 ({error})") from error
    if mask.dim() != 1:
        raise ValueError(f"{name} has shape {tuple(mask.shape)}: expected one dimension")
    if mask.numel() == 0:
        raise ValueError(f"{name} is empty: expected at least one position")
    if mask.device.type != "cpu":
        raise ValueError(f"{name} is on {mask.device}: plans are made on the CPU")
    if mask.dtype == torch.bool:
        return mask
    if mask.is_floating_point() or mask.is_complex():
        raise ValueError(f"{name} has dtype {mask.dtype}: expected bool or integers")
    low, high = (int(bound) for bound in mask.aminmax())
    if low < 0 or high > 1:
        bad = low if low < 0 else high
        raise ValueError(f"{name} holds the value {bad}: expected only 0 and 1")
    return mask.bool()


def check_boundaries(cu_seqlens, num_positions: int) -> Tensor:
    """Document boundaries as int64 [docs+1]; None = [0, num_positions].

    Empty documents are allowed, so that a rank can name documents it holds no token of.
    """
    if cu_seqlens is None:
        return torch.tensor([0, num_positions])
    try:
        bounds = torch.as_tensor(cu_seqlens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(f"cu_seqlens: expected a 1-D list of integers ({error})") from error
    if bounds.dim() != 1 or bounds.numel() < 2:
        raise ValueError(
            f"cu_seqlens has shape {tuple(bounds.shape)}: expected [documents + 1] boundaries"
        )
    if bounds.device.type != "cpu":
        raise ValueError(f"cu_seqlens is on {bounds.device}: plans are made on the CPU")
    if bounds.dtype == torch.bool or bounds.is_floating_point() or bounds.is_complex():
        raise ValueError(f"cu_seqlens has dtype {bounds.dtype}: expected integers")
    bounds = bounds.to(torch.int64)
    if int(bounds[0]) != 0 or int(bounds[-1]) != num_positions:
        raise ValueError(
            f"cu_seqlens runs from {int(bounds[0])} to {int(bounds[-1])}: "
            f"expected 0 to {num_positions}, the length of the mask"
        )
    if bool((bounds.diff() < 0).any()):
        raise ValueError("cu_seqlens decreases: expected boundaries in ascending order")
    return bounds


def check_integer(value, *, name: str, low: int, high: int | None = None) -> int:
    """`value` as an int in [low, high], or ValueError naming `name`."""
    wanted = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or number < low:
        raise ValueError(f"{name}={value!r}: expected {wanted}")
    if high is not None and number > high:
        raise ValueError(f"{name}={value!r}: expected {wanted}")
    return number
