"""The masks, sizes and random inputs that the benchmarks share, and the arms they compare.

Letters: T tokens, D width, S supervised rows, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

from specforge_trim import build_trim_pack, dense_pack
from specforge_trim.drafts.eagle3.model import Eagle3Draft
from specforge_trim.drafts.eagle3.sizes import DraftConfig
from specforge_trim.drafts.eagle3.step import StepSettings, ttt_step
from specforge_trim.loss.teacher import TeacherTable
from specforge_trim.plan.cost import DraftDims, PackCost, pack_cost
from specforge_trim.plan.memory import DEFAULT_ROW_MEMORY_MB, chunk_rows_for
from specforge_trim.plan.pack import TrimPack, restrict_pack
from specforge_trim.plan.segments import plan_chunks
from specforge_trim.plan.shard import SequenceSplit, row_edges, shard_chunks, shard_pack
from specforge_trim.ranks.layout import ALONE, Layout

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from classic import ClassicShape, classic_losses, loss_rows  # noqa: E402
from classic_ring import RingContext, own_rows  # noqa: E402

STEPS = 7
EPS, THETA = 1e-5, 10000.0

# Prototype sizes; Llama-3-8B's proportions (heads 4:1, MLP 3.5 D, Vd 7.8 D) at 1/8 width, with
# heads of half its size so that two key/value heads are left: with one, torch's CPU flash backward
# runs on one thread (docs/LOG.md); and its real sizes, for a GPU. `counting` is for
# what does not depend on sizes.
SIZES = {
    "prototype": dict(hidden=512, heads=8, kv_heads=2, head_dim=64, mlp=1408, draft_vocab=4096),
    "llama": dict(hidden=512, heads=8, kv_heads=2, head_dim=64, mlp=1792, draft_vocab=4000),
    "llama-3-8b": dict(
        hidden=4096, heads=32, kv_heads=8, head_dim=128, mlp=14336, draft_vocab=32000
    ),
    "counting": dict(hidden=16, heads=8, kv_heads=4, head_dim=4, mlp=16, draft_vocab=32),
}


def make_mask(layout: str, tokens: int, density: float) -> Tensor:
    """Row mask [T]: `blocks` (16, evenly placed), `points` (isolated), or `tail` (one block)."""
    mask = torch.zeros(tokens, dtype=torch.bool)
    if density >= 1:
        mask[:-1] = True
    elif layout == "blocks":
        stride, width = tokens // 16, int(density * tokens / 16)
        for start in range(0, tokens, stride):
            mask[start : start + width] = True
    elif layout == "points":
        mask[:: round(1 / density)] = True
    elif layout == "tail":
        mask[tokens - 1 - int(density * tokens) : tokens - 1] = True
    else:
        raise ValueError(f"layout={layout!r}: expected blocks, points or tail")
    return mask


def seconds(step: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


def append_row(path: str | None, row: dict) -> None:
    """Add a row to a JSON lines file; None: nowhere."""
    if path:
        with open(path, "a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")


@dataclass(frozen=True)
class FixedTeacher:
    """A teacher that is already known, so that no arm is timed computing it.

    The batch's `teacher_hidden` [S, 1] holds row numbers; `table` looks them up.
    """

    known: TeacherTable

    def table(self, numbers: Tensor, *, log_probs: bool = False) -> TeacherTable:
        assert not log_probs
        rows, known = numbers[:, 0].long(), self.known
        return TeacherTable(known.probs[rows], known.choice[rows], known.draft_mass[rows])


@dataclass(frozen=True)
class Problem:
    """A draft and one document of random features."""

    model: Eagle3Draft
    ids: Tensor
    aux: Tensor
    mask: Tensor
    settings: StepSettings

    @property
    def tokens(self) -> int:
        return self.ids.shape[0]

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, self.tokens])


def draft_of(size: str) -> DraftConfig:
    """The draft of one of SIZES."""
    s = SIZES[size]
    return DraftConfig(
        hidden_size=s["hidden"],
        intermediate_size=s["mlp"],
        num_attention_heads=s["heads"],
        num_key_value_heads=s["kv_heads"],
        head_dim=s["head_dim"],
        vocab_size=s["draft_vocab"],
        draft_vocab_size=s["draft_vocab"],
        target_hidden_size=s["hidden"],
        max_position_embeddings=1 << 20,
        rms_norm_eps=EPS,
        rope_parameters={"rope_type": "default", "rope_theta": THETA},
    )


def make_problem(
    size: str,
    mask: Tensor,
    *,
    aux: Tensor | None = None,
    seed: int = 0,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    backend: str = "sdpa",
) -> Problem:
    """Random weights, tokens and features; `aux` [T, 3D] may be a mapped file instead.

    On a GPU the features are there too, in the computation's dtype: no transfer is timed.
    """
    config, gen = draft_of(size), torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    tokens, width = mask.shape[0], config.dims.aux_width
    ids = torch.randint(config.vocab_size, (tokens,), generator=gen).to(device)
    if aux is None and device == "cpu":
        aux = torch.randn(tokens, width, generator=gen)
    elif aux is None:
        aux = torch.randn(tokens, width, device=device, dtype=dtype)
    return Problem(
        model=Eagle3Draft(config).to(device),
        ids=ids,
        aux=aux,
        mask=mask,
        settings=StepSettings(backend=backend, compute_dtype=dtype),
    )


def fixed_teacher(problem: Problem, count: int) -> FixedTeacher:
    """Peaked random distributions for `count` supervised rows."""
    device = problem.ids.device
    gen = torch.Generator(device).manual_seed(1)
    vocab = problem.model.config.draft_vocab_size
    probs = (torch.randn(count, vocab, generator=gen, device=device) * 2).softmax(-1)
    known = TeacherTable(probs, probs.argmax(-1), torch.ones(count, device=device))
    return FixedTeacher(known)


def step_zero_full(pack: TrimPack) -> TrimPack:
    """The pack with every row at step 0: what trimming only the later steps computes."""
    from specforge_trim.plan import pack as planner

    empty = torch.zeros(pack.owned, dtype=torch.bool)
    emits = [empty.index_fill(0, s.loss_rows, True) for s in pack.steps]
    needed = planner._needed_rows(emits)
    needed[0] = torch.ones(pack.owned, dtype=torch.bool)
    return planner._assemble(
        emits, needed, bounds=pack.cu_seqlens, owned=pack.owned, chain=pack.chain
    )


def default_chunk_rows(problem: Problem) -> int:
    """What the trainer takes by default on the problem's device."""
    return chunk_rows_for(
        problem.model.config.dims,
        STEPS,
        itemsize=problem.settings.compute_dtype.itemsize,
        budget=DEFAULT_ROW_MEMORY_MB[problem.ids.device.type] << 20,
    )


