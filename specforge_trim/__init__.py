"""Train EAGLE-3 drafts on the rows that can reach a loss, with the full computation's result.

Public names are imported on first use, so that importing the package costs nothing.
"""

from importlib import import_module

_PUBLIC = {
    "row_mask": "specforge_trim.plan.rows",
    "TrimPack": "specforge_trim.plan.pack",
    "build_trim_pack": "specforge_trim.plan.pack",
    "dense_pack": "specforge_trim.plan.pack",
    "choose_pack": "specforge_trim.plan.guard",
    # Row-sparse training of dense language models.
    "RowPlan": "specforge_trim.drafts.lm.rows",
    "loss_rows": "specforge_trim.drafts.lm.rows",
    "plan_rows": "specforge_trim.drafts.lm.rows",
    "PackedAttention": "specforge_trim.drafts.lm.functions",
    "RowSparseSettings": "specforge_trim.drafts.lm.layers",
    "enable_row_sparse": "specforge_trim.drafts.lm.layers",
    "disable_row_sparse": "specforge_trim.drafts.lm.layers",
    "hidden_states": "specforge_trim.drafts.lm.layers",
    "LogitForm": "specforge_trim.loss.labels",
    "kept_log_probs": "specforge_trim.loss.labels",
    "label_loss": "specforge_trim.loss.labels",
}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_PUBLIC[name]), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *_PUBLIC})
