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

from specforge_trim.drafts.eagle3.layers import RMSNorm, Rotary, linear, rotate
from specforge_trim.drafts.eagle3.sizes import DraftConfig


class _Attention(nn.Module):
    def __init__(self, config: DraftConfig, *, width: int) -> None:
        super().__init__()
        h, bias = config.head_dim, config.attention_bias
        self.q_proj = nn.Linear(width, config.num_attention_heads * h, bias=bias)
        self.k_proj = nn.Linear(width, config.num_key_value_heads * h, bias=bias)
        self.v_proj = nn.Linear(width, config.num_key_value_heads * h, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * h, config.hidden_size, bias=bias)
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if config.qk_norm:
            self.q_norm = RMSNorm(h, eps=config.rms_norm_eps)
            self.k_norm = RMSNorm(h, eps=config.rms_norm_eps)


class _MLP(nn.Module):
    def __init__(self, config: DraftConfig) -> None:
        super().__init__()
        d, i = config.hidden_size, config.intermediate_size
        self.gate_proj = nn.Linear(d, i, bias=False)
        self.up_proj = nn.Linear(d, i, bias=False)
        self.down_proj = nn.Linear(i, d, bias=False)


class DraftLayer(nn.Module):
    """One decoder layer. The first reads cat(token embedding, hidden), later ones hidden alone."""

    def __init__(self, config: DraftConfig, *, is_first: bool) -> None:
        super().__init__()
        d, eps = config.hidden_size, config.rms_norm_eps
        self.is_first, self._head_dim = is_first, config.head_dim
        self._normed_residual = is_first and config.norm_before_residual
        self.input_layernorm = RMSNorm(d, eps=eps)
        if is_first:
            self.hidden_norm = RMSNorm(d, eps=eps)
        self.self_attn = _Attention(config, width=2 * d if is_first else d)
        self.post_attention_layernorm = RMSNorm(d, eps=eps)
        self.mlp = _MLP(config)

    def inputs(self, embedding_RD: Tensor | None, hidden_RD: Tensor) -> Tensor:
        """What q, k and v read: [R, 2D], the embedding's norm first; [R, D] in later layers."""
        if not self.is_first:
            return self.input_layernorm(hidden_RD)
        assert embedding_RD is not None, "the first layer reads the token embedding"
        embedding = self.input_layernorm(embedding_RD.to(hidden_RD.dtype))
        return torch.cat((embedding, self.hidden_norm(hidden_RD)), dim=-1)

    def _heads(self, z: Tensor, projection: nn.Linear, norm: RMSNorm | None) -> Tensor:
        x = linear(z, projection.weight, projection.bias).unflatten(-1, (-1, self._head_dim))
        return x if norm is None else norm(x)

    def query(self, z: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """q [R, N, H], normed with qk_norm, rotated."""
        return rotate(self._heads(z, self.self_attn.q_proj, self.self_attn.q_norm), cos, sin)

    def key_value(self, z: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """k (normed with qk_norm, rotated) and v [R, M, H]."""
        k = rotate(self._heads(z, self.self_attn.k_proj, self.self_attn.k_norm), cos, sin)
        return k, self._heads(z, self.self_attn.v_proj, None)

    def finish(self, hidden_RD: Tensor, attention_RNH: Tensor) -> Tensor:
        """The layer's output [R, D]: o projection onto the residual, then the MLP.

        The residual is the un-normed hidden; hidden_norm of it with norm_before_residual.
        """
        o_proj = self.self_attn.o_proj
        if self._normed_residual:
            hidden_RD = self.hidden_norm(hidden_RD)
        residual = hidden_RD + linear(attention_RNH.flatten(1), o_proj.weight, o_proj.bias)
        y = self.post_attention_layernorm(residual)
        gate = F.silu(linear(y, self.mlp.gate_proj.weight))
        up = linear(y, self.mlp.up_proj.weight)
        return residual + linear(gate * up, self.mlp.down_proj.weight)


class Eagle3Draft(nn.Module):
    """A decoder layer over cat(token embedding, hidden), fed by projected target states.

    Source: EAGLE-3 (Li et al., 2025). With `fc_norm` and `norm_output` it is EAGLE-3.1. Layers
    after the first, named layers.1 and on, are plain Llama layers.
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
        self.input_norm: RMSNorm | None = None
        if config.norm_before_fc:
            self.input_norm = RMSNorm(config.num_aux_layers * dt, eps=config.rms_norm_eps)
        self.midlayer = DraftLayer(config, is_first=True)
        if config.num_hidden_layers > 1:
            self.layers = nn.ModuleDict(
                {
                    str(n): DraftLayer(config, is_first=False)
                    for n in range(1, config.num_hidden_layers)
                }
            )
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
            self.t2d.fill_(True)
            self._has_vocab = True
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2 and not name.startswith("embed_tokens"):
                nn.init.normal_(parameter, std=0.02)
            elif name.endswith(".bias"):
                nn.init.zeros_(parameter)

    @property
    def stack(self) -> tuple[DraftLayer, ...]:
        """The decoder layers in order."""
        deeper = self.layers.values() if self.config.num_hidden_layers > 1 else ()
        return (self.midlayer, *deeper)

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

    @property
    def lacks_embedding(self) -> bool:
        """Whether the draft was read from a file without embed_tokens and has no rows yet."""
        return bool(self.embed_tokens.weight[:1].isnan().all())

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

    # --- the pieces that the stages and the decoder need ----------------------------------

    def project_aux(self, aux_TA: Tensor) -> Tensor:
        """g^0 [T, D] = fc(aux), aux [T, A*Dt]; with fc_norm each aux layer is normed first,
        with norm_before_fc all of them together."""
        if self.fc_norm is not None:
            parts = aux_TA.chunk(self.config.num_aux_layers, dim=-1)
            aux_TA = torch.cat([n(p) for n, p in zip(self.fc_norm, parts, strict=True)], dim=-1)
        elif self.input_norm is not None:
            aux_TA = self.input_norm(aux_TA)
        return linear(aux_TA, self.fc.weight)

    def embed(self, ids: Tensor) -> Tensor:
        """Raw embedding rows [R, D] of the target for token `ids` [R]."""
        return F.embedding(ids, self.embed_tokens.weight)

    def query(self, embedding_RD: Tensor, hidden_RD: Tensor, positions: Tensor) -> Tensor:
        """The first layer's q [R, N, H] with rotary positions [R] applied."""
        z = self.midlayer.inputs(embedding_RD, hidden_RD)
        return self.midlayer.query(z, *self.rotary.cos_sin(positions, z.dtype))

    def key_value(
        self, embedding_RD: Tensor, hidden_RD: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The first layer's k, v [R, M, H]; rotary positions [R] applied to k."""
        z = self.midlayer.inputs(embedding_RD, hidden_RD)
        return self.midlayer.key_value(z, *self.rotary.cos_sin(positions, z.dtype))

    def query_key_value(
        self, embedding_RD: Tensor, hidden_RD: Tensor, positions: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The first layer's q [R, N, H], k and v [R, M, H]; q and k rotated to positions [R]."""
        z = self.midlayer.inputs(embedding_RD, hidden_RD)
        cos, sin = self.rotary.cos_sin(positions, z.dtype)
        return self.midlayer.query(z, cos, sin), *self.midlayer.key_value(z, cos, sin)

    def finish(self, hidden_RD: Tensor, attention_RNH: Tensor) -> Tensor:
        """The first layer's output [R, D]; with one layer, the draft's."""
        return self.midlayer.finish(hidden_RD, attention_RNH)

    def final_norm(self, output_RD: Tensor) -> Tensor:
        """What lm_head reads [R, D]."""
        return self.norm(output_RD)

    def feedback(self, output_RD: Tensor) -> Tensor:
        """What the next step is fed [R, D]: the raw output, or its norm with `norm_output`."""
        return self.norm(output_RD) if self.config.norm_output else output_RD

    def logits(self, output_RD: Tensor) -> Tensor:
        """Draft logits [R, Vd] of the last layer's output."""
        return linear(self.final_norm(output_RD), self.lm_head.weight)


def row_only_parameters(model: Eagle3Draft) -> list[Tensor]:
    """Trainable weights that only the row stage reads: their gradients are complete first."""
    last = model.stack[-1]
    attention = last.self_attn
    return [
        attention.q_proj.weight,
        attention.o_proj.weight,
        last.post_attention_layernorm.weight,
        *last.mlp.parameters(),
        model.norm.weight,
        model.lm_head.weight,
    ]
