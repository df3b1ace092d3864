"""What both peers are compared with: a tiny target, drafts for it, and what this package computes.

Letters: T tokens, K TTT steps, A aux layers, D width, Vd draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tiny import random_ids_and_mask, save_tiny_target, tiny_config
from tiny_step import Doc
from torch import Tensor

from specforge_trim.config.objective import parse_objective
from specforge_trim.drafts.eagle3.batch import PlanSettings, make_batch
from specforge_trim.drafts.eagle3.for_target import draft_for_target
from specforge_trim.drafts.eagle3.model import Eagle3Draft
from specforge_trim.drafts.eagle3.proposer import CachedDraft
from specforge_trim.drafts.eagle3.step import StepSettings, ttt_step
from specforge_trim.drafts.eagle3.vocab import build_draft_vocab
from specforge_trim.drafts.eagle3.writing import export_draft
from specforge_trim.loss.teacher import Teacher
from specforge_trim.verifier.capture import capture_document
from specforge_trim.verifier.hf import HFTarget, load_embedding_and_head

K = 4
DECAY = 0.8
LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0,
          "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "beta_fast": 32.0,
        "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5,
        "original_max_position_embeddings": 32}  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """One document of T tokens with two answers, and what the target says about it."""

    folder: Path  # the target's
    target: HFTarget
    doc: Doc
    aux: Tensor  # [T, A*D]
    last: Tensor  # [T, D], after the final norm


def make_problem(folder: Path) -> Problem:
    """An untied target of 8 layers whose final norm is far from 1."""
    save_tiny_target(folder, tied=False)
    target = HFTarget.load(folder, dtype=torch.float32)
    ids, mask = random_ids_and_mask(129, seed=3, spans=2, span_length=14)
    aux, last = target.features(ids)
    return Problem(folder, target, Doc(ids, mask, "peers", "0"), aux.clone(), last.clone())


def with_layers(problem: Problem, layers: tuple[int, ...]) -> Problem:
    """The same document, seen through other layers of the target."""
    target = HFTarget(problem.target.model, aux_layers=layers, name=problem.target.name)
    return dataclasses.replace(
        problem, target=target, aux=target.features(problem.doc.input_ids).aux.clone()
    )


def make_draft(problem: Problem, *, draft_vocab_size: int = 90, **changes: Any) -> Eagle3Draft:
    """Random weights of the size that training ends with, norms far from 1."""
    torch.manual_seed(11)
    plain = draft_for_target(tiny_config(), draft_vocab_size=draft_vocab_size)
    config = dataclasses.replace(plain, dtype="float32", **changes)
    model = Eagle3Draft(config)
    counts = (torch.arange(config.vocab_size) * 7) % 31
    model.set_vocab(*build_draft_vocab(counts, vocab_size=272, draft_vocab_size=draft_vocab_size))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 2.0)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    model.load_target(load_embedding_and_head(problem.folder))
    return model


def export(problem: Problem, model: Eagle3Draft, folder: Path, *, layout: str) -> Path:
    return export_draft(
        model, folder, target_config=problem.target.config, dtype=torch.float32, layout=layout,
        target_name=str(problem.folder),
    )  # fmt: skip


def served_logits(problem: Problem, model: Eagle3Draft) -> list[Tensor]:
    """Step i: logits [T-1-i, Vd] of the rows that have a next token, drafted one by one.

    Row t is fed the verified tokens up to t+1, then the document's own tokens as its guesses.
    """
    ids, rows = problem.doc.input_ids, len(problem.doc.input_ids) - 1
    cached, out = CachedDraft(model), [[] for _ in range(K)]
    for t in range(rows):
        cached.extend(problem.aux[t : t + 1], ids[t + 1 : t + 2])
        for i in range(min(K, rows - t)):
            if i:
                cached.feed(int(ids[t + 1 + i]))
            out[i].append(cached.logits().clone())
    return [torch.stack(x) for x in out]


def losses_and_gradients(
    problem: Problem,
    model: Eagle3Draft,
    *,
    alignment: str = "token",
    trim: bool = True,
    objective: str = "soft_ce",
    denominator: str = "rows",
) -> tuple[Tensor, dict[str, Tensor]]:
    """Per-step losses [K] over the denominator, and every trained parameter's gradient."""
    settings = PlanSettings(
        ttt_length=K, alignment=alignment, trim_loss_positions=trim, trim_backbone_rows=trim,
        chunk_rows=8,
    )  # fmt: skip
    batch = make_batch([problem.doc], [capture_document(problem.target, problem.doc)], settings)
    head = load_embedding_and_head(problem.folder)
    model.zero_grad(set_to_none=True)
    counts = [batch.num_rows] * K if denominator == "rows" else batch.num_loss_rows
    denominators = torch.tensor(counts, dtype=torch.float32)
    result = ttt_step(
        model,
        batch,
        teacher=Teacher(head.head, model.draft_to_target, model.t2d),
        denominators=denominators,
        settings=StepSettings(decay=DECAY, objective=parse_objective(objective)),
    )
    gradients = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
    return result.loss / denominators, gradients


def entropies(problem: Problem) -> Tensor:
    """[K]: mean entropy of the target where step i of alignment teacher has a loss.

    KL is cross-entropy less this; a constant of the draft.
    """
    logits = problem.target.model.lm_head(problem.last).log_softmax(-1)
    entropy, mask = -(logits.exp() * logits).sum(-1), problem.doc.loss_mask
    return torch.stack([entropy[1 + i :][mask[1 + i :]].mean() for i in range(K)])
