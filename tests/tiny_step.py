"""A training step of a fixed tiny draft on a batch, wherever its features come from."""

from dataclasses import dataclass

import torch
from tiny_draft import random_draft

from specforge_trim.drafts.eagle3.step import StepSettings, ttt_step
from specforge_trim.loss.teacher import Teacher
from specforge_trim.verifier.hf import load_embedding_and_head


@dataclass(frozen=True)
class Doc:
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    source: str
    doc_id: str


def run_step(target, batch, *, steps):
    """Metric sums and the gradient of every trainable parameter of a fixed draft."""
    draft = random_draft(target, draft_vocab_size=150)
    head = load_embedding_and_head(target.name)
    teacher = Teacher(head.head, draft.draft_to_target, draft.t2d, head.logit_post)
    denominators = torch.full((steps,), float(len(batch.input_ids)))
    result = ttt_step(
        draft, batch, teacher=teacher, denominators=denominators, settings=StepSettings()
    )
    return result, {n: p.grad for n, p in draft.named_parameters() if p.requires_grad}
