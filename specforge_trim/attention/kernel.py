"""What a kernel of the context side is: attention of R queries over L keys, and its backward.

The backward takes the MERGED output and log-sum-exp when the keys given are only part of a
softmax: p = exp(q.k - L) is then the part's share of the whole, and the rest of the flash
backward follows from it.

Letters: R queries, L keys, N heads, M key/value heads (N a multiple of M), H head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Kernel:
    """A forward/backward pair.

        forward(q, k, v, *, causal, mask, scale) -> o [R, N, H] in q's dtype,
                                                    lse [R, N] in at least fp32
        backward(do, q, k, v, o, lse, *, causal, mask, scale) -> dq [R, N, H], dk, dv [L, M, H]

        q, do, o [R, N, H]; k, v [L, M, H]; R > 0, L > 0, last strides 1
        causal  query r sees keys up to L - R + r; with R < L only if bottom_right
        mask    bool [R, L], True = attend, every row to some key; only if takes_mask; not with
                causal

    bottom_right: a causal mask of fewer queries than keys is aligned at the end, so that a run of
    rows and all the keys before it are one call. takes_mask: whether `mask` may be given.
    """

    name: str
    bottom_right: bool
    takes_mask: bool
    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]
