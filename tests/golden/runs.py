"""Golden runs: tiny trainings through the doors, whose numbers a refactor must not change.

    python tests/golden/runs.py record            writes runs.json and texts.json beside this file
    python tests/golden/runs.py replay            runs again and compares to the last bit
    python tests/golden/runs.py replay --against REV     compares with the commit REV instead

Float bits depend on the processor and the build of torch, which the files name; on another machine
use --against. Each run is done twice, straight through and killed in the middle and continued.
Exit codes of replay: 0 equal, 1 a difference or a run that failed, 3 files of another machine.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Read when torch loads: one thread, so that sums have one order.
os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
os.environ |= {"TOKENIZERS_PARALLELISM": "false", "COLUMNS": "100", "NO_COLOR": "1"}

import cases
import children
import digest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RUNS, TEXTS = HERE / "runs.json", HERE / "texts.json"
EQUAL, DIFFERENT, ANOTHER_MACHINE = 0, 1, 3


def machine() -> dict[str, Any]:
    """What float bits depend on beside the code."""
    import torch
    import transformers

    found = {"torch": torch.__version__, "transformers": transformers.__version__}
    found["instructions"] = torch.backends.cpu.get_cpu_capability()
    lines = (
        Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    )
    about = dict(line.split(":", 1) for line in reversed(lines) if ":" in line)
    about = {key.strip(): value.strip() for key, value in about.items()}
    family = [about.get(k, "?") for k in ("vendor_id", "cpu family", "model")]
    found["processor"] = f"{' '.join(family)} {platform.machine()}"
    flags = set(about.get("flags", "").split())
    wanted = ("fma", "avx2", "avx512f", "avx512vl", "avx512_bf16", "avx512_vnni", "amx_bf16")
    found["flags"] = " ".join(f for f in wanted if f in flags)
    return found


# ---------------------------------------------------------------------- one run


def run_case(case: cases.Case, root: Path, place: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """(what is recorded of the run, texts). Raises Failed, also where going on changes a number.

    place: of material.make.
    """
    folder = place / case.name.replace("/", "-")
    folder.mkdir()
    (folder / "recipe.yaml").write_text(case.recipe)
    base = ["--config", "recipe.yaml", *case.flags]

    def train(out: str, log: str, *more: str, ranks: int = case.ranks, **how: Any) -> None:
        arguments = [*base, "--output-dir", out, *more]
        children.run(children.door(root, case.door, arguments), folder, log, ranks=ranks, **how)

    if case.first:
        start = ["--config", "recipe.yaml", "--output-dir", "first"]
        call = children.door(root, case.door, [*start, "--max-steps", "2"])
        children.run(call, folder, "first")
        children.run(children.console(root, ["export", *start]), folder, "first-export")
    train("straight", "straight")
    kill = children.killed_after(cases.MIDDLE)
    train("resumed", "killed", first=kill, dies=True)
    train("resumed", "resumed")
    after, texts = _after(case, root, folder, base) if case.after else ({}, {})
    whole, parts = digest.of_run(folder / "straight"), digest.of_run(folder / "resumed")
    steps = [row["step"] for row in whole["rows"]]
    if steps != list(range(1, cases.STEPS + 1)):
        raise children.Failed(f"steps {steps}")
    # A loader that starts anew draws its seed anew; nothing in training draws from the generators.
    generators = {k: v for k, v in parts["tensors"].items() if k.startswith("random_")}
    parts["tensors"] |= {key: whole["tensors"].get(key) for key in generators}
    found = digest.difference(whole, parts)
    if found:
        raise children.Failed(f"going on is not as straight through: {found}")
    shutil.rmtree(folder)
    return whole | {"generators after going on": generators} | after, texts


def _after(
    case: cases.Case, root: Path, folder: Path, base: Sequence[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Export, evaluation and texts of a finished run."""
    arguments = [*base, "--output-dir", "straight"]
    dry = children.door(root, case.door, [*arguments, "--dry-run"])
    texts = {"dry run": children.run(dry, folder, "dry-run")}
    if case.kind == "eagle3":
        for name in ("export", "evaluate"):
            # Their parsers take the settings of some sections only.
            call = children.console(
                root, [name, "--config", "recipe.yaml", "--output-dir", "straight"]
            )
            children.run(call, folder, name)
        shown = ["inspect", "../train.jsonl", "--config", "recipe.yaml", "--index", "1"]
        flags = ["--trim-loss-positions", "--trim-backbone-rows", "--no-color"]
        texts["inspect"] = children.run(
            children.console(root, [*shown, *flags]), folder, "inspect"
        )
    out = folder / "straight"
    found = {
        "export": digest.of_export(out / "export"),
        "evaluation": digest.of_evaluation(out / "evaluation.json"),
    }
    return found, {f"{case.name} {key}": text for key, text in texts.items()}


