"""`make peers`: SpecForge 0.2.0 and speculators 0.9.0 as oracles for export, import and training.

    export      each peer's own loader reads our folder; logits of every row and TTT step equal
                what our cached drafting gives from the draft that was exported
    import      what the peer saves again, read by us: the same tensors, the same logits
    losses      SpecForge's per-step losses and every gradient on the same weights and features
                (alignment token, denominator rows), its Triton kernel under Triton's interpreter
                and the eager twin beside it; speculators' per-step losses of all objectives
                (alignment teacher, denominator supervised)
    flags       the names in docs/flags.md exist in the peers' settings
    controls    the same comparisons on something wrong, which must differ

Prints a table; exits 1 when a comparison fails or a control does not. Runs in an environment of
its own (requirements.txt), on a CPU, without network; never part of the test suite.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Read at import: Triton's interpreter in place of a GPU, no compiler, no hub, no progress bars.
os.environ.update(
    TRITON_INTERPRET="1", TORCHDYNAMO_DISABLE="1", HF_HUB_OFFLINE="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1", TRANSFORMERS_VERBOSITY="error",
)  # fmt: skip
sys.path[:0] = [str(Path(__file__).parents[i]) for i in range(3)]
warnings.simplefilter("ignore")

import torch  # noqa: E402
from flag_names import unknown_in_specforge, unknown_in_speculators  # noqa: E402
from loguru import logger as speculators_log  # noqa: E402
from our_side import (  # noqa: E402
    LLAMA3,
    YARN,
    K,
    Problem,
    entropies,
    export,
    losses_and_gradients,
    make_draft,
    make_problem,
    served_logits,
    with_layers,
)
from torch import Tensor  # noqa: E402
from transformers.utils import logging as transformers_log  # noqa: E402

from specforge_trim.drafts.eagle3.writing import load_draft  # noqa: E402

LIMIT = 1e-5  # of the largest value compared, in fp32: sums of some hundred products
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}
FIVE_LAYERS = (1, 2, 4, 6, 8)
EAGLE31 = {"fc_norm": True, "norm_output": True}
OBJECTIVES = {  # here and there
    "soft_ce": "kl_div", "hard_ce": "ce", "reverse_kl": "rkl", "js": "jsd", "tv": "tv",
    "lk_alpha": "nla", "lk_lambda": "lk_hybrid",
}  # fmt: skip
SPECFORGE_DRAFTS = {
    "plain": {},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "yarn rope": {"rope_parameters": YARN},
    "linear rope": {"rope_parameters": LINEAR},
    "fc_norm": {"fc_norm": True},
}
SPECULATORS_DRAFTS = {
    "plain": {},
    "whole vocabulary": {"draft_vocab_size": 272},
    "llama3 rope": {"rope_parameters": LLAMA3},
    "yarn rope": {"rope_parameters": YARN},
    "EAGLE-3.1": EAGLE31,
    "its defaults": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "biases": {"attention_bias": True},
    "q/k norm": {"qk_norm": True},
}


@dataclass(frozen=True)
class Row:
    """One comparison: the largest difference over the largest value. A control must differ."""

    peer: str
    what: str
    difference: float
    is_control: bool = False

    @property
    def passed(self) -> bool:
        return (self.difference > 100 * LIMIT) if self.is_control else (self.difference <= LIMIT)


def apart(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """Largest difference over the largest wanted value, tensor by tensor; names must agree."""
    assert set(found) == set(wanted), set(found) ^ set(wanted)
    worst = 0.0
    for name, value in wanted.items():
        difference = (found[name].double() - value.double()).abs().max()
        scale = value.double().abs().max().clamp(min=1e-30)
        share = float(difference / scale)
        worst = max(worst, share if share == share else float("inf"))
    return worst


def unknown(names: set[str]) -> float:
    """How many names the peer does not know; each is printed."""
    for name in sorted(names):
        print(f"unknown: {name}")
    return float(len(names))


def steps(logits: list[Tensor], like: list[Tensor]) -> dict[str, Tensor]:
    """Logits by step, the rows that `like` has: peers also run rows past the document's end."""
    assert len(logits) == len(like) == K
    return {str(i): x[: len(y)] for i, (x, y) in enumerate(zip(logits, like, strict=True))}


def load_and_save(
    peer: object, layout: str, problem: Problem, folder: Path, changes: dict
) -> Iterator[tuple[str, float]]:
    """Our export in the peer, the peer's save in ours."""
    model = make_draft(problem, **changes)
    ours = served_logits(problem, model)
    loaded = peer.load(export(problem, model, folder / "ours", layout=layout))
    result = peer.run(problem, loaded)
    theirs = result[0] if isinstance(result, tuple) else result
    yield "logits of our export", apart(steps(theirs, ours), steps(ours, ours))
    peer.save(loaded, folder / "theirs")
    again = load_draft(folder / "theirs", dtype=torch.float32)
    yield "tensors of its save, read by us", apart(again.state_dict(), model.state_dict())
    back = served_logits(problem, again)
    yield "logits of its save, read by us", apart(steps(back, ours), steps(ours, ours))


