"""Row-sparse training of a dense model: time of a step, and memory and time of the head.

    python benchmarks/bench_row_sparse.py --kept 0.62 0.5 0.2 0.1 --rounds 5
    python benchmarks/bench_row_sparse.py --head --kept 0.1 0.2 0.5 1.0 --rounds 3

A step is forward and backward of a Qwen3 in the proportions of Qwen3-1.7B: width 1024, 2 layers,
a vocabulary with which the head keeps its share; one document of 2,048 tokens with kept rows in
spans. Arms: `dense`, transformers' own layers with head skipping; `row-sparse`, the same
with stop_grad_context_tokens. They alternate in pairs; a ratio is taken inside each pair, and the
A/A row is `dense` against itself. Floor: the FLOPs that remain, of the dense ones.

--head: `full` is the whole head, torch's cross-entropy and the entropy by autograd, zeroed outside
the kept rows; `skipped` the fused head at kept rows. Vocabulary 49,152, width 576, 8,192 tokens.
Memory is the peak RssAnon of a fresh process above its value after set-up.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from bench_memory import peak_of
from problems import append_row, seconds
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from specforge_trim.drafts.lm.layers import (
    RowSparseSettings,
    disable_row_sparse,
    enable_row_sparse,
    hidden_states,
)
from specforge_trim.drafts.lm.rows import RowPlan, plan_rows
from specforge_trim.loss import labels as head_rows
from specforge_trim.loss.labels import kept_log_probs, label_loss

# Qwen3-1.7B: width 2048, MLP 6144, 16/8 heads of 128, 28 layers, vocabulary 151,936.
SIZES = {
    "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 2,
    "vocab_size": 151_936 * 2 // 28 // 2, "tie_word_embeddings": True,
    "max_position_embeddings": 4096, "pad_token_id": None,
}  # fmt: skip
SPANS = 4
ON = RowSparseSettings(stop_grad_context_tokens=True)
OFF = RowSparseSettings()


@dataclass(frozen=True)
class Problem:
    model: nn.Module
    ids: Tensor
    plan: RowPlan

    def step(self, settings: RowSparseSettings) -> Callable[[], float]:
        """A step under these settings; set up once per call, outside the time."""

        def run() -> float:
            positions = torch.arange(self.ids.shape[0])
            weight = self.model.lm_head.weight
            hidden = hidden_states(self.model, self.ids, positions, self.plan, settings=settings)
            scale = 1 / self.plan.num_kept
            labels = self.ids.roll(-1)
            loss, _ = label_loss(hidden, weight, labels, self.plan.keep, row_scale=scale)
            self.model.zero_grad(set_to_none=False)
            loss.backward()
            return float(loss.detach())

        return run


def spans(tokens: int, kept: float, count: int = SPANS) -> Tensor:
    """bool [tokens]: `count` equal spans, the last at the end, that hold a share of all tokens."""
    mask = torch.zeros(tokens, dtype=torch.bool)
    for i in range(count):
        end = tokens * (i + 1) // count
        mask[end - round(kept * tokens / count) : end] = True
    return mask


def make_problem(tokens: int, kept: float, sizes: dict) -> Problem:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**sizes)).train()
    ids = torch.randint(sizes["vocab_size"], (tokens,))
    return Problem(model, ids, plan_rows(spans(tokens, kept)))


def floor(sizes: dict, tokens: int, kept: float) -> float:
    """FLOPs of the row-sparse step / of the dense one, per token; head skipped in both."""
    width, rows = sizes["hidden_size"], kept
    q = sizes["num_attention_heads"] * sizes["head_dim"]
    kv = sizes["num_key_value_heads"] * sizes["head_dim"]
    own = 2 * (2 * width * q + 3 * width * sizes["intermediate_size"])  # q, o, MLP
    keys = 2 * 2 * width * kv
    attention = 4 * q * tokens / 2
    head = 3 * 2 * width * sizes["vocab_size"] * rows / sizes["num_hidden_layers"]
    dense = 3 * own + 3 * keys + 3.5 * attention + head
    return (own * (1 + 2 * rows) + 3 * keys + attention * (1 + 2.5 * rows) + head) / dense


def bench_step(args: argparse.Namespace, kept: float) -> dict:
    """Ratios of one kept fraction, pair by pair."""
    sizes = SIZES | {"hidden_size": args.width, "intermediate_size": 3 * args.width}
    sizes |= {"num_attention_heads": args.width // 128, "num_key_value_heads": args.width // 256}
    dense, sparse = (make_problem(args.tokens, kept, sizes) for _ in range(2))
    enable_row_sparse(dense.model, OFF)
    enable_row_sparse(sparse.model, ON)
    if args.checkpointing:
        dense.model.activation_checkpointing_enable()
        sparse.model.activation_checkpointing_enable()
    arms = {"dense": dense.step(OFF), "row-sparse": sparse.step(ON)}
    losses = [step() for step in arms.values()]  # the warm-up
    assert losses[0] == losses[1], f"the forward differs: {losses}"
    pairs, again = [], []
    for _ in range(args.rounds):
        first, second, third = (seconds(arms[a]) for a in ("dense", "row-sparse", "dense"))
        pairs.append((first, second))
        again.append((first, third))
    own = None
    if args.own:  # transformers' sdpa attention instead of the package's
        disable_row_sparse(dense.model)
        own = statistics.median(seconds(own_step(dense)) for _ in range(3))
    ratios = [b / a for a, b in pairs]
    control = [b / a for a, b in again]
    return {
        "tokens": args.tokens, "width": args.width, "kept": kept, "rounds": args.rounds,
        "checkpointing": args.checkpointing, "row-sparse": statistics.median(ratios),
        "row-sparse spread": (min(ratios), max(ratios)),
        "dense again": statistics.median(control), "dense again spread": (
            min(control), max(control)
        ),
        "floor": floor(sizes, args.tokens, kept),
        "dense_seconds": statistics.median(a for a, _ in pairs), "transformers_seconds": own,
    }  # fmt: skip


def own_step(problem: Problem) -> Callable[[], None]:
    """transformers' forward of the decoder as it is, with head skipping."""

    def run() -> None:
        hidden = problem.model.model(input_ids=problem.ids[None], use_cache=False)[0][0]
        labels, scale = problem.ids.roll(-1), 1 / problem.plan.num_kept
        weight, keep = problem.model.lm_head.weight, problem.plan.keep
        label_loss(hidden, weight, labels, keep, row_scale=scale)[0].backward()

    return run


