"""The layouts that draft checkpoints come in: names and configs, to and from this package's.

    native       what this package exports: the tensors SGLang, vLLM and TensorRT-LLM share
    speculators  layers.0.* for midlayer.*, sizes nested in transformer_layer_config
    eagle        SpecForge and EAGLE folders: native names, but a config.json whose norm_output
                 means another thing and which holds keys that change nothing

Only dictionaries are converted here; files are read in reading.py and written in writing.py.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from specforge_trim.drafts.eagle3.sizes import DraftConfig

log = logging.getLogger(__name__)

LAYOUTS = ("native", "speculators")
SPECULATORS_ARCHITECTURE = "Eagle3DraftModel"
# All of these are in a config.json of ours; other writers have some, and transformers_version.
_OWN_KEYS = {
    "torch_dtype", "dtype", "rope_parameters", "fc_norm", "norm_before_residual", "eagle_config",
}  # fmt: skip
_OTHER_ARCHITECTURES = ("LlamaForCausalLM", "Eagle3LlamaForCausalLM", "LlamaForCausalLMEagle3")


def format_of(raw: Mapping[str, Any]) -> str:
    """native, speculators or eagle, told by the keys of a config.json.

    Raises ValueError for a speculators config of another kind than eagle3.
    """
    kind = raw.get("speculators_model_type")
    if kind is not None:
        if kind != "eagle3":
            raise ValueError(f"speculators_model_type={kind!r}; expected 'eagle3'")
        return "speculators"
    own = set(raw) >= _OWN_KEYS and "transformers_version" not in raw
    return "native" if own else "eagle"


def read_config(raw: Mapping[str, Any]) -> DraftConfig:
    """The draft's configuration from a config.json in any of the formats.

    Raises ValueError for a key that this draft cannot honour or that is missing.
    """
    read = {
        "native": DraftConfig.from_dict,
        "speculators": _from_speculators,
        "eagle": _from_eagle,
    }
    return read[format_of(raw)](dict(raw))


def own_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors under this package's names: no model. prefix, midlayer for the first layer.

    Left out, with a log line: the verifier's head and norm that speculators may save, and rotary
    tables. Raises ValueError when two tensors come to one name.
    """
    out: dict[str, Tensor] = {}
    for name, value in tensors.items():
        if name.startswith("verifier_") or name.endswith("rotary_emb.inv_freq"):
            log.info("draft import: %s is not part of the draft, left out", name)
            continue
        own = name.removeprefix("model.")
        if own.startswith("layers.0."):
            own = "midlayer." + own.removeprefix("layers.0.")
        if own in out:
            raise ValueError(f"two tensors are both {own}: one of them is {name}")
        out[own] = value
    return out


