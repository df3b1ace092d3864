"""Peak memory and time of the loss end: teacher, draft head and soft cross-entropy of all K steps.

    python benchmarks/bench_loss_end.py                          time and memory at 8 %
    python benchmarks/bench_loss_end.py --density 0.08 0.25 1.0 --arms ours --rounds 0

Arms, each from the backbone's outputs of K = 7 steps, [T, D] each, to the gradients of the rows it
gathers and of the head:

    plain   gathers the trimmed rows, whole teacher logits, whole draft logits, cross-entropy by
            autograd, all steps in one graph; no metrics
    ours    row chunks as the trainer plans them: a table per chunk, the fused loss per step;
            metrics included
    plain again   the A/A row: the plain arm against itself

Memory is the peak RssAnon of a fresh process above its value after set-up (backbone outputs, both
heads, the head's gradient buffer), as in bench_memory.py. Times are taken in one process, arms in
turn; ratios are per round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from problems import STEPS, append_row, make_mask
from torch import Tensor

from specforge_trim import build_trim_pack
from specforge_trim.loss.linear_loss import linear_loss
from specforge_trim.loss.teacher import Teacher
from specforge_trim.plan.cost import DraftDims
from specforge_trim.plan.memory import DEFAULT_ROW_MEMORY_MB, chunk_rows_for
from specforge_trim.plan.pack import TrimPack
from specforge_trim.plan.segments import RowChunk, plan_chunks

DECAY = 0.8


@dataclass(frozen=True)
class LossEnd:
    """outputs: K tensors [T, D]. last: [T, D]. weight, weight.grad: [Vd, D]."""

    pack: TrimPack
    outputs: list[Tensor]
    last: Tensor
    teacher: Teacher
    weight: Tensor
    chunk_rows: int

    @property
    def tokens(self) -> int:
        return self.last.shape[0]


def make_problem(args: argparse.Namespace, density: float) -> LossEnd:
    """Random outputs and heads; every (V / Vd)-th target token is the draft's."""
    gen = torch.Generator().manual_seed(0)
    mask = make_mask("blocks", args.tokens, density)
    head = torch.randn(args.vocab, args.width, generator=gen) * 3 * args.width**-0.5
    kept = torch.arange(args.draft_vocab) * (args.vocab // args.draft_vocab)
    t2d = torch.zeros(args.vocab, dtype=torch.bool)
    t2d[kept] = True
    weight = torch.randn(args.draft_vocab, args.width, generator=gen) * args.width**-0.5
    weight.requires_grad_().grad = torch.zeros_like(weight)
    weight.grad.fill_(0)  # touched, so that its memory is there before the measurement
    # The shape of a Llama draft of this width, which is what sets the trainer's chunks.
    dims = DraftDims(
        hidden=args.width, heads=args.width // 128, kv_heads=args.width // 512, head_dim=128,
        intermediate=args.width * 7 // 2, draft_vocab=args.draft_vocab, aux_width=3 * args.width,
    )  # fmt: skip
    budget = DEFAULT_ROW_MEMORY_MB["cpu"] << 20
    return LossEnd(
        pack=build_trim_pack(mask, STEPS),
        outputs=[torch.randn(args.tokens, args.width, generator=gen) for _ in range(STEPS)],
        last=torch.randn(args.tokens, args.width, generator=gen),
        teacher=Teacher(head, kept, t2d),
        weight=weight,
        chunk_rows=args.chunk_rows or chunk_rows_for(dims, STEPS, itemsize=4, budget=budget),
    )


def plain(problem: LossEnd) -> Callable[[], Tensor]:
    """Loss sums per step [K] of the plain arm."""
    teacher, pack = problem.teacher, problem.pack

    def run() -> Tensor:
        with torch.no_grad():
            logits = problem.last[pack.supervised + 1] @ teacher.head.T
            in_vocab = teacher.t2d[logits.argmax(-1)].float()
            probs = logits[:, teacher.draft_to_target].softmax(-1)
            del logits
        losses = []
        for output, step in zip(problem.outputs, pack.steps, strict=True):
            hidden = output[step.loss_rows].requires_grad_()
            log_q = (hidden @ problem.weight.T).log_softmax(-1)
            row = -(probs[step.teacher_index] * log_q).sum(-1)
            losses.append((row * in_vocab[step.teacher_index]).sum())
        total = sum(DECAY**i / problem.tokens * x for i, x in enumerate(losses))
        total.backward()
        return torch.stack(losses).detach()

    return run


def ours(problem: LossEnd) -> Callable[[], Tensor]:
    """Loss sums per step [K] of the package's loss end."""
    pack, chunks = problem.pack, plan_chunks(problem.pack, chunk_rows=problem.chunk_rows)
    scales = [DECAY**i / problem.tokens for i in range(STEPS)]

    def run_chunk(chunk: RowChunk, sums: Tensor) -> None:
        a, b = chunk.teacher_slice
        with torch.no_grad():
            table = problem.teacher.table(problem.last[pack.supervised[a:b] + 1])
        total = torch.zeros(())
        for i, step in enumerate(chunk.steps):
            hidden = problem.outputs[i][step.rows[step.loss_index]].requires_grad_()
            loss, metrics = linear_loss(
                hidden, problem.weight, table, step.teacher_index, scale=scales[i],
                weight_grad=problem.weight.grad,
            )  # fmt: skip
            total = total + loss
            sums[i] += metrics.loss
        total.backward()

    def run() -> Tensor:
        sums = torch.zeros(STEPS)
        for chunk in chunks:
            run_chunk(chunk, sums)
        return sums

    return run


ARMS = {"plain": plain, "ours": ours}


def child(args: argparse.Namespace) -> None:
    """Set up, say so, wait for the word, run once."""
    run = ARMS[args.arms[0]](make_problem(args, args.density[0]))
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    run()
    print(f"done {time.perf_counter() - start:.2f}", flush=True)


def time_arms(args: argparse.Namespace, density: float) -> dict:
    """Medians and spread of per-round ratios to the plain arm."""
    problem = make_problem(args, density)
    arms = {"plain": plain(problem), "ours": ours(problem)}
    arms["plain again"] = arms["plain"]
    check = [arms[name]() for name in ("plain", "ours")]  # the warm-up
    torch.testing.assert_close(check[1], check[0], rtol=1e-4, atol=0)
    times: dict[str, list[float]] = {name: [] for name in arms}
    for _ in range(args.rounds):
        for name, run in arms.items():
            start = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - start)
    row: dict = {"plain_seconds": statistics.median(times["plain"]), "rounds": args.rounds}
    for name in ("ours", "plain again"):
        ratios = [a / b for a, b in zip(times[name], times["plain"], strict=True)]
        row[name] = statistics.median(ratios)
        row[name + " spread"] = (min(ratios), max(ratios))
    return row


