"""`python -m specforge_trim.cli.quickstart`: from nothing to a measured draft, phase by phase.

    target -> prepare -> features -> train -> export -> evaluate

Each phase finds what an earlier run left and reuses it, so a rerun is quick and an interrupted run
continues. Training has both trim flags on.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import signal
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from specforge_trim.cli.main import quiet_transformers
from specforge_trim.cli.running import guarded
from specforge_trim.cli.summary import DataLine, EvaluateLine, TrainLine, render_summary
from specforge_trim.config.options import HelpFormatter, Parser
from specforge_trim.drafts.eagle3.settings import Config, load_config
from specforge_trim.plan.cost import pack_cost
from specforge_trim.plan.guard import choose_pack_alone
from specforge_trim.plan.pack import build_trim_pack
from specforge_trim.plan.rows import row_mask

ROOT = Path(__file__).resolve().parents[2]
RECIPE = Path("examples/quickstart.yaml")
TRIM_FLAGS = ("--trim-loss-positions", "--trim-backbone-rows")
SMOKE_ROWS = 3  # conversations per file
PHASES = ("target", "prepare", "features", "train", "export", "evaluate")


class Clock:
    """Prints a line as each phase starts, and remembers its minutes."""

    def __init__(self) -> None:
        self.minutes: list[tuple[str, float]] = []

    @contextmanager
    def phase(self, name: str, what: str) -> Iterator[None]:
        number = len(self.minutes) + 1
        print(f"[{number}/{len(PHASES)}] {name}: {what}", flush=True)
        start = time.perf_counter()
        yield
        self.minutes.append((name, (time.perf_counter() - start) / 60))
        print(f"      {self.minutes[-1][1]:.1f} min", flush=True)


# ---------------------------------------------------------------------- settings


def run_flags(cache: Path, *, smoke: bool, epochs: int | None) -> list[str]:
    """The flags that this run adds to the recipe, as train_eagle3.py takes them.

    Runs of different length get folders of their own: their learning rates follow other curves.
    """
    name = "smoke" if smoke else "recipe" if epochs is None else f"{epochs}-epochs"
    flags = [*TRIM_FLAGS, "--cache-dir", str(cache), "--output-dir", str(cache / f"run-{name}")]
    if epochs is not None:
        flags += ["--epochs", str(epochs)]
    if smoke:
        recipe = recipe_config(["--cache-dir", str(cache)])
        folder = cache / "smoke"
        flags += ["--train-data", *shortest_rows(recipe.data.train_data, folder)]
        flags += ["--eval-data", *shortest_rows(recipe.evaluate.eval_data, folder)]
        flags += ["--max-steps", "3", "--eval-prompts", "1", "--eval-max-new-tokens", "8"]
    return flags


def recipe_config(flags: Sequence[str]) -> Config:
    """The recipe with flags on top, as train_eagle3.py reads it."""
    return load_config(
        ["--config", str(RECIPE), *flags], prog="quickstart", description="the quickstart recipe"
    )


def shortest_rows(paths: Sequence[str], folder: Path) -> list[str]:
    """Copies of JSON-lines files with their few shortest lines, for a smoke run."""
    folder.mkdir(parents=True, exist_ok=True)
    copies = []
    for path in paths:
        lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
        copy = folder / Path(path).name
        copy.write_text("".join(sorted(lines, key=len)[:SMOKE_ROWS]), encoding="utf-8")
        copies.append(str(copy))
    return copies


# ---------------------------------------------------------------------- phases


def train(config: Config, world: Any, flags: Sequence[str]) -> None:
    """Trains as the command does that it prints; one process needs no torchrun."""
    from specforge_trim.train import run as pipeline

    shown = shlex.join(["python", "train_eagle3.py", "--config", str(RECIPE), *flags])
    indent: dict[str, Any] = {"initial_indent": " " * 6, "subsequent_indent": " " * 8}
    lines = textwrap.wrap(shown, 78, break_long_words=False, break_on_hyphens=False, **indent)
    print(" \\\n".join(lines), flush=True)
    pipeline.train_draft(config, world)


def evaluate_once(config: Config, target: Any, world: Any) -> dict[str, Any]:
    """The evaluation report of the exported draft; read back where nothing has changed since."""
    from specforge_trim.train import results

    digest = hashlib.sha256(json.dumps(config.to_dict()["evaluate"]).encode())
    weights = config.output_dir / "export" / "model.safetensors"
    for path in (str(weights), *config.evaluate.eval_data):
        digest.update(Path(path).read_bytes())
    report, key = (config.output_dir / name for name in ("evaluation.json", "evaluation.key"))
    if not (report.is_file() and key.is_file() and key.read_text() == digest.hexdigest()):
        key.unlink(missing_ok=True)
        print(results.evaluate_drafts(config, target, world).format(), flush=True)
        key.write_text(digest.hexdigest())
    return json.loads(report.read_text(encoding="utf-8"))


# ---------------------------------------------------------------------- what the table says


def data_lines(config: Config, data: Any, dims: Any) -> list[DataLine]:
    """Counts, density and work of each training file, then of all of them together."""
    groups: dict[str, Counter[str]] = {}
    everything: Counter[str] = Counter()
    for document in data:
        counts = document_counts(config, document, dims)
        name = Path(document.source.rpartition(":")[0]).name.split(".")[0]
        groups.setdefault(name, Counter()).update(counts)
        everything.update(counts)
    return [
        DataLine(
            name=name,
            conversations=counts["conversations"],
            tokens=counts["tokens"],
            supervised=counts["supervised"],
            density=counts["kept_rows"] / max(1, counts["rows"]),
            kept_work=counts["kept_flops"] / counts["full_flops"],
        )
        for name, counts in [*groups.items(), ("all", everything)]
    ]


def document_counts(config: Config, document: Any, dims: Any) -> dict[str, int]:
    """What training on one conversation costs; rows are those of steps >= 1."""
    loss = config.loss
    m = row_mask(document.loss_mask, alignment=loss.loss_alignment)
    pack = build_trim_pack(m, ttt_length=loss.ttt_length, chain=loss.chain)
    pack = choose_pack_alone(pack, max_density=config.max_density)
    cost = pack_cost(pack, dims)
    rows = len(document.input_ids) * (loss.ttt_length - 1)
    return {
        "conversations": 1,
        "tokens": len(document.input_ids),
        "supervised": int(document.loss_mask.sum()),
        "rows": rows,
        "kept_rows": round(pack.density * rows),
        "kept_flops": cost.kept,
        "full_flops": cost.full,
    }


def train_line(config: Config) -> TrainLine:
    """Speed over all steps; loss and accuracy over the last epoch."""
    from specforge_trim.train.results import last_epoch

    path = config.output_dir / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    means = last_epoch(path)
    seconds = sum(row["time/step_seconds"] for row in rows)
    return TrainLine(
        epochs=rows[-1]["epoch"] + 1,
        steps=rows[-1]["step"],
        tokens_per_second=sum(row["rows"] for row in rows) / seconds,
        loss=tuple(means["loss"]),
        accuracy=tuple(means["accuracy"]),
    )


def evaluate_lines(report: dict[str, Any]) -> list[EvaluateLine]:
    """One line per held-out set."""
    return [
        EvaluateLine(
            name=entry["name"].split(".")[0],
            prompts=entry["prompts"],
            tokens=entry["trained"]["tokens"],
            acceptance_length=entry["trained"]["acceptance_length"],
            untrained_length=entry["untrained"]["acceptance_length"],
            equal=entry["equal"],
        )
        for entry in report["sets"]
    ]


# ---------------------------------------------------------------------- the run


def run(cache: Path, *, smoke: bool, epochs: int | None) -> str:
    """All phases; returns the closing table."""
    clock = Clock()
    flags = run_flags(cache, smoke=smoke, epochs=epochs)
    config = recipe_config(flags)
    from specforge_trim.ranks import world as distributed
    from specforge_trim.train import results
    from specforge_trim.train import run as pipeline

    quiet_transformers()
    world = distributed.start(device=config.train.device)
    with clock.phase("target", config.model.target):
        target = pipeline.open_target(config, world)
    with clock.phase("prepare", "conversations -> tokens and loss masks"):
        data = pipeline.prepare_data(config, target, world)
    with clock.phase("features", f"the target's hidden states of {data.num_tokens:,} tokens"):
        pipeline.make_features(config, target, data, world)
    with clock.phase("train", "the draft, on the rows that reach a loss"):
        train(config, world, flags)
    with clock.phase("export", str(config.output_dir / "export")):
        results.export_trained(config, target)
    with clock.phase("evaluate", "held-out prompts, decoded with draft and target"):
        report = evaluate_once(config, target, world)
    import torch

    return render_summary(
        title=f"quickstart: {config.model.target}, {torch.get_num_threads()} threads",
        data=data_lines(config, data, target.draft.dims),
        train=train_line(config),
        evaluate=evaluate_lines(report),
        minutes=clock.minutes,
    )


def command(argv: Sequence[str]) -> None:
    """Parses, runs, prints the table and keeps a copy of it beside the run."""
    parser = Parser(
        prog="python -m specforge_trim.cli.quickstart",
        description=(__doc__ or "").partition(": ")[2],
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "--cache-dir", type=Path, default=Path(".quickstart"), metavar="DIR",
        help="where the target, the features and the runs are kept (default: .quickstart)",
    )  # fmt: skip
    parser.add_argument("--smoke", action="store_true", help="three steps, a few conversations")
    parser.add_argument(
        "--epochs", type=int, metavar="INT", help="passes over the data (default: the recipe's, 4)"
    )
    arguments = parser.parse_args(argv)
    cache = arguments.cache_dir.expanduser().absolute()
    if not (ROOT / RECIPE).is_file():
        raise ValueError(f"the quickstart runs in a checkout: {ROOT / RECIPE} is missing")
    os.chdir(ROOT)  # the recipe names its files from here
    text = run(cache, smoke=arguments.smoke, epochs=arguments.epochs)
    print(f"\n{text}", flush=True)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(guarded(command, sys.argv[1:]))
