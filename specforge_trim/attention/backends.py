"""Which kernel an attention backend's name stands for on a device."""

from __future__ import annotations

import torch

from specforge_trim.attention.kernel import Kernel
from specforge_trim.attention.kernels import flash_attn, torch_cpu, torch_cuda, torch_cuda_fp32


def select_kernel(backend: str, *, device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel of a segmented backend.

    Args:
        backend: "sdpa", torch's own flash and memory-efficient operators; or "fa", flash-attn.
        device, dtype: of queries, keys and values.

    Raises:
        ValueError: the backend does not run there; the remedy is named. Nothing falls back.
    """
    is_half = dtype in (torch.bfloat16, torch.float16)
    if backend == "sdpa":
        if device.type == "cpu":
            return torch_cpu.KERNEL
        if is_half:
            return torch_cuda.KERNEL
        if dtype == torch.float32:
            return torch_cuda_fp32.KERNEL
        raise ValueError(
            f"attention_backend=sdpa on a GPU computes in bfloat16, float16 or float32, not "
            f"{dtype}; set dtype to one of these, or use attention_backend=reference"
        )
    if backend == "fa":
        if device.type == "cpu":
            raise ValueError("attention_backend=fa runs on a GPU only; use sdpa on a CPU")
        if not is_half:
            raise ValueError(
                f"attention_backend=fa computes in bfloat16 or float16, not {dtype}; set dtype "
                "to bfloat16"
            )
        return flash_attn.load()
    raise ValueError(f"attention_backend={backend!r}: expected reference, sdpa or fa")
