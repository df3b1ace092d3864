"""Training-time test against real drafting, and the evaluation built on it.

Catches: a position that does not advance per step; a step that attends to the wrong keys; fc
applied again to a fed-back state; a fed-back state that is normed in training and not in serving
(or the other way round); training rows one token off from what an engine asks.
"""

import math

import pytest
import torch
from tiny import randomise, tiny_config
from tiny_draft import prompt_ids, random_draft
from transformers import LlamaForCausalLM

from specforge_trim.drafts.eagle3.proposer import CachedDraft
from specforge_trim.verifier.hf import HFTarget

K = 4


@pytest.fixture(scope="module")
def target():
    return HFTarget(randomise(LlamaForCausalLM(tiny_config())))


def rms(x, norm):
    return norm.weight * x / (x.pow(2).mean(-1, keepdim=True) + norm.eps).sqrt()


def rope(x, position, theta):
    """Rotate-half, written for one vector [heads, H] and one position."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for j in range(half):
        angle = position * theta ** (-2 * j / x.shape[-1])
        c, s = math.cos(angle), math.sin(angle)
        out[:, j] = x[:, j] * c - x[:, j + half] * s
        out[:, j + half] = x[:, j + half] * c + x[:, j] * s
    return out


def ttt_logits(draft, aux, tokens, *, steps):
    """logits[i][t] of every row t and step i, row by row from the definition.

    Row t at step i: input token x_{t+1+i}, position t+i, keys k0 of rows <= t and the row's own
    of steps 1..i.
    """
    config, layer = draft.config, draft.midlayer
    attn, mlp, theta = layer.self_attn, layer.mlp, config.rope_parameters["rope_theta"]
    group = config.num_attention_heads // config.num_key_value_heads
    rows = len(tokens) - steps

    def heads(x, weight):
        return (weight @ x).view(-1, config.head_dim)

    if config.fc_norm:
        thirds = [rms(p, n) for p, n in zip(aux.chunk(3, -1), draft.fc_norm, strict=True)]
        aux = torch.cat(thirds, -1)
    hidden = [draft.fc.weight @ aux[t] for t in range(rows)]
    own = [[] for _ in range(rows)]  # own[t][i] = (k, v) of row t at step i
    out = []
    for i in range(steps):
        logits = []
        for t in range(rows):
            embedding = draft.embed_tokens.weight[tokens[t + 1 + i]]
            z = torch.cat(
                (rms(embedding, layer.input_layernorm), rms(hidden[t], layer.hidden_norm))
            )
            q = rope(heads(z, attn.q_proj.weight), t + i, theta)
            k = rope(heads(z, attn.k_proj.weight), t + i, theta)
            own[t].append((k, heads(z, attn.v_proj.weight)))
            entries = [own[s][0] for s in range(t + 1)] + own[t][1 : i + 1]
            result = []
            for h in range(config.num_attention_heads):
                ks = torch.stack([e[0][h // group] for e in entries])
                vs = torch.stack([e[1][h // group] for e in entries])
                result.append((ks @ q[h] / config.head_dim**0.5).softmax(0) @ vs)
            r = hidden[t] + attn.o_proj.weight @ torch.cat(result)
            y = rms(r, layer.post_attention_layernorm)
            gate = torch.nn.functional.silu(mlp.gate_proj.weight @ y)
            g = r + mlp.down_proj.weight @ (gate * (mlp.up_proj.weight @ y))
            logits.append(draft.lm_head.weight @ rms(g, draft.norm))
            hidden[t] = rms(g, draft.norm) if config.norm_output else g
        out.append(torch.stack(logits))
    return out


@pytest.mark.parametrize("eagle31", [False, True])
def test_ttt_step_k_is_cached_drafting_at_depth_k(target, eagle31):
    draft = random_draft(
        target,
        fc_norm=eagle31,
        norm_output=eagle31,
        rope_parameters={"rope_type": "default", "rope_theta": 500.0},
    )
    with torch.no_grad():
        for parameter in draft.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 2.0)
            else:
                parameter.normal_(std=parameter.shape[-1] ** -0.5)
    tokens = prompt_ids(14, 8)
    aux = target.features(tokens).aux.clone()
    with torch.no_grad():
        expected = ttt_logits(draft.double(), aux.double(), tokens, steps=K)
    draft.float()
    cached = CachedDraft(draft)
    rows = len(tokens) - K
    for t in range(rows):  # one more verified token a round; drafted entries are dropped each time
        cached.extend(aux[t : t + 1], tokens[t + 1 : t + 2])
        for i in range(K):
            if i:
                cached.feed(int(tokens[t + 1 + i]))
            error = float((cached.logits() - expected[i][t]).abs().max())
            assert error < 1e-5 * float(expected[i][t].abs().max().clamp(min=1)), (t, i, error)
    at_once = CachedDraft(draft)
    at_once.extend(aux[:rows], tokens[1 : rows + 1])
    torch.testing.assert_close(
        at_once.logits(), expected[0][rows - 1].float(), atol=1e-5, rtol=1e-5
    )
