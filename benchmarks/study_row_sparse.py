"""What stop_grad_context_tokens does to training: a small study on CPU.

    python benchmarks/study_row_sparse.py target  --work DIR      the target's part, once
    python benchmarks/study_row_sparse.py train   --work DIR --seed 0 [--cut]
    python benchmarks/study_row_sparse.py report  --work DIR      table and curves

Draft: the first 8 of SmolLM2-135M-Instruct's 30 layers with its head. Target: the whole model, its
distribution is what is learned (soft cross-entropy). 40 long-prompt conversations of the
quickstart, about 30,000 tokens of which 6 % are supervised, two epochs; 8 held-out ones. The
target's states and greedy answers do not depend on the draft and are computed once; decoding is
verified against these answers, which gives the counts of live decoding.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from specforge_trim.decode import Prompt, last_prompt
from specforge_trim.decode_rounds import RecordedVerifier, Recording, decode_rounds
from specforge_trim.distributed import World
from specforge_trim.lm_config import LmConfig
from specforge_trim.lm_evaluate import LmProposer
from specforge_trim.lm_pipeline import build_lm, open_lm, soft_targets, step_settings
from specforge_trim.options import build
from specforge_trim.pipeline import prepare_data
from specforge_trim.row_sparse import disable_row_sparse
from specforge_trim.target.hf import HFTarget
from specforge_trim.train.lm_batch import LmBatch, LmPlan, make_lm_batch
from specforge_trim.train.lm_loop import HeldOut, train_lm
from specforge_trim.train.lm_step import SoftTargets
from specforge_trim.train.sampler import Schedule

ROOT = Path(__file__).resolve().parents[1]
WORLD = World(rank=0, size=1, device=torch.device("cpu"))
PROMPTS, NEW_TOKENS, DEPTH = 8, 32, 5


def config_of(work: Path, cache: str, seed: int, cut: bool) -> LmConfig:
    values = {
        "draft_layers": 8, "target_dtype": "float32", "cache_dir": cache, "seed": seed,
        "train_data": (str(ROOT / "examples/data/long_prompt.train.jsonl"),),
        "eval_data": (str(ROOT / "examples/data/long_prompt.heldout.jsonl"),),
        "max_conversations": 40, "tokens_per_batch": 1024, "num_workers": 0, "epochs": 2,
        "label_weight": 0.0, "distill_weight": 1.0, "learning_rate": 5e-4, "warmup_ratio": 0.1,
        "stop_grad_context_tokens": cut, "device": "cpu", "held_out_every": 24,
        "save_every": 15, "keep_checkpoints": 1,
        "output_dir": str(work / f"run-{seed}-{'cut' if cut else 'whole'}"),
    }  # fmt: skip
    return build(LmConfig, values)


def documents(config: LmConfig):
    """Models, training documents, held-out ones. The sample is the same for every seed."""
    models = open_lm(config, WORLD)
    fixed = replace(config, train=replace(config.train, seed=0))
    train = prepare_data(fixed, models, WORLD, announce=False)
    whole = replace(fixed, data=replace(config.data, max_conversations=None))
    held = prepare_data(
        whole, models, WORLD, paths=list(config.evaluate.eval_data), announce=False
    )
    return models, train, [held[i] for i in range(PROMPTS)]


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
    config = config_of(args.work, args.cache, 0, True)
    models, train, held = documents(config)
    real = soft_targets(config, models, WORLD)
    known = {}
    for document in [*train, *held]:
        batch = make_lm_batch([document], LmPlan())
        known[key(document.input_ids)] = real.states(batch, batch.head_rows)
    target = HFTarget.load(models.path, dtype=torch.float32, aux_layers=(1,))
    answers = []
    for document in held:
        ids = last_prompt(document.input_ids, document.loss_mask)
        own = Prompt(target, ids, max_new_tokens=NEW_TOKENS).greedy()
        answers.append((ids, own.tokens, target.eos_token_ids))
    torch.save({"known": known, "answers": answers}, args.work / "target.pt")
    print(len(train), train.num_tokens, train.num_supervised, len(known))


def acceptance_length(model, answers) -> float:
    """Tokens per verification pass over all prompts."""
    tokens = passes = 0
    for ids, own, ends in answers:
        aux = torch.zeros(len(own), 1)
        done = decode_rounds(
            RecordedVerifier(Recording(own, (), aux)),
            LmProposer(model, [*ids.tolist(), own[0]]),
            own[0], depth=DEPTH, max_new_tokens=NEW_TOKENS, eos_ids=frozenset(ends),
        )  # fmt: skip
        tokens, passes = tokens + done.emitted, passes + done.passes
    return tokens / passes


def train_part(args: argparse.Namespace) -> None:
    config = config_of(args.work, args.cache, args.seed, args.cut)
    models, train, held = documents(config)
    found = torch.load(args.work / "target.pt")
    model, real = build_lm(config, models, WORLD)
    assert real is not None
    schedule = Schedule(
        lengths=tuple(int(n) for n in train.lengths), seed=args.seed,
        tokens_per_batch=config.data.tokens_per_batch, epochs=config.train.epochs,
        max_steps=args.max_steps,
    )  # fmt: skip
    start = time.perf_counter()
    train_lm(
        config, model=model, settings=step_settings(config),
        targets=KnownTargets.of(real, found["known"]), documents=train, schedule=schedule,
        plan=LmPlan(), held_out=HeldOut(held, config.evaluate.held_out_every), world=WORLD,
        identity={"seed": args.seed, "cut": args.cut}, provenance={},
    )  # fmt: skip
    seconds = time.perf_counter() - start
    disable_row_sparse(model)
    row = {"seed": args.seed, "cut": args.cut, "steps": schedule.total_steps, "seconds": seconds}
    row["acceptance_length"] = acceptance_length(model.eval(), found["answers"])
    row["held_out"] = [
        json.loads(line) for line in (config.output_dir / "heldout.jsonl").open(encoding="utf-8")
    ]
    print({k: v for k, v in row.items() if k != "held_out"}, row["held_out"][-1], flush=True)
    with (args.work / "runs.jsonl").open("a", encoding="utf-8") as out:
        out.write(json.dumps(row) + "\n")


def report_part(args: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [json.loads(line) for line in (args.work / "runs.jsonl").open(encoding="utf-8")]
    print("| seed | flag | held-out loss | acceptance of a token | acceptance length |")
    print("|---|---|---|---|---|")
    for row in sorted(rows, key=lambda r: (r["seed"], r["cut"])):
        last = row["held_out"][-1]
        print(
            f"| {row['seed']} | {'on' if row['cut'] else 'off'} | {last['distill_loss']:.3f} | "
            f"{last['acceptance']:.3f} | {row['acceptance_length'] or float('nan'):.2f} |"
        )
    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    for row in rows:
        style = ("C1", "--") if row["cut"] else ("C0", "-")
        steps = [h["step"] for h in row["held_out"]]
        label = ("flag on" if row["cut"] else "flag off") if row["seed"] == 0 else None
        for axis, name in zip(axes, ("distill_loss", "acceptance"), strict=True):
            values = [h[name] for h in row["held_out"]]
            axis.plot(steps, values, color=style[0], linestyle=style[1], label=label)
    axes[0].set(xlabel="optimizer step", ylabel="held-out soft cross-entropy (nats)", yscale="log")
    axes[1].set(xlabel="optimizer step", ylabel="held-out acceptance of a token")
    axes[0].legend()
    figure.suptitle("SmolLM2-135M: 8 layers as the draft of 30")
    figure.tight_layout()
    figure.savefig(args.out or args.work / "row_sparse.png", dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("part", choices=("target", "train", "report"))
    parser.add_argument("--work", type=Path, required=True, help="folder for what is computed")
    parser.add_argument("--cache", default=".quickstart", help="the quickstart's cache")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cut", action="store_true", help="stop_grad_context_tokens")
    parser.add_argument("--max-steps", type=int)
    parser.add_argument("--out", type=Path, help="picture of the report")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    {"target": target_part, "train": train_part, "report": report_part}[args.part](args)


if __name__ == "__main__":
    main()
