"""A draft with a smaller vocabulary than it was trained with: fewer rows of the head, new maps.

Letters: V target vocabulary, Vd draft vocabulary, D draft width.
"""

import dataclasses

import torch
from torch import Tensor

from specforge_trim.drafts.eagle3.model import Eagle3Draft
from specforge_trim.drafts.eagle3.vocab import build_draft_vocab


def prune_vocab(model: Eagle3Draft, counts_V: Tensor, *, size: int) -> Eagle3Draft:
    """A copy of `model` that proposes only the `size` most frequent of its own tokens.

    counts_V: occurrences [V] over supervised tokens; ties go to the smaller id. Tokens the draft
    does not propose never join. What is left is proposed with the same logits as before.
    Raises ValueError unless 1 <= size < Vd, and for counts of another length.
    """
    config = model.config
    if isinstance(size, bool) or not isinstance(size, int) or not 0 < size:
        raise ValueError(f"prune_vocab={size!r}: expected a whole number of at least 1")
    if size >= config.draft_vocab_size:
        raise ValueError(
            f"prune_vocab={size}: the draft proposes {config.draft_vocab_size} tokens; expected "
            "fewer"
        )
    if counts_V.shape != (config.vocab_size,):
        raise ValueError(
            f"token counts have shape {tuple(counts_V.shape)}; expected ({config.vocab_size},)"
        )
    own = model.draft_to_target.cpu()
    # One is added where the draft can propose, so that those come first even without a count.
    ranked = torch.zeros(config.vocab_size, dtype=torch.int64)
    ranked[own] = counts_V.cpu().to(torch.int64)[own] + 1
    d2t, t2d = build_draft_vocab(ranked, vocab_size=config.vocab_size, draft_vocab_size=size)
    with torch.random.fork_rng(devices=[]):
        pruned = Eagle3Draft(dataclasses.replace(config, draft_vocab_size=size))
    pruned.to(model.fc.weight.dtype)
    kept = torch.searchsorted(own, d2t + torch.arange(size))
    state = {k: v for k, v in model.state_dict().items() if k not in ("d2t", "t2d")}
    state["lm_head.weight"] = state["lm_head.weight"][kept.to(model.lm_head.weight.device)]
    pruned.load_state_dict(state, strict=False)
    pruned.set_vocab(d2t, t2d)
    return pruned.to(model.fc.weight.device)
