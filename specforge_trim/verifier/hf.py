"""A Hugging Face target: its hidden states through hooks on the decoder, without its head.

Letters: L tokens of a document, A aux layers, Dt target hidden, V target vocabulary.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specforge_trim.verifier.aux_layers import resolve_aux_layers, to_sglang
from specforge_trim.verifier.head import (
    LogitPost,
    TargetHead,
    load_embedding_and_head,
    model_folder,
)

__all__ = [
    "HFTarget",
    "LogitPost",
    "TargetFeatures",
    "TargetHead",
    "load_embedding_and_head",
    "resolve_aux_layers",
    "target_fingerprint",
    "to_sglang",
]


@dataclass(frozen=True)
class TargetFeatures:
    """Hidden states of one document."""

    aux: Tensor  # [L, A*Dt], the aux layers side by side in ascending order
    last: Tensor  # [L, Dt], after the final norm

    def __iter__(self):
        return iter((self.aux, self.last))


class HFTarget:
    """A causal language model whose hidden states are read.

    Attributes: `model`, `config` (of the text part), `aux_layers` (Hugging Face numbering),
    `hidden_size`, `vocab_size`, `num_layers`, `eos_token_ids`, `name`, `fingerprint`.
    """

    def __init__(
        self,
        model: Any,
        *,
        aux_layers: Sequence[int] | None = None,
        name: str = "",
        fingerprint: str = "",
    ):
        self.model = model.eval().requires_grad_(False)
        self.config = model.config.get_text_config()
        self.name = name
        self.fingerprint = fingerprint
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = self.config.vocab_size
        self.decoder = model.get_decoder()
        self.num_layers = len(self.decoder.layers)
        self.aux_layers = resolve_aux_layers(self.num_layers, aux_layers)
        ends = getattr(model, "generation_config", None) and model.generation_config.eos_token_id
        ends = self.config.eos_token_id if ends is None else ends
        ends = ends if isinstance(ends, (list, tuple)) else (ends,)
        self.eos_token_ids = tuple(end for end in ends if end is not None)

    @classmethod
    def load(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device = "cpu",
        aux_layers: Sequence[int] | None = None,
        device_map: str | None = None,
        tensor_parallel: bool = False,
    ) -> "HFTarget":
        """Load a model folder or hub id.

        Args:
            device_map: spread the layers over this process's devices, by transformers' rules
                ("auto", "balanced", ...); `device` is not used then.
            tensor_parallel: split every layer over all ranks, by the plan that transformers has
                for the model. Every rank then runs the same documents and gets whole states.

        Raises ValueError for aux layers it does not have and for a model without such a plan.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        text = AutoConfig.from_pretrained(path).get_text_config()
        resolve_aux_layers(text.num_hidden_layers, aux_layers)  # before the slow part
        if tensor_parallel and not getattr(text, "base_model_tp_plan", None):
            raise ValueError(
                f"target {path}: transformers has no tensor-parallel plan for model type "
                f"{text.model_type!r}; use --target-device-map auto"
            )
        load: Any = AutoModelForCausalLM.from_pretrained
        if device_map is not None:
            model = load(path, dtype=dtype, device_map=device_map)
        elif tensor_parallel:
            from transformers.distributed import DistributedConfig

            split = DistributedConfig(tp_size=torch.distributed.get_world_size())
            model = load(path, dtype=dtype, distributed_config=split)
        else:
            model = load(path, dtype=dtype).to(device)
        return cls(
            model, aux_layers=aux_layers, name=str(path), fingerprint=target_fingerprint(path)
        )

    @property
    def device(self) -> torch.device:
        return next(self.decoder.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.decoder.parameters()).dtype

    # Not inference_mode: training on its tensors as they are would fail in the backward.
    @torch.no_grad()
    def features(self, input_ids: Tensor) -> TargetFeatures:
        """Run the decoder over one document of token ids int64 [L], L >= 1."""
        width = self.hidden_size
        captured: dict[int, Tensor] = {}
        handles = [
            self.decoder.layers[k - 1].register_forward_hook(_keep(captured, k))
            for k in self.aux_layers
        ]
        try:
            ids = input_ids.to(self.device)[None]  # where a device map puts the embedding
            last = self.decoder(input_ids=ids, use_cache=False).last_hidden_state[0]
        finally:
            for handle in handles:
                handle.remove()
        aux = last.new_empty(len(last), len(self.aux_layers) * width)
        for slot, k in enumerate(self.aux_layers):
            aux[:, slot * width : (slot + 1) * width] = captured[k][0]
        return TargetFeatures(aux, last)

    @torch.inference_mode()
    def check_head(self, head: TargetHead, input_ids: Tensor, *, tolerance: float = 0.02) -> None:
        """Compare head(last) with the model's own logits for a few tokens [L].

        A target that does something to its logits that `head.py` does not know would train
        the draft on wrong probabilities. Raises ValueError when the largest difference exceeds
        `tolerance` x the largest logit (bf16 rounds to 0.004 of a value).
        """
        ids = input_ids.to(self.device)
        expected = self.model(input_ids=ids[None], use_cache=False).logits[0].float()
        found = head.logits(self.features(ids).last).float()
        error = (found - expected).abs().max().item()
        if not error <= tolerance * expected.abs().max().item():
            raise ValueError(
                f"target {self.name}: its logits are not head(last hidden): they differ by "
                f"{error:.3g}. Model type {self.config.model_type!r} post-processes its logits in "
                "a way that is not supported"
            )


def _keep(captured: dict[int, Tensor], k: int):
    def hook(module: torch.nn.Module, args: tuple, output: Tensor | tuple) -> None:
        captured[k] = output[0] if isinstance(output, tuple) else output

    return hook


def target_fingerprint(path: str | Path) -> str:
    """A hash of the model's config and of samples of its weight files, quick for any size.

    Of a hub id: the config and the revision's commit, since its weights may not be here yet.
    Of a folder: the config without version notes, each safetensors file's name, size, and 16
    blocks of 64 KiB spread over it. A file edited elsewhere than in those is not noticed.
    """
    folder = model_folder(path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for key in ("transformers_version", "_name_or_path", "_model_name_or_path"):
        config.pop(key, None)
    digest = hashlib.sha256(json.dumps(config, sort_keys=True).encode())
    if not Path(path).is_dir():
        digest.update(folder.name.encode())  # .../snapshots/<commit>
        return digest.hexdigest()[:24]
    for file in sorted(folder.glob("*.safetensors")):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for block in range(16):
                stream.seek(size * block // 16)
                digest.update(stream.read(1 << 16))
    return digest.hexdigest()[:24]
