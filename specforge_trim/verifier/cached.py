"""One sequence's target state while decoding: the model's own cache, and its aux states.

Letters: R tokens of one pass, A aux layers, Dt target width, V vocabulary.
"""

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache


@dataclass(frozen=True)
class TargetPass:
    """What one pass of the target gives.

    choices: greedy next tokens after the last `keep` of the R tokens, int64 [keep];
    gaps: by how much the best logit leads the second best, fp32 [keep];
    aux: aux states of all R tokens, [R, A*Dt];
    logits: what choices were made from, fp32 [keep, V].
    """

    choices: tuple[int, ...]
    gaps: tuple[float, ...]
    aux: Tensor
    logits: Tensor


class CachedTarget:
    """A causal language model and the cache of one sequence. No gradient is kept.

    `model` is a transformers model with a head; `aux_layers` are Hugging Face numbers
    (k = the output after k layers).
    """

    def __init__(self, model: Any, aux_layers: Sequence[int]) -> None:
        self.model = model
        self.aux_layers = tuple(aux_layers)
        self.length = 0
        # Without a config every layer keeps all its entries, sliding ones too: only then can
        # rejected tokens be cut off again. The window stays in the attention mask.
        self._cache = DynamicCache()
        parameters = inspect.signature(model.forward).parameters
        self._cache_key = "cache" if "cache" in parameters else "past_key_values"

    @torch.no_grad()
    def advance(self, ids: Sequence[int] | Tensor, *, keep: int) -> TargetPass:
        """Run R more tokens and cache them; choices and gaps for the last `keep` of them."""
        device = self.model.get_input_embeddings().weight.device
        input_ids = torch.as_tensor(ids, dtype=torch.int64, device=device)[None]
        states: dict[int, Tensor] = {}

        def saver(layer: int) -> Any:
            def save(_module: Any, _inputs: Any, output: Any) -> None:
                states[layer] = (output[0] if isinstance(output, tuple) else output)[0]

            return save

        layers = self.model.get_decoder().layers
        hooks = [layers[k - 1].register_forward_hook(saver(k)) for k in self.aux_layers]
        try:
            output = self.model(
                input_ids,
                use_cache=True,
                logits_to_keep=keep,
                **{self._cache_key: self._cache},
            )
        finally:
            for hook in hooks:
                hook.remove()
        self.length += input_ids.shape[1]
        logits_KV = output.logits[0].float()
        best = logits_KV.topk(2, dim=-1).values
        return TargetPass(
            choices=tuple(logits_KV.argmax(-1).tolist()),
            gaps=tuple((best[:, 0] - best[:, 1]).tolist()),
            aux=torch.cat([states[k] for k in self.aux_layers], dim=-1),
            logits=logits_KV,
        )

    def rewind(self, length: int) -> None:
        """Forget every token from position `length` on."""
        assert 0 < length <= self.length, (length, self.length)
        if length < self.length:
            self._cache.crop(length - self.length)  # a negative number counts what to remove
        self.length = length
