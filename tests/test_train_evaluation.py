"""Evaluation while training, and the checkpoint kept for what it measured.

Catches: an evaluation that changes what training does next (weights, gradients, random state,
training mode); held-out metrics that differ from those training logs for the same weights and
documents; ranks that each report their own share; a draft that learns its training answers and is
accepted no more for it; a best checkpoint that rotation removes, or that a resumed run forgets.
"""

import json
from dataclasses import replace

import pytest
import tiny
import torch
from ranks import run_world
from safetensors.torch import load_file
from test_peer_formats import write_specforge

from specforge_trim.cli.main import main, train_main
from specforge_trim.decode.prompts import Prompt, evaluate
from specforge_trim.drafts.eagle3.settings import ConfigError, load_config
from specforge_trim.ranks.world import World
from specforge_trim.train import checkpoint as checkpoints
from specforge_trim.train import run as pipeline
from specforge_trim.train.evaluation import HeldOut
from specforge_trim.train.loop import train
from specforge_trim.train.results import load_trained
from specforge_trim.verifier.hf import HFTarget

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
TRIM = ["--trim-loss-positions", "--trim-backbone-rows"]
MEASURE = ["--eval-every", "2", "--decode-every", "3"]
run = tiny.run_recipe


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tiny.training_place(tmp_path_factory.mktemp("evaluation"))


def settings(place, name, *flags):
    argv = ["--config", str(place / "recipe.yaml"), "--output-dir", str(place / name), *TRIM]
    return load_config([*argv, *flags], prog="t", description="d")


def trained_weights(place, name):
    target = pipeline.open_target(settings(place, name), ALONE)
    return load_trained(settings(place, name), target)[0].state_dict()


def without_time(row):
    return {
        k: v for k, v in row.items() if not k.startswith(("time/", "perf/", "eval/", "decode/"))
    }


# ---------------------------------------------------------------------- what training does


def test_a_run_that_evaluates_trains_bit_for_bit_as_one_that_does_not(place):
    plain = run(place, "plain", *TRIM)
    measured = run(place, "measured", *TRIM, *MEASURE)
    assert [without_time(r) for r in measured] == [without_time(r) for r in plain]
    for name, tensor in trained_weights(place, "plain").items():
        assert torch.equal(tensor, trained_weights(place, "measured")[name]), name
    last = len(plain)
    evaluated = [r["step"] for r in measured if "eval/loss" in r]
    assert evaluated == sorted({*range(2, last + 1, 2), last})
    decoded = [r["step"] for r in measured if "decode/acceptance_length" in r]
    assert decoded == sorted({*range(3, last + 1, 3), last})


def test_the_random_state_and_the_training_mode_stay(place):
    config = settings(place, "states", "--max-steps", "2", "--eval-every", "1")
    seen = []

    def decoder(draft):
        seen.append(draft.training)
        torch.rand(3)
        return {"decode/acceptance_length": 1.0}

    torch.manual_seed(7)
    model = train_with(config, decoder)
    assert seen == [False] and model.training
    torch.manual_seed(7)
    other = train_with(replace_output(config, place / "states none"), None)
    assert torch.equal(torch.rand(1), drawn_after[-1]) and len(drawn_after) == 2
    assert drawn_after[0].equal(drawn_after[1]) and other.training


drawn_after = []  # the first number that follows each run


def replace_output(config, out, **train_changes):
    return replace(config, train=replace(config.train, output_dir=str(out), **train_changes))


def train_with(config, decoder, *, decode_every=2):
    """Trains with a decoder handed in; returns the model."""
    held = HeldOut(decoder=decoder)
    config = replace(config, evaluate=replace(config.evaluate, decode_every=decode_every))
    target = pipeline.open_target(config, ALONE)
    data, documents = pipeline.training_data(config, target, ALONE)
    model, teacher = pipeline.build_draft(config, target, data, device=ALONE.device)
    torch.manual_seed(7)
    train(
        config,
        model=model,
        teacher=teacher,
        documents=documents,
        lengths=[int(n) for n in data.lengths],
        held_out=held,
        world=ALONE,
        identity=pipeline.run_identity(config, target, data, model, ALONE),
        provenance={},
    )
    state = torch.get_rng_state()
    drawn_after.append(torch.rand(1))
    torch.set_rng_state(state)
    return model


