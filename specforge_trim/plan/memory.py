"""How many kept rows a chunk may have under a memory budget: the activations of its K steps.

A row chunk's graph is the peak of a training step, and lives only while the chunk runs. Counted
are the tensors that the K steps keep for the backward, the working space of one step's backward,
and the loss end's tables and blocks; weights, gradients and K0/V0 are not.

Letters: K ttt_length, D draft hidden, N query heads, Nkv kv heads, H head_dim, I MLP width, Vd
draft vocabulary.
"""

from specforge_trim.plan.cost import DraftDims
from specforge_trim.plan.rows import check_integer

MIN_CHUNK_ROWS, MAX_CHUNK_ROWS = 32, 8192
# A CPU is as fast with a few hundred rows; a GPU wants thousands.
DEFAULT_ROW_MEMORY_MB = {"cpu": 256, "cuda": 4096}


def row_bytes(dims: DraftDims, ttt_length: int, *, itemsize: int) -> int:
    """Bytes one row of a chunk needs at the peak.

    Kept per step and layer: 10 D (embedding, both norms' outputs, residual, norms' inputs, head
    input and its gradient), 2 N H + 2 Nkv H (queries, output, own key and value), 4 I (gate, its
    SiLU, up, their product). Working space: 6 D + 4 I. Loss end in fp32: 4 Vd (teacher's
    probabilities and their logarithms, logits and teacher rows of a block).
    """
    attention = 2 * dims.heads * dims.head_dim + 2 * dims.kv_heads * dims.head_dim
    kept = 10 * dims.hidden + attention + 4 * dims.intermediate
    working = 6 * dims.hidden + 4 * dims.intermediate
    return itemsize * (ttt_length * dims.layers * kept + working) + 4 * 4 * dims.draft_vocab


def chunk_rows_for(dims: DraftDims, ttt_length: int, *, itemsize: int, budget: int) -> int:
    """Rows per chunk under a budget in bytes, between 32 and 8,192.

    Raises ValueError when not even 32 rows fit; matrix products of fewer rows are too slow to be
    what anyone wants.
    """
    budget = check_integer(budget, name="budget", low=1)
    rows = budget // row_bytes(dims, ttt_length, itemsize=itemsize)
    if rows < MIN_CHUNK_ROWS:
        need = MIN_CHUNK_ROWS * row_bytes(dims, ttt_length, itemsize=itemsize)
        raise ValueError(
            f"row_memory_mb = {budget >> 20}: {MIN_CHUNK_ROWS} rows of this draft need "
            f"{-(-need >> 20)} MB; raise row_memory_mb or set chunk_rows"
        )
    return min(rows, MAX_CHUNK_ROWS)
