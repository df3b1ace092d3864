"""Read the target's embedding and head from its files, without loading the model.

Letters: V target vocabulary, Dt target hidden.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

EMBEDDING_NAMES = ("embed_tokens", "wte", "word_embeddings", "tok_embeddings", "embed_in")
HEAD_NAMES = ("lm_head", "embed_out", "output")


@dataclass(frozen=True)
class LogitPost:
    """What some targets do to head(last): scale (Cohere), divide (Granite), cap (Gemma 2).

    logits -> cap * tanh(logits * multiplier / divisor / cap)
    """

    multiplier: float = 1.0
    divisor: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        if self.multiplier != 1.0:
            logits = logits * self.multiplier
        if self.divisor != 1.0:
            logits = logits / self.divisor
        return logits if self.cap is None else torch.tanh(logits / self.cap) * self.cap


@dataclass(frozen=True)
class TargetHead:
    """The target's two vocabulary matrices, in the dtype of its files."""

    embed: Tensor  # [V, Dt]
    head: Tensor  # [V, Dt]; the same tensor as `embed` when tied
    tied: bool
    logit_post: Callable[[Tensor], Tensor] | None  # logits -> logits; None = nothing to do
    vocab_size: int
    hidden_size: int

    def logits(self, last: Tensor) -> Tensor:
        """The target's logits [..., V] from its last hidden state [..., Dt] after the final norm,
        in the dtype and on the device of `last`."""
        logits = last @ self.head.to(device=last.device, dtype=last.dtype).T
        return logits if self.logit_post is None else self.logit_post(logits)


def load_embedding_and_head(path: str | Path) -> TargetHead:
    """Read the two matrices of the model at `path` (folder or hub id).

    Raises ValueError, naming the keys there are, when one cannot be told from the others; when the
    head has a bias, which no EAGLE-3 engine applies; and when the files are no safetensors.
    """
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(path)
    text = config.get_text_config()
    shape = (text.vocab_size, text.hidden_size)
    files = tensor_files(model_folder(path))
    embed_key = _find(files, EMBEDDING_NAMES, shape)
    if embed_key is None:
        raise ValueError(
            f"no embedding of shape {list(shape)} in {path}: none of its tensors is named "
            f"*.{{{','.join(EMBEDDING_NAMES)}}}.weight. Its tensors: {_some(files)}"
        )
    embed = _read(files, embed_key)
    head_key = _find(files, HEAD_NAMES, shape)
    tied = bool(getattr(config, "tie_word_embeddings", False) or text.tie_word_embeddings)
    if head_key is None and not tied:
        raise ValueError(
            f"no head of shape {list(shape)} in {path}, and its config does not tie it to the "
            f"embedding. Its tensors: {_some(files)}"
        )
    if head_key is not None and head_key.removesuffix("weight") + "bias" in files:
        raise ValueError(f"the head of {path} has a bias, which EAGLE-3 drafts cannot express")
    head = embed if tied else _read(files, head_key)
    return TargetHead(embed, head, tied, logit_post(text), *shape)


def logit_post(text_config: object) -> LogitPost | None:
    """The post-operation that the config of a target asks for, or None."""
    post = LogitPost(
        multiplier=_number(text_config, "logit_scale", 1.0)
        * _number(text_config, "lm_head_multiplier", 1.0),
        divisor=_number(text_config, "logits_scaling", 1.0),
        cap=_number(text_config, "final_logit_softcapping", None),
    )
    return None if post == LogitPost() else post


def model_folder(path: str | Path) -> Path:
    """The local folder of a model: `path` itself, or the hub cache's snapshot of it."""
    if Path(path).is_dir():
        return Path(path)
    from transformers.utils import cached_file

    return Path(cached_file(str(path), "config.json")).parent


def tensor_files(folder: Path) -> dict[str, Path]:
    """Tensor name -> safetensors file, of a sharded or a single-file checkpoint."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {key: folder / name for key, name in names.items()}
    single = folder / "model.safetensors"
    if not single.exists():
        raise ValueError(f"{folder} has no model.safetensors and no index of its shards")
    with safe_open(single, framework="pt") as file:
        return dict.fromkeys(file.keys(), single)


def _find(files: dict[str, Path], names: tuple[str, ...], shape: tuple[int, int]) -> str | None:
    """The key that ends in one of `names` and has the shape; the shortest of several."""
    found = [
        key
        for key in files
        if key.endswith(".weight") and key.split(".")[-2] in names and _shape(files, key) == shape
    ]
    return min(found, key=lambda key: (len(key), key), default=None)


def _shape(files: dict[str, Path], key: str) -> tuple[int, ...]:
    with safe_open(files[key], framework="pt") as file:
        return tuple(file.get_slice(key).get_shape())


def _read(files: dict[str, Path], key: str) -> Tensor:
    with safe_open(files[key], framework="pt") as file:
        return file.get_tensor(key)


def _number(config: object, key: str, default: float | None) -> float | None:
    value = getattr(config, key, None)
    return default if value is None else float(value)


def _some(files: dict[str, Path], limit: int = 20) -> str:
    keys = sorted(files, key=lambda key: (len(key), key))
    return ", ".join(keys[:limit]) + (", ..." if len(keys) > limit else "")