# ---------------------------------------------------------------------- many runs


def run_all(chosen: Sequence[cases.Case], root: Path) -> Iterator[tuple[cases.Case, dict]]:
    """Each run as it ends: {"run", "texts"} or {"failed"}. One or two at once, as cores allow."""
    children.warm(root)
    import material

    # No TemporaryDirectory: its clean-up at exit would be a forked rank's too.
    place = Path(tempfile.mkdtemp(prefix="golden-"))
    try:
        material.make(place)
        waiting, running = list(chosen), {}
        while waiting or running:
            while waiting and len(running) < (os.cpu_count() or 1):
                case = waiting.pop(0)
                running[_supervise(case, root, place)] = case
            pid, _ = os.wait()
            if pid in running:
                case = running.pop(pid)
                file = place / f"{pid}.json"
                gone = {"failed": "the process that watched it is gone"}
                yield case, json.loads(file.read_text()) if file.exists() else gone
    finally:
        shutil.rmtree(place)


def _supervise(case: cases.Case, root: Path, place: Path) -> int:
    """Starts a process that runs one case and leaves its result in place/PID.json."""
    pid = os.fork()
    if pid:
        return pid
    try:
        run, texts = run_case(case, root, place)
        result: dict[str, Any] = {"run": run, "texts": texts}
    except children.Failed as error:
        result = {"failed": str(error)}
    except BaseException:
        result = {"failed": traceback.format_exc()}
    (place / f"{os.getpid()}.json").write_text(json.dumps(result))
    os._exit(0)


def collect(chosen: Sequence[cases.Case], root: Path, *, say: bool) -> dict[str, Any]:
    """{"machine", "runs", "texts"} of all chosen runs, whole; exits where one fails."""
    runs, texts, failed = {}, {}, []
    for case, result in run_all(chosen, root):
        if "failed" in result:
            failed.append(f"{case.name}: {result['failed']}")
            print(failed[-1], file=sys.stderr, flush=True)
            continue
        runs[case.name], texts = result["run"], texts | result["texts"]
        if say:
            print(f"{case.name}: {len(result['run']['rows'])} steps", flush=True)
    if failed:
        sys.exit(DIFFERENT)
    return {"machine": machine(), "runs": runs, "texts": texts}


# ---------------------------------------------------------------------- commands


def record(arguments: argparse.Namespace) -> int:
    """Writes the golden files, or with --whole one file of everything that was seen."""
    chosen = choose(arguments.only)
    if arguments.texts:
        chosen = [case for case in chosen if case.after]
    found = collect(chosen, arguments.root, say=True)
    if arguments.whole:
        Path(arguments.whole).write_text(json.dumps(found))
        return EQUAL
    _write(TEXTS, (_read(TEXTS) if TEXTS.exists() else {}) | found["texts"])
    if arguments.texts:
        return EQUAL
    runs = {name: digest.shorten(run) for name, run in found["runs"].items()}
    if arguments.only and RUNS.exists():
        kept = _read(RUNS)
        if kept["machine"] != found["machine"]:
            print("error: the other runs are of another machine: record all", file=sys.stderr)
            return DIFFERENT
        runs = kept["runs"] | runs
    order = [case.name for case in cases.all_cases()]
    runs = {name: runs[name] for name in order if name in runs}
    _write(RUNS, {"machine": found["machine"], "runs": runs})
    print(f"{len(found['runs'])} runs recorded; {RUNS.stat().st_size / 1e3:.0f} kB")
    return EQUAL


