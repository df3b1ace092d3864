"""One vocabulary for a draft and its target: the same tokens, and as many rows of weights.

Drafted ids are read by the target, so a token must have one id in both. The number of rows may
differ all the same: models of one family are padded to different sizes (Qwen2.5-0.5B has 151,936
rows, Qwen2.5-7B 152,064, for 151,665 tokens). Serving engines ask for equal sizes; the draft gets
the target's.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from specforge_trim.config.options import ConfigError

logger = logging.getLogger(__name__)


def check_vocabulary(
    draft_path: str | Path,
    target_path: str | Path,
    *,
    draft_rows: int,
    target_rows: int,
) -> None:
    """Raises ConfigError where the two tokenizers give an ordinary token different ids.

    Added tokens (such as <|im_start|>) that differ are warned of: the draft learns the target's.
    A draft folder without a tokenizer is taken on trust if its rows are as many as the target's.
    """
    draft = _tokens(draft_path)
    target = _tokens(target_path)
    if target is None:
        return  # the preparation says so
    if draft is None:
        if draft_rows != target_rows:
            raise ConfigError(
                f"draft {draft_path} has {draft_rows} vocabulary rows, the target {target_rows}, "
                "and no tokenizer that would show whether their tokens are the same: put its "
                "tokenizer into the folder"
            )
        logger.warning(
            "draft %s has no tokenizer: whether its tokens are the target's is not checked",
            draft_path,
        )
        return
    ordinary, added = _differences(*draft, *target)
    if ordinary:
        raise ConfigError(
            f"draft {draft_path} has another tokenizer than the target: {len(ordinary)} ids mean "
            f"other tokens, such as {_example(ordinary)}; choose a draft of the target's family"
        )
    if added:
        logger.warning(
            "draft %s: %d special or added tokens are not the target's, such as %s; the draft "
            "learns the target's from the data",
            draft_path, len(added), _example(added),
        )  # fmt: skip
    if draft_rows != target_rows:
        logger.info(
            "the draft's vocabulary of %d rows is made the target's of %d",
            draft_rows, target_rows,
        )  # fmt: skip


def _tokens(path: str | Path) -> tuple[dict[str, int], frozenset[str]] | None:
    """A model's tokens with their ids, and which of them were added; None without a tokenizer."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (ValueError, OSError):
        return None
    return tokenizer.get_vocab(), frozenset(tokenizer.added_tokens_encoder)


_Difference = tuple[int, str | None, str | None]  # id, token of the draft, of the target


def _differences(
    draft: Mapping[str, int],
    draft_added: frozenset[str],
    target: Mapping[str, int],
    target_added: frozenset[str],
) -> tuple[list[_Difference], list[_Difference]]:
    """Ids that mean two ordinary tokens, and ids of an added token or of one that is missing."""
    of_draft = {i: token for token, i in draft.items()}
    of_target = {i: token for token, i in target.items()}
    ordinary: list[_Difference] = []
    added: list[_Difference] = []
    for i in sorted(of_draft.keys() | of_target.keys()):
        here, there = of_draft.get(i), of_target.get(i)
        if here == there:
            continue
        odd = here is None or there is None or here in draft_added or there in target_added
        (added if odd else ordinary).append((i, here, there))
    return ordinary, added


def _example(differences: Sequence[_Difference]) -> str:
    i, here, there = differences[0]
    draft, target = ("none" if token is None else repr(token) for token in (here, there))
    return f"{i}: {draft} in the draft, {target} in the target"


def fit_vocabulary(model: Any, rows: int, path: str | Path) -> None:
    """Gives a model `rows` rows of embedding and head, in place.

    New rows are the mean of those that no token of the tokenizer at `path` uses, which a model
    has learned never to predict, or of all rows where every one is used.
    """
    old = model.get_input_embeddings().num_embeddings
    if old == rows:
        return
    found = _tokens(path)
    used = set() if found is None else set(found[0].values())
    spare = [i for i in range(old) if i not in used] or list(range(old))
    means = [weight.detach()[spare].mean(0) for weight in _weights(model)]
    model.resize_token_embeddings(rows, mean_resizing=False)
    with torch.no_grad():
        for weight, mean in zip(_weights(model), means, strict=True):
            weight[old:] = mean  # no row where it has become smaller


def _weights(model: Any) -> list[Any]:
    return [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
