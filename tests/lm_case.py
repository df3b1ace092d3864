"""Small dense language models and packed streams, with the dense reference of a cut gradient.

The reference runs each document through the model as transformers wrote it, with a plain masked
softmax as its attention, and cuts the gradient by `torch.where` at every decoder-layer input. It
shares nothing with the package.
"""

from __future__ import annotations

import types
from dataclasses import dataclass

import torch
from torch import nn
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

SIZES = {
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
# The biases that a family can have are on.
FAMILIES = {
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"attention_bias": True}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "llama": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
}


def double_norm(self, x):
    """RMS norm in its input's precision; transformers' own rounds to fp32."""
    return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def plain_attention(module, q, k, v, attention_mask, scaling, **_):
    """[1, N, L, H] by one masked softmax in the inputs' precision."""
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    later = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    scores = (q @ k.transpose(2, 3) * scaling).masked_fill(later, float("-inf"))
    return (scores.softmax(-1) @ v).transpose(1, 2), None


AttentionInterface.register("plain_reference", plain_attention)


def make_model(family: str, *, seed: int = 0, dtype=torch.float64, **sizes) -> nn.Module:
    model_class, config_class, extra = FAMILIES[family]
    model = model_class(config_class(**{**SIZES, **extra, **sizes}))
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() == 1:
                p.copy_(torch.randn(p.shape, generator=gen) * 0.2 + ("norm" in name))
            else:
                p.copy_(torch.randn(p.shape, generator=gen) * p.shape[1] ** -0.5)
    model = model.to(dtype)
    if dtype == torch.float64:
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = types.MethodType(double_norm, module)
    return model.train()


@dataclass
class Stream:
    """Documents end to end; mask[t]: token t is scored."""

    ids: torch.Tensor
    mask: torch.Tensor
    lengths: list[int]

    @property
    def cu(self):
        return torch.tensor([0, *self.lengths]).cumsum(0)

    @property
    def positions(self):
        return torch.cat([torch.arange(n) for n in self.lengths])

    @property
    def labels(self):
        return torch.cat([self.ids[1:], self.ids[:1]])

    def kept(self):
        """bool [T]: rows whose next token, in the same document, is scored; written as a loop."""
        out, start = [False] * len(self.ids), 0
        for n in self.lengths:
            for t in range(start, start + n - 1):
                out[t] = bool(self.mask[t + 1])
            start += n
        return torch.tensor(out)


def make_stream(masks, *, vocab=53, seed=0) -> Stream:
    """One document per mask, a string of 0 and 1."""
    lengths = [len(m) for m in masks]
    gen = torch.Generator().manual_seed(seed + 100)
    ids = torch.randint(vocab, (sum(lengths),), generator=gen)
    return Stream(ids, torch.tensor([c == "1" for m in masks for c in m]), lengths)


def reference_step(model, stream, *, cut=True, weight=0.1):
    """(loss, {name: gradient}) of the dense computation, a document at a time."""
    model.set_attn_implementation("plain_reference")
    kept = stream.kept()
    total = torch.zeros((), dtype=torch.float64)
    start = 0
    for n in stream.lengths:
        keep = kept[start : start + n]

        def hook(module, args, kwargs, keep=keep):
            h = args[0] if args else kwargs.pop("hidden_states")
            return (torch.where(keep[None, :, None], h, h.detach()), *args[1:]), kwargs

        handles = [
            layer.register_forward_pre_hook(hook, with_kwargs=True)
            for layer in (model.model.layers if cut else ())
        ]
        ids = stream.ids[start : start + n]
        logits = model(input_ids=ids[None]).logits[0].to(torch.float64)
        for handle in handles:
            handle.remove()
        log_probs = logits.log_softmax(-1)
        for t in range(n - 1):
            if keep[t]:
                total = total - weight * log_probs[t, ids[t + 1]]
        start += n
    model.zero_grad()
    total.backward() if total.requires_grad else None
    grads = {k: torch.zeros(p.shape, dtype=p.dtype) if p.grad is None else p.grad.clone()
             for k, p in model.named_parameters()}  # fmt: skip
    model.zero_grad()
    return total.detach(), grads
