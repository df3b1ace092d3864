"""The README.md of an exported draft: what it is, how it was made, how good, how to serve it.

The commands follow the engines' documentation; they are not run here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specforge_trim.drafts.eagle3.sizes import DraftConfig

CARD = "README.md"
_MADE_HERE = "Trained with specforge_trim."
_ACCEPTANCE = "## Acceptance\n"
_SERVE = "## Serve\n"


def model_card(
    config: DraftConfig,
    *,
    target: str,
    layout: str,
    training: Mapping[str, Any] | None,
    depth: int,
    evaluation: Mapping[str, Any] | None = None,
) -> str:
    """Markdown. target: name or path; depth: tokens drafted per round in the commands;
    evaluation: `EvalReport.to_dict()`; training: the provenance beside the weights."""
    kind = "EAGLE-3.1" if config.fc_norm and config.norm_output else "EAGLE-3"
    sizes = (
        f"- width {config.hidden_size}, MLP {config.intermediate_size}, "
        f"{config.num_attention_heads} heads / {config.num_key_value_heads} key-value heads of "
        f"{config.head_dim}\n"
        f"- proposes {config.draft_vocab_size:,} of the target's {config.vocab_size:,} tokens\n"
        f"- target layers read: {_layers(config)}\n"
        f"- {config.dtype}, rope {config.rope_parameters['rope_type']}, up to "
        f"{config.max_position_embeddings:,} positions"
    )
    front = f"---\nbase_model: {target}\ntags:\n- speculative-decoding\n- eagle3\n---\n"
    return (
        f"{front}\n# {kind} draft for {target}\n\n"
        "A draft model for speculative decoding: it proposes tokens that the target verifies, so "
        "the target's output stays what it is. "
        f"{_MADE_HERE}\n\n"
        f"{sizes}\n\n## Made from\n\n{_provenance(training)}\n"
        f"{_ACCEPTANCE}\n{_acceptance(evaluation)}\n"
        f"{_SERVE}\n{serving_commands(config, target=target, layout=layout, depth=depth)}"
    )


def update_acceptance(folder: str | Path, evaluation: Mapping[str, Any]) -> bool:
    """Put measured acceptance into the card of an exported folder; False when it has none."""
    path = Path(folder) / CARD
    if not path.is_file():
        return False
    text = path.read_text(encoding="utf-8")
    before, found, rest = text.partition(_ACCEPTANCE)
    _, found_end, after = rest.partition(_SERVE)
    if not (found and found_end):
        return False
    new = f"{before}{found}\n{_acceptance(evaluation)}\n{found_end}{after}"
    temporary = path.with_name(f".{CARD}.writing")
    temporary.write_text(new, encoding="utf-8")
    temporary.replace(path)
    return True


def is_own_card(folder: Path) -> bool:
    """Whether `folder` has a card that `model_card` wrote."""
    path = folder / CARD
    return path.is_file() and _MADE_HERE in path.read_text(encoding="utf-8", errors="replace")


def serving_commands(config: DraftConfig, *, target: str, layout: str, depth: int) -> str:
    """A section per engine that reads this draft, and the reason for the ones that do not."""
    speculative = json.dumps(
        {"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": depth}
    )
    blocks = [
        "DRAFT is this folder.\n",
        f"vLLM\n\n    vllm serve {target} \\\n        --speculative-config '{speculative}'\n",
    ]
    reasons = list(config.vllm_only)
    if layout == "speculators":
        reasons.append("the speculators layout")
    if reasons:
        blocks.append(f"SGLang, TensorRT-LLM: no; they do not read {', '.join(reasons)}.\n")
        return "\n".join(blocks)
    blocks.append(
        f"SGLang\n\n    python -m sglang.launch_server --model-path {target} \\\n"
        "        --speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFT \\\n"
        f"        --speculative-num-steps {depth} --speculative-eagle-topk 1 \\\n"
        f"        --speculative-num-draft-tokens {depth + 1}\n"
    )
    blocks.append(
        f"TensorRT-LLM\n\n    trtllm-serve {target} --extra_llm_api_options eagle3.yaml\n\n"
        "with eagle3.yaml:\n\n    speculative_config:\n      decoding_type: Eagle\n"
        f"      max_draft_len: {depth}\n      speculative_model_dir: DRAFT\n{_captured(config)}"
    )
    return "\n".join(blocks)


def _captured(config: DraftConfig) -> str:
    """TensorRT-LLM takes the layers from its own settings; 0-based, the output of layer k is k."""
    if config.aux_layers is None:
        return ""
    return f"      eagle3_layers_to_capture: {[k - 1 for k in config.aux_layers]}\n"


def _layers(config: DraftConfig) -> str:
    if config.aux_layers is None:
        return "the default ones (after 2, half, and all but 3 of its layers)"
    return "after " + ", ".join(map(str, config.aux_layers)) + " of its layers"


def _provenance(training: Mapping[str, Any] | None) -> str:
    if not training:
        return "Not recorded.\n"
    lines = [
        f"- {key}: {training[key]}" for key in ("step", "commit") if training.get(key) is not None
    ]
    if training.get("arguments"):
        lines.append("- arguments: `" + " ".join(map(str, training["arguments"])) + "`")
    packages = training.get("packages")
    if isinstance(packages, Mapping):
        lines.append("- versions: " + ", ".join(f"{k} {v}" for k, v in packages.items()))
    identity = training.get("identity")
    if isinstance(identity, Mapping):
        for key in ("data", "target", "seed", "ttt_length", "loss_alignment", "chain"):
            if identity.get(key) is not None:
                lines.append(f"- {key}: {identity[key]}")
    lines.append("- everything: training.json")
    return "\n".join(lines) + "\n"


def _acceptance(evaluation: Mapping[str, Any] | None) -> str:
    if not evaluation:
        return "Not measured yet: `specforge-trim evaluate` fills this in.\n"
    lines = [
        f"Greedy decoding, {evaluation['depth']} tokens drafted per round; tokens per pass of the "
        "target, 1.00 = no help.\n",
        "| prompts | count | acceptance length | output equals the target's |",
        "|---|---|---|---|",
    ]
    for one in evaluation["sets"]:
        length = one["trained"]["acceptance_length"]
        lines.append(
            f"| {one['name']} | {one['prompts']} | {length:.2f} | "
            f"{one['equal']}/{one['prompts']} |"
        )
    return "\n".join(lines) + "\n"
