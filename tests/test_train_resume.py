"""A run that died and went on equals one that did not, wherever it died.

Catches: a document seen twice or never after a restart, an epoch that begins anew, gradients of a
half-accumulated step that are lost or counted twice, AdamW moments or step counters that one rank
takes from another, a learning rate that jumps, weights that another number of ranks reads wrongly,
split weights (FSDP2) that are saved whole from one rank or not at all, a restart that begins from
nothing and so only arrives at the same end.

Ten points of death: before the first micro-batch of a step, between two of its micro-batches, in
the middle of an epoch and at its end. Saves are every two steps, so a point lies on a checkpoint
or one step beyond it.
"""

from dataclasses import replace

import pytest
import tiny
import torch
from ranks import run_world

from specforge_trim.drafts.eagle3.settings import load_config
from specforge_trim.ranks.world import World
from specforge_trim.train import loop
from specforge_trim.train import run as pipeline

ALONE = World(rank=0, size=1, device=torch.device("cpu"))
# (step, micro-batches of it that were done): steps count from 1; an epoch has 4 of them.
EPOCH, SAVE_EVERY = 4, 2
POINTS = [(3, 0), (3, 1), (4, 1), (5, 0), (5, 1), (6, 1), (7, 1), (8, 1), (9, 0), (12, 1)]
MOVED = (6, 1)  # where a run dies that other ranks go on with
TIMES = ("time/", "perf/tokens", "perf/gflops", "perf/peak")


class Died(Exception):
    """Stands for a kill at a certain point."""


class Bench:
    """Trains the same draft on the same data again and again."""

    def __init__(self, place, world, *flags):
        argv = ["--config", str(place / "recipe.yaml"), "--trim-loss-positions"]
        argv += ["--trim-backbone-rows", "--epochs", "3", "--save-every", str(SAVE_EVERY)]
        argv += ["--warmup-ratio", "0.2", "--weight-decay", "0.1", *flags]
        self.place, self.world = place, world
        self.config = load_config(argv, prog="t", description="d")
        self.target = pipeline.open_target(self.config, world)
        self.data, self.documents = pipeline.training_data(self.config, self.target, world)

    def run(self, name, *, die_at=None):
        """Weights and metrics of a run in place/name that may die at a point of POINTS.

        self.first is the first step that it takes.
        """
        out, self.first = self.place / name, None
        config = replace(self.config, train=replace(self.config.train, output_dir=str(out)))
        model, teacher = pipeline.build_draft(
            config, self.target, self.data, device=self.world.device
        )
        original = loop._Gradients.of, loop.ttt_step
        loop._Gradients.of, loop.ttt_step = self._mortal(out, die_at, *original)
        try:
            loop.train(
                config,
                model=model,
                teacher=teacher,
                documents=self.documents,
                lengths=[int(n) for n in self.data.lengths],
                world=self.world,
                identity={"it": 1},
                provenance={"config": config.to_dict()},
            )
        except Died:
            return None
        finally:
            loop._Gradients.of, loop.ttt_step = original
        assert die_at is None
        return whole_state(model), self.rows(out)

    def _mortal(self, out, die_at, gradients_of, ttt_step):
        """The loop's functions of the same names, which count and die at the point."""
        here = [0, 0]

        def gradients(whose, batches, counts):
            done = torch.tensor([len(self.rows(out)) if self.world.is_main else 0])
            here[:] = int(self.world.sum(done)) + 1, 0
            self.first = self.first or here[0]
            if die_at and here[0] == die_at[0]:
                enough = torch.tensor([int(len(batches) > die_at[1])])
                assert int(self.world.sum(enough.clone())) > 0, f"no rank has {die_at}"
                if not enough:
                    raise Died  # a rank with fewer micro-batches dies with the others
            return gradients_of(whose, batches, counts)

        def step(*args, **more):
            if tuple(here) == die_at:
                raise Died
            here[1] += 1
            return ttt_step(*args, **more)

        return gradients, step

    def rows(self, out):
        if not (out / "metrics.jsonl").exists():
            return []
        return [
            {k: v for k, v in row.items() if not k.startswith(TIMES)}
            for row in tiny.metric_rows(out)
        ]

    def die_and_go_on(self, name, points):
        """Dies at every point in turn, each time from the state before; then runs to the end."""
        begin = 1
        for point in points:
            assert self.run(name, die_at=point) is None, f"did not get to {point}"
            assert self.first == begin, point
            begin = after_checkpoint(point)
        return self.go_on(name, begin)

    def go_on(self, name, begin):
        """Runs to the end, the steps before `begin` taken from a checkpoint."""
        found = self.run(name)
        assert self.first == begin, f"began at step {self.first}, not {begin}"
        return found