# ---------------------------------------------------------------------- the head


def head_step(arm: str, tokens: int, kept: float, dtype: torch.dtype) -> Callable[[], Tensor]:
    """Log-probabilities and entropy at kept rows to the gradients of hidden states and head."""
    gen = torch.Generator().manual_seed(0)
    width, vocab = 576, 49_152
    hidden = torch.randn(tokens, width, generator=gen).to(dtype).requires_grad_()
    weight = (torch.randn(vocab, width, generator=gen) * width**-0.5).to(dtype).requires_grad_()
    labels = torch.randint(vocab, (tokens,), generator=gen)
    plan = plan_rows(spans(tokens, kept))
    mask = torch.zeros(tokens).index_fill(0, plan.keep, 1.0)

    def run() -> Tensor:
        hidden.grad = weight.grad = None
        if arm == "skipped":
            rows = kept_log_probs(hidden, weight, labels, plan.keep)
            log_probs, entropy = rows.log_probs, rows.entropy
        else:
            logits = (hidden @ weight.T).float()
            all_log = logits.log_softmax(-1)
            entropy = -(all_log.exp() * all_log).sum(-1) * mask
            log_probs = all_log.gather(1, labels[:, None])[:, 0] * mask
        (-log_probs.sum() - 0.01 * entropy.sum()).backward()
        return torch.stack((log_probs.sum(), entropy.sum())).detach()

    return run


def bench_head(args: argparse.Namespace, kept: float) -> dict:
    dtype = getattr(torch, args.dtype)
    row = {"tokens": args.head_tokens, "dtype": args.dtype, "kept": kept, "rounds": args.rounds}
    row["block_mb"] = head_rows.BLOCK_ELEMENTS["cpu"] * 4 >> 20
    for arm in ("full", "skipped"):
        command = [sys.executable, __file__, "--child", arm, "--kept", str(kept)]
        command += ["--head-tokens", str(args.head_tokens), "--dtype", args.dtype]
        row[arm + "_peak_bytes"] = peak_of(command, arm)[0]
    if args.rounds:
        arms = {a: head_step(a, args.head_tokens, kept, dtype) for a in ("full", "skipped")}
        values = {name: step() for name, step in arms.items()}
        torch.testing.assert_close(values["full"], values["skipped"], rtol=1e-3, atol=0.1)
        times = {name: [] for name in ("full", "skipped", "full again")}
        for _ in range(args.rounds):
            for name, found in times.items():
                found.append(seconds(arms[name.removesuffix(" again")]))
        row["full_seconds"] = statistics.median(times["full"])
        for name in ("skipped", "full again"):
            ratios = [a / b for a, b in zip(times[name], times["full"], strict=True)]
            row[name] = statistics.median(ratios)
            row[name + " spread"] = (min(ratios), max(ratios))
    return row


def child(args: argparse.Namespace) -> None:
    """One head step between `ready` and `done`, for peak_of."""
    step = head_step(args.child, args.head_tokens, args.kept[0], getattr(torch, args.dtype))
    print("ready", flush=True)
    sys.stdin.readline()
    print("done", seconds(step), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kept", type=float, nargs="+", default=[0.62, 0.5, 0.2, 0.1])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=1024, help="2048 = Qwen3-1.7B's own")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--own", action="store_true", help="also transformers' own attention")
    parser.add_argument("--checkpointing", action="store_true", help="recompute in both arms")
    parser.add_argument("--head", action="store_true", help="the head alone")
    parser.add_argument("--head-tokens", type=int, default=8192)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--out", help="append rows to this JSON lines file")
    parser.add_argument("--child", choices=("full", "skipped"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    for kept in args.kept:
        row = (bench_head if args.head else bench_step)(args, kept)
        print(row, flush=True)
        append_row(args.out, row)


if __name__ == "__main__":
    main()
