"""Hugging Face dense models on a packed stream, with gradients through kept rows only if asked.

    for every decoder layer, from its input h [1, T, D]:
        x      h, the gradient of rows that are not kept cut (mask_grad)
        n      input_layernorm(x)                     all rows, forward and backward
        k, v   of n                                   all rows, forward and backward
        q      of n, attention, o, MLP                forward all rows, backward kept rows
    which equals the dense backward of `torch.where(keep, h, h.detach())` at every layer input

The forward runs the operations of the model's own layer on the same shapes, so its bits are those
of a run without the flag. Models whose layers are of another kind are refused.

Letters: T tokens, R kept rows, D width, N heads, M key/value heads, H head dim.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from specforge_trim.drafts.lm.families import (
    Family,
    HubModel,
    check_blocks,
    check_window,
    dense_linears,
    family_of,
    is_plain,
)
from specforge_trim.drafts.lm.functions import (
    PackedAttention,
    Rows,
    as_rows,
    join_rows,
    kept_attention,
    mask_grad,
    packed_attention,
    row_linear,
    take_rows,
)
from specforge_trim.drafts.lm.rows import RowPlan

logger = logging.getLogger(__name__)

ATTENTION = "specforge_trim_packed"
_WARNED = "_row_sparse_dense_linears"  # a model's attribute: those that a warning has named


@dataclass(frozen=True)
class RowSparseSettings:
    """What is left out.

    skip_masked_lm_head_tokens: head and losses at kept rows only; exact.
    stop_grad_context_tokens: gradients through kept rows only; needs the former.
    attention: how the packed stream attends.
    """

    skip_masked_lm_head_tokens: bool = True
    stop_grad_context_tokens: bool = False
    attention: PackedAttention = field(default_factory=PackedAttention)

    def __post_init__(self) -> None:
        if self.stop_grad_context_tokens and not self.skip_masked_lm_head_tokens:
            raise ValueError(
                "stop_grad_context_tokens needs skip_masked_lm_head_tokens: a head that reads "
                "every row would send gradients into rows that are cut; turn it on, or drop "
                "stop_grad_context_tokens"
            )


def enable_row_sparse(model: HubModel, settings: RowSparseSettings) -> None:
    """Make a Hugging Face model run packed streams, in place; `hidden_states` then runs it.

    Call it before FSDP2's `fully_shard`, in any order with activation checkpointing and with
    the replacement of linears (LoRA, quantisation).

    Raises ValueError for a model that is not a dense Qwen3, Qwen2, Llama or Mistral of
    transformers, for attention dropout, and under stop_grad_context_tokens for hooks on attention
    or MLP blocks. Warns once where a linear is not plain: its backward then stays dense, and is
    exact.
    """
    family = family_of(model)
    if getattr(model.config, "attention_dropout", 0.0):
        raise ValueError(
            f"attention_dropout = {model.config.attention_dropout}: packed attention has no "
            "dropout; set it to 0 in the model's config"
        )
    _register_attention()
    _set_attention(model, ATTENTION)
    layers = model.model.layers
    _restore_layers(model)
    if not settings.stop_grad_context_tokens:
        return
    _check_layers(model, family)
    for layer in layers:
        layer.__class__ = _sparse_class(type(layer), family)


def _check_layers(model: HubModel, family: Family) -> None:
    """Refuses blocks that would be passed by; warns, once, of linears whose backward is dense."""
    for layer in model.model.layers:
        check_blocks(layer, family)
    dense = dense_linears(model)
    if dense and dense != getattr(model, _WARNED, ()):
        logger.warning(
            "stop_grad_context_tokens: the backward of %s stays dense, since they are not plain "
            "linears; gradients are the same, the time is not",
            ", ".join(dense),
        )
    setattr(model, _WARNED, dense)


def _check_enabled(model: Any, settings: RowSparseSettings) -> None:
    """The layers cut gradients or don't; settings that say otherwise would be passed by."""
    layers = model.model.layers
    packed = all(layer.self_attn.config._attn_implementation == ATTENTION for layer in layers)
    cuts = {isinstance(layer, _Sparse) for layer in layers}
    if not packed or cuts != {settings.stop_grad_context_tokens}:
        found = f"stop_grad_context_tokens = {True in cuts}" if packed else "nothing"
        raise ValueError(
            f"hidden_states with stop_grad_context_tokens = {settings.stop_grad_context_tokens}, "
            f"but the model is set up for {found}: call enable_row_sparse with the same settings"
        )


def disable_row_sparse(model: HubModel) -> None:
    """Give a model its own layers and attention back."""
    _restore_layers(model)
    _set_attention(model, "sdpa")


def _restore_layers(model: HubModel) -> None:
    for layer in model.model.layers:
        if isinstance(layer, _Sparse):
            layer.__class__ = layer.dense_class


def hidden_states(
    model: HubModel,
    input_ids: Tensor,
    position_ids: Tensor,
    plan: RowPlan,
    *,
    settings: RowSparseSettings,
) -> Tensor:
    """Final hidden states [T, D], after the last norm, of a packed stream.

    input_ids, position_ids: int64 [T], positions restarting per document; all on the model's
    device, the plan's index tensors too. Rows of `plan` are those a loss may read. Under FSDP2
    call it, and the head, inside the root module's forward.

    Raises ValueError where a document is longer than the model's sliding window, where the model
    was not set up with these settings, and as `enable_row_sparse` for what has been done to the
    layers since.
    """
    _check_enabled(model, settings)
    if settings.stop_grad_context_tokens:
        _check_layers(model, family_of(model))
    check_window(model, plan.longest)
    output = model.model(
        input_ids=input_ids[None],
        position_ids=position_ids[None],
        use_cache=False,
        rows=plan,
        packed=settings.attention,
    )
    return output.last_hidden_state[0]


