"""Which alignment and chain train the better draft: held-out acceptance length of six arms.

    python benchmarks/study_alignment.py --cache-dir .quickstart
    python benchmarks/study_alignment.py --cache-dir .quickstart --only served shift 0

Trains the quickstart recipe once per alignment, chain and seed, on data and features that
`make quickstart` left in the cache, and decodes every held-out prompt with each draft. The target
answers each prompt once; drafts are verified by that recording, which gives the counts of live
passes. Finished arms stand in --out and are skipped, so an interrupted study continues.

Prompts are halved: even-numbered ones choose, odd-numbered ones report.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch

from specforge_trim.decode.prompts import Prompt, last_prompt
from specforge_trim.decode.rounds import RecordedVerifier, decode_rounds
from specforge_trim.drafts.eagle3.model import Eagle3Draft
from specforge_trim.drafts.eagle3.proposer import CachedDraft
from specforge_trim.drafts.eagle3.settings import Config, load_config
from specforge_trim.ranks import world as distributed
from specforge_trim.train import results
from specforge_trim.train import run as pipeline
from specforge_trim.verifier.hf import HFTarget

HERE = Path(__file__).resolve().parent
RECIPE = HERE.parent / "examples" / "quickstart.yaml"
ALIGNMENTS = ("served", "teacher", "token")
CHAINS = ("shift", "run")
SEEDS = (0, 1)
MAX_NEW_TOKENS = 64


def arm_config(args: argparse.Namespace, alignment: str, chain: str, seed: int) -> Config:
    """The recipe with both trim flags, its own folder, and the arm's settings."""
    folder = args.cache_dir / "study-alignment" / f"{alignment}-{chain}-{seed}-{args.epochs}"
    flags = ["--config", str(RECIPE), "--cache-dir", str(args.cache_dir)]
    flags += ["--output-dir", str(folder), "--trim-loss-positions", "--trim-backbone-rows"]
    flags += ["--loss-alignment", alignment, "--chain", chain, "--seed", str(seed)]
    flags += ["--epochs", str(args.epochs), "--no-resume", "--save-every", "0"]
    return load_config(flags, prog="study_alignment", description="one arm")


def recordings(config: Config, target: Any, world: Any) -> dict[str, list[Any]]:
    """Per held-out file: (prompt ids, states, first token, the target's answer), made once."""
    path = config.cache_dir / "study-alignment" / "recordings.pt"
    if not path.is_file():
        model = HFTarget.load(target.path, dtype=torch.float32, device="cpu")
        sets: dict[str, list[Any]] = {}
        for file in config.evaluate.eval_data:
            answers = []
            for document in pipeline.prepare_data(config, target, world, paths=[file]):
                ids = last_prompt(document.input_ids, document.loss_mask)
                prompt = Prompt(model, ids, max_new_tokens=MAX_NEW_TOKENS)
                answers.append((ids, prompt.aux, prompt.first_token, prompt.greedy()))
            sets[Path(file).stem] = answers
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(sets, path)
    # Made by this script; nothing foreign is read.
    return torch.load(path, weights_only=False)


def measure(draft: Eagle3Draft, answers: list[Any], depth: int, eos: set[int]) -> dict[str, Any]:
    """Tokens and passes of the even and odd prompts of one set, and acceptance per depth."""
    row: dict[str, Any] = {"even": [0, 0], "odd": [0, 0]}
    tried, accepted = [0] * depth, [0] * depth
    for number, (ids, aux, first, recording) in enumerate(answers):
        cached = CachedDraft(draft)
        cached.extend(aux, torch.cat((ids[1:], torch.tensor([first]))))
        decoded = decode_rounds(
            RecordedVerifier(recording),
            cached,
            first,
            depth=depth,
            max_new_tokens=MAX_NEW_TOKENS,
            eos_ids=eos,
        )
        half = row["odd" if number % 2 else "even"]
        half[0] += decoded.emitted
        half[1] += decoded.passes
        tried = [a + b for a, b in zip(tried, decoded.tried, strict=True)]
        accepted = [a + b for a, b in zip(accepted, decoded.accepted, strict=True)]
    row["per_depth"] = [a / t if t else None for a, t in zip(accepted, tried, strict=True)]
    return row


