"""The EAGLE-3 draft, as the pieces that the training stages and the decoder call.

Parameter names are the serving names, so `state_dict()` is the checkpoint. There is no forward
over a sequence here: which rows run, and against which keys, is the caller's business.

Letters: T tokens, R rows, D draft width, Dt target width, A aux layers, N heads, M key/value
heads, H head dim, V target vocabulary, Vd draft vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .draft_config import DraftConfig
from .layers import RMSNorm, Rotary, linear, rotate


class _Attention(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        d, h = config.hidden_size, config.head_dim
        self.q_proj = nn.Linear(2 * d, config.num_attention_heads * h, bias=False)
        self.k_proj = nn.Linear(2 * d, config.num_key_value_heads * h, bias=False)
        self.v_proj = nn.Linear(2 * d, config.num_key_value_heads * h, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * h, d, bias=False)


class _MLP(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        d, i = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(d, i, bias=False)
        self.up_proj = nn.Linear(d, i, bias=False)
        self.down_proj = nn.Linear(i, d, bias=False)


class _Midlayer(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(d, eps=eps)
        self.hidden_norm = RMSNorm(d, eps=eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = RMSNorm(d, eps=eps)
        self.mlp = _MLP(config)


class Eagle3Draft(nn.Module):
    """One decoder layer over cat(token embedding, hidden), fed by projected target states.

    Source: EAGLE-3 (Li et al., 2025). With `fc_norm` and `norm_output` it is EAGLE-3.1.
    """

    d2t: Tensor
    t2d: Tensor

    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        if config.hidden_size != config.target_hidden_size:
            raise ValueError(
                f"hidden_size={config.hidden_size} differs from target_hidden_size="
                f"{config.target_hidden_size}; the draft reads the target's embedding rows, so "
                "the two must be equal"
            )
        self.config = config
        d, dt = config.hidden_size, config.target_hidden_size
        self.fc = nn.Linear(config.num_aux_layers * dt, d, bias=False)
        self.fc_norm: nn.ModuleList | None = None
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(
                RMSNorm(dt, eps=config.rms_norm_eps) for _ in range(config.num_aux_layers)
            )
        self.midlayer = _Midlayer(config)
        self.norm = RMSNorm(d, eps=config.rms_norm_eps)
        self.lm_head = nn.Linear(d, config.draft_vocab_size, bias=False)
        self.embed_tokens = nn.Embedding(config.vocab_size, dt)
        self.embed_tokens.weight.requires_grad_(False)
        self.rotary = Rotary(
            config.rope_parameters,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_position_embeddings,
        )
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self._has_vocab = False
        if config.draft_vocab_size == config.vocab_size:
            self.set_vocab(self.d2t, torch.ones(config.vocab_size, dtype=torch.bool))
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and not name.startswith("embed_tokens"):
                nn.init.normal_(parameter, std=0.02)

    # --- vocabulary and target rows -------------------------------------------------------

    def set_vocab(self, d2t: Tensor, t2d: Tensor) -> None:
        """Set the draft vocabulary: target id = draft id + d2t[draft id].

        Raises:
            ValueError: wrong shapes, or the two maps name different tokens.
        """
        vd, v = self.config.draft_vocab_size, self.config.vocab_size
        if tuple(d2t.shape) != (vd,) or tuple(t2d.shape) != (v,):
            raise ValueError(
                f"d2t {list(d2t.shape)} and t2d {list(t2d.shape)}: expected [{vd}] and [{v}]"
            )
        kept = d2t.cpu() + torch.arange(vd)
        if not torch.equal(t2d.cpu().bool().nonzero().flatten(), kept):
            raise ValueError("d2t and t2d name different draft vocabularies")
        with torch.no_grad():
            self.d2t.copy_(d2t)
            self.t2d.copy_(t2d)
        self._has_vocab = True

    @property
    def draft_to_target(self) -> Tensor:
        """Target ids of the draft vocabulary, int64 [Vd], ascending."""
        if not self._has_vocab:
            # Weights may have been loaded since; looking asks the device, so only until found.
            self._has_vocab = bool(self.t2d.any())
        if not self._has_vocab:
            raise ValueError(
                "the draft has no vocabulary map: call set_vocab before training or decoding "
                "(without one its ids would silently mean the first ids of the target)"
            )
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

    def load_target(self, head: Any) -> None:
        """Take the target's embedding rows (`head.embed` [V, Dt]); they stay frozen."""
        self._copy_rows(self.embed_tokens.weight, head.embed, "embedding")

    def init_head_from_target(self, head: Any) -> None:
        """Start lm_head from the rows of `head.head` [V, Dt] that the draft vocabulary keeps."""
        rows = self.draft_to_target.to(head.head.device)
        self._copy_rows(self.lm_head.weight, head.head.index_select(0, rows), "head")

    @staticmethod
    def _copy_rows(parameter: Tensor, rows: Tensor, name: str) -> None:
        if rows.shape != parameter.shape:
            raise ValueError(
                f"target {name} has shape {list(rows.shape)}, the draft expects "
                f"{list(parameter.shape)}; check vocab_size and target_hidden_size"
            )
        with torch.no_grad():
            parameter.copy_(rows)

    # --- the layer, in the pieces that the stages need ------------------------------------

    def project_aux(self, aux_TA: Tensor) -> Tensor:
        """g^0 [T, D] = fc(aux), aux [T, A*Dt]; with fc_norm each aux layer is normed first."""
        if self.fc_norm is not None:
            parts = aux_TA.chunk(self.config.num_aux_layers, dim=-1)
            aux_TA = torch.cat([n(p) for n, p in zip(self.fc_norm, parts, strict=True)], dim=-1)
        return linear(aux_TA, self.fc.weight)

    def embed(self, ids: Tensor) -> Tensor:
        """Raw embedding rows [R, D] of the target for token `ids` [R]."""
        return F.embedding(ids, self.embed_tokens.weight)

    def _inputs(self, embedding_RD: Tensor, hidden_RD: Tensor) -> Tensor:
        """z [R, 2D]: the embedding's norm first, the hidden's second."""
        embedding = self.midlayer.input_layernorm(embedding_RD.to(hidden_RD.dtype))
        return torch.cat((embedding, self.midlayer.hidden_norm(hidden_RD)), dim=-1)

    def _heads(self, z: Tensor, weight: Tensor) -> Tensor:
        return linear(z, weight).unflatten(-1, (-1, self.config.head_dim))

    def query(self, embedding_RD: Tensor, hidden_RD: Tensor, positions: Tensor) -> Tensor:
        """q [R, N, H] with rotary positions [R] applied."""
        z = self._inputs(embedding_RD, hidden_RD)
        cos, sin = self.rotary.cos_sin(positions, z.dtype)
        return rotate(self._heads(z, self.midlayer.self_attn.q_proj.weight), cos, sin)

    def key_value(
        self, embedding_RD: Tensor, hidden_RD: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """k, v [R, M, H]; rotary positions [R] applied to k."""
        attn = self.midlayer.self_attn
        z = self._inputs(embedding_RD, hidden_RD)
        cos, sin = self.rotary.cos_sin(positions, z.dtype)
        k = rotate(self._heads(z, attn.k_proj.weight), cos, sin)
        return k, self._heads(z, attn.v_proj.weight)

    def query_key_value(
        self, embedding_RD: Tensor, hidden_RD: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q [R, N, H], k and v [R, M, H]; rotary positions [R] applied to q and k."""
        attn = self.midlayer.self_attn
        z = self._inputs(embedding_RD, hidden_RD)
        cos, sin = self.rotary.cos_sin(positions, z.dtype)
        q = rotate(self._heads(z, attn.q_proj.weight), cos, sin)
        k = rotate(self._heads(z, attn.k_proj.weight), cos, sin)
        return q, k, self._heads(z, attn.v_proj.weight)

    def finish(self, hidden_RD: Tensor, attention_RNH: Tensor) -> Tensor:
        """The layer's output [R, D]: o projection onto the un-normed hidden, then the MLP."""
        layer = self.midlayer
        residual = hidden_RD + linear(attention_RNH.flatten(1), layer.self_attn.o_proj.weight)
        y = layer.post_attention_layernorm(residual)
        gate = F.silu(linear(y, layer.mlp.gate_proj.weight))
        up = linear(y, layer.mlp.up_proj.weight)
        return residual + linear(gate * up, layer.mlp.down_proj.weight)

    def final_norm(self, output_RD: Tensor) -> Tensor:
        """What lm_head reads [R, D]."""
        return self.norm(output_RD)

    def feedback(self, output_RD: Tensor) -> Tensor:
        """What the next step is fed [R, D]: the raw output, or its norm with `norm_output`."""
        return self.norm(output_RD) if self.config.norm_output else output_RD

    def logits(self, output_RD: Tensor) -> Tensor:
        """Draft logits [R, Vd] of a layer output."""
        return linear(self.final_norm(output_RD), self.lm_head.weight)
