"""Which models and modules a row-sparse layer may stand in for, and what it refuses.

A module that looks like one of these and computes something else would be trained wrongly without
a sign of it; everything here says so before that happens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

HubModel = Any  # a model of transformers: what it is made of is known at run time only


@dataclass(frozen=True)
class Family:
    """How the layers of a model class are built; head_norms: q and k are normed per head."""

    layer: str
    head_norms: bool = False


# Dense decoders: pre-norm, gated MLP, rotary positions, causal attention.
FAMILIES = {
    "Qwen3ForCausalLM": Family("Qwen3DecoderLayer", head_norms=True),
    "Qwen2ForCausalLM": Family("Qwen2DecoderLayer"),
    "LlamaForCausalLM": Family("LlamaDecoderLayer"),
    "MistralForCausalLM": Family("MistralDecoderLayer"),
}
_SPARSE_LINEARS = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def check_model_type(model_type: str) -> None:
    """Raises ValueError for the `model_type` of a config that `enable_row_sparse` would refuse."""
    known = [name.removesuffix("ForCausalLM").lower() for name in FAMILIES]
    if model_type not in known:
        raise ValueError(
            f"a draft of model type {model_type!r} is not supported: expected one of "
            f"{', '.join(known)} (dense, text only)"
        )


def family_of(model: HubModel) -> Family:
    name = type(model).__name__
    family = FAMILIES.get(name)
    is_hub_class = type(model).__module__.startswith("transformers.models.")
    if family is None or not is_hub_class:
        raise ValueError(
            f"{name} is not supported: expected one of {', '.join(FAMILIES)}, as transformers "
            "defines them (dense, text only; of a PEFT model pass get_base_model()). Mixtures of "
            "experts, vision and other backbones have layers whose rows are not computed alone"
        )
    for layer in model.model.layers:
        base = getattr(layer, "dense_class", type(layer))  # made row-sparse before
        if base.__name__ != family.layer:
            raise ValueError(
                f"{name} has a layer of type {base.__name__}, expected {family.layer}: enable "
                "row-sparse training before wrapping its layers"
            )
    return family


def shortest_window(model: HubModel) -> int | None:
    """The shortest sliding window of a model's layers."""
    found = [getattr(layer.self_attn, "sliding_window", None) for layer in model.model.layers]
    if type(model).__name__ == "MistralForCausalLM":  # all layers, named in the config only
        found.append(model.config.sliding_window)
    return min((w for w in found if w is not None), default=None)


def check_window(model: HubModel, longest: int) -> None:
    """Raises ValueError where a document of `longest` tokens exceeds a layer's sliding window."""
    window = shortest_window(model)
    if window is not None and longest > window:
        raise ValueError(
            f"a document of {longest} tokens exceeds the sliding window of {window}, which "
            "packed attention does not have: lower max_length, or set sliding_window to null in "
            "the model's config"
        )


def dense_linears(model: Any) -> tuple[str, ...]:
    """`name (what it is)` of the projections that are not plain linears, sorted."""
    found = set()
    for layer in model.model.layers:
        both = {**dict(layer.self_attn.named_children()), **dict(layer.mlp.named_children())}
        odd = [(name, both[name]) for name in _SPARSE_LINEARS if not is_plain(both[name])]
        found |= {f"{name} ({_kind(module)})" for name, module in odd}
    return tuple(sorted(found))


def is_plain(module: nn.Module) -> bool:
    """Whether a module is y = x W^T + b and nothing else.

    What changes it may leave its class as it is: hooks, a forward of its own, or a weight that is
    a tensor of another kind (quantised ones).
    """
    return (
        type(module) is nn.Linear
        and not _has_hooks(module)
        and "forward" not in vars(module)
        and type(module.weight) in (nn.Parameter, Tensor)
    )


def _kind(module: Any) -> str:
    """What a projection is that is not a plain linear."""
    if type(module) is not nn.Linear:
        return f"{type(module).__module__.partition('.')[0]}.{type(module).__name__}"
    if type(module.weight) not in (nn.Parameter, Tensor):
        return f"Linear with a weight of {type(module.weight).__name__}"
    return "Linear with hooks" if _has_hooks(module) else "Linear with a forward of its own"


def _has_hooks(module: nn.Module) -> bool:
    found = (
        module._forward_hooks, module._forward_pre_hooks,
        module._backward_hooks, module._backward_pre_hooks,
    )  # fmt: skip
    return any(found)


def check_blocks(layer: Any, family: Family) -> None:
    """Raises ValueError where a layer's attention or MLP is more than its projections."""
    number = layer.self_attn.layer_idx
    model = family.layer.removesuffix("DecoderLayer")
    for name, kind in (("self_attn", f"{model}Attention"), ("mlp", f"{model}MLP")):
        block = getattr(layer, name)
        if type(block).__name__ != kind:
            raise ValueError(
                f"layer {number} has an {name} of type {type(block).__name__}, expected {kind}: "
                "stop_grad_context_tokens runs its projections one by one; turn it off, or wrap "
                "the projections instead"
            )
        if _has_hooks(block):
            raise ValueError(
                f"a hook on {name} of layer {number} would not be called: under "
                "stop_grad_context_tokens the block's projections run one by one; hook the layer "
                "or a projection, or turn the flag off"
            )
