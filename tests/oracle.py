"""The dense fp64 oracle: training-time test written as nested loops over documents, steps, rows.

It shares no code with the package and knows nothing of packing, trimming, chunks or kernels. It
follows the definitions only: every row of every document is run at every step.

Letters: L tokens of one document, D width, N heads, M key/value heads, H head dim.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass
class OracleDocument:
    """ids [L]; row_mask [L] 0/1 (row t predicts x_{t+2}); aux [L, A*D]; last [L, D]."""

    ids: list[int]
    row_mask: list[int]
    aux: torch.Tensor
    last: torch.Tensor


@dataclass
class OracleModel:
    """params: serving names -> fp64 tensors. kept: target ids of the draft vocabulary."""

    params: dict[str, torch.Tensor]
    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    theta: float
    kept: list[int]
    head: torch.Tensor
    fc_norm: bool = False
    norm_output: bool = False


def rms(x, w, eps):
    return w * x / torch.sqrt((x * x).mean() + eps)


def rope(x, position, theta):
    """x [heads, H] rotated at an integer position."""
    half = x.shape[-1] // 2
    out = [None] * (2 * half)
    for j in range(half):
        angle = position * theta ** (-2.0 * j / (2 * half))
        c, s = math.cos(angle), math.sin(angle)
        out[j] = x[:, j] * c - x[:, j + half] * s
        out[j + half] = x[:, j + half] * c + x[:, j] * s
    return torch.stack(out, dim=-1)


def unroll_document(
    model: OracleModel, doc: OracleDocument, steps: int, filler: int = 0, learning=None
):
    """Logits [step][row] of a document's dense unroll.

    learning: rows whose g^0 takes a gradient; None = all.
    """
    p, length = model.params, len(doc.ids)
    hidden = []
    for t in range(length):
        a = doc.aux[t]
        if model.fc_norm:
            parts = a.split(doc.last.shape[-1])
            a = torch.cat(
                [rms(x, p[f"fc_norm.{n}.weight"], model.eps) for n, x in enumerate(parts)]
            )
        g = p["fc.weight"] @ a
        hidden.append(g if learning is None or t in learning else g.detach())
    depth = 1 + len({n.split(".")[1] for n in p if n.startswith("layers.")})
    names = ["midlayer."] + [f"layers.{n}." for n in range(1, depth)]
    # keys[layer][step][row]
    keys: list[list[list[torch.Tensor]]] = [[] for _ in names]
    values: list[list[list[torch.Tensor]]] = [[] for _ in names]
    logits = []
    for i in range(steps):
        for layer, name in enumerate(names):
            hidden = _layer(model, doc, layer, name, i, hidden, keys[layer], values[layer], filler)
        row_logits = []
        for t in range(length):
            normed = rms(hidden[t], p["norm.weight"], model.eps)
            row_logits.append(p["lm_head.weight"] @ normed)
            if model.norm_output:
                hidden[t] = normed
        logits.append(row_logits)
    return logits


def _layer(model, doc, layer, name, i, hidden, keys, values, filler):
    """One decoder layer at step i over all rows of a document; appends its keys and values."""
    p, length = model.params, len(doc.ids)
    qs, ks, vs = [], [], []
    for t in range(length):
        if layer == 0:
            nxt = t + 1 + i
            token = doc.ids[nxt] if nxt < length else filler
            e = rms(p["embed_tokens.weight"][token], p[name + "input_layernorm.weight"], model.eps)
            z = torch.cat([e, rms(hidden[t], p[name + "hidden_norm.weight"], model.eps)])
        else:
            z = rms(hidden[t], p[name + "input_layernorm.weight"], model.eps)
        q = (p[name + "self_attn.q_proj.weight"] @ z).view(model.heads, model.head_dim)
        k = (p[name + "self_attn.k_proj.weight"] @ z).view(model.kv_heads, model.head_dim)
        v = (p[name + "self_attn.v_proj.weight"] @ z).view(model.kv_heads, model.head_dim)
        qs.append(rope(q, t + i, model.theta))
        ks.append(rope(k, t + i, model.theta))
        vs.append(v)
    keys.append(ks)
    values.append(vs)
    outputs = []
    for t in range(length):
        seen_k = [keys[0][s] for s in range(t + 1)] + [keys[j][t] for j in range(1, i + 1)]
        seen_v = [values[0][s] for s in range(t + 1)] + [values[j][t] for j in range(1, i + 1)]
        outs = []
        for n in range(model.heads):
            m = n // (model.heads // model.kv_heads)
            kk = torch.stack([x[m] for x in seen_k])
            vv = torch.stack([x[m] for x in seen_v])
            weights = torch.softmax(kk @ qs[t][n] / math.sqrt(model.head_dim), dim=0)
            outs.append(weights @ vv)
        r = hidden[t] + p[name + "self_attn.o_proj.weight"] @ torch.cat(outs)
        y = rms(r, p[name + "post_attention_layernorm.weight"], model.eps)
        gate = p[name + "mlp.gate_proj.weight"] @ y
        up = p[name + "mlp.up_proj.weight"] @ y
        outputs.append(r + p[name + "mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up))
    return outputs


@dataclass
class OracleResult:
    total: torch.Tensor
    loss_sum: list[float]
    correct: list[float]
    accept: list[float]
    accept_in_vocab: list[float]
    in_vocab: list[float]
    loss_rows: list[int]


def oracle(
    model: OracleModel,
    docs: list[OracleDocument],
    *,
    steps: int,
    chain: str = "shift",
    denominator: str = "rows",
    decay: float = 0.8,
    row_loss=lambda teacher, log_q, best: -(teacher * log_q).sum(),
    unrolled=None,
) -> OracleResult:
    """Loss and metrics of a batch, from the definitions.

    row_loss: (teacher over the draft vocabulary, log q, draft id of its argmax) -> the row's loss,
    soft cross-entropy. unrolled: unroll_document of every document, where it is known.
    """
    sums = {n: [0.0] * steps for n in ("ce", "correct", "accept", "accept_in", "in_vocab")}
    ce: list = [torch.zeros((), dtype=torch.float64) for _ in range(steps)]
    counts = [0] * steps
    kept = model.kept
    for n_doc, doc in enumerate(docs):
        logits = unrolled[n_doc] if unrolled else unroll_document(model, doc, steps)
        length = len(doc.ids)
        for i in range(steps):
            for t in range(length):
                s = t + i
                if s >= length or not doc.row_mask[s]:
                    continue
                if chain == "run" and not all(doc.row_mask[t + j] for j in range(i + 1)):
                    continue
                counts[i] += 1
                target = model.head @ doc.last[s + 1]
                best = int(target.argmax())
                full = torch.softmax(target, 0)
                teacher = torch.softmax(target[kept], 0)
                log_q = torch.log_softmax(logits[i][t], 0)
                q = log_q.detach().exp()
                accept = float(sum(min(full[v], q[n]) for n, v in enumerate(kept)))
                sums["accept"][i] += accept
                sums["correct"][i] += float(kept[int(log_q.argmax())] == best)
                if best in kept:
                    ce[i] = ce[i] + row_loss(teacher, log_q, kept.index(best))
                    sums["in_vocab"][i] += 1
                    sums["accept_in"][i] += accept
    rows = sum(len(d.ids) for d in docs)
    total = torch.zeros((), dtype=torch.float64)
    for i in range(steps):
        count = rows if denominator == "rows" else max(counts[i], 1)
        total = total + decay**i * ce[i] / count
    return OracleResult(
        total,
        [float(x.detach()) for x in ce],
        sums["correct"],
        sums["accept"],
        sums["accept_in"],
        sums["in_vocab"],
        counts,
    )
