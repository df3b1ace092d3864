"""The target's final norm alone, for hidden states that were stored before it."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from specforge_trim.verifier.head import TensorFiles, opened

NORM_NAMES = ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f")


def load_final_norm(path: str | Path) -> Callable[[Tensor], Tensor]:
    """States [n, Dt] before the final norm -> after it, in their own dtype.

    The module is transformers' own for this model, filled from the model's files; no other weight
    is read. Raises ValueError when the files hold no such norm or several.
    """
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(path)
    with torch.device("meta"):
        decoder = AutoModel.from_config(config)
    decoder = decoder.get_decoder() or decoder
    norm = next((getattr(decoder, n) for n in NORM_NAMES if hasattr(decoder, n)), None)
    name = next((n for n in NORM_NAMES if hasattr(decoder, n)), "")
    if not isinstance(norm, nn.Module):
        raise ValueError(f"target {path}: its final norm has none of the names {NORM_NAMES}")
    files = TensorFiles(path)
    state = {}
    for key in norm.state_dict():
        wanted = f"{name}.{key}"
        found = [f for f in files if f == wanted or f.endswith(f".{wanted}")]
        found = [f for f in found if ".layers." not in f and not f.startswith("layers.")]
        if len(found) != 1:
            raise ValueError(f"target {path}: {len(found)} tensors {wanted}, expected one")
        with opened(files[found[0]]) as file:
            state[key] = file.get_tensor(found[0])
    norm.load_state_dict(state, assign=True)
    norm.requires_grad_(False)

    def apply(states: Tensor) -> Tensor:
        return norm.to(states.dtype)(states)

    return apply