# ---------------------------------------------------------------------- what is measured


def test_held_out_metrics_are_those_training_logs_for_the_same_weights(place):
    """The training data held out, all of it in one batch: the step that follows an evaluation
    starts from the same weights, and logs the same numbers."""
    flags = ["--tokens-per-batch", "100000", "--epochs", "4", "--eval-every", "1"]
    rows = run(place, "same", *TRIM, *flags, "--eval-data", str(place / "train.jsonl"))
    assert len(rows) == 4
    names = [
        k for k in rows[0] if "/" in k and k.split("/")[0] in ("loss", "accuracy", "acceptance")
    ]
    names += ["loss", "acceptance_length", "conditional_accuracy/1", "rows", "loss_rows"]
    assert len(names) > 12
    for now, following in zip(rows, rows[1:], strict=False):
        for name in names:
            assert now[f"eval/{name}"] == pytest.approx(following[name], rel=1e-6), name
    assert rows[0]["eval/skipped_documents"] == 0


def test_decoding_while_training_counts_as_the_evaluation_does(place):
    rows = run(place, "counts", *TRIM, "--decode-every", "100", "--eval-temperature", "0")
    assert not any("sampled" in key for key in rows[-1])
    config = settings(place, "counts")
    target = pipeline.open_target(config, ALONE)
    draft, _ = load_trained(config, target)
    report = evaluate(
        HFTarget.load(target.path, dtype=torch.float32),
        draft,
        pipeline.held_out_prompts(config, target, ALONE),
        depth=2,
        max_new_tokens=6,
        progress=False,
    )
    (held,) = report.sets
    assert rows[-1]["decode/acceptance_length"] == held.trained.acceptance_length
    assert rows[-1]["decode/held/acceptance_length"] == held.trained.acceptance_length
    assert rows[-1]["decode/acceptance/0"] == held.trained.acceptance[0]


def test_every_source_of_held_out_features_gives_the_same_numbers(place):
    """From a store, from the target of an online run, and from files another trainer captured."""
    flags = [*TRIM, *MEASURE, "--max-steps", "3"]
    stored = run(place, "stored", *flags)[-1]
    online = run(place, "online", *flags, "--online")[-1]
    target = HFTarget.load(place / "target", dtype=torch.float32)
    config = settings(place, "stored")
    held = pipeline.prepare_data(
        config, pipeline.open_target(config, ALONE), ALONE, paths=config.evaluate.eval_data
    )
    write_specforge(place / "captured", target, [held[i] for i in range(len(held))])
    read = run(place, "read", *flags, "--eval-features", str(place / "captured"))[-1]
    keys = [key for key in stored if key.startswith(("eval/", "decode/"))]
    assert len(keys) > 20 and stored["eval/loss_rows"] > 10
    for key in keys:
        for other in (online, read):
            value = stored[key]
            assert other[key] == (value if value is None else pytest.approx(value, rel=1e-6)), key


def own_answers(place, count, length):
    """Prompts with the target's own greedy answers, as rows of tokens."""
    model = HFTarget.load(place / "target", dtype=torch.float32).model
    lines = []
    for seed in range(count):
        ids = torch.randint(3, 250, (24,), generator=torch.Generator().manual_seed(seed)).tolist()
        prompt = len(ids)
        for _ in range(length):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        mask = [0] * prompt + [1] * length
        lines.append(json.dumps({"input_ids": ids, "loss_mask": mask}) + "\n")
    path = place / f"own{count}.jsonl"
    path.write_text("".join(lines))
    return path


