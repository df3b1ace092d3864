"""Serving, written from what engines do with the exported names and config, against training.

`ServedDraft` shares no code with the package: it reads tensors under vLLM's names and the keys of
config.json, keeps a key/value cache of one sequence, and computes its rotary tables by hand. Its
logits at every depth must be those of the training step at every TTT step.

Catches: a training step that is not what serving asks (a position that stands still, fc applied
twice, the un-normed state fed back where the normed one is served), scaled positions that differ
between the two, a switch that only one side honours.
"""

import math

import pytest
import torch
from ttt_case import make_batch, make_case, make_pack, run_step

from specforge_trim.drafts.eagle3 import step as stages

LENGTH, K = 11, 4
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 500.0,
    "factor": 4.0,
    "beta_fast": 2.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}


def vllm_name(name):
    return name.replace("midlayer.", "layers.0.")


def frequencies(config):
    """(inverse frequencies, scale of cos and sin), from the papers' formulas."""
    h, rope = config["head_dim"], config["rope_parameters"]
    plain = [rope["rope_theta"] ** (-2 * j / h) for j in range(h // 2)]
    if rope["rope_type"] == "default":
        return plain, 1.0
    window, factor = rope["original_max_position_embeddings"], rope["factor"]
    if rope["rope_type"] == "llama3":
        out = []
        for f in plain:
            turns = window * f / (2 * math.pi)
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            share = min(1.0, max(0.0, (turns - low) / (high - low)))
            out.append(share * f + (1 - share) * f / factor)
        return out, 1.0
    assert rope["rope_type"] == "yarn"

    def dimension(turns):
        return h * math.log(window / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"]))

    low = max(0, math.floor(dimension(rope["beta_fast"])))
    high = min(h - 1, math.ceil(dimension(rope["beta_slow"])))
    out = []
    for j, f in enumerate(plain):
        ramp = min(1.0, max(0.0, (j - low) / (high - low)))
        out.append(f * (1 - ramp) + f / factor * ramp)
    return out, 0.1 * math.log(factor) + 1.0


class ServedDraft:
    """One sequence's draft as an engine runs it."""

    def __init__(self, weights, config):
        self.w, self.c = weights, config
        self.true, self.drafted = [], []  # cached (k, v), each [kv heads, H]
        self.freq, self.scale = frequencies(config)

    def norm(self, x, name):
        w = self.w[name + ".weight"]
        return w * x / (x.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]).sqrt()

    def project(self, x, name):
        y = self.w[f"layers.0.self_attn.{name}_proj.weight"] @ x
        if self.c["attention_bias"]:
            y = y + self.w[f"layers.0.self_attn.{name}_proj.bias"]
        return y

    def rotated(self, x, position):
        half = x.shape[-1] // 2
        out = x.clone()
        for j, f in enumerate(self.freq):
            c = math.cos(position * f) * self.scale
            s = math.sin(position * f) * self.scale
            out[:, j] = x[:, j] * c - x[:, j + half] * s
            out[:, j + half] = x[:, j + half] * c + x[:, j] * s
        return out

    def combine(self, aux):
        """The engine's combine_hidden_states: norms before fc, then fc."""
        if self.c.get("norm_before_fc"):
            aux = self.norm(aux, "input_norm")
        elif self.c["fc_norm"]:
            parts = aux.chunk(aux.shape[-1] // self.c["target_hidden_size"], -1)
            aux = torch.cat([self.norm(p, f"fc_norm.{i}") for i, p in enumerate(parts)], -1)
        return self.w["fc.weight"] @ aux

    def layer(self, hidden, token, cache):
        """One entry appended to `cache`; (logits, what the next step is fed)."""
        position = len(self.true) + len(self.drafted)
        embedding = self.norm(self.w["embed_tokens.weight"][token], "layers.0.input_layernorm")
        normed = self.norm(hidden, "layers.0.hidden_norm")
        residual = normed if self.c["norm_before_residual"] else hidden
        z = torch.cat((embedding, normed))
        q, k, v = (self.project(z, name).view(-1, self.c["head_dim"]) for name in "qkv")
        if self.c["model_type"] == "qwen3":
            q = self.norm(q, "layers.0.self_attn.q_norm")
            k = self.norm(k, "layers.0.self_attn.k_norm")
        cache.append((self.rotated(k, position), v))
        q, group = self.rotated(q, position), q.shape[0] // k.shape[0]
        entries, heads = self.true + self.drafted, []
        for h in range(q.shape[0]):
            ks = torch.stack([e[0][h // group] for e in entries])
            vs = torch.stack([e[1][h // group] for e in entries])
            heads.append((ks @ q[h] / self.c["head_dim"] ** 0.5).softmax(0) @ vs)
        r = residual + self.project(torch.cat(heads), "o")
        y = self.norm(r, "layers.0.post_attention_layernorm")
        gate, up, down = (self.w[f"layers.0.mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        z = r + down @ (torch.nn.functional.silu(gate @ y) * (up @ y))
        normed = self.norm(z, "norm")
        return self.w["lm_head.weight"] @ normed, normed if self.c.get("norm_output") else z

    def verified(self, aux, token):
        """A verified token: drafted entries go, the pair (aux_t, x_{t+1}) joins."""
        self.drafted.clear()
        logits, self.fed = self.layer(self.combine(aux), token, self.true)
        return logits

    def draft(self, token):
        logits, self.fed = self.layer(self.fed, token, self.drafted)
        return logits


def trained_logits(case, monkeypatch):
    """logits[i][t] that the training step computes at step i for row t of its one document."""
    seen = []
    real = stages.linear_loss

    def recording(hidden, weight, *args, **kwargs):
        seen.append(hidden.detach() @ weight.detach().T)
        return real(hidden, weight, *args, **kwargs)

    monkeypatch.setattr(stages, "linear_loss", recording)
    pack = make_pack(case)
    run_step(case, make_batch(case, pack))
    assert len(seen) == K  # one chunk, a loss at every step
    return {
        (i, t): logits
        for i, step in enumerate(pack.steps)
        for t, logits in zip(step.loss_rows.tolist(), seen[i], strict=True)
    }


EAGLE31 = {"fc_norm": True, "norm_output": True}
CASES = {
    "eagle3": {},
    "eagle3.1": EAGLE31,
    "mha": {"num_key_value_heads": 4},
    "mqa, head_dim 10": {"num_key_value_heads": 1, "head_dim": 10},
    "llama3": {"rope_parameters": LLAMA3},
    "llama3, 3.1": {"rope_parameters": LLAMA3, **EAGLE31},
    "yarn": {"rope_parameters": YARN},
    "yarn, 3.1": {"rope_parameters": YARN, **EAGLE31},
    "norm_before_residual and _fc": {"norm_before_residual": True, "norm_before_fc": True},
    "speculators' defaults": {
        "norm_before_residual": True, "norm_before_fc": True, "norm_output": True,
    },
    "biases": {"attention_bias": True},
    "q/k norm": {"qk_norm": True},
    "five aux layers": {"num_aux_layers": 5, "aux_layers": (1, 2, 4, 6, 7), **EAGLE31},
}  # fmt: skip


@pytest.mark.parametrize("changes", CASES.values(), ids=CASES)
def test_served_drafting_at_depth_k_is_the_training_step_k(changes, monkeypatch):
    changes = dict(changes)
    sizes = {
        "kv_heads": changes.pop("num_key_value_heads", 2),
        "head_dim": changes.pop("head_dim", 8),
    }
    mask = [0, 0, 1] + [1] * (LENGTH - 3)
    case = make_case([mask], steps=K, changes=changes, **sizes)
    model, (doc,) = case.model, case.docs
    assert model.config.head_dim != model.config.hidden_size // model.config.num_attention_heads
    expected = trained_logits(case, monkeypatch)
    served = ServedDraft(
        {vllm_name(name): value.detach() for name, value in model.state_dict().items()},
        model.config.to_dict(),
    )
    compared = 0
    for t in range(LENGTH - 1):
        logits = served.verified(doc.aux[t], doc.ids[t + 1])
        for i in range(K):
            if i and t + 1 + i < LENGTH:
                logits = served.draft(doc.ids[t + 1 + i])
            if (i, t) in expected:
                error = float((logits - expected[i, t]).abs().max())
                assert error < 1e-5, (i, t, error)
                compared += 1
    assert compared == len(expected) > 20


def test_the_chain_sees_what_a_wrong_engine_does(monkeypatch):
    """The comparison fails when the served side feeds back what training does not."""
    case = make_case([[0, 0, 1] + [1] * (LENGTH - 3)], steps=K)
    model, (doc,) = case.model, case.docs
    expected = trained_logits(case, monkeypatch)
    weights = {vllm_name(name): value.detach() for name, value in model.state_dict().items()}
    served = ServedDraft(weights, {**model.config.to_dict(), "norm_output": True})
    for t in range(4):
        at_zero = served.verified(doc.aux[t], doc.ids[t + 1])
    assert float((at_zero - expected[0, 3]).abs().max()) < 1e-5
    at_one = served.draft(doc.ids[5])
    assert float((at_one - expected[1, 3]).abs().max()) > 1e-2