def speculators_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of ours under the names of the speculators layout."""
    return {
        "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name: v
        for name, v in tensors.items()
    }


def speculators_config(
    config: DraftConfig, *, verifier: str, architectures: list[str], depth: int
) -> dict[str, Any]:
    """config.json in the speculators layout.

    verifier: name or path of the target; architectures: of its config; depth: tokens an engine
    drafts per round unless told otherwise.
    """
    own = config.to_dict()
    layer = (
        "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads "
        "num_key_value_heads head_dim hidden_act rms_norm_eps max_position_embeddings vocab_size "
        "attention_bias mlp_bias tie_word_embeddings rope_theta rope_scaling rope_parameters "
        "bos_token_id eos_token_id pad_token_id"
    )
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": depth,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    out: dict[str, Any] = {
        "architectures": [SPECULATORS_ARCHITECTURE],
        "speculators_model_type": "eagle3",
        "transformer_layer_config": {key: own[key] for key in layer.split()},
        "draft_vocab_size": config.draft_vocab_size,
        "target_hidden_size": config.target_hidden_size,
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_output": config.norm_output,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": config.dtype,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": verifier, "architectures": architectures},
        },
    }
    if config.num_aux_layers != 3:  # vLLM sizes fc by this key, which it looks for in here only
        out["transformer_layer_config"]["num_aux_hidden_states"] = config.num_aux_layers
    if config.aux_layers is not None:  # this layout counts as Hugging Face does
        out["eagle_aux_hidden_state_layer_ids"] = list(config.aux_layers)
    return out


def _from_speculators(raw: dict[str, Any]) -> DraftConfig:
    layer = raw.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError("transformer_layer_config is missing; expected the draft's sizes")
    if "norm_before_residual" not in raw:
        raise ValueError(
            "norm_before_residual is missing and readers disagree about its default (vLLM takes "
            "true, older speculators trained with false): add it to config.json"
        )
    if raw.get("tie_word_embeddings") or layer.get("tie_word_embeddings"):
        raise ValueError("tie_word_embeddings=True is not supported; expected False")
    from transformers import LlamaConfig, Qwen3Config

    kinds: dict[str, Any] = {"llama": LlamaConfig, "qwen3": Qwen3Config}
    kind = layer.get("model_type", "llama")
    if kind not in kinds:
        raise ValueError(f"transformer_layer_config.model_type={kind!r}; expected llama or qwen3")
    # The nested config may hold only what differs from its class's defaults.
    full = kinds[kind](**{key: v for key, v in layer.items() if key != "model_type"})
    same = (
        "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
        "head_dim hidden_act rms_norm_eps max_position_embeddings vocab_size attention_bias "
        "rope_parameters"
    )
    values = {key: getattr(full, key) for key in same.split()}
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        values[key] = layer.get(key)
    if values["rope_parameters"]:
        # transformers adds rope_type and rope_theta in place; the rest is the file's own.
        values["rope_parameters"] = dict(values["rope_parameters"])
    values |= {
        "model_type": kind,
        "mlp_bias": getattr(full, "mlp_bias", False),
        "draft_vocab_size": raw.get("draft_vocab_size") or full.vocab_size,
        "target_hidden_size": raw.get("target_hidden_size") or full.hidden_size,
        "dtype": raw.get("dtype") or raw.get("torch_dtype") or "bfloat16",
        "eagle_aux_hidden_state_layer_ids": raw.get("eagle_aux_hidden_state_layer_ids"),
    }
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        values[key] = bool(raw.get(key, False))
    return DraftConfig.from_dict(values)


def _from_eagle(raw: dict[str, Any]) -> DraftConfig:
    """SpecForge's and EAGLE's config.json, whose other keys are transformers' own."""
    architecture = (raw.pop("architectures", None) or ["LlamaForCausalLMEagle3"])[0]
    known = DraftConfig.known_keys()
    if architecture in _OTHER_ARCHITECTURES:
        raw["model_type"] = "llama"
    else:
        raw["architectures"] = [architecture]
    norm_output = raw.pop("norm_output", None)
    if norm_output is False:
        log.warning(
            "draft import: norm_output false: a draft that SpecForge 0.2 trained so has no norm "
            "before its head, which no engine serves; here the norm stands before the head"
        )
    elif norm_output:
        log.warning(
            "draft import: norm_output is not carried over: in SpecForge it says that a norm "
            "stands before the head, here (as in engines) that the normed state is fed back. For "
            "a draft trained as EAGLE-3.1 give a draft_config with norm_output true"
        )
    for old, new in (("truncated_vocab_size", "draft_vocab_size"),):
        if old in raw:
            raw.setdefault(new, raw.pop(old))
    if raw.get("draft_vocab_size") is None:
        raw["draft_vocab_size"] = raw.get("vocab_size")
    raw.setdefault("max_position_embeddings", 2048)
    if raw.get("num_key_value_heads") is None:
        raw["num_key_value_heads"] = raw.get("num_attention_heads")
    for key in ("head_dim", "target_hidden_size"):
        if raw.get(key, 0) is None:
            del raw[key]
    ignored = sorted(set(raw) - known)
    if ignored:
        log.info(
            "draft import: keys of config.json that mean nothing here: %s", ", ".join(ignored)
        )
    return DraftConfig.from_dict({key: value for key, value in raw.items() if key in known})