# ---------------------------------------------------------------------- attention


def _set_attention(model: HubModel, name: str) -> None:
    """Every layer reads its own config, which need not be the model's (one that lost layers)."""
    model.set_attn_implementation(name)
    for layer in model.model.layers:
        layer.self_attn.config._attn_implementation = name


def _register_attention() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _packed_attention)


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    rows: RowPlan | None = None,
    packed: PackedAttention | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention interface: [1, heads, T, H] in, [1, T, N, H] out."""
    if rows is None or packed is None:
        raise ValueError(
            "this model is set up for packed streams: run it with row_sparse.hidden_states, or "
            "call disable_row_sparse first"
        )
    assert attention_mask is None, "documents are kept apart by the plan"
    q, k, v = (_heads(x, value.dtype) for x in (query, key, value))
    return packed_attention(q, k, v, rows, how=packed, scale=scaling)[None], None


def _heads(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[1, heads, T, H] -> [T, heads, H]; under autocast norms and rotations widen q and k."""
    return x[0].transpose(0, 1).to(dtype)


# ---------------------------------------------------------------------- the layer


class _Sparse:
    """Marks layers whose backward runs kept rows only; dense_class: what they were."""

    family: Family
    dense_class: type


_CLASSES: dict[Any, type] = {}


def _sparse_class(base: Any, family: Family) -> type:
    """A layer class with the row-sparse forward; transformers adds checkpointing to it."""
    if issubclass(base, _Sparse):
        return base
    if base not in _CLASSES:

        def forward(
            self: Any,
            hidden_states: Tensor,
            attention_mask: Tensor | None = None,
            position_ids: Tensor | None = None,
            cache: Any = None,
            use_cache: bool | None = False,
            position_embeddings: tuple[Tensor, Tensor] | None = None,
            *,
            rows: RowPlan | None = None,
            packed: PackedAttention | None = None,
            **_: Any,
        ) -> Tensor:
            assert rows is not None and packed is not None, "run it with row_sparse.hidden_states"
            assert position_embeddings is not None and cache is None
            if rows.keeps_all:  # nothing is cut
                return base.forward(
                    self, hidden_states, attention_mask, position_ids,
                    position_embeddings=position_embeddings, rows=rows, packed=packed,
                )  # fmt: skip
            return _run_layer(self, hidden_states, position_embeddings, rows, packed)

        members = {"forward": forward, "family": family, "dense_class": base}
        _CLASSES[base] = type(f"RowSparse{base.__name__}", (_Sparse, base), members)
    return _CLASSES[base]


def _run_layer(
    layer: Any,
    hidden: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    plan: RowPlan,
    packed: PackedAttention,
) -> Tensor:
    """A decoder layer [1, T, D] -> [1, T, D]; see the module."""
    x = mask_grad(hidden, plan)
    attended = _run_attention(layer, layer.input_layernorm(x), position_embeddings, plan, packed)
    h = as_rows(x, plan) + attended
    y = h.map(layer.post_attention_layernorm)
    mlp = layer.mlp
    gate = _linear(mlp.gate_proj, y, plan).map(mlp.act_fn)
    up = _linear(mlp.up_proj, y, plan)
    with torch.no_grad():
        full = gate.full * up.full
    product = Rows(full, gate.kept * up.kept)
    return join_rows(h + _linear(mlp.down_proj, product, plan), plan)


def _run_attention(
    layer: Any,
    normed: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    plan: RowPlan,
    packed: PackedAttention,
) -> Rows:
    """The attention block's output of all rows, from input_layernorm's [1, T, D]."""
    attention, norms = layer.self_attn, layer.family.head_norms
    rotate = _rotation(layer)
    cos, sin = position_embeddings
    width = (-1, attention.head_dim)

    q = _linear(attention.q_proj, as_rows(normed, plan), plan)
    q = q.map(lambda x: x.unflatten(-1, width))
    k = attention.k_proj(normed).unflatten(-1, width)
    v = attention.v_proj(normed).unflatten(-1, width)
    if norms:
        q, k = q.map(attention.q_norm), attention.k_norm(k)
    k = rotate(k, cos, sin)
    with torch.no_grad():
        full = rotate(q.full, cos, sin)
    kept = rotate(q.kept, take_rows(cos, plan), take_rows(sin, plan))

    o = kept_attention(
        Rows(full[0].to(v.dtype), kept[0].to(v.dtype)),
        k[0].to(v.dtype),
        v[0],
        plan,
        how=packed,
        scale=attention.scaling,
    )
    return _linear(attention.o_proj, o.map(lambda x: x.flatten(1)[None]), plan)


def _rotation(layer: Any) -> Any:
    """The model's own rotation of [1, T, heads, H] by cos, sin [1, T, H]."""
    source = sys.modules[layer.dense_class.__module__]

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
        return (x * cos) + (source.rotate_half(x) * sin)

    return rotate


def _linear(module: Any, x: Rows, plan: RowPlan) -> Rows:
    """A projection of all rows, its backward over kept rows where the module is a plain linear."""
    if is_plain(module):
        return row_linear(x, module.weight, module.bias, plan)
    # The gradient of its output is zero at all other rows, so the dense backward is exact.
    return as_rows(module(join_rows(x, plan)), plan)
