"""Trackers, curves and profiles: the same numbers everywhere, and one series over restarts.

Catches: a tracker that gets other numbers than metrics.jsonl, a resumed run whose steps stand
twice or whose series ends, a value that is not finite in a JSON line, a package that is missing
and only missed after hours, a picture without a curve or with a run left out, a trace of the wrong
steps or of fewer than it says, settings of a tracker that is not there.
"""

import gzip
import importlib.util
import json
import math
import sys
import types

import pytest
import tiny
import torch

from specforge_trim.cli import plot as curves
from specforge_trim.cli.main import main, train_main
from specforge_trim.drafts.eagle3.settings import ConfigError, load_config
from specforge_trim.ranks.world import World
from specforge_trim.train.profiling import profiled
from specforge_trim.train.trackers import Trackers, acceptance_keys

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
TRIM = ["--trim-loss-positions", "--trim-backbone-rows"]
TIMES = ("time/", "perf/")
run = tiny.run_recipe


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tiny.training_place(tmp_path_factory.mktemp("trackers"))


def load(*argv):
    return load_config(list(argv), prog="t", description="d")


def without_time(rows):
    return [{k: v for k, v in r.items() if not k.startswith(TIMES)} for r in rows]


# ---------------------------------------------------------------------- services


def tensorboard_rows(folder):
    """step -> key -> value, as TensorBoard reads its files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    rows = {}
    for key in reader.Tags()["scalars"]:
        for event in reader.Scalars(key):
            assert key not in rows.setdefault(event.step, {}), f"{key} of {event.step} twice"
            rows[event.step][key] = event.value
    return rows


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_holds_the_numbers_of_the_lines_over_a_resume(place):
    pytest.importorskip("tensorboard")
    flags = [*TRIM, "--trackers", "tensorboard", "--eval-every", "3", "--save-every", "2"]
    # Stopped after 4 steps; the checkpoint of step 4 lost, so that 3 and 4 are done again.
    run(place, "board", *flags, "--max-steps", "4", "--keep-checkpoints", "9")
    for file in (place / "board" / "checkpoints" / "step-00000004").iterdir():
        file.unlink()
    (place / "board" / "checkpoints" / "step-00000004").rmdir()
    lines = run(place, "board", *flags)
    assert [row["step"] for row in lines] == list(range(1, len(lines) + 1)) and len(lines) > 4
    found = tensorboard_rows(place / "board" / "tensorboard")
    assert sorted(found) == [row["step"] for row in lines]
    for row in lines:
        wanted = {k: v for k, v in row.items() if k != "step" and v is not None}
        assert found[row["step"]].keys() == wanted.keys()
        for key, value in wanted.items():  # TensorBoard keeps float32
            assert found[row["step"]][key] == pytest.approx(value, rel=1e-6), key


class FakeRun:
    """Stands in for the service's client, whose package is large: what it is told, in order."""

    def __init__(self, calls):
        self.calls = calls

    def log(self, values, *, step):
        self.calls.append(("log", step, dict(values)))

    def finish(self):
        self.calls.append(("finish",))


@pytest.fixture
def wandb(monkeypatch):
    calls = []
    module = types.ModuleType("wandb")
    module.__spec__ = types.SimpleNamespace(name="wandb")
    module.Settings = lambda **settings: settings
    module.Error = type("Error", (Exception,), {})

    def init(**arguments):
        calls.append(("init", arguments))
        return FakeRun(calls)

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return calls


