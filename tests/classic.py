"""The classic unroll: every row at every step in one autograd graph, a trimmed loss end.

The fair opponent for speed, memory and low-precision error. It shares nothing with the package's
stages, planner or kernels: context attention is torch's flash operator on whole documents, the
rows' own later keys are merged by log-sum-exp, nothing is gathered except the loss rows.

Letters: T tokens, D width, N heads, M key/value heads, H head dim, Vd draft vocabulary.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
import torch.nn.functional as F

_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_CPU_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def flash(q, k, v, dropout, causal, *, scale):
    """torch's flash forward over [B, H, S, D] of the tensors' device."""
    if q.device.type == "cpu":
        return _CPU(q, k, v, dropout, causal, scale=scale)
    return torch.ops.aten._scaled_dot_product_flash_attention(
        q, k, v, dropout, causal, False, scale=scale
    )[:2]


def flash_backward(do, q, k, v, o, lse, dropout, causal, *, scale):
    if q.device.type == "cpu":
        return _CPU_BACKWARD(do, q, k, v, o, lse, dropout, causal, scale=scale)
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        do, q, k, v, o, lse.contiguous(), None, None, q.shape[2], k.shape[2], dropout, causal,
        state, unused, scale=scale,
    )  # fmt: skip


@dataclass(frozen=True)
class ClassicShape:
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    fc_norm: bool = False
    norm_output: bool = False


def _bnth(x):
    return x.transpose(0, 1)[None]


@dataclass(frozen=True)
class WholeContext:
    """Step-0 keys in one process; bounds: (start, end) of each document."""

    bounds: list[tuple[int, int]]
    scale: float

    def forward(self, q, k0, v0):
        parts = [
            flash(_bnth(q[a:b]), _bnth(k0[a:b]), _bnth(v0[a:b]), 0.0, True, scale=self.scale)
            for a, b in self.bounds
        ]
        o = torch.cat([p[0][0].transpose(0, 1) for p in parts])
        return o, torch.cat([p[1][0].transpose(0, 1) for p in parts])

    def backward(self, do, q, k0, v0, o, lse):
        dq, dk0, dv0 = torch.empty_like(q), torch.empty_like(k0), torch.empty_like(v0)
        for a, b in self.bounds:
            grads = flash_backward(
                _bnth(do[a:b]),
                _bnth(q[a:b]),
                _bnth(k0[a:b]),
                _bnth(v0[a:b]),
                _bnth(o[a:b]),
                lse[a:b].transpose(0, 1)[None],
                0.0,
                True,
                scale=self.scale,
            )
            for buffer, grad in zip((dq, dk0, dv0), grads, strict=True):
                buffer[a:b] = grad[0].transpose(0, 1)
        return dq, dk0, dv0


class ClassicAttention(torch.autograd.Function):
    """Attention over step-0 keys, plus each row's own keys of later steps."""

    @staticmethod
    def forward(ctx, context, scale, q, k0, v0, *own):
        groups = (k0.shape[1], -1)
        o, lse = context.forward(q, k0, v0)
        ks, vs = own[: len(own) // 2], own[len(own) // 2 :]
        if ks:
            wide = lse.dtype
            qg = q.unflatten(1, groups).to(wide)
            logits = [((qg * k[:, :, None]).sum(-1) * scale).flatten(1) for k in ks]
            total = torch.stack([lse, *logits]).logsumexp(0)
            out = o.to(wide) * (lse - total).exp()[..., None]
            for v, logit in zip(vs, logits, strict=True):
                weight = (logit - total).exp().unflatten(1, groups)[..., None]
                out += (weight * v[:, :, None]).flatten(1, 2)
            o, lse = out.to(q.dtype), total
        ctx.context, ctx.scale, ctx.groups = context, scale, groups
        ctx.save_for_backward(q, k0, v0, o, lse, *own)
        return o

    @staticmethod
    def backward(ctx, do):
        q, k0, v0, o, lse, *own = ctx.saved_tensors
        scale, groups, wide = ctx.scale, ctx.groups, lse.dtype
        do = do.contiguous()
        dq, dk0, dv0 = ctx.context.backward(do, q, k0, v0, o, lse)
        ks, vs = own[: len(own) // 2], own[len(own) // 2 :]
        dks, dvs = [], []
        if ks:
            qg, dog = q.unflatten(1, groups).to(wide), do.unflatten(1, groups).to(wide)
            delta = (dog * o.unflatten(1, groups)).sum(-1)
            lse_g = lse.unflatten(1, groups)
            extra = torch.zeros_like(qg)
            for k, v in zip(ks, vs, strict=True):
                k, v = k[:, :, None].to(wide), v[:, :, None].to(wide)
                p = ((qg * k).sum(-1) * scale - lse_g).exp()
                ds = (p * ((dog * v).sum(-1) - delta) * scale)[..., None]
                extra += ds * k
                dks.append((ds * qg).sum(2).to(q.dtype))
                dvs.append((p[..., None] * dog).sum(2).to(q.dtype))
            dq = dq + extra.flatten(1, 2).to(q.dtype)
        return None, None, dq, dk0, dv0, *dks, *dvs


def _rms(x, w, eps):
    work = torch.float64 if x.dtype == torch.float64 else torch.float32
    if x.dtype == work:
        return F.rms_norm(x, (x.shape[-1],), w, eps)
    return F.rms_norm(x.to(work), (x.shape[-1],), None, eps).to(x.dtype) * w.to(x.dtype)


def _rope(x, cos, sin):
    half = x.shape[-1] // 2
    a, b = x[..., :half].to(cos.dtype), x[..., half:].to(cos.dtype)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).to(x.dtype)


def loss_rows(mask, cu, steps):
    """[(rows t, their teacher's place in S)] per step, from the definition m[t+i] = 1."""
    supervised = mask.nonzero().flatten()
    start = cu[torch.searchsorted(cu, supervised, right=True) - 1]
    out = []
    for i in range(steps):
        alive = supervised - i >= start
        out.append(((supervised - i)[alive], alive.nonzero().flatten()))
    return out


def _project(w, shape, aux):
    if shape.fc_norm:
        chunks = aux.chunk(3, -1)
        aux = torch.cat(
            [_rms(c, w[f"fc_norm.{n}.weight"], shape.eps) for n, c in enumerate(chunks)], -1
        )
    return aux @ w["fc.weight"].T


LAYER = "midlayer."


def _frequencies(shape):
    return shape.theta ** -(
        torch.arange(0, shape.head_dim, 2, dtype=torch.float64) / shape.head_dim
    )


def _heads(w, name, z, shape):
    x = z @ w[f"{LAYER}self_attn.{name}_proj.weight"].T
    return x.unflatten(-1, (-1, shape.head_dim))


def _finish(w, hidden, attended, shape):
    """o projection and MLP with their residuals."""
    r = hidden + attended.flatten(1) @ w[LAYER + "self_attn.o_proj.weight"].T
    y = _rms(r, w[LAYER + "post_attention_layernorm.weight"], shape.eps)
    gate = F.silu(y @ w[LAYER + "mlp.gate_proj.weight"].T)
    up = y @ w[LAYER + "mlp.up_proj.weight"].T
    return r + (gate * up) @ w[LAYER + "mlp.down_proj.weight"].T


def classic_losses(
    params,
    shape,
    *,
    ids,
    cu,
    aux,
    probs,
    in_vocab,
    rows,
    steps,
    dtype=torch.float32,
    lo=0,
    context=None,
):
    """Sum of cross-entropies per step, 0-dim tensors in one graph.

    params: serving names -> tensors; probs [S, Vd] and in_vocab [S] of the teacher; rows: the
    result of loss_rows; aux [T, A*D].

    A rank that holds tokens [lo, lo + n) of the T gives aux [n, A*D], rows counted from lo, its
    own teachers, and a context that knows the others (classic_ring.py).
    """
    w = {n: p.to(dtype) for n, p in params.items()}
    index = torch.arange(lo, lo + aux.shape[0])
    positions = torch.cat([torch.arange(n) for n in cu.diff().tolist()])[index].to(ids.device)
    doc_end = torch.repeat_interleave(cu[1:], cu.diff())[index].to(ids.device)
    index = index.to(ids.device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    scale = shape.head_dim**-0.5
    context = context or WholeContext(list(itertools.pairwise(cu.tolist())), scale)
    hidden = _project(w, shape, aux.to(dtype))
    own_k, own_v, losses = [], [], []
    inv = _frequencies(shape).to(ids.device)
    k0 = v0 = None
    for i in range(steps):
        shifted = index + 1 + i
        token = torch.where(shifted < doc_end, ids[shifted.clamp(max=ids.shape[0] - 1)], 0)
        e = _rms(w["embed_tokens.weight"][token], w[LAYER + "input_layernorm.weight"], shape.eps)
        z = torch.cat([e, _rms(hidden, w[LAYER + "hidden_norm.weight"], shape.eps)], -1)
        angle = ((positions + i).to(wide)[:, None] * inv.to(wide))[:, None]
        cos, sin = angle.cos(), angle.sin()
        q, k, v = (_heads(w, n, z, shape) for n in "qkv")
        q, k = _rope(q, cos, sin), _rope(k, cos, sin)
        if i == 0:
            k0, v0 = k, v
        else:
            own_k.append(k)
            own_v.append(v)
        attended = ClassicAttention.apply(context, scale, q, k0, v0, *own_k, *own_v)
        out = _finish(w, hidden, attended, shape)
        t, s = rows[i]
        normed = _rms(out if shape.norm_output else out[t], w["norm.weight"], shape.eps)
        logits = (normed[t] if shape.norm_output else normed) @ w["lm_head.weight"].T
        cross_entropy = -(probs[s].to(wide) * torch.log_softmax(logits.to(wide), -1)).sum(-1)
        losses.append((cross_entropy * in_vocab[s]).sum())
        hidden = normed if shape.norm_output else out
    return losses
