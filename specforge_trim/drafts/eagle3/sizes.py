"""The draft model's configuration file: one frozen dataclass, Hugging Face style JSON on disk.

The keys are the ones that serving engines read (`config.json` of an exported draft), so a
configuration under `configs/` and the one beside exported weights are the same file.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specforge_trim.drafts.eagle3.rope import flat_rope, merged_rope

if TYPE_CHECKING:
    from specforge_trim.plan.cost import DraftDims

ARCHITECTURE = "LlamaForCausalLMEagle3"
# vLLM's class for drafts with q/k norm; SGLang and TensorRT-LLM have none.
QK_NORM_ARCHITECTURE = "Eagle3Qwen3ForCausalLM"

# Keys that a draft of this kind has one value for: accepted when they agree, refused when they
# do not, and written on export.
_FIXED: dict[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
SWITCHES = (
    "attention_bias",
    "qk_norm",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
)
_DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True)
class DraftConfig:
    """Sizes and switches of an EAGLE-3 draft.

    `aux_layers` are Hugging Face numbers (k = the output after k layers); None = the default
    three of the target. The switches, and who reads them besides this package:

        fc_norm, norm_output    EAGLE-3.1 when both are on: an RMSNorm per aux layer before fc;
                                the fed-back state is the final norm's output   all engines
        norm_before_residual    the residual of attention is hidden_norm(g)     vLLM
        norm_before_fc          one RMSNorm over all aux layers before fc       vLLM
        attention_bias          biases on q, k, v and o                         vLLM
        qk_norm                 RMSNorm over each query and key head            vLLM
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    vocab_size: int
    draft_vocab_size: int
    head_dim: int
    target_hidden_size: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-5
    rope_parameters: dict[str, Any] = dataclasses.field(
        default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0}
    )
    num_hidden_layers: int = 1
    num_aux_layers: int = 3
    aux_layers: tuple[int, ...] | None = None
    fc_norm: bool = False
    norm_output: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    attention_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        positive = (
            "hidden_size intermediate_size num_attention_heads num_key_value_heads vocab_size "
            "draft_vocab_size head_dim target_hidden_size max_position_embeddings "
            "num_hidden_layers num_aux_layers"
        )
        for name in positive.split():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name}={value!r}: expected a whole number of at least 1")
        self._check_types()
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(
                f"draft_vocab_size={self.draft_vocab_size} exceeds the target's "
                f"vocab_size={self.vocab_size}; choose at most {self.vocab_size}"
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is no multiple of "
                f"num_key_value_heads={self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim}: rotary positions need an even number")
        if self.fc_norm and self.norm_before_fc:
            raise ValueError(
                "fc_norm and norm_before_fc both norm what fc reads; set one of them to false"
            )
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: expected one of {', '.join(_DTYPES)}")
        if self.aux_layers is not None and len(self.aux_layers) != self.num_aux_layers:
            raise ValueError(
                f"aux_layers={list(self.aux_layers)} names {len(self.aux_layers)} layers but "
                f"num_aux_layers={self.num_aux_layers}"
            )

    def _check_types(self) -> None:
        """What JSON may hold but the model cannot use."""
        for name in SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r}: expected true or false")
        object.__setattr__(self, "rope_parameters", flat_rope(self.rope_parameters))
        eps = self.rms_norm_eps
        if isinstance(eps, bool) or not isinstance(eps, int | float) or not eps > 0:
            raise ValueError(f"rms_norm_eps={eps!r}: expected a number above 0")
        for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
            value = getattr(self, name)
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(_is_id(x) for x in ids):
                raise ValueError(f"{name}={value!r}: expected a token id, or a list of them")

    @classmethod
    def known_keys(cls) -> set[str]:
        """Every key that a `config.json` may hold, in any spelling."""
        own = {field.name for field in dataclasses.fields(cls)}
        return (
            own
            | set(_FIXED)
            | set(
                "architectures model_type rope_theta rope_scaling partial_rotary_factor "
                "torch_dtype eagle_config eagle_aux_hidden_state_layer_ids".split()
            )
        )

    @property
    def dims(self) -> DraftDims:
        """The sizes that the cost model needs."""
        from specforge_trim.plan.cost import DraftDims

        return DraftDims(
            hidden=self.hidden_size,
            heads=self.num_attention_heads,
            kv_heads=self.num_key_value_heads,
            head_dim=self.head_dim,
            intermediate=self.intermediate_size,
            draft_vocab=self.draft_vocab_size,
            aux_width=self.num_aux_layers * self.target_hidden_size,
            layers=self.num_hidden_layers,
            fc_norm=self.fc_norm or self.norm_before_fc,
        )

    @classmethod
    def from_json(cls, path: str | Path) -> DraftConfig:
        """Read a configuration file; an unknown key or a missing one is a ValueError."""
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"draft config {path}: no such file")
        try:
            raw = json.loads(path.read_text(encoding="utf-8"))
        except json.JSONDecodeError as error:
            raise ValueError(f"draft config {path}:{error.lineno}: {error.msg}") from None
        except (UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"draft config {path}: not readable as UTF-8 JSON: {error}") from None
        if not isinstance(raw, dict):
            raise ValueError(f"draft config {path}: expected a JSON object")
        try:
            return cls.from_dict(raw)
        except ValueError as error:
            raise ValueError(f"draft config {path}: {error}") from None

    @property
    def vllm_only(self) -> tuple[str, ...]:
        """The settings in force that vLLM alone reads; such a draft is wrong elsewhere."""
        only = ("qk_norm", "attention_bias", "norm_before_residual", "norm_before_fc")
        return tuple(name for name in only if getattr(self, name))

    def notes(self, *, max_length: int) -> tuple[str, ...]:
        """What to know before training such a draft on documents of max_length tokens."""
        notes = []
        if self.vllm_only:
            notes.append(f"{', '.join(self.vllm_only)} is read by vLLM only")
        if self.num_hidden_layers > 1:
            notes.append(
                f"num_hidden_layers={self.num_hidden_layers} can be trained, but neither exported "
                "nor evaluated: engines share no layout for drafts of several layers"
            )
        if max_length > self.max_position_embeddings:
            notes.append(
                f"max_length={max_length} is beyond max_position_embeddings="
                f"{self.max_position_embeddings}: engines serve no position there; "
                "lower --max-length, or give the target's longer limit with its rope parameters"
            )
        return tuple(notes)

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> DraftConfig:
        """Build from the keys of a `config.json`, older and newer spellings alike."""
        raw = dict(raw)
        for key, expected in _FIXED.items():
            value = raw.pop(key, expected)
            if value != expected:
                raise ValueError(f"{key}={value!r} is not supported; expected {expected!r}")
        values: dict[str, Any] = {
            "qk_norm": _pop_kind(raw),
            "rope_parameters": _pop_rope(raw),
        }
        legacy_dtype = raw.pop("torch_dtype", None)
        values["dtype"] = raw.pop("dtype", legacy_dtype or "bfloat16")
        if legacy_dtype is not None and legacy_dtype != values["dtype"]:
            raise ValueError(f"torch_dtype={legacy_dtype!r} contradicts dtype={values['dtype']!r}")
        values["aux_layers"] = _pop_aux_layers(raw)
        known = {field.name for field in dataclasses.fields(cls)}
        for key in list(raw):
            if key.startswith("_") or key == "transformers_version":
                raw.pop(key)
            elif key not in known:
                raise ValueError(f"unknown key {key!r}; known keys: {', '.join(sorted(known))}")
        values.update(raw)
        width, heads = values.get("hidden_size"), values.get("num_attention_heads")
        if "head_dim" not in values and "num_attention_heads" in values:
            # A width or head count that cannot be divided is named when all sizes are checked.
            values["head_dim"] = width // heads if _is_id(width) and _is_id(heads) and heads else 0
        values.setdefault("target_hidden_size", values.get("hidden_size"))
        if values["aux_layers"] is not None:
            values.setdefault("num_aux_layers", len(values["aux_layers"]))
        required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        missing = [n for n in required if n not in values and n != "rope_parameters"]
        if missing:
            raise ValueError(f"missing key(s): {', '.join(missing)}")
        return cls(**values)

    def to_dict(self) -> dict[str, Any]:
        """The complete `config.json` that SGLang, vLLM and TensorRT-LLM read."""
        rope = dict(self.rope_parameters)
        scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
        is_plain = scaling.get("rope_type", "default") == "default"
        out: dict[str, Any] = {
            "architectures": [QK_NORM_ARCHITECTURE if self.qk_norm else ARCHITECTURE],
            "model_type": "qwen3" if self.qk_norm else "llama",
            **_FIXED,
            "attention_bias": self.attention_bias,
            "norm_before_residual": self.norm_before_residual,
        }
        if self.norm_before_fc:  # else unwritten: readers that do not know the key reject it
            out["norm_before_fc"] = True
        for name in (
            "hidden_size intermediate_size num_hidden_layers num_attention_heads "
            "num_key_value_heads head_dim rms_norm_eps max_position_embeddings "
            "vocab_size draft_vocab_size "
            "bos_token_id eos_token_id pad_token_id target_hidden_size fc_norm"
        ).split():
            out[name] = getattr(self, name)
        # False stays unwritten: engines take it so, and SpecForge reads a written false as "the
        # head sees the state without its norm".
        if self.norm_output:
            out["norm_output"] = True
        out["rope_theta"] = rope.get("rope_theta", 10000.0)
        out["rope_scaling"] = None if is_plain else scaling
        out["rope_parameters"] = rope
        if "partial_rotary_factor" in rope:  # SGLang looks for it here
            out["partial_rotary_factor"] = rope["partial_rotary_factor"]
        out["torch_dtype"] = out["dtype"] = self.dtype
        eagle: dict[str, Any] = {"use_aux_hidden_state": True}
        if self.aux_layers is not None:
            out["eagle_aux_hidden_state_layer_ids"] = list(self.aux_layers)
            # SGLang reads only this key, and counts the output of 0-based layer k as k.
            eagle["eagle_aux_hidden_state_layer_ids"] = [k - 1 for k in self.aux_layers]
        out["eagle_config"] = eagle
        return out


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _pop_object(raw: dict[str, Any], key: str) -> dict[str, Any]:
    """Removes `key` from raw; its value, {} when absent or null."""
    value = raw.pop(key, None)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f"{key}={value!r}: expected an object")
    return dict(value)


