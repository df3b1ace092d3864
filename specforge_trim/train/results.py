"""After training: the checkpoint as a draft, its export, and what decoding with it measures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specforge_trim.config.options import ConfigError
from specforge_trim.decode.prompts import evaluate
from specforge_trim.decode.report import EvalReport
from specforge_trim.drafts.eagle3.card import update_acceptance
from specforge_trim.drafts.eagle3.model import Eagle3Draft
from specforge_trim.drafts.eagle3.prune import prune_vocab
from specforge_trim.drafts.eagle3.settings import Config
from specforge_trim.drafts.eagle3.sizes import DraftConfig
from specforge_trim.drafts.eagle3.writing import export_draft, load_draft
from specforge_trim.ranks.world import World
from specforge_trim.train import checkpoint as checkpoints
from specforge_trim.train.run import Target, held_out_prompts
from specforge_trim.verifier.hf import (
    HFTarget,
    TargetHead,
    load_embedding_and_head,
    target_fingerprint,
)


def load_trained(
    config: Config, target: Target, which: str = "newest"
) -> tuple[Eagle3Draft, checkpoints.Checkpoint]:
    """The draft of a checkpoint in output_dir (newest, best, or a step), fp32 on the CPU."""
    found = _checkpoint(config, which)
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


def _checkpoint(config: Config, which: str) -> checkpoints.Checkpoint:
    """The checkpoint that `which` names: newest, best, or a step.  Raises ValueError."""
    root = config.output_dir / "checkpoints"
    if which == "newest":
        found = checkpoints.newest(root)
        if found is None:
            raise ValueError(
                f"no complete checkpoint in {root}: train first, or name the run with --output-dir"
            )
        return found
    if which == "best":
        marked = checkpoints.best(root)
        if marked is None:
            raise ValueError(
                f"no checkpoint in {root} was measured: train with --eval-every or "
                "--decode-every, or take the newest one"
            )
        return marked[0]
    complete = checkpoints.list_complete(root)
    for checkpoint in complete:
        if str(checkpoint.step) == which:
            return checkpoint
    known = ", ".join(str(checkpoint.step) for checkpoint in complete) or "none"
    raise ValueError(f"no checkpoint {which!r} in {root}: there are newest, best, steps {known}")


def export_trained(
    config: Config,
    target: Target,
    out: Path | None = None,
    *,
    layout: str = "native",
    dtype: torch.dtype | None = None,
    prune_counts: tuple[Tensor, int] | None = None,
    which: str = "newest",
) -> Path:
    """Writes a checkpoint as a serving folder, by default output_dir/export.

    which: newest, best, or a step.
    prune_counts: token counts [V] and the size of the draft vocabulary to keep.
    """
    model, found = load_trained(config, target, which)
    if prune_counts is not None:
        model = prune_vocab(model, prune_counts[0], size=prune_counts[1])
    training = {"step": found.step, "identity": found.meta["identity"]}
    training |= dict(found.meta["provenance"])
    return export_draft(
        model,
        out or config.output_dir / "export",
        target_config=target.text_config,
        training=training,
        layout=layout,
        dtype=dtype,
        target_name=config.model.target,
    )


def evaluate_drafts(
    config: Config, target: Target, world: World, *, draft_dir: Path | None = None
) -> EvalReport:
    """Decodes the held-out prompts with the exported draft and with an untrained one, in fp32.

    The report also goes to output_dir/evaluation.json. Raises ConfigError where nothing was
    exported yet.
    """
    prompts = held_out_prompts(config, target, world)
    folder = draft_dir or config.output_dir / "export"
    if draft_dir is None and not folder.is_dir():
        raise ConfigError(
            f"no draft in {folder}: write it with `specforge-trim export` and the same settings, "
            "or name one with --draft"
        )
    draft = load_draft(folder, dtype=torch.float32)
    head = load_embedding_and_head(target.path)
    if draft.lacks_embedding:  # SpecForge and EAGLE leave the target's rows out
        draft.load_target(head)
    untrained = _untrained_like(config, head, draft)
    model = HFTarget.load(
        target.path,
        dtype=torch.float32,
        device=world.device,
        aux_layers=draft.config.aux_layers,
    )
    trained = last_epoch(config.output_dir / "metrics.jsonl")
    report = evaluate(
        model,
        draft.to(world.device),
        prompts,
        untrained=untrained.to(world.device),
        depth=config.evaluate.eval_depth,
        max_new_tokens=config.evaluate.eval_max_new_tokens,
        training_accuracy=trained.get("accuracy"),
        training_acceptance=trained.get("acceptance"),
    )
    config.output_dir.mkdir(parents=True, exist_ok=True)
    text = json.dumps(report.to_dict(), indent=1)
    (config.output_dir / "evaluation.json").write_text(text + "\n", encoding="utf-8")
    if draft_dir is None:  # a run's own export; another's folder stays as it is
        update_acceptance(folder, report.to_dict())
    return report


def _untrained_like(config: Config, head: TargetHead, draft: Eagle3Draft) -> Eagle3Draft:
    """The draft as it was before training: initial weights under the same vocabulary."""
    torch.manual_seed(config.train.seed)
    model = Eagle3Draft(draft.config)
    model.load_target(head)
    model.set_vocab(draft.d2t.clone(), draft.t2d.clone())
    if config.model.init_head_from_target:
        model.init_head_from_target(head)
    return model


def last_epoch(path: Path) -> dict[str, list[float]]:
    """Per TTT step, `loss`, `accuracy` and `acceptance` of metrics.jsonl over its last epoch.

    Means over logged steps, weighted by their loss rows; {} without any.
    """
    rows = [row for row in _read_rows(path) if row["loss"] is not None]
    rows = [row for row in rows if row["epoch"] == rows[-1]["epoch"]]
    means: dict[str, list[float]] = {}
    for name in ("loss", "accuracy", "acceptance") if rows else ():
        means[name] = []
        while f"{name}/{len(means[name])}" in rows[0]:
            key = f"{name}/{len(means[name])}"
            known = [(row[key], row["loss_rows"]) for row in rows if row[key] is not None]
            weight = sum(count for _, count in known)
            means[name].append(sum(v * n for v, n in known) / weight if weight else 0.0)
    return means


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """Whole rows of a metrics.jsonl; a line cut off by a kill is passed over."""
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
