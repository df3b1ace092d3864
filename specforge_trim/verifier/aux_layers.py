"""The one place that knows which hidden states of the target a draft reads, in every numbering.

    id k in                                      means
    Hugging Face hidden_states, vLLM, speculators   output after k layers (0 = embedding)
    SGLang, SpecForge, TorchSpec, TensorRT-LLM      output of the 0-based layer k

This package uses the first numbering everywhere; the second appears in exported configs only.
"""

from collections.abc import Sequence

MIN_LAYERS_FOR_DEFAULT = 7


def default_aux_layers(num_layers: int) -> tuple[int, ...]:
    """2, n // 2, n - 3: what engines read when a draft's config names no ids.

    Raises ValueError for fewer than 7 layers, where these are not distinct and in order.
    """
    if num_layers < MIN_LAYERS_FOR_DEFAULT:
        raise ValueError(
            f"aux_layers is not set and the target has {num_layers} layers: the default "
            f"(2, n // 2, n - 3) needs at least {MIN_LAYERS_FOR_DEFAULT}. Set aux_layers to "
            f"ascending ids between 1 and {num_layers}"
        )
    return (2, num_layers // 2, num_layers - 3)


def resolve_aux_layers(num_layers: int, ids: Sequence[int] | None = None) -> tuple[int, ...]:
    """The ids to read (Hugging Face numbering): `ids` checked, or the default for None.

    Raises ValueError unless they are ascending, distinct and within 1..num_layers. Id num_layers
    is the output of the last layer before the final norm.
    """
    if ids is None:
        return default_aux_layers(num_layers)
    found = tuple(ids)
    integers = all(isinstance(k, int) and not isinstance(k, bool) for k in found)
    if not found or not integers or list(found) != sorted(set(found)):
        raise ValueError(f"aux_layers is {list(found)}, expected ascending distinct integers")
    if found[0] < 1 or found[-1] > num_layers:
        raise ValueError(
            f"aux_layers is {list(found)}, expected ids between 1 and {num_layers}, the number of "
            "the target's layers (id k = output after k layers)"
        )
    return found


def to_sglang(ids: Sequence[int]) -> tuple[int, ...]:
    """Ids in the numbering of SGLang, SpecForge and TensorRT-LLM: one less."""
    return tuple(k - 1 for k in ids)


def from_sglang(ids: Sequence[int]) -> tuple[int, ...]:
    """Ids of SGLang, SpecForge or TensorRT-LLM in Hugging Face numbering: one more."""
    return tuple(k + 1 for k in ids)


def exported_aux_keys(num_layers: int, ids: Sequence[int]) -> dict:
    """Config keys that tell serving engines the ids; {} for the default, which they assume.

    vLLM looks at the top level (Hugging Face numbering) first, SGLang in eagle_config only.
    """
    ids = resolve_aux_layers(num_layers, ids)
    if num_layers >= MIN_LAYERS_FOR_DEFAULT and ids == default_aux_layers(num_layers):
        return {}
    return {
        "eagle_aux_hidden_state_layer_ids": list(ids),
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": list(to_sglang(ids)),
        },
    }
