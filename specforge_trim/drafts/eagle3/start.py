"""The draft at step 0: its vocabulary, its weights, and the teacher it learns from.

A new draft takes the most frequent supervised tokens of its data, or a vocabulary map.  One that
goes on from an export keeps the weights and the vocabulary it has, unless rebuild_vocab is set.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import torch
from torch import Tensor

from specforge_trim.data.dataset import PreparedData
from specforge_trim.data.peer_formats.folder import PeerData
from specforge_trim.data.peer_formats.vocab_maps import read_vocab_maps
from specforge_trim.drafts.eagle3.features import Target
from specforge_trim.drafts.eagle3.model import Eagle3Draft
from specforge_trim.drafts.eagle3.reading import folder_format
from specforge_trim.drafts.eagle3.settings import Config, ConfigError
from specforge_trim.drafts.eagle3.sizing import shares_head
from specforge_trim.drafts.eagle3.vocab import (
    build_draft_vocab,
    check_maps,
    count_supervised_tokens,
    coverage,
    kept_ids,
)
from specforge_trim.drafts.eagle3.writing import load_draft
from specforge_trim.loss.teacher import Teacher
from specforge_trim.verifier.aux_layers import resolve_aux_layers
from specforge_trim.verifier.hf import load_embedding_and_head

logger = logging.getLogger(__name__)
LOW_COVERAGE = 0.9  # of supervised tokens in the draft vocabulary; below, a warning


def build_draft(
    config: Config, target: Target, data: PreparedData | PeerData, *, device: torch.device
) -> tuple[Eagle3Draft, Teacher]:
    """The draft (fp32 weights, the same on every rank) and the teacher, on `device`.

    Raises ConfigError when a map or a draft to go on from has other sizes than this run.
    """
    counts = count_supervised_tokens(data, vocab_size=target.draft.vocab_size)
    start = None if config.model.init_from is None else _start(config, target)
    head = load_embedding_and_head(target.path)
    torch.manual_seed(config.train.seed)
    model = Eagle3Draft(target.draft)
    model.load_target(head)
    if start is None or config.model.rebuild_vocab:
        model.set_vocab(*draft_vocab(config, target, counts))
    else:
        model.set_vocab(start.d2t, start.t2d)
    if config.model.init_head_from_target:
        model.init_head_from_target(head)
    if start is not None:
        _copy_weights(model, start)
    for note in target.draft.notes(max_length=config.data.max_length):
        logger.warning("draft: %s", note)
    _report_vocab(model, counts)
    model.to(device)
    held = model.embed_tokens.weight.detach() if shares_head(config, head.tied) else head.head
    teacher = Teacher(
        head=held.to(device, getattr(torch, config.train.dtype)),
        draft_to_target=model.draft_to_target,
        t2d=model.t2d,
        logit_post=head.logit_post,
    )
    return model, teacher


def draft_vocab(config: Config, target: Target, counts_V: Tensor) -> tuple[Tensor, Tensor]:
    """d2t and t2d: the vocabulary that vocab_map names, else the most frequent tokens.

    counts_V: occurrences over the supervised tokens of this run's data.
    Raises ConfigError when the map has another size than the draft.
    """
    found = named_vocab(config, target)
    if isinstance(found, tuple):
        return found
    return build_draft_vocab(
        counts_V if found is None else found,
        vocab_size=target.draft.vocab_size,
        draft_vocab_size=target.draft.draft_vocab_size,
    )


def named_vocab(config: Config, target: Target) -> tuple[Tensor, Tensor] | Tensor | None:
    """What vocab_map names: d2t and t2d, or counts [V] to choose from; None without one.

    Raises ValueError when it cannot be read or is another target's, ConfigError for another size
    than the draft has.
    """
    path = config.model.vocab_map
    if path is None:
        return None
    found = read_vocab_maps(path, vocab_size=target.draft.vocab_size)
    if isinstance(found, Tensor):
        return found
    d2t, t2d = found
    if d2t.numel() != target.draft.draft_vocab_size:
        raise ConfigError(
            f"vocab_map {path} keeps {d2t.numel()} tokens, the draft has "
            f"{target.draft.draft_vocab_size}: set draft_vocab_size = {d2t.numel()}"
        )
    check_maps(d2t, t2d, vocab_size=target.draft.vocab_size)
    return d2t, t2d


def _start(config: Config, target: Target) -> Eagle3Draft:
    """The exported draft to go on from, of the sizes that this run has."""
    folder = config.model.init_from
    assert folder is not None
    start = load_draft(Path(folder).expanduser(), dtype=torch.float32)
    found, wanted = dataclasses.asdict(start.config), dataclasses.asdict(target.draft)
    for sizes in (found, wanted):
        layers = target.text_config.num_hidden_layers
        sizes["aux_layers"] = resolve_aux_layers(layers, sizes["aux_layers"])
    free = {"dtype", "bos_token_id", "eos_token_id", "pad_token_id", "max_position_embeddings"}
    if config.model.rebuild_vocab:
        free.add("draft_vocab_size")
    if folder_format(folder) == "eagle":  # whose norm_output is another thing: draft_config rules
        free.add("norm_output")
    for key in sorted(set(wanted) - free):
        if found[key] != wanted[key]:
            raise ConfigError(
                f"init_from {folder}: its draft has {key} = {found[key]!r}, this run "
                f"{wanted[key]!r}: set the same sizes"
                + (", or add --rebuild-vocab" if key == "draft_vocab_size" else "")
            )
    return start


@torch.no_grad()
def _copy_weights(model: Eagle3Draft, start: Eagle3Draft) -> None:
    """The trained weights of `start`; head rows of the tokens that both vocabularies hold."""
    own = {"d2t", "t2d", "embed_tokens.weight", "lm_head.weight"}
    weights = {name: x for name, x in start.state_dict().items() if name not in own}
    model.load_state_dict(weights, strict=False)
    here, there = kept_ids(model.d2t), kept_ids(start.d2t)
    place = torch.searchsorted(there, here).clamp(max=there.numel() - 1)
    shared = there[place] == here
    model.lm_head.weight[shared] = start.lm_head.weight[place[shared]]


def _report_vocab(model: Eagle3Draft, counts: Tensor) -> None:
    """One line on how much of what the target writes the draft can propose."""
    size, share = model.config.draft_vocab_size, coverage(counts, model.t2d)
    line = f"draft vocabulary: {size:,} of {model.config.vocab_size:,} tokens, {share:.1%} of the"
    if share < LOW_COVERAGE:
        remedy = "what it lacks is never accepted: raise --draft-vocab-size"
        remedy += " (or --rebuild-vocab for a draft that goes on from an export)"
        logger.warning("%s supervised tokens; %s", line, remedy)
    else:
        logger.info("%s supervised tokens", line)
