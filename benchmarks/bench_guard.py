"""Where trimming stops paying: trimmed against dense rows per backend, and the guard's refusal.

    python benchmarks/bench_guard.py --tokens 2048 --out guard.jsonl

`trimmed` and `guarded` are step times relative to the dense pack of the same backend in the same
round; `guarded` goes through the guard at the backend's default max_density, so that a refused
document costs what dense rows cost. The break-even is the density at which `trimmed` reaches 1.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import statistics

from problems import append_row, make_mask, make_problem, our_step, packs, seconds

from specforge_trim.plan.guard import choose_pack_alone

DEFAULT_MAX_DENSITY = {"reference": 0.35, "sdpa": 1.0}


class Count(logging.Handler):
    """Counts the guard's INFO lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def bench(backend: str, tokens: int, density: float, rounds: int, count: Count) -> dict:
    problem = make_problem("prototype", make_mask("blocks", tokens, density))
    settings = dataclasses.replace(problem.settings, backend=backend)
    problem = dataclasses.replace(problem, settings=settings)
    plan = packs(problem)
    count.lines.clear()
    guarded = choose_pack_alone(plan["ours"], max_density=DEFAULT_MAX_DENSITY[backend])
    chunk = 256 if backend == "reference" else 1024
    steps = {
        "dense": our_step(problem, plan["dense"], chunk_rows=chunk),
        "trimmed": our_step(problem, plan["ours"], chunk_rows=chunk),
        "guarded": our_step(problem, guarded, chunk_rows=chunk),
    }
    times: dict[str, list[float]] = {name: [] for name in steps}
    for step in steps.values():
        step()
    order = list(steps.items())
    for n in range(rounds):
        # Another arm begins each round: what ran just before costs an arm a few percent.
        for name, step in order[n % 3 :] + order[: n % 3]:
            times[name].append(seconds(step))
    row = {
        "backend": backend, "tokens": tokens, "density": density, "kept": plan["ours"].density,
        "refusals_logged": len(count.lines), "dense_seconds": statistics.median(times["dense"]),
    }  # fmt: skip
    for name in ("trimmed", "guarded"):
        ratios = [a / b for a, b in zip(times[name], times["dense"], strict=True)]
        row[name], row[name + " spread"] = statistics.median(ratios), (min(ratios), max(ratios))
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument(
        "--density", type=float, nargs="+", default=[0.1, 0.25, 0.35, 0.5, 0.75, 0.9, 1.0]
    )
    parser.add_argument("--backends", nargs="+", default=["reference", "sdpa"])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", help="append rows to this JSON lines file")
    args = parser.parse_args()
    count = Count()
    logging.getLogger("specforge_trim").addHandler(count)
    logging.getLogger("specforge_trim").setLevel(logging.INFO)
    for backend in args.backends:
        for density in args.density:
            row = bench(backend, args.tokens, density, args.rounds, count)
            print(
                f"{backend:9s} {args.tokens} tokens {density:4.0%} (kept {row['kept']:.2f})  "
                f"trimmed/dense {row['trimmed']:.3f}  guarded/dense {row['guarded']:.3f}  "
                f"refusals logged {row['refusals_logged']}",
                flush=True,
            )
            append_row(args.out, row)


if __name__ == "__main__":
    main()
