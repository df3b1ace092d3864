"""Read the target's embedding and head from its files, without loading the model.

Letters: V target vocabulary, Dt target hidden.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
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
    files = TensorFiles(path)
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
    head = embed if tied or head_key is None else _read(files, head_key)
    return TargetHead(embed, head, tied, logit_post(text), *shape)


def logit_post(text_config: object) -> LogitPost | None:
    """The post-operation that the config of a target asks for, or None."""
    cap = getattr(text_config, "final_logit_softcapping", None)
    post = LogitPost(
        multiplier=_number(text_config, "logit_scale")
        * _number(text_config, "lm_head_multiplier"),
        divisor=_number(text_config, "logits_scaling"),
        cap=None if cap is None else float(cap),
    )
    return None if post == LogitPost() else post


def model_folder(path: str | Path) -> Path:
    """The local folder of a model: `path` itself, or the hub cache's snapshot of it."""
    if Path(path).is_dir():
        return Path(path)
    from transformers.utils import cached_file

    config = cached_file(str(path), "config.json")
    assert config is not None, path  # it raises where there is none
    return Path(config).parent


class TensorFiles(Mapping[str, Path]):
    """Tensor name -> safetensors file of a folder or hub id, sharded or single.

    A file of the hub is fetched when a tensor of it is asked for, and no other one is.
    Raises ValueError when there is neither an index of shards nor a single file.
    """

    def __init__(self, path: str | Path) -> None:
        self._where = path
        single = "model.safetensors"
        index = self._file(f"{single}.index.json")
        if index is not None:
            self._names = shard_names(index)
            return
        only = self._file(single)
        if only is None:
            raise ValueError(f"{path} has no {single} and no index of its shards")
        with opened(only) as file:
            self._names = dict.fromkeys(file.keys(), single)

    def _file(self, name: str) -> Path | None:
        """The file on this disk, None where the model has none of that name."""
        if Path(self._where).is_dir():
            file = Path(self._where) / name
            return file if file.exists() else None
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError

        try:
            return Path(hf_hub_download(str(self._where), name))
        except EntryNotFoundError:
            return None

    def __getitem__(self, tensor: str) -> Path:
        file = self._file(self._names[tensor])
        if file is None:
            raise ValueError(
                f"{self._where}: {self._names[tensor]}, which holds {tensor}, is missing"
            )
        return file

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """The safetensors file at `path`; ValueError names it when it is damaged or lacks a tensor."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        with path.open("rb") as raw:
            is_pointer = raw.read(40).startswith(b"version https://git-lfs")
        reason = "a Git LFS pointer, not the file itself (git lfs pull)" if is_pointer else error
        raise ValueError(f"{path}: {reason}; fetch the target's file again") from None


def shard_names(index: Path) -> dict[str, str]:
    """Tensor name -> file name from an index of shards. Raises ValueError naming the index."""
    try:
        names = json.loads(index.read_text("utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError):
        names = None
    if not isinstance(names, dict) or not all(isinstance(n, str) for n in names.values()):
        raise ValueError(f"{index}: no weight_map of tensor names to files; fetch the file again")
    return names


def _find(files: TensorFiles, names: tuple[str, ...], shape: tuple[int, int]) -> str | None:
    """The key that ends in one of `names` and has the shape; the shortest of several."""
    ends = tuple(f"{name}.weight" for name in names)
    likely = [k for k in files if k in ends or k.endswith(tuple(f".{end}" for end in ends))]
    # The shape may cost a download, so it is asked of one after the other.
    return next(
        (k for k in sorted(likely, key=lambda k: (len(k), k)) if _shape(files, k) == shape), None
    )


def _shape(files: TensorFiles, key: str) -> tuple[int, ...]:
    with opened(files[key]) as file:
        return tuple(file.get_slice(key).get_shape())


def _read(files: TensorFiles, key: str) -> Tensor:
    with opened(files[key]) as file:
        return file.get_tensor(key)


def _number(config: object, key: str) -> float:
    value = getattr(config, key, None)
    return 1.0 if value is None else float(value)


def _some(files: TensorFiles, limit: int = 20) -> str:
    keys = sorted(files, key=lambda key: (len(key), key))
    return ", ".join(keys[:limit]) + (", ..." if len(keys) > limit else "")