def test_weights_and_biases_gets_every_row_once_over_a_resume(place, wandb, monkeypatch, capsys):
    flags = [*TRIM, "--trackers", "wandb", "--wandb-mode", "offline", "--run-name", "mine"]
    flags += ["--lr-schedule", "constant"]  # whose rates do not know how long the run will be
    run(place, "wb", *flags, "--max-steps", "4", "--save-every", "2")
    for file in (place / "wb" / "checkpoints" / "step-00000004").iterdir():
        file.unlink()
    (place / "wb" / "checkpoints" / "step-00000004").rmdir()
    lines = run(place, "wb", *flags)
    inits = [call[1] for call in wandb if call[0] == "init"]
    assert [i["resume"] for i in inits] == ["never", "allow"] and inits[0]["id"] == inits[1]["id"]
    assert inits[0]["mode"] == "offline" and inits[0]["name"] == "mine"
    assert inits[0]["config"]["loss"]["ttt_length"] == 3
    logged = [(call[1], call[2]) for call in wandb if call[0] == "log"]
    assert [step for step, _ in logged] == [row["step"] for row in lines]
    for (_, values), row in zip(logged, lines, strict=True):
        wanted = {k: v for k, v in row.items() if v is not None}
        if row["step"] in (3, 4):  # reported before the stop: the same numbers, other times
            values, wanted = without_time([values, wanted])
        assert values == wanted
    assert wandb.count(("finish",)) == 2
    # Starting over is another run, and a refusal is one line.
    run(place, "wb", *flags, "--no-resume", "--max-steps", "1")
    assert wandb[-3][1]["resume"] == "never" and wandb[-3][1]["id"] != inits[0]["id"]

    def refuse(**_):
        raise sys.modules["wandb"].Error("no key")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    argv = ["--config", str(place / "recipe.yaml"), "--output-dir", str(place / "refused")]
    assert train_main([*argv, *flags]) == 2
    assert "no key; log in with `wandb login`" in capsys.readouterr().err


