"""A draft's sizes from its target's own configuration. Only the fields named here are copied.

    hidden_size, vocab_size, rms_norm_eps, max_position_embeddings, rope, token ids
                        the target's (hidden_size is also target_hidden_size)
    heads, head_dim     the target's. Targets with latent attention (DeepSeek) have no such heads:
                        heads of v_head_dim, as many as fill the width, in groups of at most 8
    intermediate_size   the target's; a mixture of experts: the width one token passes through,
                        experts per token x expert width, shared experts included

Sliding windows, attention biases, q/k norms, logit scales, caps and whatever else a target may
have stay the target's own. Biases and q/k norm are left out on purpose: engines share no layout
for drafts that have them.
"""

from __future__ import annotations

import math
from typing import Any

from specforge_trim.drafts.eagle3.rope import MULTIMODAL_KEYS
from specforge_trim.drafts.eagle3.sizes import DraftConfig

_EPS_NAMES = ("rms_norm_eps", "layer_norm_eps", "norm_eps", "layer_norm_epsilon")
_EXPERTS_PER_TOKEN = ("num_experts_per_tok", "moe_topk", "top_k_experts")
_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")


def draft_for_target(config: Any, *, draft_vocab_size: int | None = None) -> DraftConfig:
    """One decoder layer for the target of a transformers `config` (its text part is used).

    draft_vocab_size: None = the target's whole vocabulary. Raises ValueError naming the field
    that the target's configuration lacks, or a rope type that no draft can have.
    """
    text = config.get_text_config()
    heads, kv_heads, head_dim = _attention(text)
    rope = getattr(text, "rope_parameters", None) or {}
    return DraftConfig(
        hidden_size=_need(text, "hidden_size"),
        intermediate_size=mlp_width(text),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=_need(text, "vocab_size"),
        draft_vocab_size=draft_vocab_size or text.vocab_size,
        target_hidden_size=text.hidden_size,
        max_position_embeddings=_need(text, "max_position_embeddings"),
        rms_norm_eps=_first(text, _EPS_NAMES, 1e-5),
        rope_parameters={k: v for k, v in rope.items() if k not in MULTIMODAL_KEYS},
        bos_token_id=_id(config, text, "bos_token_id"),
        eos_token_id=_id(config, text, "eos_token_id"),
        pad_token_id=_id(config, text, "pad_token_id"),
    )


def mlp_width(text: Any) -> int:
    """Width of the MLP that a token passes through in one layer of the target."""
    per_token = _first(text, _EXPERTS_PER_TOKEN, None)
    if not per_token or not _first(text, _EXPERTS, None):
        return _need(text, "intermediate_size")
    own_width = getattr(text, "moe_intermediate_size", None)
    expert = own_width or _need(text, "intermediate_size")
    shared = getattr(text, "shared_expert_intermediate_size", None) or 0
    if not shared:
        shared = expert * (getattr(text, "n_shared_experts", None) or 0)
    if getattr(text, "model_type", "") == "llama4_text":
        shared = expert  # one shared expert beside the routed ones, of the same width
    return int(per_token) * int(expert) + int(shared)


def _attention(text: Any) -> tuple[int, int, int]:
    """(query heads, key/value heads, head_dim)."""
    width, heads = _need(text, "hidden_size"), _need(text, "num_attention_heads")
    if getattr(text, "kv_lora_rank", None):
        head_dim = _need(text, "v_head_dim")
        heads = max(1, width // head_dim)
        return heads, math.gcd(heads, 8), head_dim
    kv_heads = getattr(text, "num_key_value_heads", None) or heads
    return heads, kv_heads, getattr(text, "head_dim", None) or width // heads


def _need(text: Any, key: str) -> int:
    value = getattr(text, key, None)
    if value is None:
        raise ValueError(f"the target's configuration has no {key}: write a draft config by hand")
    return int(value)


def _first(text: Any, names: tuple[str, ...], default: Any) -> Any:
    found = (getattr(text, name, None) for name in names)
    return next((value for value in found if value is not None), default)


def _id(config: Any, text: Any, key: str) -> Any:
    value = getattr(text, key, None)
    return getattr(config, key, None) if value is None else value
