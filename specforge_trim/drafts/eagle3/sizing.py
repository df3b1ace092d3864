"""The sizes of the draft that a run trains, and whether they fit the target."""

from __future__ import annotations

import dataclasses
from typing import Any

from specforge_trim.drafts.eagle3.for_target import draft_for_target
from specforge_trim.drafts.eagle3.reading import read_draft_config
from specforge_trim.drafts.eagle3.settings import Config, ConfigError
from specforge_trim.drafts.eagle3.sizes import DraftConfig
from specforge_trim.drafts.eagle3.vocab import check_vocab_sizes
from specforge_trim.verifier.aux_layers import resolve_aux_layers


def draft_config(config: Config, text_config: Any) -> DraftConfig:
    """The draft's sizes: of the draft it continues, of its JSON file or of the target's shape,
    with the settings that override.

    Raises ValueError naming the setting that does not fit the target.
    """
    settings = config.model
    size = settings.draft_vocab_size
    if size is not None:
        check_vocab_sizes(vocab_size=text_config.vocab_size, draft_vocab_size=size)
    draft, source = sized_draft(config, text_config)
    for key, found, wanted in (
        ("vocab_size", draft.vocab_size, text_config.vocab_size),
        ("target_hidden_size", draft.target_hidden_size, text_config.hidden_size),
    ):
        if found != wanted:
            raise ConfigError(
                f"{source}: {key} = {found}, but target {settings.target} has {wanted}"
            )
    chosen = settings.aux_layers
    if chosen is not None and draft.aux_layers not in (None, chosen):
        raise ConfigError(
            f"aux_layers = {list(chosen)} contradicts {source}, which has "
            f"{list(draft.aux_layers or ())}"
        )
    layers = chosen or draft.aux_layers
    used = resolve_aux_layers(text_config.num_hidden_layers, layers)
    if layers is not None:
        return dataclasses.replace(draft, aux_layers=used, num_aux_layers=len(used))
    if draft.num_aux_layers != len(used):
        raise ConfigError(
            f"{source}: num_aux_layers = {draft.num_aux_layers}, but aux_layers is not set and "
            f"the default is {list(used)}"
        )
    return draft


def sized_draft(config: Config, text_config: Any | None) -> tuple[DraftConfig, str]:
    """The draft's sizes before the target has its say, and where they come from.

    text_config None: sizes must come from draft_config or init_from.
    """
    settings = config.model
    size = settings.draft_vocab_size
    source = f"draft_config {settings.draft_config}"
    if settings.draft_config is not None:
        draft = DraftConfig.from_json(settings.draft_config)
    elif settings.init_from is not None:
        draft = read_draft_config(settings.init_from)
        source = f"init_from {settings.init_from}"
        if text_config is not None:  # the limit that serving has; others export shorter ones
            limit = text_config.max_position_embeddings
            draft = dataclasses.replace(draft, max_position_embeddings=limit)
    elif text_config is not None:
        return draft_for_target(text_config, draft_vocab_size=size), "the target's shape"
    else:
        raise ConfigError("neither the target's config nor draft_config can be read")
    if size is None or size == draft.draft_vocab_size:
        return draft, source
    return dataclasses.replace(draft, draft_vocab_size=size), source


def shares_head(config: Config, tied: bool) -> bool:
    """Whether the draft's copy of the target's embedding serves as the target's head too.

    tied: they are one matrix in the target. The draft's is fp32, and FSDP2 splits it.
    """
    return tied and config.train.dtype == "float32" and not config.parallel.fsdp