def _read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text(encoding="utf-8"))


def _write(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=0, ensure_ascii=False) + "\n", encoding="utf-8")


def replay(arguments: argparse.Namespace) -> int:
    """Runs again and says what is not as it was."""
    chosen, began = choose(arguments.only), time.monotonic()
    with _expected(arguments, chosen) as kept:
        if kept is None:
            return ANOTHER_MACHINE
        equal = 0
        for case, result in run_all(chosen, arguments.root):
            found = result.get("failed") or _compare(kept, case.name, result, arguments)
            equal += not found
            print(f"{case.name}: {cases.STEPS} steps, {found or 'equal'}", flush=True)
    print(f"{equal} of {len(chosen)} runs equal, {time.monotonic() - began:.0f} s")
    return EQUAL if equal == len(chosen) else DIFFERENT


def _compare(
    kept: dict[str, Any], name: str, result: dict[str, Any], arguments: argparse.Namespace
) -> str | None:
    if name not in kept["runs"]:
        return "not recorded"
    run = result["run"] if arguments.against else digest.shorten(result["run"])
    found = digest.difference(kept["runs"][name], run)
    for key, text in () if found or arguments.no_texts else result["texts"].items():
        if kept["texts"].get(key) != text:
            found = f"text of {key.removeprefix(name).strip()} (--no-texts leaves texts out)"
    return found


@contextmanager
def _expected(
    arguments: argparse.Namespace, chosen: Sequence[cases.Case]
) -> Iterator[dict[str, Any] | None]:
    """What to compare with; None when it is of another machine, which is said."""
    if not arguments.against:
        kept, here = _read(RUNS), machine()
        other = [f"{k} {v!r} (here {here.get(k)!r})" for k, v in kept["machine"].items()]
        other = [text for text, k in zip(other, kept["machine"], strict=True)
                 if kept["machine"][k] != here.get(k)]  # fmt: skip
        if other:
            print(f"recorded on another machine: {', '.join(other)}; use --against REV")
        yield None if other else kept | {"texts": _read(TEXTS)}
        return
    with tempfile.TemporaryDirectory(prefix="golden-against-") as name:
        tree, out = Path(name) / "tree", Path(name) / "whole.json"
        git = ["git", "-C", str(ROOT), "worktree"]
        subprocess.run(
            [*git, "add", "--quiet", "--detach", str(tree), arguments.against], check=True
        )
        try:
            command = [sys.executable, __file__, "record", "--root", str(tree)]
            command += ["--whole", str(out), *(f"--only={p}" for p in arguments.only)]
            subprocess.run(command, check=True)
            yield _read(out)
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def choose(patterns: Sequence[str]) -> list[cases.Case]:
    """Cases whose name fits a pattern; all without one."""
    found = [
        case
        for case in cases.all_cases()
        if not patterns or any(fnmatch.fnmatch(case.name, f"*{p}*") for p in patterns)
    ]
    if not found:
        sys.exit(f"error: no run fits {', '.join(patterns)}; --list names them")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=("record", "replay"))
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN",
        help="runs whose name holds this, * and ? allowed; may stand several times",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="name the runs and end")
    parser.add_argument(
        "--against", metavar="REV", help="replay: compare with a commit, recorded now and here"
    )
    parser.add_argument(
        "--no-texts", action="store_true", help="replay: leave out what commands print"
    )
    parser.add_argument(
        "--texts", action="store_true", help="record: what commands print only (texts.json)"
    )
    parser.add_argument(
        "--whole", metavar="FILE", help="record: write everything, not shortened, to this file"
    )
    parser.add_argument(
        "--root",
        type=Path,
        default=ROOT,
        help="the source tree that is run (default: that of this file)",
    )
    arguments = parser.parse_args()
    arguments.root = arguments.root.resolve()
    if arguments.list:
        for case in choose(arguments.only):
            print(f"{case.name}: {case.ranks} ranks, {' '.join(case.flags)}")
        return EQUAL
    return {"record": record, "replay": replay}[arguments.command](arguments)


if __name__ == "__main__":
    sys.exit(main())
