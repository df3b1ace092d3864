"""What stop_grad_context_tokens does to training: two small studies on CPU.

    python benchmarks/study_row_sparse.py target                 the target's part, once
    python benchmarks/study_row_sparse.py train --seed 0 --arm off    an arm of the dense draft
    python benchmarks/study_row_sparse.py eagle --seed 0 --arm off    an arm of the EAGLE draft
    python benchmarks/study_row_sparse.py report                 tables and curves of both

Arms: the flag `off`, the flag `on`, and of the EAGLE draft off `again` with smaller chunks, which
sums the same gradients in another order: how far rounding alone drives two runs apart.

Dense draft: the first 8 of SmolLM2-135M-Instruct's 30 layers with its head. Target: the whole
model, its distribution is what is learned (soft cross-entropy). 40 long-prompt conversations of
the quickstart, about 36,000 tokens of which 5 % are supervised, two epochs; 8 held-out ones. The
target's states and greedy answers do not depend on the draft and are computed once; decoding is
verified against these answers, which gives the counts of live decoding.

The EAGLE draft is the quickstart's (study_cut_eagle.py). Both work in the quickstart's cache,
which `make quickstart` fills. A finished arm is a row in results/; of several rows of one arm the
report takes the last.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import study_cut_eagle
import study_cut_report
import torch
from torch import Tensor

from specforge_trim.cli.plot import read_run
from specforge_trim.config.options import build
from specforge_trim.decode.lm import LmProposer
from specforge_trim.decode.prompts import Prompt, last_prompt
from specforge_trim.decode.rounds import RecordedVerifier, Recording, decode_rounds
from specforge_trim.drafts.lm.layers import disable_row_sparse
from specforge_trim.drafts.lm.settings import LmConfig
from specforge_trim.ranks.world import World
from specforge_trim.train.lm_batch import LmBatch, LmPlan, make_lm_batch
from specforge_trim.train.lm_loop import HeldOut, train_lm
from specforge_trim.train.lm_run import build_lm, open_lm, soft_targets, step_settings
from specforge_trim.train.lm_step import SoftTargets
from specforge_trim.train.provenance import package_versions
from specforge_trim.train.run import prepare_data
from specforge_trim.train.sampler import Schedule
from specforge_trim.verifier.hf import HFTarget

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "benchmarks" / "results" / "row_sparse_study.jsonl"
WORLD = World(rank=0, size=1, device=torch.device("cpu"))
HELD_OUT, NEW_TOKENS, DEPTH = 8, 64, 5


def config_of(args: argparse.Namespace) -> LmConfig:
    values = {
        "draft_layers": 8, "target_dtype": "float32", "cache_dir": str(args.cache_dir),
        "train_data": (str(ROOT / "examples/data/long_prompt.train.jsonl"),),
        "eval_data": (str(ROOT / "examples/data/long_prompt.heldout.jsonl"),),
        "max_conversations": 40, "tokens_per_batch": 1024, "num_workers": 0, "epochs": 2,
        "label_weight": 0.0, "distill_weight": 1.0, "learning_rate": 5e-4, "warmup_ratio": 0.1,
        "stop_grad_context_tokens": args.arm == "on", "device": "cpu", "held_out_every": 12,
        "seed": args.seed, "save_every": 0, "keep_checkpoints": 1, "resume": False,
        "output_dir": str(folder(args) / f"run-{args.seed}-{args.arm}"),
    }  # fmt: skip
    return build(LmConfig, values)


def folder(args: argparse.Namespace) -> Path:
    return args.cache_dir / "study-row-sparse"


def documents(config: LmConfig):
    """Models, training documents, held-out ones. The sample is the same for every seed."""
    models = open_lm(config, WORLD)
    fixed = replace(config, train=replace(config.train, seed=0))
    train = prepare_data(fixed, models, WORLD, announce=False)
    whole = replace(fixed, data=replace(config.data, max_conversations=None))
    held = prepare_data(
        whole, models, WORLD, paths=list(config.evaluate.eval_data), announce=False
    )
    return models, train, [held[i] for i in range(len(held))]


def key(ids: Tensor) -> str:
    return hashlib.sha256(ids.numpy().tobytes()).hexdigest()[:24]


class KnownTargets(SoftTargets):
    """The same soft targets from states computed before: {document: states of its kept rows}."""

    def states(self, batch: LmBatch, rows: Tensor) -> Tensor:
        edges = batch.cu_seqlens.tolist()
        ids = batch.input_ids
        return torch.cat(
            [self.known[key(ids[a:b])] for a, b in zip(edges[:-1], edges[1:], strict=True)]
        )

    @staticmethod
    def of(real: SoftTargets, known: dict[str, Tensor]) -> KnownTargets:
        made = KnownTargets(real.decoder, real.teacher)
        object.__setattr__(made, "known", known)
        return made


def target_part(args: argparse.Namespace) -> None:
    study_cut_eagle.answers(study_cut_eagle.arm_config(args))
    config = config_of(args)
    models, train, held = documents(config)
    real = soft_targets(config, models, WORLD)
    known = {}
    for document in [*train, *held[:HELD_OUT]]:
        batch = make_lm_batch([document], LmPlan())
        known[key(document.input_ids)] = real.states(batch, batch.head_rows)
    target = HFTarget.load(models.path, dtype=torch.float32, aux_layers=(1,))
    answers = []
    for document in held:
        ids = last_prompt(document.input_ids, document.loss_mask)
        own = Prompt(target, ids, max_new_tokens=NEW_TOKENS).greedy()
        answers.append((ids, own.tokens, target.eos_token_ids))
    folder(args).mkdir(parents=True, exist_ok=True)
    torch.save({"known": known, "answers": answers}, folder(args) / "target.pt")
    print(
        f"{len(train)} conversations, {train.num_tokens} tokens, {train.num_supervised} with loss"
    )


def decoded(model, answers) -> dict[str, int]:
    """Tokens and verification passes over all prompts."""
    tokens = passes = 0
    for ids, own, ends in answers:
        aux = torch.zeros(len(own), 1)
        done = decode_rounds(
            RecordedVerifier(Recording(own, (), aux)),
            LmProposer(model, [*ids.tolist(), own[0]]),
            own[0], depth=DEPTH, max_new_tokens=NEW_TOKENS, eos_ids=frozenset(ends),
        )  # fmt: skip
        tokens, passes = tokens + done.emitted, passes + done.passes
    return {"tokens": tokens, "passes": passes}


def train_part(args: argparse.Namespace) -> None:
    config = config_of(args)
    models, train, held = documents(config)
    found = torch.load(folder(args) / "target.pt")
    model, real = build_lm(config, models, WORLD)
    assert real is not None
    schedule = Schedule(
        lengths=tuple(int(n) for n in train.lengths), seed=args.seed,
        tokens_per_batch=config.data.tokens_per_batch, epochs=config.train.epochs,
        max_steps=args.max_steps,
    )  # fmt: skip
    train_lm(
        config, model=model, settings=step_settings(config),
        targets=KnownTargets.of(real, found["known"]), documents=train, schedule=schedule,
        plan=LmPlan(), held_out=HeldOut(held[:HELD_OUT], config.evaluate.held_out_every),
        world=WORLD, identity={"seed": args.seed, "arm": args.arm}, provenance={},
    )  # fmt: skip
    disable_row_sparse(model)
    lines = (config.output_dir / "heldout.jsonl").read_text(encoding="utf-8").splitlines()
    row = arm(args, config.output_dir, order=schedule.order_digest(schedule.total_steps))
    row |= {"decoded": decoded(model.eval(), found["answers"])}
    append(ROWS, row | {"held_out": [json.loads(line) for line in lines]})


def eagle_part(args: argparse.Namespace) -> None:
    config = study_cut_eagle.train(args)
    row = arm(args, config.output_dir, order=study_cut_eagle.order(config))
    append(study_cut_eagle.ROWS, row | study_cut_eagle.measured(config))


def arm(args: argparse.Namespace, run: Path, *, order: str) -> dict[str, Any]:
    """What both studies say of an arm. order: digest of the documents of all steps, in order."""
    rows = read_run(run)
    norms = [row["grad_norm"] for row in rows]
    return {
        "seed": args.seed, "arm": args.arm, "versions": package_versions(), "steps": len(rows),
        "order": order, "grad_norm": sum(norms) / len(norms),
        "clipped_steps": sum(norm > 1.0 for norm in norms),
    }  # fmt: skip


def append(path: Path, row: dict[str, Any]) -> None:
    shown = {k: v for k, v in row.items() if k not in ("held_out", "versions")}
    print(shown, row["held_out"][-1], flush=True)
    with path.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parts = {
        "target": target_part, "train": train_part, "eagle": eagle_part,
        "report": lambda args: study_cut_report.report(ROWS, study_cut_eagle.ROWS),
    }  # fmt: skip
    parser.add_argument("part", nargs="?", choices=tuple(parts), default="report")
    parser.add_argument("--cache-dir", type=Path, default=Path(".quickstart"), metavar="DIR")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--arm", choices=("off", "on", "again"), default="off")
    parser.add_argument("--max-steps", type=int, help="fewer steps, to try the script")
    args = parser.parse_args()
    if args.arm == "again" and args.part != "eagle":
        parser.error("--arm again is an arm of the EAGLE draft")
    args.cache_dir = args.cache_dir.absolute()
    parts[args.part](args)


if __name__ == "__main__":
    main()
