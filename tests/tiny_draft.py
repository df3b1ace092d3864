"""Random drafts for a tiny target, and prompts to decode."""

import torch

from specforge_trim.drafts.eagle3.model import Eagle3Draft
from specforge_trim.drafts.eagle3.sizes import DraftConfig
from specforge_trim.drafts.eagle3.vocab import build_draft_vocab


def random_draft(target, *, draft_vocab_size=100, seed=3, **changes):
    torch.manual_seed(seed)
    config = DraftConfig(
        hidden_size=target.hidden_size,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=12,
        vocab_size=target.vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=target.hidden_size,
        max_position_embeddings=4096,
        **changes,
    )
    draft = Eagle3Draft(config)
    with torch.no_grad():
        draft.embed_tokens.weight.copy_(target.model.get_input_embeddings().weight)
    if draft_vocab_size < target.vocab_size:
        counts = torch.arange(target.vocab_size) % 11
        draft.set_vocab(
            *build_draft_vocab(
                counts, vocab_size=target.vocab_size, draft_vocab_size=draft_vocab_size
            )
        )
    return draft.eval()


def prompt_ids(length=40, seed=0):
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(seed))
