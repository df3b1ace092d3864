"""flash-attn 2: bf16 and fp16, grouped heads, causal aligned bottom-right, one call per run.

The package's public function ignores the gradient of the log-sum-exp, so merging parts needs its
private forward/backward pair (flash-attn 2.7 and newer name their arguments as here). Its
backward allocates dk and dv for ALL query heads, so long contexts want calls capped in keys.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from specforge_trim.attention.kernel import Kernel


def load() -> Kernel:
    """The kernel; ImportError without the package."""
    from flash_attn import flash_attn_interface as package

    def forward(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        assert mask is None, "this kernel takes no mask"
        # With no key at all it returns an lse of +inf, which a merge would believe.
        assert q.shape[0] > 0 and k.shape[0] > 0, (q.shape, k.shape)
        o, lse, *_ = package._flash_attn_forward(
            q[None], k[None], v[None], dropout_p=0.0, softmax_scale=scale, causal=causal, **_PLAIN,
            return_softmax=False,
        )  # fmt: skip
        return o[0], lse[0].transpose(0, 1)

    def backward(
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        *,
        causal: bool,
        mask: Tensor | None,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        assert mask is None, "this kernel takes no mask"
        dq, dk, dv = (torch.empty_like(x)[None] for x in (q, k, v))
        package._flash_attn_backward(
            do[None].contiguous(), q[None], k[None], v[None], o[None].contiguous(),
            lse.transpose(0, 1)[None].contiguous(), dq, dk, dv, dropout_p=0.0,
            softmax_scale=scale, causal=causal, **_PLAIN, deterministic=False,
        )  # fmt: skip
        return dq[0], dk[0], dv[0]

    return Kernel("flash-attn", True, False, forward, backward)


# No window, no soft cap, no slopes.
_PLAIN: dict[str, Any] = {
    "window_size_left": -1,
    "window_size_right": -1,
    "softcap": 0.0,
    "alibi_slopes": None,
}