@pytest.mark.filterwarnings("ignore")
def test_the_service_own_client_takes_what_it_is_told(place, capsys):
    """The stand-in above takes any call; the real client, where it is installed, does not."""
    pytest.importorskip("wandb")
    flags = [*TRIM, "--trackers", "wandb", "--wandb-mode", "offline"]
    run(place, "client", *flags, "--max-steps", "2", "--save-every", "1")
    run(place, "client", *flags, "--max-steps", "3")
    files = sorted((place / "client" / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len({file.name for file in files}) == 1 and len(files) in (1, 2)
    assert all(b"acceptance_length" in file.read_bytes() for file in files)


def test_a_tracker_that_is_not_installed_is_named_before_anything_is_loaded(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("tensorboard", "wandb"):
        with pytest.raises(ConfigError, match=rf"{name}.*specforge_trim\[track\]"):
            load("--trackers", name)
    with pytest.raises(ConfigError, match="mlflow"):
        load("--trackers", "mlflow")


def test_a_value_that_is_not_finite_is_null(tmp_path):
    class Keep:
        def __init__(self):
            self.rows = []

        def write(self, row):
            self.rows.append(row)

    keep = Keep()
    Trackers([keep]).write({"step": 1, "loss": math.nan, "grad_norm": math.inf, "lr": 0.5})
    assert keep.rows == [{"step": 1, "loss": None, "grad_norm": None, "lr": 0.5}]


def test_the_bar_shows_acceptance_per_step_speed_and_kept_work(place, capfd):
    (*_, row) = run(place, "bar", *TRIM)
    err = capfd.readouterr().err
    shown = err.rpartition("train:")[2]
    steps = " ".join(f"{row[key]:.2f}" for key in acceptance_keys(row))
    assert len(acceptance_keys(row)) == 3
    assert f"loss {row['loss']:.3f}" in shown and f"accept {steps} = " in shown
    assert "tok/s" in shown and "kept work" in shown and "<" in shown  # elapsed < remaining


# ---------------------------------------------------------------------- curves


def png_size(path):
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    return int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_plot_draws_one_run_and_several(place, capsys, monkeypatch):
    axes = pytest.importorskip("matplotlib.axes")
    run(place, "curve", *TRIM, "--eval-every", "2", "--decode-every", "4")
    run(place, "other", *TRIM, "--max-steps", "3")
    drawn = []
    plot = axes.Axes.plot

    def note(self, x, y, **settings):
        drawn.append((self.get_title(loc="left"), settings["label"], list(x), list(y)))
        return plot(self, x, y, **settings)

    monkeypatch.setattr(axes.Axes, "plot", note)
    assert main(["plot", str(place / "curve")]) == 0
    assert capsys.readouterr().out.strip() == str(place / "curve" / "curves.png")
    assert min(png_size(place / "curve" / "curves.png")) > 800
    rows = tiny.metric_rows(place / "curve")
    loss = [d for d in drawn if d[0].startswith("loss")]
    assert [d[1] for d in loss][:2] == ["step 0", "held out"]
    assert loss[0][2:] == ([r["step"] for r in rows], [r["loss/0"] for r in rows])
    held = [(r["step"], r["eval/loss/0"]) for r in rows if "eval/loss/0" in r]
    assert list(zip(*loss[1][2:], strict=True)) == held
    lengths = [d[1] for d in drawn if d[0].startswith("acceptance length")]
    assert "decoded, greedy" in lengths and "decoded, sampled" in lengths

    drawn.clear()
    out = place / "pictures" / "both.png"
    assert main(["plot", str(place / "curve"), str(place / "other"), "--out", str(out)]) == 0
    assert png_size(out)[0] > 800
    names = {d[1] for d in drawn if d[0].startswith("tokens per second")}
    assert names == {"curve", "other"}
    (mean,) = [d for d in drawn if d[0].startswith("loss") and d[1] == "other"]
    first = tiny.metric_rows(place / "other")[0]
    assert mean[3][0] == pytest.approx(sum(first[f"loss/{i}"] for i in range(3)) / 3)


def test_plot_says_what_is_missing(place, capsys, monkeypatch):
    assert main(["plot", str(place / "nothing")]) == 2
    assert "no such file; name a run's output folder" in capsys.readouterr().err
    (place / "empty.jsonl").write_text('{"ste')
    assert main(["plot", str(place / "empty.jsonl")]) == 2
    assert "no row of metrics" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r"specforge_trim\[plot\]"):
        curves.draw_curves({"a": [{"step": 1, "loss": 1.0}]}, place / "x.png")


def test_smoothed_lines_are_centred_means():
    assert curves.smoothed([0, 3, 6, 9, 12], 3) == [1.5, 3, 6, 9, 10.5]


# ---------------------------------------------------------------------- profile, rate, seed


def test_profile_traces_the_steps_behind_the_warm_up(place):
    run(place, "profiled", *TRIM, "--profile", "2")
    (file,) = (place / "profiled" / "profile").iterdir()
    assert file.name == "rank-0.json.gz"
    events = json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    steps = {e["name"] for e in events if e.get("name", "").startswith("ProfilerStep#")}
    assert steps == {"ProfilerStep#2", "ProfilerStep#3"}
    assert any("aten::mm" in e.get("name", "") for e in events)
    run(place, "unprofiled", *TRIM, "--max-steps", "1")
    assert not (place / "unprofiled" / "profile").exists()


@pytest.mark.parametrize(
    ("left", "taken", "traced", "warned"),
    [(8, 8, 4, []), (5, 5, 3, ["profile = 4: this run has 5 steps left, so 3 are traced"]),
     (8, 5, 3, []),  # stopped by a signal
     (2, 2, None, ["profile = 4: this run has 2 steps left, so 0 are traced"])],
)  # fmt: skip
def test_profile_says_what_was_traced(tmp_path, caplog, left, taken, traced, warned):
    caplog.set_level("INFO", "specforge_trim")
    with profiled(4, tmp_path, world=ALONE, done=10 - left, total=10) as profiler:
        for _ in range(taken):
            torch.ones(2).add(1)
            profiler.step()
    said = [record.getMessage() for record in caplog.records]
    path = tmp_path / "rank-0.json.gz"
    assert said == warned + ([] if traced is None else [f"profile of {traced} steps: {path}"])
    assert path.exists() == (traced is not None)
    if traced is not None:
        events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
        names = [e["name"] for e in events if e.get("name", "").startswith("ProfilerStep#")]
        assert len(set(names)) in (traced, traced + 1)  # a step that was stopped in


def test_a_profile_that_no_run_of_this_length_can_have_is_refused(place, capsys):
    with pytest.raises(ConfigError, match="profile = 3 needs 5 steps.*max_steps = 4 ends the run"):
        load("--profile", "3", "--max-steps", "4")
    assert load("--profile", "3", "--max-steps", "5").track.profile == 3
    arguments = ["--config", f"{place}/recipe.yaml", "--output-dir", f"{place}/long", *TRIM]
    assert train_main([*arguments, "--profile", "500"]) == 2
    err = capsys.readouterr().err
    assert "profile = 500 traces 500 steps after 2 to warm up, and this run has 8 in all" in err
    assert err.splitlines()[-1].startswith("error: profile"), err


@pytest.mark.parametrize(
    "flags", [["--run-name", "x"], ["--wandb-project", "y"], ["--wandb-mode", "offline"]]
)
def test_a_setting_of_weights_and_biases_without_it_is_refused(flags, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)  # all are installed
    key = flags[0].removeprefix("--").replace("-", "_")
    for trackers in ([], ["--trackers", "tensorboard"]):
        with pytest.raises(ConfigError, match=f"{key} = .* has no effect without Weights & Bia"):
            load(*trackers, *flags)
    assert getattr(load("--trackers", "wandb", *flags).track, key) == flags[1]


def test_rates_of_both_schedules(place):
    """Warm-up of 2 of 8 steps, then flat or down to a fifth."""
    common = [*TRIM, "--tokens-per-batch", "1200", "--warmup-ratio", "0.25", "--epochs", "4"]
    flat = run(place, "flat", *common, "--lr-schedule", "constant", "--learning-rate", "0.5")
    assert [row["lr"] for row in flat] == [0.25] + [0.5] * 7
    falling = run(place, "falling", *common, "--min-lr-ratio", "0.2", "--learning-rate", "0.5")
    rates = [row["lr"] for row in falling]
    cosine = [0.1 + 0.4 * (1 + math.cos(math.pi * k / 6)) / 2 for k in range(6)]
    assert rates == pytest.approx([0.25, 0.5, *cosine])
    with pytest.raises(ConfigError, match="min_lr_ratio = 0.2.*constant"):
        load("--lr-schedule", "constant", "--min-lr-ratio", "0.2")


@pytest.mark.parametrize("workers", ["0", "1"])
def test_one_seed_gives_the_same_losses_bit_for_bit(place, workers):
    flags = [*TRIM, "--num-workers", workers, "--seed", "11"]
    one, two = (run(place, f"seed {workers} {n}", *flags) for n in "ab")
    assert without_time(one) == without_time(two)
    other = run(place, f"seed {workers} c", *flags, "--seed", "12")
    assert [row["loss"] for row in other] != [row["loss"] for row in one]


def test_bf16_computes_in_bf16_and_keeps_fp32_masters(place):
    full = run(place, "fp32", *TRIM)
    rows = run(place, "bf16", *TRIM, "--dtype", "bfloat16")
    assert rows[0]["loss"] != full[0]["loss"]
    # bf16 has 8 significant bits; a sum of some hundred logits, over a handful of steps.
    assert rows[-1]["loss"] == pytest.approx(full[-1]["loss"], rel=0.05)
    from specforge_trim.ranks.world import World
    from specforge_trim.train import run as pipeline
    from specforge_trim.train.results import load_trained

    config = load("--config", str(place / "recipe.yaml"), "--output-dir", str(place / "bf16"))
    alone = World(rank=0, size=1, device=torch.device("cpu"))
    model, _ = load_trained(config, pipeline.open_target(config, alone))
    weight = model.lm_head.weight
    assert weight.dtype == torch.float32 and not torch.equal(weight, weight.bfloat16().float())


def test_gradients_are_clipped_to_the_norm_that_is_set(place):
    """Under a tiny norm every step counts alike: AdamW divides by the gradient's own size, so the
    runs go the same way; the logged norm is the one before."""
    rows = run(place, "clipped", *TRIM, "--max-grad-norm", "1e-4", "--max-steps", "2")
    free = run(place, "free", *TRIM, "--max-grad-norm", "1e6", "--max-steps", "2")
    assert rows[0]["grad_norm"] == free[0]["grad_norm"] > 1e-3
    assert rows[1]["loss"] == pytest.approx(free[1]["loss"], rel=1e-2)
    assert rows[1]["loss"] != free[1]["loss"]


def test_settings_reach_the_run(place, capsys):
    """A recipe that asks for what cannot be had ends at once, in one line."""
    argv = ["--config", str(place / "recipe.yaml"), "--output-dir", str(place / "bad")]
    assert train_main([*argv, "--lr-schedule", "linear"]) == 2
    assert "lr_schedule = 'linear', expected one of cosine, constant" in capsys.readouterr().err
