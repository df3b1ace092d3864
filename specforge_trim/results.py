"""After training: the checkpoint as a draft, its export, and what decoding with it measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specforge_trim.config import Config, ConfigError
from specforge_trim.decode import evaluate, last_prompt
from specforge_trim.decode_report import EvalReport
from specforge_trim.distributed import World
from specforge_trim.export import export_draft, load_draft
from specforge_trim.model.draft import Eagle3Draft
from specforge_trim.model.draft_config import DraftConfig
from specforge_trim.pipeline import Target, prepare_data
from specforge_trim.target.hf import HFTarget, load_embedding_and_head, target_fingerprint
from specforge_trim.train import checkpoint as checkpoints


def load_trained(config: Config, target: Target) -> tuple[Eagle3Draft, checkpoints.Checkpoint]:
    """The draft of the newest complete checkpoint in output_dir, fp32 on the CPU."""
    found = checkpoints.newest(config.output_dir / "checkpoints")
    if found is None:
        raise ValueError(
            f"no complete checkpoint in {config.output_dir / 'checkpoints'}: train first, or name "
            "the run with --output-dir"
        )
    identity = found.meta["identity"]
    saved = {k.removeprefix("draft."): v for k, v in identity.items() if k.startswith("draft.")}
    saved["aux_layers"] = saved["aux_layers"] and tuple(saved["aux_layers"])
    if identity["target"] != target_fingerprint(target.path):
        raise ValueError(
            f"checkpoint {found.path} was trained for another target than {target.path}"
        )
    model = Eagle3Draft(DraftConfig(**saved))
    checkpoints.restore_weights(found, model=model)
    model.set_vocab(model.d2t.clone(), model.t2d.clone())
    model.load_target(load_embedding_and_head(target.path))
    return model, found


def export_trained(config: Config, target: Target, out: Path | None = None) -> Path:
    """Writes the newest checkpoint as a serving folder, by default output_dir/export."""
    model, found = load_trained(config, target)
    training = {"step": found.step, "identity": found.meta["identity"]}
    training |= dict(found.meta["provenance"])
    return export_draft(
        model,
        out or config.output_dir / "export",
        target_config=target.text_config,
        training=training,
    )


def held_out_prompts(config: Config, target: Target, world: World) -> dict[str, list[Tensor]]:
    """Prompts of each eval_data file: the tokens before the last answer, eval_prompts of each."""
    if not config.evaluate.eval_data:
        raise ConfigError(
            "eval_data names no file: pass --eval-data FILE or set evaluate.eval_data"
        )
    sets = {}
    for path in config.evaluate.eval_data:
        data = prepare_data(config, target, world, paths=[path])
        count = min(config.evaluate.eval_prompts, len(data))
        documents = [data[i] for i in range(count)]
        sets[Path(path).stem] = [last_prompt(d.input_ids, d.loss_mask) for d in documents]
    return sets


def evaluate_drafts(
    config: Config, target: Target, world: World, *, draft_dir: Path | None = None
) -> EvalReport:
    """Decodes the held-out prompts with the exported draft and with an untrained one, in fp32.

    The report also goes to output_dir/evaluation.json.
    """
    prompts = held_out_prompts(config, target, world)
    draft = load_draft(draft_dir or config.output_dir / "export", dtype=torch.float32)
    untrained = _untrained_like(config, target, draft)
    model = HFTarget.load(
        target.path,
        dtype=torch.float32,
        device=world.device,
        aux_layers=draft.config.aux_layers,
    )
    last = _last_metrics(config.output_dir / "metrics.jsonl")
    report = evaluate(
        model,
        draft.to(world.device),
        prompts,
        untrained=untrained.to(world.device),
        depth=config.evaluate.eval_depth,
        max_new_tokens=config.evaluate.eval_max_new_tokens,
        training_accuracy=_per_step(last, "accuracy"),
        training_acceptance=_per_step(last, "acceptance"),
    )
    config.output_dir.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report.to_dict(), indent=1)
    (config.output_dir / "evaluation.json").write_text(text + "\n", encoding="utf-8")
    return report


def _untrained_like(config: Config, target: Target, draft: Eagle3Draft) -> Eagle3Draft:
    """The draft as it was before training: initial weights under the same vocabulary."""
    head = load_embedding_and_head(target.path)
    torch.manual_seed(config.train.seed)
    model = Eagle3Draft(draft.config)
    model.load_target(head)
    model.set_vocab(draft.d2t.clone(), draft.t2d.clone())
    if config.model.init_head_from_target:
        model.init_head_from_target(head)
    return model


def _last_metrics(path: Path) -> dict[str, Any] | None:
    """The last whole row of metrics.jsonl that has a loss; None where there is none."""
    if not path.is_file():
        return None
    for line in reversed(path.read_text(encoding="utf-8").splitlines()):
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if row.get("loss") is not None:
            return row
    return None


def _per_step(row: dict[str, Any] | None, name: str) -> list[float] | None:
    """Values of `name/0`, `name/1`, ... up to the first step without one."""
    values: list[float] = []
    while row is not None and row.get(f"{name}/{len(values)}") is not None:
        values.append(row[f"{name}/{len(values)}"])
    return values or None
