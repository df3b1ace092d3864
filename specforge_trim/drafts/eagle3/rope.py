"""Rotary positions: the ways configurations write them -> one flat dictionary -> frequencies.

    legacy      rope_theta beside rope_scaling {type or rope_type, factor, ...}, both optional
    current     rope_parameters {rope_type, rope_theta, ...}
    per layer   rope_parameters {full_attention: {...}, sliding_attention: {...}}

A draft has one attention layer that sees everything, so of a per-layer dictionary it takes
full_attention. Multimodal positions (mrope) are plain ones for text: all three axes are equal.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger(__name__)

ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
DEFAULT_THETA = 10000.0  # what every reader takes when a config has no rope_theta
# Keys of image and video positions: with them an engine takes a text draft for a multimodal one.
MULTIMODAL_KEYS = ("mrope_section", "mrope_interleaved")
# Older names: a target's type -> the type whose table its text positions have.
_ALIASES = {"mrope": "default", "su": "longrope"}


def flat_rope(rope: Mapping[str, Any] | None) -> dict[str, Any]:
    """`rope` as one flat dictionary with rope_type and rope_theta set; None and {} are plain.

    Raises ValueError for a type that is not in ROPE_TYPES and for values of the wrong kind.
    """
    if not isinstance(rope, Mapping | None):
        raise ValueError(f"rope_parameters={rope!r}: expected an object")
    flat = dict(_one_layer_type(rope or {}))
    kind = flat.get("rope_type") or flat.get("type") or _unnamed(flat)
    flat.pop("type", None)
    flat["rope_type"] = _ALIASES.get(str(kind), kind)
    if flat["rope_type"] not in ROPE_TYPES:
        raise ValueError(
            f"rope_parameters: rope_type={kind!r} is not supported; expected one of "
            f"{', '.join(ROPE_TYPES)}. A draft need not have its target's type: set "
            "rope_parameters to {rope_type: default, rope_theta: ...}"
        )
    if flat.get("rope_theta") is None:
        flat["rope_theta"] = DEFAULT_THETA
    for key, low, high in (("rope_theta", 0.0, None), ("partial_rotary_factor", 0.0, 1.0)):
        value = flat.get(key, 1.0)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low < value < math.inf or (high is not None and value > high):
            limit = "" if high is None else f" and at most {high:g}"
            raise ValueError(f"{key}={value!r}: expected a number above {low:g}{limit}")
    if flat.get("partial_rotary_factor") == 1:  # all of them, as without the key
        del flat["partial_rotary_factor"]
    return flat


def _unnamed(rope: Mapping[str, Any]) -> str:
    """The type of a dictionary that names none: plain, unless numbers of a scaling are in it."""
    if rope.get("factor") not in (None, 1):
        raise ValueError(
            f"rope_parameters: factor={rope['factor']!r} without a rope_type; expected one of "
            f"{', '.join(ROPE_TYPES)} beside it"
        )
    return "default"


def _one_layer_type(rope: Mapping[str, Any]) -> Mapping[str, Any]:
    """The entry of full attention where `rope` has one per layer type, else `rope` itself."""
    nested = {k: v for k, v in rope.items() if isinstance(v, Mapping)}
    if not nested:
        return rope
    if "full_attention" in nested:
        chosen = "full_attention"
    elif len(nested) == 1:
        (chosen,) = nested
    else:
        raise ValueError(
            f"rope_parameters has entries {', '.join(sorted(nested))} and none is "
            "full_attention: give the draft one flat rope_parameters"
        )
    log.info("rope_parameters per layer type: the draft takes %s %s", chosen, nested[chosen])
    return nested[chosen]


def merged_rope(
    rope_parameters: Mapping[str, Any] | None,
    *,
    rope_scaling: Mapping[str, Any] | None,
    rope_theta: float | None,
) -> dict[str, Any]:
    """The flat form of a config that may hold current keys, legacy keys, or both.

    Raises ValueError when they contradict each other.
    """
    rope = dict(_one_layer_type(rope_parameters or {}))
    older = dict(rope_scaling or {})
    if "type" in older:
        older.setdefault("rope_type", older["type"])
    older.pop("type", None)
    if rope_theta is not None:
        older["rope_theta"] = rope_theta
    for key, value in older.items():
        if rope.get(key, value) != value:
            raise ValueError(f"rope_parameters[{key!r}]={rope[key]!r} contradicts older {value!r}")
        rope.setdefault(key, value)
    return flat_rope(rope)


def rotary_dim(rope: Mapping[str, Any], *, head_dim: int) -> int:
    """How many of the H dimensions are rotated: all, or the share partial_rotary_factor."""
    return int(head_dim * rope.get("partial_rotary_factor", 1.0))


def rope_frequencies(
    rope_parameters: Mapping[str, Any], *, head_dim: int, max_position_embeddings: int
) -> tuple[Tensor, float]:
    """Inverse frequencies [rotary_dim / 2] in fp64 and the scale applied to cos and sin.

    Plain positions are computed here in fp64, so that a double-precision model is exact; scaled
    ones come from transformers' own functions (fp32). Two types depend on the sequence length,
    and cached keys allow one choice: both take max_position_embeddings, the longest sequence an
    engine serves. `dynamic` then is unscaled up to that limit and `longrope` uses its long
    factors when the limit exceeds the original one.

    Raises ValueError for an unknown type, a missing key, or an odd number of rotated dimensions.
    """
    rope = flat_rope(rope_parameters)
    kind = rope["rope_type"]
    width = rotary_dim(rope, head_dim=head_dim)
    if width < 2 or width % 2:
        raise ValueError(
            f"head_dim={head_dim}: rotary positions need an even number of dimensions, and "
            f"partial_rotary_factor={rope.get('partial_rotary_factor', 1.0)} gives {width}"
        )
    if kind == "default":
        exponent = torch.arange(0, width, 2, dtype=torch.float64, device="cpu") / width
        return float(rope["rope_theta"]) ** -exponent, 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    known = {key: value for key, value in rope.items() if key not in MULTIMODAL_KEYS}
    _check_factor_lists(rope, pairs=width // 2)
    try:
        # Tables are numbers even while a model is laid out on the meta device.
        with torch.device("cpu"):
            config = LlamaConfig(
                hidden_size=head_dim,
                num_attention_heads=1,
                head_dim=head_dim,
                max_position_embeddings=max_position_embeddings,
                rope_parameters=known,
            )
            inv_freq, scale = ROPE_INIT_FUNCTIONS[kind](
                config, torch.device("cpu"), seq_len=max_position_embeddings
            )
    except (KeyError, TypeError, ValueError, RuntimeError, ArithmeticError) as error:
        raise ValueError(f"rope_parameters of type {kind}: {error}") from None
    if not (
        bool((inv_freq > 0).all()) and bool(inv_freq.isfinite().all()) and 0 < scale < math.inf
    ):
        raise ValueError(
            f"rope_parameters of type {kind}: {known} give frequencies that are not finite and "
            "positive; expected positive factors"
        )
    return inv_freq.double(), float(scale)


def _check_factor_lists(rope: Mapping[str, Any], *, pairs: int) -> None:
    """Raise ValueError for a list of longrope that has not one factor per rotated pair.

    A list of one factor would be spread over all of them without a word.
    """
    for key in ("short_factor", "long_factor"):
        value = rope.get(key)
        if value is None:  # transformers names what it misses
            continue
        if not isinstance(value, list | tuple) or len(value) != pairs:
            found = f"{len(value)} numbers" if isinstance(value, list | tuple) else repr(value)
            raise ValueError(
                f"rope_parameters: {key} has {found}; expected a list of {pairs}, "
                "one per pair of rotated dimensions"
            )
