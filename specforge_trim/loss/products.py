"""Matrix products of low-precision factors whose results are not rounded to that precision.

Logits decide differences of probabilities: rounded to bf16 (8 bits) they err by 0.4 % of their
size, e.g. 0.06 at 16, more than a good draft differs from its target.  Letters: n rows, D width.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Rows of the second factor widened, or of a product held, at once on its way to fp32.
_BLOCK = 8192


def work_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, else fp32: what softmax, loss and gradient sums run in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def product(a_nD: Tensor, b_mD: Tensor, *, out: Tensor | None = None) -> Tensor:
    """a @ b.T as [n, m] in work_dtype, summed and kept in it; b is read in a's dtype.

    out: where to write, contiguous.
    """
    work = work_dtype(a_nD.dtype)
    if out is None:
        out = torch.empty(a_nD.shape[0], b_mD.shape[0], dtype=work, device=a_nD.device)
    if a_nD.dtype == work:
        return torch.mm(a_nD, b_mD.to(work).T, out=out)
    if a_nD.is_cuda:
        return out.copy_(torch.mm(a_nD, b_mD.to(a_nD.dtype).T, out_dtype=work))
    # The CPU has no product that takes bf16 and gives fp32; widened factors are exact.
    low, a_nD = a_nD.dtype, a_nD.to(work)
    for c in range(0, b_mD.shape[0], _BLOCK):
        part = slice(c, c + _BLOCK)
        out[:, part] = a_nD @ b_mD[part].to(low).to(work).T
    return out


def add_product_(buffer: Tensor, a_nm: Tensor, b_nD: Tensor) -> None:
    """buffer [m, D] += a.T @ b, in the buffer's precision when the factors are of a lower one."""
    if a_nm.dtype == buffer.dtype:
        buffer.addmm_(a_nm.T, b_nD)
        return
    for c in range(0, a_nm.shape[1], _BLOCK):
        part = slice(c, c + _BLOCK)
        buffer[part] += a_nm[:, part].T @ b_nD