def after_checkpoint(point):
    """The step that follows the newest checkpoint of a run that died at a point."""
    return (point[0] - 1) // SAVE_EVERY * SAVE_EVERY + 1


def whole_state(model):
    """Trained weights, put together where ranks hold parts."""
    parts = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    return {
        n: (p.full_tensor() if hasattr(p, "full_tensor") else p).clone() for n, p in parts.items()
    }


def assert_bit_equal(found, expected, where):
    for name, weight in expected[0].items():
        assert torch.equal(found[0][name], weight), (
            f"{where}: {name} differs by {float((found[0][name] - weight).abs().max()):.1e}"
        )
    assert found[1] == expected[1], where  # every metric but times, of every step once


def assert_close(found, expected, where):
    """Another number of ranks: the same sums in another order."""
    for a, b in zip(found[1], expected[1], strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6), where
        assert (a["step"], a["epoch"], a["lr"], a["loss_rows"]) == (
            b["step"], b["epoch"], b["lr"], b["loss_rows"],
        )  # fmt: skip
    for name, weight in expected[0].items():
        error = float((found[0][name] - weight).abs().max() / weight.abs().max())
        assert error < 1e-6, f"{where}: {name} {error:.1e}"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tiny.training_place(tmp_path_factory.mktemp("resume"))
    tiny.write_conversations(folder / "train.jsonl", 30)
    return folder


@pytest.fixture(scope="module")
def alone(place):
    return Bench(place, ALONE, "--accumulate", "4")


@pytest.fixture(scope="module")
def straight(alone):
    found = alone.run("straight")
    epochs = [row["epoch"] for row in found[1]]
    assert epochs == [n for n in range(3) for _ in range(EPOCH)], epochs
    return found


def test_train_resume_a_run_that_died_ten_times_equals_the_straight_run(alone, straight):
    assert_bit_equal(alone.die_and_go_on("alone-all", POINTS), straight, "ten deaths in one run")


@pytest.mark.slow
def test_train_resume_at_each_of_ten_points_equals_the_straight_run(alone, straight):
    for point in POINTS:
        found = alone.die_and_go_on(f"alone-{point[0]}-{point[1]}", [point])
        assert_bit_equal(found, straight, point)


def two_ranks(world, place):
    both = Bench(place, world, "--accumulate", "2")
    straight = both.run("two-straight")
    for point in POINTS:
        found = both.die_and_go_on(f"two-{point[0]}-{point[1]}", [point])
        assert_bit_equal(found, straight, point)
    assert_bit_equal(both.die_and_go_on("two-all", POINTS), straight, "ten deaths")
    for name in ("one-to-two", "one-to-fsdp"):  # begun by one rank
        bench = (
            both if name == "one-to-two" else Bench(place, world, "--accumulate", "2", "--fsdp")
        )
        save_for(world, place / f"{name}.pt", bench.go_on(name, after_checkpoint(MOVED)))
    sharded = Bench(place, world, "--accumulate", "2", "--fsdp")
    straight = sharded.run("fsdp-straight")
    for point in POINTS[2:5]:
        found = sharded.die_and_go_on(f"fsdp-{point[0]}-{point[1]}", [point])
        assert_bit_equal(found, straight, f"FSDP2, {point}")
    both.run("two-to-one", die_at=MOVED)
    sharded.run("fsdp-to-one", die_at=MOVED)
    save_for(world, place / "fsdp-straight.pt", straight)


def save_for(world, path, found):
    if world.is_main:
        torch.save(found, path)


@pytest.mark.slow
def test_train_resume_on_two_ranks_and_from_one_to_the_other(alone, straight, place, tmp_path):
    for name in ("one-to-two", "one-to-fsdp"):
        alone.run(name, die_at=MOVED)
    run_world(2, two_ranks, tmp_path, place, seconds=120)
    for name in ("one-to-two", "one-to-fsdp", "fsdp-straight"):
        assert_close(torch.load(place / f"{name}.pt"), straight, name)
    for name in ("two-to-one", "fsdp-to-one"):
        assert_close(alone.go_on(name, after_checkpoint(MOVED)), straight, name)
