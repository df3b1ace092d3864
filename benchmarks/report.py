"""Tables and pictures of benchmarks/results/*.jsonl, as benchmarks/RESULTS.md.

    python benchmarks/report.py

Rows are what the benchmark scripts wrote; nothing is measured here. Needs the extra `bench`.
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results"


def read(name: str) -> list[dict]:
    path = RESULTS / name
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def spread(row: dict, arm: str) -> str:
    if arm not in row:
        return ""
    low, high = row[arm + " spread"]
    return f"{row[arm]:.3f} ({low:.3f}-{high:.3f})"


def step_table(rows: list[dict]) -> str:
    header = "size layout tokens density ours floor".split()
    header += ["step 0 full", "A/A", "ours s", "its rate", "classic s", "its rate"]
    return table(
        header,
        [
            [
                r["size"], r["layout"], f"{r['tokens']:,}", f"{r['density']:.0%}",
                spread(r, "ours"), f"{r['floor']:.3f}", spread(r, "step 0 full"),
                spread(r, "classic again"), f"{r['ours_seconds']:.2f}",
                f"{r['ours_rate_of_matmul']:.0%}",
                f"{r['classic_seconds']:.1f}" if "ours" in r else "",
                f"{r['classic_rate_of_matmul']:.0%}" if "ours" in r else "",
            ]
            for r in rows
        ],
    )  # fmt: skip


def memory_table(rows: list[dict]) -> str:
    header = "size layout tokens density arm".split() + ["rows a chunk", "peak MB", "KB/token"]
    return table(
        header,
        [
            [
                r["size"], r["layout"], f"{r['tokens']:,}", f"{r['density']:.0%}", r["arm"],
                str(r["chunk_rows"] or "default") if r["arm"] != "classic" else "",
                f"{r['peak_bytes'] / 1e6:,.0f}", f"{r['bytes_per_token'] / 1e3:.2f}",
            ]
            for r in rows
        ],
    )  # fmt: skip


def arms_table(rows: list[dict]) -> str:
    header = ["arm", "s/step", "vs loss only", "kept FLOPs", "peak MB", "worst loss difference"]
    return table(
        header,
        [
            [
                r["arm"], f"{r['seconds_per_step']:.2f}", f"{r['relative_to_loss_only']:.2f}",
                f"{r['kept_flops']:.1%}", f"{r['peak_mb']:,.0f}",
                f"{r['worst_loss_difference']:.1e}",
            ]
            for r in rows
        ],
    )  # fmt: skip


def guard_table(rows: list[dict]) -> str:
    header = ["backend", "tokens", "density", "rows kept", "trimmed/dense", "guarded/dense"]
    header += ["INFO lines"]
    return table(
        header,
        [
            [
                r["backend"], f"{r['tokens']:,}", f"{r['density']:.0%}", f"{r['kept']:.2f}",
                spread(r, "trimmed"), spread(r, "guarded"), str(r["refusals_logged"]),
            ]
            for r in rows
        ],
    )  # fmt: skip


def loss_end_table(rows: list[dict]) -> str:
    header = ["vocabulary", "draft", "width", "tokens", "density", "plain MB", "ours MB"]
    header += ["ours/plain", "plain s", "time ours/plain", "A/A"]

    def megabytes(row: dict, arm: str) -> str:
        return f"{row[arm + '_peak_bytes'] / 1e6:,.0f}" if arm + "_peak_bytes" in row else ""

    return table(
        header,
        [
            [
                f"{r['vocab']:,}", f"{r['draft_vocab']:,}", str(r["width"]), f"{r['tokens']:,}",
                f"{r['density']:.0%}", megabytes(r, "plain"), megabytes(r, "ours"),
                f"{r['ours_peak_bytes'] / r['plain_peak_bytes']:.3f}"
                if "plain_peak_bytes" in r else "",
                f"{r['plain_seconds']:.1f}" if "plain_seconds" in r else "",
                spread(r, "ours"), spread(r, "plain again"),
            ]
            for r in rows
        ],
    )  # fmt: skip


def row_sparse_table(rows: list[dict]) -> str:
    header = ["tokens", "width", "recompute", "rows kept", "row-sparse/dense", "A/A", "floor"]
    header += ["dense s"]
    return table(
        header,
        [
            [
                f"{r['tokens']:,}", str(r["width"]), "yes" if r.get("checkpointing") else "",
                f"{r['kept']:.0%}", spread(r, "row-sparse"), spread(r, "dense again"),
                "" if r.get("checkpointing") else f"{r['floor']:.3f}",
                f"{r['dense_seconds']:.2f}",
            ]
            for r in rows
        ],
    )  # fmt: skip


def head_table(rows: list[dict]) -> str:
    header = ["tokens", "dtype", "rows kept", "logits a block", "full MB", "skipped MB", "full s"]
    header += ["time skipped/full", "A/A"]
    return table(
        header,
        [
            [
                f"{r['tokens']:,}", r["dtype"], f"{r['kept']:.0%}", f"{r['block_mb']} MB",
                f"{r['full_peak_bytes'] / 1e6:,.0f}", f"{r['skipped_peak_bytes'] / 1e6:,.0f}",
                f"{r['full_seconds']:.1f}", spread(r, "skipped"), spread(r, "full again"),
            ]
            for r in rows
        ],
    )  # fmt: skip


def ranks_table(rows: list[dict]) -> str:
    header = ["tokens", "supervision", "density", "ranks", "rows", "dealt", "keys", "GB sent"]
    header += ["of dense ring", "TFLOP", "largest/mean", "counted, small draft"]
    ring = {
        (r["tokens"], r["layout"]): r["bytes_sent_max"]
        for r in rows
        if (r["rows"], r["context"]) == ("dense", "ring")
    }
    return table(
        header,
        [
            [
                f"{r['tokens']:,}", r["layout"], f"{r['density']:.0%}", str(r["ranks"]),
                r["rows"], r["dealt"], r["context"], f"{r['bytes_sent_max'] / 1e9:.3f}",
                f"{r['bytes_sent_max'] / ring[r['tokens'], r['layout']]:.3f}",
                f"{r['flops_max'] / 1e12:.1f}", f"{r['row_flops_max_over_mean']:.2f}",
                f"{r['counted_bytes']:,}" if r["counted_bytes"] else "",
            ]
            for r in rows
        ],
    )  # fmt: skip


def rank_memory_table(rows: list[dict]) -> str:
    header = ["arm", "tokens", "density", "ranks", "peak MB of the largest rank", "of classic"]
    header += ["MB sent", "s"]
    classic = {r["tokens"]: r["peak_bytes"] for r in rows if r["arm"] == "classic"}
    return table(
        header,
        [
            [
                r["arm"], f"{r['tokens']:,}", f"{r['density']:.0%}", str(r["ranks"]),
                f"{r['peak_bytes'] / 1e6:,.0f}", f"{r['peak_bytes'] / classic[r['tokens']]:.2f}",
                f"{r['bytes_sent'] / 1e6:,.1f}" if r["bytes_sent"] else "",
                f"{r['seconds']:.1f}",
            ]
            for r in rows
        ],
    )  # fmt: skip


def plot_guard(rows: list[dict], path: Path) -> None:
    """Trimmed against dense per backend: where a curve meets 1, trimming stops paying."""
    figure, axes = plt.subplots(figsize=(6, 4))
    for backend in dict.fromkeys(r["backend"] for r in rows):
        points = [(r["kept"], r["trimmed"]) for r in rows if r["backend"] == backend]
        axes.plot(*zip(*points, strict=True), "o-", label=backend)
    axes.axhline(1.0, color="gray", linewidth=0.8)
    axes.set(
        xlabel="share of rows kept at steps after the first", ylabel="trimmed / dense step time",
        title="break-even of trimming per backend", ylim=(0, 1.2),
    )  # fmt: skip
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def plot_steps(rows: list[dict], path: Path) -> None:
    """Relative step time over density at the longest context with all arms."""
    rows = [r for r in rows if (r["size"], r["layout"]) == ("prototype", "blocks")]
    rows = [r for r in rows if "ours" in r]  # those measured beside the classic arm
    tokens = max(r["tokens"] for r in rows)
    rows = sorted((r for r in rows if r["tokens"] == tokens), key=lambda r: r["density"])
    figure, axes = plt.subplots(figsize=(6, 4))
    density = [r["density"] for r in rows]
    styles = {"ours": "o-", "step 0 full": "s--"}
    for arm, style in styles.items():
        points = [(r["density"], r[arm]) for r in rows if arm in r]
        axes.plot(*zip(*points, strict=True), style, label=arm)
    axes.plot(density, [r["floor"] for r in rows], "k:", label="floor (FLOPs)")
    axes.axhline(1.0, color="gray", linewidth=0.8)
    axes.set(
        xlabel="share of rows with loss", ylabel="step time / classic unroll",
        title=f"{tokens:,} tokens, 16 blocks, K = 7", xscale="log", yscale="log",
    )  # fmt: skip
    ticks = [0.02, 0.05, 0.1, 0.2, 0.5, 1.0]
    axes.set_xticks(ticks, [f"{x:.0%}" for x in ticks])
    axes.set_yticks(ticks, [f"{x:g}" for x in ticks])
    axes.minorticks_off()
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


SECTIONS = (
    ("Step time", "step.jsonl", step_table, "python benchmarks/bench_step.py"),
    ("Peak memory of a step", "memory.jsonl", memory_table, "python benchmarks/bench_memory.py"),
    ("The loss end", "loss_end.jsonl", loss_end_table, "python benchmarks/bench_loss_end.py"),
    ("Guard and break-even", "guard.jsonl", guard_table, "python benchmarks/bench_guard.py"),
    (
        "Row-sparse step of a dense model",
        "row_sparse.jsonl",
        row_sparse_table,
        "python benchmarks/bench_row_sparse.py",
    ),
    (
        "Head at kept rows of a dense model",
        "row_sparse_head.jsonl",
        head_table,
        "python benchmarks/bench_row_sparse.py --head --head-tokens 2048 --kept 0.1 0.2 0.5 1.0",
    ),
    (
        "Shared sequences: bytes and FLOPs per rank, a draft of Llama-3-8B's size",
        "ranks.jsonl",
        ranks_table,
        "python benchmarks/bench_ranks.py --count",
    ),
    (
        "Shared sequences: peak memory per rank",
        "rank_memory.jsonl",
        rank_memory_table,
        "python benchmarks/bench_rank_memory.py",
    ),
    ("Three arms of the command", "arms.jsonl", arms_table, "python benchmarks/bench_arms.py"),
)


def main() -> None:
    notes = (RESULTS / "NOTES.md").read_text(encoding="utf-8")
    parts = [notes.strip()]
    for title, name, make, command in SECTIONS:
        rows = read(name)
        if rows:
            parts.append(f"## {title}\n\n`{command}`\n\n{make(rows)}")
    steps = read("step.jsonl")
    if steps:
        plot_steps(steps, RESULTS / "step.png")
        parts.insert(2, "![step time over density](results/step.png)")
    guard = read("guard.jsonl")
    if guard:
        plot_guard(guard, RESULTS / "guard.png")
        parts.append("![trimmed against dense per backend](results/guard.png)")
    (HERE / "RESULTS.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