def _pop_kind(raw: dict[str, Any]) -> bool:
    """Removes architectures, model_type and qk_norm; whether they say q/k norm."""
    architectures = raw.pop("architectures", None)
    model_type = raw.pop("model_type", None)
    kinds = {
        (None, None): None,
        ("llama", ARCHITECTURE): False,
        ("llama", None): False,
        (None, ARCHITECTURE): False,
        ("qwen3", QK_NORM_ARCHITECTURE): True,
        ("qwen3", None): True,
        (None, QK_NORM_ARCHITECTURE): True,
    }
    is_list = isinstance(architectures, list) and len(architectures) == 1
    name = architectures[0] if is_list else architectures
    if not all(isinstance(x, str | None) for x in (model_type, name)) or (
        (model_type, name) not in kinds
    ):
        raise ValueError(
            f"architectures={architectures!r} with model_type={model_type!r} is not supported; "
            f"expected [{ARCHITECTURE!r}] with 'llama', or [{QK_NORM_ARCHITECTURE!r}] with 'qwen3'"
        )
    kind = kinds[model_type, name]
    asked = raw.pop("qk_norm", kind or False)
    if kind is not None and asked != kind:
        raise ValueError(
            f"qk_norm={asked!r} contradicts architectures={architectures!r}; expected "
            f"architectures [{QK_NORM_ARCHITECTURE!r}] and model_type 'qwen3' with qk_norm true, "
            f"[{ARCHITECTURE!r}] and 'llama' without"
        )
    return asked


