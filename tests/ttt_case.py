"""Small random TTT problems, handed both to the training step and to the oracle."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from oracle import OracleDocument, OracleModel

from specforge_trim.config.objective import parse_objective
from specforge_trim.drafts.eagle3.model import Eagle3Draft
from specforge_trim.drafts.eagle3.sizes import DraftConfig
from specforge_trim.drafts.eagle3.step import StepResult, StepSettings, ttt_step
from specforge_trim.loss.teacher import Teacher
from specforge_trim.plan.pack import TrimPack, build_trim_pack, dense_pack
from specforge_trim.plan.segments import plan_chunks

THETA, EPS = 10000.0, 1e-5


@dataclass
class Case:
    """One model, some documents, and the target's head."""

    model: Eagle3Draft
    docs: list[OracleDocument]
    head: torch.Tensor
    steps: int

    @property
    def teacher(self) -> Teacher:
        return Teacher(self.head, self.model.draft_to_target, self.model.t2d)

    @property
    def row_mask(self) -> torch.Tensor:
        return torch.tensor([m for d in self.docs for m in d.row_mask], dtype=torch.bool)

    @property
    def cu_seqlens(self) -> torch.Tensor:
        return torch.tensor([0] + [len(d.ids) for d in self.docs]).cumsum(0)


def make_case(
    masks: list[list[int]],
    *,
    steps: int = 4,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 8,
    width: int = 24,
    vocab: int = 32,
    draft_vocab: int = 16,
    eagle31: bool = False,
    layers: int = 1,
    seed: int = 0,
    changes: dict[str, Any] | None = None,
) -> Case:
    """One document per mask; head_dim * heads need not equal width. changes: config fields."""
    gen = torch.Generator().manual_seed(seed)
    config = DraftConfig(
        hidden_size=width,
        intermediate_size=20,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        target_hidden_size=width,
        **{
            "max_position_embeddings": 256,
            "rms_norm_eps": EPS,
            "rope_parameters": {"rope_type": "default", "rope_theta": THETA},
            "fc_norm": eagle31,
            "norm_output": eagle31,
            **(changes or {}),
        },
    )
    model = Eagle3Draft(config).double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(torch.randn(p.shape, generator=gen, dtype=torch.float64))
            if p.dim() == 2:
                p.mul_(p.shape[1] ** -0.5)
            else:
                p.mul_(0.3).add_(1.0)
            if name == "embed_tokens.weight":
                p.mul_(3.0)
    kept = torch.randperm(vocab, generator=gen)[:draft_vocab].sort().values
    t2d = torch.zeros(vocab, dtype=torch.bool)
    t2d[kept] = True
    model.set_vocab(kept - torch.arange(draft_vocab), t2d)
    head = torch.randn(vocab, width, generator=gen, dtype=torch.float64) * 0.5
    docs = [_document(mask, config, gen) for mask in masks]
    return Case(model, docs, head, steps)


def _document(mask: list[int], config: DraftConfig, gen: torch.Generator) -> OracleDocument:
    length, width = len(mask), config.hidden_size
    return OracleDocument(
        ids=torch.randint(config.vocab_size, (length,), generator=gen).tolist(),
        row_mask=list(mask[:-1]) + [0],  # the last position has no teacher
        aux=torch.randn(length, config.num_aux_layers * width, generator=gen, dtype=torch.float64),
        last=torch.randn(length, width, generator=gen, dtype=torch.float64),
    )


def oracle_model(case: Case) -> OracleModel:
    """The oracle's own copy of the parameters, requiring gradients."""
    config = case.model.config
    frozen = ("d2t", "t2d", "embed_tokens.weight")
    params = {
        name: value.detach().clone().requires_grad_(name not in frozen)
        for name, value in case.model.state_dict().items()
        if value.is_floating_point()
    }
    return OracleModel(
        params,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        head_dim=config.head_dim,
        eps=config.rms_norm_eps,
        theta=THETA,
        kept=[v for v in range(config.vocab_size) if bool(case.model.t2d[v])],
        head=case.head,
        fc_norm=config.fc_norm,
        norm_output=config.norm_output,
    )


def make_batch(
    case: Case,
    pack: TrimPack,
    *,
    chunk_rows: int = 1024,
    group_gap: int = 32,
    max_group: int = 2048,
    dtype: torch.dtype = torch.float64,
    loss_weights: tuple[torch.Tensor, ...] | None = None,
    grad_rows: torch.Tensor | None = None,
) -> SimpleNamespace:
    """The fields of a training batch, built without the loader."""
    cu = case.cu_seqlens
    lengths = cu.diff()
    aux = torch.cat([d.aux for d in case.docs]).to(dtype)
    last = torch.cat([d.last for d in case.docs]).to(dtype)
    return SimpleNamespace(
        input_ids=torch.tensor([x for d in case.docs for x in d.ids]),
        position_ids=torch.cat([torch.arange(n) for n in lengths.tolist()]),
        doc_end=torch.repeat_interleave(cu[1:], lengths),
        cu_seqlens=cu,
        pack=pack,
        chunks=plan_chunks(pack, chunk_rows=chunk_rows, group_gap=group_gap, max_group=max_group),
        loss_weights=loss_weights,
        shard=None,
        grad_rows=grad_rows,
        aux=lambda a, b: aux[a:b],
        teacher_hidden=last[pack.supervised + 1],
    )


def make_pack(case: Case, *, chain: str = "shift", dense: bool = False) -> TrimPack:
    build = dense_pack if dense else build_trim_pack
    return build(case.row_mask, case.steps, cu_seqlens=case.cu_seqlens, chain=chain)


def run_step(
    case: Case,
    batch: SimpleNamespace,
    *,
    backend: str = "sdpa",
    denominators: torch.Tensor | None = None,
    dtype: torch.dtype = torch.float64,
    context_chunk: int = 4096,
    max_keys: int | None = None,
    objective: str = "soft_ce",
    decay: float = 0.8,
) -> tuple[StepResult, dict[str, torch.Tensor]]:
    """Metric sums and the gradient of every trainable parameter."""
    case.model.zero_grad(set_to_none=True)
    if denominators is None:
        denominators = torch.full((case.steps,), float(case.cu_seqlens[-1]))
    settings = StepSettings(
        backend=backend,
        compute_dtype=dtype,
        context_chunk=context_chunk,
        max_keys=max_keys,
        objective=parse_objective(objective),
        decay=decay,
    )
    teacher = Teacher(case.head.to(dtype), case.teacher.draft_to_target, case.teacher.t2d)
    result = ttt_step(
        case.model, batch, teacher=teacher, denominators=denominators, settings=settings
    )
    grads = {n: p.grad.clone() for n, p in case.model.named_parameters() if p.requires_grad}
    return result, grads