def bench(args: argparse.Namespace, density: float) -> dict:
    from bench_memory import peak_of

    row = {
        "vocab": args.vocab, "draft_vocab": args.draft_vocab, "width": args.width,
        "tokens": args.tokens, "density": density, "threads": torch.get_num_threads(),
    }  # fmt: skip
    sizes = ["--vocab", "--draft-vocab", "--width", "--tokens"]
    values = [args.vocab, args.draft_vocab, args.width, args.tokens]
    for arm in args.arms:
        command = [sys.executable, __file__, "--child", "--arms", arm, "--density", str(density)]
        for flag, value in zip(sizes, values, strict=True):
            command += [flag, str(value)]
        if args.chunk_rows:
            command += ["--chunk-rows", str(args.chunk_rows)]
        row[arm + "_peak_bytes"], row[arm + "_fresh_seconds"] = peak_of(command, arm)
        print(f"{density:.0%} {arm:6s} {row[arm + '_peak_bytes'] / 1e6:8.0f} MB", flush=True)
    if args.rounds:
        row |= time_arms(args, density)
        print(f"{density:.0%} ours/plain {row['ours']:.3f} {row['ours spread']}  A/A "
              f"{row['plain again']:.3f} {row['plain again spread']}", flush=True)  # fmt: skip
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--draft-vocab", type=int, default=32_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--density", type=float, nargs="+", default=[0.08])
    parser.add_argument("--chunk-rows", type=int, help="default: as the trainer chooses on a CPU")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds; 0 = memory only")
    parser.add_argument("--out", help="append rows to this JSON lines file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    for density in args.density:
        row = bench(args, density)
        append_row(args.out, row)


if __name__ == "__main__":
    main()