def _pop_rope(raw: dict[str, Any]) -> dict[str, Any]:
    """Removes the rotary keys, current and legacy; one flat dictionary."""
    partial = raw.pop("partial_rotary_factor", None)
    rope = merged_rope(
        _pop_object(raw, "rope_parameters"),
        rope_scaling=_pop_object(raw, "rope_scaling"),
        rope_theta=raw.pop("rope_theta", None),
    )
    if partial not in (None, 1) and rope.setdefault("partial_rotary_factor", partial) != partial:
        raise ValueError(
            f"partial_rotary_factor={partial!r} contradicts rope_parameters "
            f"{rope['partial_rotary_factor']!r}"
        )
    return flat_rope(rope)


def _pop_aux_layers(raw: dict[str, Any]) -> tuple[int, ...] | None:
    """Aux layer ids in Hugging Face numbering, from either of the two keys."""
    eagle = _pop_object(raw, "eagle_config")
    top = raw.pop("eagle_aux_hidden_state_layer_ids", None)
    own = raw.pop("aux_layers", None)
    sglang = eagle.get("eagle_aux_hidden_state_layer_ids")
    for ids in (top, own, sglang):
        if ids is not None and not (isinstance(ids, list | tuple) and all(map(_is_id, ids))):
            raise ValueError(f"aux layer ids {ids!r}: expected a list of layer numbers")
    found = [
        tuple(ids)
        for ids in (top, own, None if sglang is None else [k + 1 for k in sglang])
        if ids is not None
    ]
    if len(set(found)) > 1:
        raise ValueError(f"aux layer ids contradict each other (HF numbering): {found}")
    return found[0] if found else None