def specforge_rows(problem: Problem, folder: Path) -> Iterator[Row]:
    import specforge_peer as peer

    for name, changes in SPECFORGE_DRAFTS.items():
        for what, value in load_and_save(peer, "native", problem, folder / name, changes):
            yield Row("SpecForge", f"{name}: {what}", value)
        model = make_draft(problem, **changes)
        theirs = peer.load(folder / name / "ours")
        for kernel in ("eager", "triton"):
            _, losses, gradients = peer.run(problem, theirs, kernel=kernel)
            for trim in (True, False):
                mine, own = losses_and_gradients(problem, model, trim=trim)
                how = f"{kernel} loss, ours {'trimmed' if trim else 'untrimmed'}"
                yield Row(
                    "SpecForge", f"{name}: {K} step losses, {how}", apart({"": mine}, {"": losses})
                )
                yield Row(
                    "SpecForge", f"{name}: {len(own)} gradients, {how}", apart(own, gradients)
                )
    # Its training has no fed-back norm, so of EAGLE-3.1 only the first step can be compared.
    model = make_draft(problem, **EAGLE31)
    theirs = peer.load(export(problem, model, folder / "31", layout="native"))
    first, ours = peer.run(problem, theirs)[0][0], served_logits(problem, model)[0]
    yield Row(
        "SpecForge", "EAGLE-3.1: logits of step 0", apart({"": first[: len(ours)]}, {"": ours})
    )
    yield Row("SpecForge", "settings named in docs/flags.md", unknown(unknown_in_specforge()))
    yield from specforge_controls(problem, folder)


def specforge_controls(problem: Problem, folder: Path) -> Iterator[Row]:
    import specforge_peer as peer

    model, ours = make_draft(problem), folder / "plain" / "ours"
    wanted = served_logits(problem, model)
    theirs = peer.load(ours)
    _, losses, _ = peer.run(problem, theirs)
    served, _ = losses_and_gradients(problem, model, alignment="served")
    yield Row("SpecForge", "losses of another alignment", apart({"": served}, {"": losses}), True)
    _disturb(theirs)
    logits = peer.run(problem, theirs)[0]
    yield Row("SpecForge", "one weight changed", _apart_logits(logits, wanted), True)
    config = json.loads((ours / "config.json").read_text())
    (ours / "config.json").write_text(json.dumps(config | {"norm_output": False}))
    logits = peer.run(problem, peer.load(ours))[0]
    yield Row("SpecForge", "norm_output false in config.json", _apart_logits(logits, wanted), True)


def speculators_rows(problem: Problem, folder: Path) -> Iterator[Row]:
    import speculators_peer as peer

    for name, changes in SPECULATORS_DRAFTS.items():
        place = folder / name.replace("/", " ")
        for what, value in load_and_save(peer, "speculators", problem, place, changes):
            yield Row("speculators", f"{name}: {what}", value)
    five = with_layers(problem, FIVE_LAYERS)
    changes = {"aux_layers": FIVE_LAYERS, "num_aux_layers": 5}
    for what, value in load_and_save(peer, "speculators", five, folder / "five", changes):
        yield Row("speculators", f"five aux layers: {what}", value)
    yield from speculators_losses(problem, folder)
    yield Row("speculators", "flags named in docs/flags.md", unknown(unknown_in_speculators()))
    ours = folder / "plain" / "ours"
    wanted = served_logits(problem, make_draft(problem))
    theirs = peer.load(ours)
    _disturb(theirs)
    logits = peer.run(problem, theirs)
    yield Row("speculators", "one weight changed", _apart_logits(logits, wanted), True)
    config = json.loads((ours / "config.json").read_text())
    (ours / "config.json").write_text(json.dumps(config | {"norm_before_residual": True}))
    logits = peer.run(problem, peer.load(ours))
    yield Row("speculators", "norm_before_residual true", _apart_logits(logits, wanted), True)


def speculators_losses(problem: Problem, folder: Path) -> Iterator[Row]:
    """On a whole vocabulary, where no row's teacher lies outside it."""
    import speculators_peer as peer

    model = make_draft(problem, draft_vocab_size=272)
    theirs = peer.load(folder / "whole vocabulary" / "ours")
    for name, loss in OBJECTIVES.items():
        mine, _ = losses_and_gradients(
            problem, model, alignment="teacher", objective=name, denominator="supervised"
        )
        if name == "soft_ce":
            mine = mine - entropies(problem)
        wanted = peer.losses(problem, theirs, loss)
        what = f"{K} step losses, ours {name}, its {loss}"
        yield Row("speculators", what, apart({"": mine}, {"": wanted}))
        if name == "soft_ce":
            mine, _ = losses_and_gradients(problem, model, denominator="supervised")
            apart_now = apart({"": mine - entropies(problem)}, {"": wanted})
            yield Row("speculators", "losses of another alignment", apart_now, True)


def _apart_logits(logits: list[Tensor], wanted: list[Tensor]) -> float:
    return apart(steps(logits, wanted), steps(wanted, wanted))


def _disturb(draft: torch.nn.Module) -> None:
    with torch.no_grad():
        draft.fc.weight[3, 5] += 0.1


def main() -> int:
    speculators_log.remove()
    transformers_log.disable_progress_bar()
    # What the export says about engines that are not compared here.
    logging.getLogger("specforge_trim").setLevel(logging.ERROR)
    failed = total = 0
    print(f"{'peer':<12} {'comparison':<72} {'difference':>10}  (limit {LIMIT:g} of the largest)")
    with tempfile.TemporaryDirectory() as name:
        problem = make_problem(Path(name) / "target")
        kinds: tuple[Callable[[Problem, Path], Iterator[Row]], ...] = (
            specforge_rows,
            speculators_rows,
        )
        for rows in kinds:
            for row in rows(problem, Path(name) / rows.__name__):
                verdict = "ok" if row.passed else "FAILED"
                what = f"control, must differ: {row.what}" if row.is_control else row.what
                print(f"{row.peer:<12} {what:<72} {row.difference:>10.1e}  {verdict}", flush=True)
                failed, total = failed + (not row.passed), total + 1
    print(f"\n{total - failed} of {total} comparisons as they should be")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
