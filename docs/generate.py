"""Writes what is derived: draft configs, the table of their sizes, the reference of settings.

    python docs/generate.py           write configs/*-eagle3.json, docs/drafts.md, docs/config.md,
                                      docs/*.svg and the predictions in examples/*.yaml
    python docs/generate.py --check   exit 1 and name the files that are not current

A draft config comes from the figures of its target in configs/targets (each with its source) as
`specforge-trim make-config` makes it.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

import torch  # noqa: E402
from drawings import DRAWINGS  # noqa: E402

from specforge_trim import build_trim_pack, row_mask  # noqa: E402
from specforge_trim.cli.draft_commands import draft_json  # noqa: E402
from specforge_trim.cli.dry_run import draft_size, training_memory  # noqa: E402
from specforge_trim.config.options import build, flag_name, leaves_of, read_yaml  # noqa: E402
from specforge_trim.drafts.eagle3.settings import Config  # noqa: E402
from specforge_trim.drafts.eagle3.sizes import DraftConfig  # noqa: E402
from specforge_trim.drafts.lm.settings import LmConfig  # noqa: E402
from specforge_trim.plan.cost import pack_cost  # noqa: E402
from specforge_trim.plan.pack import TrimPack  # noqa: E402

DRAFT_VOCAB = 32000
TOKENS, SUPERVISED = 8192, 655  # the example batch of the table: one document, its last 8 %
# What the recipes' data is like, by the file's name: share of supervised tokens, number of turns.
SITUATIONS = {"chat": (0.5, 4), "rag": (0.03, 1), "agent": (0.04, 16), "long": (0.02, 1)}
PREDICTED = "# predicted: "


def targets() -> list[Path]:
    return sorted((ROOT / "configs" / "targets").glob("*.json"))


def draft_files() -> dict[Path, str]:
    """configs/NAME-eagle3.json for each target."""
    out = {}
    for path in targets():
        size = json.loads(path.read_text()).get("_draft_vocab_size", DRAFT_VOCAB)
        text = json.dumps(draft_json(path, draft_vocab_size=size), indent=2) + "\n"
        out[ROOT / "configs" / f"{path.stem}-eagle3.json"] = text
    return out


def drafts_table(drafts: dict[Path, str]) -> str:
    """docs/drafts.md: parameters, memory and FLOPs of every draft config."""
    mask = torch.zeros(TOKENS, dtype=torch.bool)
    mask[-SUPERVISED:-1] = True
    pack = build_trim_pack(mask, ttt_length=7)
    lines = [
        "# Sizes of the drafts in configs/",
        "",
        "Written by `python docs/generate.py`. Parameters: on the meta device. Memory: what",
        "one rank holds while training in bfloat16 with a batch of 8,192 tokens and a row",
        "chunk of 4,096 MB (`train_eagle3.py --dry-run` prints it item by item); GB here and in",
        "recipes are 10^9 bytes, MB of the plan and of `row_memory_mb` 2^20. FLOPs: a training",
        f"step of 7 TTT steps on one document of {TOKENS:,} tokens whose last {SUPERVISED} carry",
        "loss (8 %), forward and backward, without the frozen target; kept: with both trim flags.",
        "",
        "| draft | trained parameters | target's embedding | export, bf16 | memory of a rank | "
        "full step | kept |",
        "|---|---|---|---|---|---|---|",
    ]
    config = build(Config, {"dtype": "bfloat16", "device": "cuda", "tokens_per_batch": TOKENS})
    for path, text in drafts.items():
        draft = DraftConfig.from_dict(json.loads(text))
        size, cost = draft_size(draft), pack_cost(pack, draft.dims)
        memory = sum(training_memory(config, draft, device="cuda").values())
        lines.append(
            f"| {path.stem.removesuffix('-eagle3')} | {size.trained / 1e6:,.0f} M | "
            f"{size.frozen / 1e6:,.0f} M | {2 * (size.trained + size.frozen) / 1e9:,.1f} GB | "
            f"{memory / 1e9:,.1f} GB | {cost.full / 1e12:,.1f} TFLOP | {cost.fraction:.0%} |"
        )
    return "\n".join(lines) + "\n"


def example_pack(length: int, share: float, turns: int) -> TrimPack:
    """The plan of one conversation: `turns` prompts, each followed by an answer."""
    mask = torch.zeros(length, dtype=torch.bool)
    for turn in range(turns):
        end = length * (turn + 1) // turns
        mask[end - int(length * share / turns) : end] = True
    return build_trim_pack(row_mask(mask), ttt_length=7)


def recipe_files() -> dict[Path, str]:
    """examples/*.yaml with their line of predictions; the quickstart has measured ones."""
    out = {}
    for path in sorted((ROOT / "examples").glob("*.yaml")):
        lines = path.read_text(encoding="utf-8").splitlines()
        at = [i for i, line in enumerate(lines) if line.startswith(PREDICTED)]
        if not at:
            continue
        config = build(Config, read_yaml(path, Config))
        draft = DraftConfig.from_json(ROOT / str(config.model.draft_config))
        (data,) = config.data.train_data
        share, turns = SITUATIONS[Path(data).stem]
        cost = pack_cost(example_pack(config.data.max_length, share, turns), draft.dims)
        named = re.search(r"--nproc_per_node (\d+)", "".join(lines))
        ranks = int(named[1]) if named else 1
        parts = training_memory(config, draft, device="cuda", world_size=ranks)
        memory = sum(parts.values())
        lines[at[0]] = (
            f"{PREDICTED}{memory / 1e9:.0f} GB per rank for the draft; {cost.fraction:.0%} of the "
            f"full work where {share:.0%} carries loss"
        )
        out[path] = "\n".join(lines) + "\n"
    return out


def config_reference() -> str:
    """docs/config.md: every setting, from the dataclasses."""
    lines = [
        "# Settings",
        "",
        "Written by `python docs/generate.py` from the settings themselves. In a YAML file a",
        "setting stands below its section; on the command line it is the flag beside it, and",
        "flags win. A switch has `--x` and `--no-x`. `null` is `none` on the command line.",
    ]
    lines += _settings(Config, "")
    lines += [
        "",
        "# Settings of train_draft_lm.py",
        "",
        "Its own sections; `train` is the one above.",
    ]
    lines += _settings(LmConfig, "draft_lm ", left_out=("train",))
    return "\n".join(lines) + "\n"


def _settings(config_class: type, prefix: str, left_out: tuple[str, ...] = ()) -> list[str]:
    """A table per section."""
    lines: list[str] = []
    section = None
    for leaf in leaves_of(config_class).values():
        if leaf.section in left_out:
            continue
        if leaf.section != section:
            section = leaf.section
            lines += ["", f"## {prefix}{section}", "", "| setting | flag | default | meaning |",
                      "|---|---|---|---|"]  # fmt: skip
        default = json.dumps(leaf.default if not leaf.is_tuple or leaf.default is None
                             else list(leaf.default))  # fmt: skip
        text = leaf.meta["help"].replace("|", "\\|")
        if leaf.meta["choices"]:
            text += f" ({', '.join(leaf.meta['choices'])})"
        lines.append(f"| `{leaf.key}` | `{flag_name(leaf.key)}` | `{default}` | {text} |")
    return lines


def derived() -> dict[Path, str]:
    """Every derived file and what it has to hold. Recipes read draft configs, so those go first
    where they are not current."""
    drafts = draft_files()
    if "--check" not in sys.argv and __name__ == "__main__":
        for path, text in drafts.items():
            path.write_text(text, encoding="utf-8")
    return {
        **drafts,
        **recipe_files(),
        ROOT / "docs" / "drafts.md": drafts_table(drafts),
        ROOT / "docs" / "config.md": config_reference(),
        **{ROOT / "docs" / name: draw() for name, draw in DRAWINGS.items()},
    }


def main() -> int:
    stale = []
    for path, text in derived().items():
        if path.is_file() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if "--check" not in sys.argv:
            path.write_text(text, encoding="utf-8")
    if stale:
        print("\n".join(stale))
    return int(bool(stale) and "--check" in sys.argv)


if __name__ == "__main__":
    sys.exit(main())