def our_step(
    problem: Problem,
    pack: TrimPack,
    *,
    chunk_rows: int | None = None,
    split: SequenceSplit | None = None,
    layout: Layout = ALONE,
    dims: DraftDims | None = None,
) -> Callable[[], Tensor]:
    """One training step of the package on a pack; returns loss sums per TTT step.

    chunk_rows: None = what the trainer takes by default on this device. split, layout: this
    rank's part, where ranks share the document; dims: sizes by whose costs rows are dealt, None =
    the problem's.
    """
    chunk_rows, shard = chunk_rows or default_chunk_rows(problem), None
    chunks = plan_chunks(pack, chunk_rows=chunk_rows)
    if split is not None:
        edges = row_edges(pack, split, dims or problem.model.config.dims)
        shard = shard_pack(pack, split, edges)
        chunks = shard_chunks(pack, split, edges, chunk_rows=chunk_rows)
        pack = restrict_pack(pack, edges[split.rank], edges[split.rank + 1])
    batch = SimpleNamespace(
        input_ids=problem.ids,
        position_ids=torch.arange(problem.tokens),
        doc_end=torch.full((problem.tokens,), problem.tokens),
        cu_seqlens=problem.cu_seqlens,
        pack=pack,
        chunks=chunks,
        loss_weights=None,
        shard=shard,
        grad_rows=None,
        aux=lambda a, b: problem.aux[a:b],
        teacher_hidden=torch.arange(pack.supervised.shape[0], dtype=torch.float32)[:, None],
    )
    teacher = fixed_teacher(problem, pack.supervised.shape[0])
    denominators = torch.full((STEPS,), float(problem.tokens))

    def step() -> Tensor:
        problem.model.zero_grad(set_to_none=False)
        return ttt_step(
            problem.model,
            batch,
            teacher=teacher,
            denominators=denominators,
            settings=problem.settings,
            layout=layout,
        ).loss

    return step


def classic_step(problem: Problem, *, rank: int = 0, size: int = 1) -> Callable[[], Tensor]:
    """The same step as one graph over all rows; returns loss sums per TTT step.

    Of several ranks, each runs its block of the tokens over ring attention.
    """
    c, device = problem.model.config, problem.ids.device
    shape = ClassicShape(c.num_attention_heads, c.num_key_value_heads, c.head_dim, EPS, THETA)
    params = dict(problem.model.named_parameters())
    n, context = problem.tokens // size, None
    assert n * size == problem.tokens, (problem.tokens, size)
    if size > 1:
        context = RingContext([(0, problem.tokens)], c.head_dim**-0.5, rank, size)
    every = loss_rows(problem.mask, problem.cu_seqlens, STEPS)
    own, kept = own_rows(every, rank * n, (rank + 1) * n)
    known = fixed_teacher(problem, kept.numel()).known
    rows = [(t.to(device), s.to(device)) for t, s in own]

    def step() -> Tensor:
        problem.model.zero_grad(set_to_none=False)
        losses = classic_losses(
            params,
            shape,
            ids=problem.ids,
            cu=problem.cu_seqlens,
            aux=problem.aux[rank * n : (rank + 1) * n],
            probs=known.probs,
            in_vocab=known.in_vocab,
            rows=rows,
            steps=STEPS,
            dtype=problem.settings.compute_dtype,
            lo=rank * n,
            context=context,
        )
        torch.stack([0.8**i * x / problem.tokens for i, x in enumerate(losses)]).sum().backward()
        return torch.stack(losses).detach()

    return step


def costs(problem: Problem, pack: TrimPack) -> PackCost:
    return pack_cost(pack, problem.model.config.dims)


def packs(problem: Problem) -> dict[str, TrimPack]:
    """ours, step-0-full and dense packs of a problem's mask."""
    trimmed = build_trim_pack(problem.mask, STEPS)
    return {
        "ours": trimmed,
        "step 0 full": step_zero_full(trimmed),
        "dense": dense_pack(problem.mask, STEPS),
    }