def test_an_overfitted_answer_is_accepted_as_training_predicts(place):
    """One sample, learnt by heart: accepted length close to the simulated one, and long."""
    data = str(own_answers(place, 1, 16))
    flags = ["--train-data", data, "--eval-data", data, "--eval-max-new-tokens", "16"]
    flags += ["--epochs", "150", "--learning-rate", "5e-3", "--draft-vocab-size", "272"]
    flags += ["--eval-depth", "3", "--decode-every", "150", "--log-every", "150"]
    flags += ["--loss-denominator", "supervised"]
    row = run(place, "overfit", *TRIM, *flags)[-1]
    assert row["accuracy/0"] > 0.95, row
    # 15 tokens in at most 4 + 1 passes of up to 4; one state of three, or a wrong shift, gives 1.
    assert row["decode/acceptance_length"] >= 3.0, row["decode/acceptance_length"]
    greedy = 1 + sum(product(row, i) for i in range(3))
    assert row["decode/acceptance_length"] == pytest.approx(greedy, rel=0.25)
    assert row["decode/sampled_acceptance_length"] > 1.5
    whole, part = (decoded_with(place, "overfit", data, states) for states in (3, 1))
    assert whole == pytest.approx(row["decode/acceptance_length"])
    assert part < 2.0, part


def decoded_with(place, name, data, states):
    """Acceptance length of a run's draft that is given only the first of the aux states."""
    config = settings(place, name, "--eval-data", data)
    target = pipeline.open_target(config, ALONE)
    draft, _ = load_trained(config, target)
    (ids,) = next(iter(pipeline.held_out_prompts(config, target, ALONE).values()))
    model = HFTarget.load(target.path, dtype=torch.float32)
    prompt = Prompt(model, ids, max_new_tokens=16)
    width = model.hidden_size * states
    advance = prompt.target.advance

    def partly(*arguments, **settings):
        result = advance(*arguments, **settings)
        result.aux[:, width:] = 0
        return result

    prompt.target.advance = partly
    prompt.aux[:, width:] = 0
    decoded = prompt.speculate(draft, depth=3)
    return decoded.emitted / decoded.passes


def product(row, depth):
    value = 1.0
    for i in range(depth + 1):
        value *= row[f"conditional_accuracy/{i}"]
    return value


# ---------------------------------------------------------------------- ranks


def ranks_main(world, place):
    found = {}
    layouts = {
        "data": (),
        "data again": (),
        "fsdp x ring": ("--fsdp", "--attention-backend", "usp", "--sp-context", "ring"),
    }
    for name, flags in layouts.items():
        config = settings(place, f"two {name}", *MEASURE, "--max-steps", "3", *flags)
        pipeline.train_draft(config, world)
        found[name] = tiny.metric_rows(place / f"two {name}")[-1]
    if world.is_main:
        (place / "two.json").write_text(json.dumps(found))


def test_two_ranks_measure_what_one_does(place, tmp_path):
    """And with one seed, two ranks log the same numbers twice, bit for bit."""
    alone = run(place, "one", *TRIM, *MEASURE, "--max-steps", "3")[-1]
    summed = run(place, "sum", *TRIM, *MEASURE, "--max-steps", "3", "--accumulate", "2")[-1]
    run_world(2, ranks_main, tmp_path, place)
    found = json.loads((place / "two.json").read_text())
    assert without_time(found["data"]) == without_time(found["data again"])
    for name, expected in (("data", summed), ("fsdp x ring", alone)):
        keys = [k for k in expected if k.startswith(("eval/", "decode/"))]
        assert len(keys) > 20
        for key in keys:
            # fp32 in other orders of summation; decoding counts whole tokens.
            wanted = expected[key]
            if wanted is not None:
                wanted = pytest.approx(wanted, rel=1e-4)
            assert found[name][key] == wanted, (name, key)


# ---------------------------------------------------------------------- the best one