def run_arm(args: argparse.Namespace, alignment: str, chain: str, seed: int) -> dict[str, Any]:
    config = arm_config(args, alignment, chain, seed)
    world = distributed.start(device="cpu")
    target = pipeline.open_target(config, world)
    sets = recordings(config, target, world)
    start = time.perf_counter()
    pipeline.train_draft(config, world)
    seconds = time.perf_counter() - start
    draft = results.load_trained(config, target)[0].eval()
    eos = target.text_config.eos_token_id
    eos = set(eos) if isinstance(eos, list) else {eos}
    lines = (config.output_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return {
        "alignment": alignment,
        "chain": chain,
        "seed": seed,
        "epochs": args.epochs,
        "steps": len(lines),
        "loss_rows": sum(json.loads(line)["loss_rows"] for line in lines),
        "seconds": seconds,
        "sets": {
            name: measure(draft, answers, config.evaluate.eval_depth, eos)
            for name, answers in sets.items()
        },
    }


def acceptance_length(rows: list[dict[str, Any]], halves: tuple[str, ...], name: str) -> float:
    """Tokens per verification pass over the given rows, prompt halves and set ("" = all sets)."""
    parts = [
        row["sets"][one][half]
        for row in rows
        for one in row["sets"]
        for half in halves
        if name in ("", one)
    ]
    return sum(tokens for tokens, _ in parts) / sum(passes for _, passes in parts)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: one line per alignment and chain; acceptance lengths pool tokens and passes."""
    names = list(rows[0]["sets"])
    header = ["alignment", "chain", "seeds", "even prompts", "odd prompts", "all"]
    header += [name.split(".")[0] for name in names] + ["each seed, all", "loss rows", "train s"]
    lines = [header, ["---"] * len(header)]
    for alignment, chain in itertools.product(ALIGNMENTS, CHAINS):
        arm = [r for r in rows if (r["alignment"], r["chain"]) == (alignment, chain)]
        if not arm:
            continue
        both = ("even", "odd")
        cells = [alignment, chain, str(len(arm))]
        cells += [f"{acceptance_length(arm, (half,), ''):.3f}" for half in both]
        cells += [f"{acceptance_length(arm, both, name):.3f}" for name in ("", *names)]
        cells.append(", ".join(f"{acceptance_length([row], both, ''):.3f}" for row in arm))
        cells.append(f"{sum(row['loss_rows'] for row in arm) / len(arm):,.0f}")
        cells.append(f"{sum(row['seconds'] for row in arm) / len(arm):.0f}")
        lines.append(cells)
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def finished(path: Path, epochs: int) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [row for row in rows if row["epochs"] == epochs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--cache-dir", type=Path, default=Path(".quickstart"), metavar="DIR")
    out = HERE / "results" / "alignment.jsonl"
    parser.add_argument("--out", type=Path, default=out, metavar="FILE")
    parser.add_argument("--epochs", type=int, default=2, help="passes over the data of each arm")
    parser.add_argument(
        "--only", nargs=3, metavar=("ALIGNMENT", "CHAIN", "SEED"), help="train this arm alone"
    )
    args = parser.parse_args()
    args.cache_dir, args.out = args.cache_dir.absolute(), args.out.absolute()
    arms = list(itertools.product(SEEDS, ALIGNMENTS, CHAINS))
    if args.only:
        arms = [(int(args.only[2]), args.only[0], args.only[1])]
    for seed, alignment, chain in arms:
        done = {(r["alignment"], r["chain"], r["seed"]) for r in finished(args.out, args.epochs)}
        if (alignment, chain, seed) in done:
            continue
        row = run_arm(args, alignment, chain, seed)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        with args.out.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
    print(table(finished(args.out, args.epochs)))


if __name__ == "__main__":
    main()
