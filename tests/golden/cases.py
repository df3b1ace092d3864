"""The golden runs: which settings, on how many ranks.

Every pair (trimming, attention) and (attention, ranks) occurs where it is allowed; the rest of
what a run can do is spread over them, each at least once. A run has STEPS steps; a killed one goes
on from the checkpoint of step MIDDLE.
"""

from __future__ import annotations

from dataclasses import dataclass

MIDDLE, STEPS = 3, 6

EAGLE3 = """
model: {target: ../target, draft_vocab_size: 64, target_dtype: float32}
data:
  train_data: [../train.jsonl]
  cache_dir: cache
  feature_dtype: float32
  tokens_per_batch: 400
  num_workers: 0
  prepare_processes: 1
loss: {ttt_length: 3}
parallel: {timeout_minutes: 2}
train:
  learning_rate: 1.0e-3
  epochs: 20
  max_steps: 6
  save_every: 3
  keep_checkpoints: 9
  warmup_ratio: 0.3
  weight_decay: 0.1
  device: cpu
evaluate: {eval_data: [../held.jsonl], eval_prompts: 2, eval_depth: 2, eval_max_new_tokens: 6}
"""
LM = """
model: {target: ../target, draft_layers: 2, target_dtype: float32}
data:
  train_data: [../train.jsonl]
  cache_dir: cache
  tokens_per_batch: 300
  num_workers: 0
  prepare_processes: 1
loss: {label_weight: 0.0, distill_weight: 1.0}
parallel: {timeout_minutes: 2}
train:
  learning_rate: 3.0e-3
  epochs: 20
  max_steps: 6
  save_every: 3
  keep_checkpoints: 9
  weight_decay: 0.1
  device: cpu
evaluate: {eval_data: [../held.jsonl], eval_prompts: 1, eval_depth: 2, eval_max_new_tokens: 4}
"""


@dataclass(frozen=True)
class Case:
    """One run.

    flags: settings beyond the recipe's; first: goes on from the export of a shorter run;
    after: export, evaluation and texts are recorded too.
    """

    name: str
    kind: str
    ranks: int
    flags: tuple[str, ...]
    first: bool = False
    after: bool = False

    @property
    def door(self) -> str:
        return {"eagle3": "train_eagle3.py", "lm": "train_draft_lm.py"}[self.kind]

    @property
    def recipe(self) -> str:
        return {"eagle3": EAGLE3, "lm": LM}[self.kind]


LOSS = "--trim-loss-positions"
TRIMS = {
    "none": "",
    "loss": LOSS,
    "both": f"{LOSS} --trim-backbone-rows",
    "stop": f"{LOSS} --trim-backbone-rows --stop-grad-context-tokens",
}
USP = "--attention-backend usp --sp-context"
BACKENDS = {
    "sdpa": "--attention-backend sdpa",
    "reference": "--attention-backend reference",
    "gathered": f"{USP} gathered",
    "ring": f"{USP} ring",
    "ulysses": f"{USP} ulysses",
}
TWO = "--draft-config ../draft2.json"
EVAL = "--eval-every 2"
# Whose export, evaluation and texts are recorded too; one run of each kind.
AFTER = {"both-sdpa", "distill"}
# trimming, attention, ranks (f = two ranks, split weights), other settings, a name for them.
_EAGLE3: list[tuple[str, ...]] = [
    ("none", "sdpa", "1", EVAL),
    ("none", "reference", "2", "--accumulate 2"),
    ("none", "gathered", "4", "--sp-ulysses 2"),
    ("none", "ring", "2", "--loss-denominator supervised"),
    ("none", "ulysses", "2", "--chain run"),
    ("none", "sdpa", "f", ""),
    ("loss", "sdpa", "2", "--num-workers 2"),
    ("loss", "reference", "1", "--chain run --loss-alignment teacher"),
    ("loss", "gathered", "2", "--online"),
    ("loss", "ring", "4", ""),
    ("loss", "ulysses", "4", "--sp-ulysses 2 --sp-ring 2"),
    ("loss", "reference", "f", "--objective hard_ce"),
    (
        "both",
        "sdpa",
        "1",
        "--draft-config ../draft31.json --accumulate 2 --num-workers 2 --decode-every 2",
        "3.1",
    ),
    ("both", "sdpa", "1", f"{TWO} {EVAL}", "layers"),
    (
        "both",
        "sdpa",
        "1",
        "--dtype bfloat16 --feature-dtype bfloat16 --loss-alignment token",
        "bf16",
    ),
    ("both", "sdpa", "1", "--online --decode-every 3 --eval-every 2 --num-workers 2", "online"),
    ("both", "sdpa", "1", EVAL),
    ("both", "sdpa", "4", EVAL),
    ("both", "reference", "4", "--objective 0.5*soft_ce+0.5*lk_lambda --lk-eta 2"),
    ("both", "gathered", "f", f"--local-attention reference {EVAL}"),
    ("both", "ring", "2", f"--sp-rows owner --accumulate 2 {EVAL}"),
    ("both", "ulysses", "f", "--num-workers 2"),
    ("stop", "sdpa", "1", "--objective tv --init-from first/export"),
    ("stop", "reference", "2", "--chain run --train-data ../train.jsonl ../more.jsonl@0.5"),
    ("stop", "gathered", "2", f"{TWO} --num-workers 2"),
    ("stop", "ring", "f", ""),
    ("stop", "ulysses", "4", "--sp-ulysses 2"),
    ("stop", "sdpa", "f", f"--accumulate 2 {EVAL}"),
]
LEARN = {
    "label": "--label-weight 1.0 --distill-weight 0.0",
    "distill": "",
    "stop": "--stop-grad-context-tokens",
    "mixed": "--label-weight 0.5 --objective 0.5*soft_ce+0.5*tv",
}
HELD = "--held-out-every 2"
_LM = [
    ("label", "1", HELD),
    ("label", "2", "--num-workers 2"),
    ("label", "4", ""),
    ("label", "f", HELD),
    ("distill", "1", HELD),
    ("distill", "2", "--accumulate 2"),
    ("distill", "4", HELD),
    ("distill", "f", ""),
    ("stop", "1", "--accumulate 2"),
    ("stop", "2", HELD),
    ("stop", "4", ""),
    ("stop", "f", "--num-workers 2"),
    ("mixed", "1", "--activation-checkpointing"),
    ("mixed", "2", "--no-skip-masked-lm-head-tokens"),
]


def _case(kind: str, name: str, ranks: str, flags: str) -> Case:
    number, shown = (2, "fsdp2") if ranks == "f" else (int(ranks), ranks)
    words = (*flags.split(), *(["--fsdp"] if ranks == "f" else []))
    return Case(
        f"{kind}/{name}-{shown}",
        kind,
        number,
        words,
        first="first/export" in words,
        after=name in AFTER and ranks == "1",
    )


def all_cases() -> list[Case]:
    """Those of many ranks first, so that no long one is left over at the end."""
    found = [
        _case("eagle3", f"{trim}-{backend}{note}", ranks, f"{TRIMS[trim]} {BACKENDS[backend]} {m}")
        for trim, backend, ranks, m, *rest in _EAGLE3
        for note in ["".join(f"-{word}" for word in rest)]
    ]
    found += [_case("lm", learn, ranks, f"{LEARN[learn]} {more}") for learn, ranks, more in _LM]
    names = [case.name for case in found]
    assert len(set(names)) == len(names), names
    return sorted(found, key=lambda case: -case.ranks)
