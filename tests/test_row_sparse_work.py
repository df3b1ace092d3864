"""What the row-sparse backward computes, and through which modules: counted, not timed.

Equal gradients do not show that anything was saved: a projection that runs the dense backward, or
an attention that runs all queries, is exact too.

Catches: a backward of all rows in q, o, the MLP or the attention, a module that looks like a plain
linear and is not (a hook, a forward of its own, a weight that is a quantised tensor), a hook or an
adapter on a block that the row-sparse layer passes by.
"""

import logging

import pytest
import torch
from lm_case import FAMILIES, SIZES, make_model, make_stream, reference_step
from test_row_sparse_model import OFF, ON, assert_equal_gradients, run
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from specforge_trim.drafts.lm.layers import enable_row_sparse, hidden_states
from specforge_trim.drafts.lm.rows import plan_rows

PRODUCTS = {"aten::mm": (0, 1), "aten::addmm": (1, 2), "aten::bmm": (0, 1)}


class Work(TorchDispatchMode):
    """Multiplications of matrix products; query-key pairs and queries of attention backwards;
    element counts of all floating results."""

    def __init__(self):
        super().__init__()
        self.products = self.pairs = self.queries = 0
        self.sizes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().split(".")[0]
        if name in PRODUCTS:
            a, b = (args[i] for i in PRODUCTS[name])
            self.products += a.numel() * b.shape[-1]
        if "attention" in name and name.endswith("backward"):
            q, k = args[1], args[2]  # [1, N, R, H]
            self.pairs += q.shape[2] * k.shape[2]
            self.queries += q.shape[2]
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x.is_floating_point():
                self.sizes.add(x.numel())
        return out


@pytest.mark.parametrize("family", FAMILIES)
def test_the_backward_runs_kept_rows_only(family):
    tokens, first, end = 61, 40, 56  # rows 40..55 are kept
    stream = make_stream(["0" * (first + 1) + "1" * (end - first) + "0" * (tokens - end - 1)])
    model = make_model(family, dtype=torch.float32, attention_bias=False, mlp_bias=False)
    enable_row_sparse(model, ON)
    plan = plan_rows(stream.kept())
    rows = plan.num_kept
    assert (rows, plan.keep[0], plan.num_tokens) == (end - first, first, tokens)
    hidden = hidden_states(model, stream.ids, stream.positions, plan, settings=ON)
    d_hidden = torch.zeros_like(hidden).index_fill_(0, plan.keep, 1.0)
    with Work() as work:
        hidden.backward(d_hidden)
    width, inner, heads, head_dim = 24, 40, 4, 8
    wide, narrow = heads * head_dim, SIZES["num_key_value_heads"] * head_dim
    # Each weight twice, for its own gradient and its input's.
    of_rows = 2 * rows * width * (wide + wide + 3 * inner)
    of_tokens = 2 * tokens * width * 2 * narrow
    assert work.products == 3 * (of_rows + of_tokens)
    # Before the first kept row all of them see everything; inside the run, the causal square.
    assert work.queries == 3 * 2 * rows
    assert work.pairs == 3 * (rows * first + rows * rows)
    # No gradient of all rows is as wide as the queries or the MLP.
    assert not work.sizes & {tokens * wide, tokens * inner}


def test_the_count_sees_a_dense_backward():
    """The control: without the flag the same count is that of all rows."""
    stream = make_stream(["0" * 41 + "1" * 16 + "0" * 4])
    model = make_model("qwen3", dtype=torch.float32, attention_bias=False)
    enable_row_sparse(model, OFF)
    plan = plan_rows(stream.kept())
    hidden = hidden_states(model, stream.ids, stream.positions, plan, settings=OFF)
    with Work() as work:
        hidden.sum().backward()
    assert work.products == 3 * 2 * 61 * 24 * (32 + 32 + 3 * 40 + 2 * 16)
    assert work.pairs == 3 * 61 * 61
    assert {61 * 32, 61 * 40} <= work.sizes


# ---------------------------------------------------------------------- what is a plain linear


def hooked(linear):
    linear.register_forward_hook(lambda module, args, out: out * 1.5)


def before(linear):
    linear.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))


def gradient_hooked(linear):
    linear.register_full_backward_hook(lambda module, d_in, d_out: (d_in[0] * 1.5,))


def own_forward(linear):
    """As accelerate's hooks and compressed-tensors wrap a module: the class stays."""
    inner = linear.forward
    linear.forward = lambda x: inner(x * 1.5)


class Rounded(torch.Tensor):
    """A frozen weight that products read rounded to eighths, as torchao's quantised ones."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            x, weight, *rest = args
            plain = torch.round(weight.as_subclass(torch.Tensor) * 8) / 8
            return func(x, plain, *rest)
        return super().__torch_function__(func, types, args, kwargs)


def rounded_weight(linear):
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(Rounded), requires_grad=False)


@pytest.mark.parametrize("change", [hooked, before, gradient_hooked, own_forward, rounded_weight])
def test_a_linear_that_only_looks_plain_keeps_the_dense_backward(change, caplog):
    def make():
        model = make_model("llama")
        for layer in model.model.layers:
            change(layer.self_attn.o_proj)
            change(layer.mlp.up_proj)
        return model

    stream = make_stream(["000000111000110", "0001"])
    _, expected = reference_step(make(), stream)
    _, unchanged = reference_step(make_model("llama"), stream)
    name = "model.layers.0.self_attn.q_proj.weight"
    assert float((expected[name] - unchanged[name]).abs().max()) > 1e-3
    with caplog.at_level(logging.WARNING, logger="specforge_trim"):
        model = make()
        _, _, found = run(model, stream, ON)
    said = {own_forward: "a forward of its own", rounded_weight: "a weight of Rounded"}
    kind = f"(Linear with {said.get(change, 'hooks')})"
    assert f"o_proj {kind}, up_proj {kind}" in caplog.text, caplog.text
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert_equal_gradients({n: found[n] for n in trained}, {n: expected[n] for n in trained})


def test_a_hook_on_a_block_that_is_passed_by_is_an_error():
    """The row-sparse layer runs the projections of a block, not the block itself."""
    stream = make_stream(["000000111000110"])
    for block in ("self_attn", "mlp"):
        model = make_model("qwen3")
        getattr(model.model.layers[1], block).register_forward_hook(lambda *_: None)
        with pytest.raises(ValueError, match=f"hook on {block} of layer 1"):
            enable_row_sparse(model, ON)
        model = make_model("qwen3")
        enable_row_sparse(model, ON)
        getattr(model.model.layers[1], block).register_forward_hook(lambda *_: None)
        with pytest.raises(ValueError, match=f"hook on {block} of layer 1"):
            run(model, stream, ON, enable=False)
        disabled = make_model("qwen3")
        getattr(disabled.model.layers[1], block).register_forward_hook(lambda *_: None)
        run(disabled, stream, OFF)  # without the flag the block itself runs


def test_a_block_of_another_kind_is_an_error():
    class Adapter(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return self.inner(x) + x

    model = make_model("llama")
    model.model.layers[2].mlp = Adapter(model.model.layers[2].mlp)
    with pytest.raises(ValueError, match="layer 2 has an mlp of type Adapter, expected LlamaMLP"):
        enable_row_sparse(model, ON)
