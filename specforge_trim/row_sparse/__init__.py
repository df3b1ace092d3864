"""Row-sparse training of dense language models: only rows that some loss reads.

    rows.py        which rows those are, as integers made in the loader
    head.py        skip_masked_lm_head_tokens: log-probabilities and entropy at kept rows. Exact
    functions.py   autograd functions with a full forward and a backward over kept rows
    families.py    which models and modules those layers may stand in for
    layers.py      stop_grad_context_tokens: the decoder layers of Hugging Face models

stop_grad_context_tokens changes the gradient on purpose: it flows through kept rows only.
"""

from specforge_trim.row_sparse.families import check_model_type, check_window
from specforge_trim.row_sparse.functions import PackedAttention
from specforge_trim.row_sparse.head import HeadRows, LogitForm, kept_log_probs, label_loss
from specforge_trim.row_sparse.layers import (
    RowSparseSettings,
    disable_row_sparse,
    enable_row_sparse,
    hidden_states,
)
from specforge_trim.row_sparse.rows import RowPlan, loss_rows, plan_rows

__all__ = [
    "HeadRows",
    "LogitForm",
    "PackedAttention",
    "RowPlan",
    "RowSparseSettings",
    "check_model_type",
    "check_window",
    "disable_row_sparse",
    "enable_row_sparse",
    "hidden_states",
    "kept_log_probs",
    "label_loss",
    "loss_rows",
    "plan_rows",
]