def test_the_checkpoint_that_decodes_best_is_kept_and_exported(place, capsys):
    """Accepted length peaks mid-run and then drops while the loss falls."""
    lengths = iter([1.5, 2.5, 2.0, 1.8])
    config = settings(place, "peak", "--tokens-per-batch", "100000", "--epochs", "8")
    out = place / "peak"
    config = replace_output(config, out, keep_checkpoints=1, save_every=1)
    train_with(config, lambda draft: {"decode/acceptance_length": next(lengths)})
    root = out / "checkpoints"
    assert [c.step for c in checkpoints.list_complete(root)] == [4, 8]
    kept, measured = checkpoints.best(root)
    assert kept.step == 4 and measured == {"decode/acceptance_length": 2.5}
    rows = tiny.metric_rows(out)
    assert rows[7]["loss"] < rows[3]["loss"]

    common = ["--config", str(place / "recipe.yaml"), "--output-dir", str(out)]
    for which, step in (("best", 4), ("newest", 8), ("4", 4)):
        assert main(["export", *common, "--checkpoint", which, "--out", str(out / which)]) == 0
        assert f"- step: {step}" in (out / which / "README.md").read_text()
    folders = ("best", "newest", "4")
    best, newest, four = (load_file(out / n / "model.safetensors") for n in folders)
    assert all(torch.equal(best[name], four[name]) for name in best)
    assert any(not torch.equal(best[name], newest[name]) for name in best)
    assert main(["export", *common, "--checkpoint", "5", "--out", str(out / "x")]) == 2
    assert "steps 4, 8" in capsys.readouterr().err

    # Going on, the run still knows what there is to beat.
    more = iter([2.4, 2.6])
    config = replace_output(config, out, epochs=12)
    train_with(config, lambda draft: {"decode/acceptance_length": next(more)})
    assert checkpoints.best(root)[1] == {"decode/acceptance_length": 2.6}


def test_without_decoding_the_simulated_length_chooses(place):
    run(place, "simulated", *TRIM, "--eval-every", "1", "--keep-checkpoints", "1")
    rows = tiny.metric_rows(place / "simulated")
    lengths = [row["eval/acceptance_length"] for row in rows]
    kept, measured = checkpoints.best(place / "simulated" / "checkpoints")
    assert measured == {"eval/acceptance_length": max(lengths)}
    assert kept.step == 1 + lengths.index(max(lengths))


def test_without_measurements_no_checkpoint_is_the_best(place, capsys):
    run(place, "unmeasured", *TRIM)
    assert checkpoints.best(place / "unmeasured" / "checkpoints") is None
    common = ["--config", str(place / "recipe.yaml"), "--output-dir", str(place / "unmeasured")]
    assert main(["export", *common, "--checkpoint", "best"]) == 2
    assert "--eval-every" in capsys.readouterr().err


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--eval-every", "5"], "eval_every = 5.*--eval-data"),
        (["--decode-every", "5"], "decode_every = 5.*--eval-data"),
        (
            ["--decode-every", "5", "--eval-data", "x", "--target-tensor-parallel"],
            "parallel splits",
        ),
        (["--eval-features", "x"], "eval_features has no effect"),
    ],
)
def test_settings_that_measure_nothing_are_refused(flags, words):
    with pytest.raises(ConfigError, match=words):
        load_config(flags, prog="t", description="d")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--eval-max-new-tokens", "4090"], ["max_new_tokens=4090", "4096 positions"]),
        (["--eval-max-new-tokens", "4096"], ["eval_max_new_tokens = 4096", "4096 positions"]),
        (["--eval-data", "{place}/held.jsonl", "{place}/x/held.jsonl"], ["2 files called 'held'"]),
    ],
)
def test_prompts_that_cannot_be_decoded_are_refused_before_features_are_made(
    place, capsys, monkeypatch, flags, words
):
    monkeypatch.setattr(pipeline, "training_data", lambda *_: pytest.fail("features are made"))
    (place / "x").mkdir(exist_ok=True)
    (place / "x" / "held.jsonl").write_bytes((place / "held.jsonl").read_bytes())
    flags = [flag.replace("{place}", str(place)) for flag in flags]
    common = ["--config", str(place / "recipe.yaml"), "--output-dir", str(place / "refused")]
    assert train_main([*common, *TRIM, "--decode-every", "1", *flags]) == 2
    err = capsys.readouterr().err
    assert all(word in err for word in words) and err.count("error: ") == 1, err


def test_a_target_without_weights_cannot_decode(place):
    """Training on features needs its head only."""
    config = settings(place, "no weights", "--decode-every", "1")
    target = pipeline.open_target(config, ALONE)
    missing = replace(target, path=place / "gone")
    with pytest.raises(ConfigError, match="decode_every = 1 decodes with the target itself"):
        pipeline._decoding_target(config, missing, ALONE)
