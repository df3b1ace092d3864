"""Settings of loss and vocabulary through the real training loop, on a tiny random target.

Catches: a combination of alignment, chain and denominator that does not train or trains other rows
than it names, micro-batches that weigh differently than one batch, a stale vocabulary map taken
because it exists, a vocabulary that changes when a draft goes on from an export or stays when it
was to be rebuilt, sizes that train on nonsense, batches with nothing to learn that break the run,
a refusal of other data that does not say what is other.
"""

import itertools
import re
from dataclasses import replace

import pytest
import tiny
import torch
from safetensors.torch import load_file
from transformers import GraniteConfig, GraniteForCausalLM

from specforge_trim.cli.main import main, train_main
from specforge_trim.data.made_from import changes
from specforge_trim.drafts.eagle3 import start as first_draft
from specforge_trim.drafts.eagle3.settings import load_config
from specforge_trim.drafts.eagle3.vocab import kept_ids
from specforge_trim.drafts.eagle3.writing import load_draft
from specforge_trim.ranks.world import World
from specforge_trim.train import run as pipeline
from specforge_trim.train.loop import train
from specforge_trim.verifier.hf import HFTarget

TRIM = ["--trim-loss-positions", "--trim-backbone-rows"]
ONE_BATCH = ["--tokens-per-batch", "100000"]
NOT_OF_GRANITE = ("model_type", "architectures", "transformers_version", "pretraining_tp")
WORLD = World(rank=0, size=1, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tiny.training_place(tmp_path_factory.mktemp("options"))
    shouting = [
        [{"role": "user", "content": "abc def"}, {"role": "assistant", "content": "XYZ " * n}]
        for n in (3, 5, 6)
    ]
    lines = (tiny.json.dumps({"messages": messages}) + "\n" for messages in shouting)
    (folder / "other.jsonl").write_text("".join(lines))
    return folder


def settings(place, *flags):
    argv = ["--config", str(place / "recipe.yaml"), *TRIM, *flags]
    config = load_config(argv, prog="t", description="t")
    target = pipeline.open_target(config, WORLD)
    return config, target, pipeline.prepare_data(config, target, WORLD)


def draft(place, *flags):
    config, target, data = settings(place, *flags)
    return pipeline.build_draft(config, target, data, device=WORLD.device)


def failing(place, capsys, *flags):
    """What a command that ends with exit code 2 says."""
    out = str(place / "failing")
    assert train_main(["--config", str(place / "recipe.yaml"), "--output-dir", out, *flags]) == 2
    return capsys.readouterr().err


# ---------------------------------------------------------------------- what is supervised


def loss_rows(mask, alignment, chain, steps):
    """Rows that emit loss over all steps, counted one by one from the definitions."""
    mask = [*mask, 0, 0]
    length = len(mask) - 2
    m = [
        t < length - 1
        and {"token": mask[t], "teacher": mask[t + 1], "served": mask[t + 1] and mask[t + 2]}[
            alignment
        ]
        for t in range(length)
    ]
    count = 0
    for i, t in itertools.product(range(steps), range(length)):
        if chain == "shift":
            count += bool(t + i < length and m[t + i])
        else:
            count += t + i < length and all(m[t : t + i + 1])
    return count


@pytest.mark.parametrize("chain", ["shift", "run"])
@pytest.mark.parametrize("alignment", ["served", "teacher", "token"])
def test_every_alignment_and_chain_trains_the_rows_it_names(place, alignment, chain):
    flags = [*TRIM, *ONE_BATCH, "--loss-alignment", alignment, "--chain", chain, "--epochs", "3"]
    runs = {
        kind: tiny.run_recipe(
            place, f"{alignment}-{chain}-{kind}", *flags, "--loss-denominator", kind
        )
        for kind in ("rows", "supervised")
    }
    data = settings(place)[2]
    expected = sum(loss_rows(d.loss_mask.tolist(), alignment, chain, 3) for d in data)
    for rows in runs.values():
        assert [row["loss_rows"] for row in rows] == [expected] * 3
        assert rows[-1]["loss"] < rows[0]["loss"]
        assert rows[0]["perf/lm_head_token_fraction"] == expected / (3 * rows[0]["rows"])
        assert rows[0]["perf/gflops_per_second"] > 0 and rows[0]["perf/peak_memory_mb"] > 50
    first = [rows[0] for rows in runs.values()]
    assert first[0]["loss"] == first[1]["loss"]  # logged per loss row, whatever the denominator
    assert first[1]["grad_norm"] > 2 * first[0]["grad_norm"]


def test_cutting_context_gradients_changes_the_gradient_and_not_the_loss(place):
    flags = [*TRIM, *ONE_BATCH, "--max-steps", "1"]
    whole = tiny.run_recipe(place, "uncut", *flags)
    cut = tiny.run_recipe(place, "cut", *flags, "--stop-grad-context-tokens")
    assert cut[0]["loss"] == whole[0]["loss"]
    assert abs(cut[0]["grad_norm"] / whole[0]["grad_norm"] - 1) > 1e-4  # fc learns from fewer rows


@pytest.mark.parametrize("kind", ["rows", "supervised"])
def test_accumulated_micro_batches_equal_one_batch(place, kind):
    flags = [*TRIM, "--loss-denominator", kind, "--epochs", "3"]
    whole = tiny.run_recipe(place, f"whole-{kind}", *flags, *ONE_BATCH)
    parts = tiny.run_recipe(place, f"parts-{kind}", *flags, "--accumulate", "8")
    assert len(whole) == len(parts) == 3
    for key in ("loss", "grad_norm", "acceptance_length", "accuracy/1"):
        # fp32: the same sums in another order, over a few optimizer steps.
        found = [row[key] for row in parts]
        assert found == pytest.approx([row[key] for row in whole], rel=1e-4), key


@pytest.mark.parametrize(
    "flags",
    [
        ("--ttt-length", "1"),
        ("--draft-vocab-size", "1"),
        ("--draft-vocab-size", str(tiny.VOCAB_SIZE)),
        ("--loss-decay", "0.5"),
    ],
    ids=" ".join,
)
def test_smallest_and_largest_settings_train(place, flags):
    name = "edge" + "".join(flags)
    rows = tiny.run_recipe(place, name, *TRIM, *ONE_BATCH, *flags, "--epochs", "3")
    losses = [row["loss"] for row in rows]
    one_token = flags == ("--draft-vocab-size", "1")
    # A draft of one token is certain of it: cross-entropy 0, and nothing to learn.
    assert losses == [0.0] * 3 if one_token else losses[-1] < losses[0]
    first = rows[0]
    steps = 1 if flags[0] == "--ttt-length" else 3
    assert f"loss/{steps - 1}" in first and f"loss/{steps}" not in first
    decay = 0.5 if flags[0] == "--loss-decay" else 0.8
    total = sum(decay**i * first[f"loss/{i}"] for i in range(steps))
    assert first["loss"] == pytest.approx(total, rel=1e-12)
    if flags[-1] == str(tiny.VOCAB_SIZE):
        assert first["acceptance/0"] == first["acceptance_in_vocab/0"]
        common = ["--config", str(place / "recipe.yaml"), "--output-dir", str(place / name)]
        assert main(["export", *common, *flags]) == 0
        keys = set(load_file(place / name / "export" / "model.safetensors"))
        assert not keys & {"d2t", "t2d"}


@pytest.mark.parametrize("flags", [(), TRIM], ids=["no trimming", "both"])
def test_a_run_whose_rows_are_all_outside_the_vocabulary(place, monkeypatch, flags):
    """A step is taken, with a gradient of zero; loss and accuracy are 0, not undefined."""
    name = f"outside{len(flags)}"
    config, target, data = settings(place, "--output-dir", str(place / name), *ONE_BATCH)
    config = replace(config, trim=replace(config.trim, **dict.fromkeys(
        ("trim_loss_positions", "trim_backbone_rows"), bool(flags))))  # fmt: skip
    store = pipeline.make_features(config, target, data, WORLD)
    _, teacher = pipeline.build_draft(config, target, data, device=WORLD.device)
    states = torch.cat([store.document(n).last() for n in range(len(data))])
    chosen = set((states.float() @ teacher.head.T).argmax(-1).tolist())
    others = torch.tensor([v for v in range(tiny.VOCAB_SIZE) if v not in chosen][:64])
    t2d = torch.zeros(tiny.VOCAB_SIZE, dtype=torch.bool)
    t2d[others] = True
    maps = (others - torch.arange(64), t2d)
    monkeypatch.setattr(first_draft, "build_draft_vocab", lambda *_, **__: maps)
    model, teacher = pipeline.build_draft(config, target, data, device=WORLD.device)
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    summary = train(
        config,
        model=model,
        teacher=teacher,
        documents=pipeline.TrainingDocuments(data, store),
        lengths=[int(n) for n in data.lengths],
        world=WORLD,
        identity={},
        provenance={},
    )
    assert (summary.steps, summary.skipped_steps) == (2, 0)
    for row in tiny.metric_rows(place / name):
        assert row["loss_rows"] > 0
        assert row["loss"] == row["accuracy/0"] == row["grad_norm"] == 0.0
        assert row["acceptance/0"] > 0 and row["acceptance_in_vocab/0"] is None
    assert all(torch.equal(before[key], x) for key, x in model.state_dict().items())


def test_the_teacher_of_a_run_scales_its_logits_as_the_target_does(place, tmp_path):
    """Granite divides them by logits_scaling; the head's product alone is another distribution."""
    shape = {k: v for k, v in tiny.tiny_config().to_dict().items() if k not in NOT_OF_GRANITE}
    granite = GraniteForCausalLM(GraniteConfig(**shape, logits_scaling=5.0))
    tiny.randomise(granite).save_pretrained(tmp_path)
    tiny.tiny_tokenizer().save_pretrained(tmp_path)
    _, teacher = draft(place, "--target", str(tmp_path))
    target, ids = HFTarget.load(tmp_path, dtype=torch.float32), torch.arange(20, 40)
    with torch.no_grad():
        full = target.model(input_ids=ids[None]).logits[0].softmax(-1)
    table = teacher.table(target.features(ids).last)
    error = (table.draft_mass - full[:, teacher.draft_to_target].sum(-1)).abs().max()
    assert float(error) < 1e-5, f"{float(error):.1e}"


# ---------------------------------------------------------------------- vocabulary


def test_the_vocabulary_follows_size_and_data_not_files_that_lie_about(place):
    first = draft(place, "--draft-vocab-size", "32")[0]
    for folder in (place, place / "cache"):
        for name in ("vocab_mapping.pt", "d2t.pt", "token_counts.pt"):
            torch.save({"d2t": torch.arange(32), "t2d": torch.ones(9)}, folder / name)
    again = draft(place, "--draft-vocab-size", "32")[0]
    assert torch.equal(first.d2t, again.d2t)
    larger = draft(place, "--draft-vocab-size", "48")[0]
    assert larger.d2t.numel() == 48 == int(larger.t2d.sum())
    other = draft(place, "--draft-vocab-size", "8", "--train-data", str(place / "other.jsonl"))[0]
    assert {"X", "Y", "Z"} <= {
        settings(place)[1].tokenizer().convert_ids_to_tokens(int(v)) for v in kept_ids(other.d2t)
    }


def test_fewer_distinct_tokens_than_the_vocabulary_holds(place):
    """The answers use about a dozen tokens; 64 are wanted."""
    model, _ = draft(place, "--train-data", str(place / "other.jsonl"))
    kept = kept_ids(model.d2t).tolist()
    assert len(kept) == 64 and kept == sorted(set(kept)) and kept[-1] < tiny.VOCAB_SIZE


@pytest.mark.parametrize("size", ["0", "-1", "4.0", "9999"])
def test_impossible_vocabulary_sizes_stop_before_anything_is_done(place, capsys, size):
    err = failing(place, capsys, "--draft-vocab-size", size)
    assert "draft_vocab_size" in err.replace("-", "_") and size in err
    assert not (place / "failing" / "metrics.jsonl").exists()


def test_a_vocabulary_map_that_cannot_be_used_stops_before_features_are_made(place, capsys):
    maps = {"d2t": torch.zeros(8, dtype=torch.int64), "t2d": torch.arange(272) < 8}
    torch.save(maps, place / "eight.pt")
    cache = place / "unused"
    for path, says in (("none", "no vocabulary map at"), ("eight.pt", "keeps 8 tokens")):
        flags = ["--vocab-map", str(place / path), "--cache-dir", str(cache)]
        assert says in failing(place, capsys, *flags)
        assert not list(cache.rglob("*"))


def test_low_coverage_is_said(place, capfd):
    tiny.run_recipe(place, "narrow", *TRIM, "--draft-vocab-size", "2", "--max-steps", "1")
    err = capfd.readouterr().err
    assert "draft vocabulary: 2 of 272 tokens" in err and "raise --draft-vocab-size" in err


@pytest.fixture(scope="module")
def exported(place):
    flags = ["--draft-vocab-size", "8"]
    tiny.run_recipe(place, "start", *TRIM, *flags)
    common = ["--config", str(place / "recipe.yaml"), "--output-dir", str(place / "start")]
    assert main(["export", *common, *flags]) == 0
    return place / "start" / "export"


def test_a_draft_that_goes_on_keeps_weights_and_vocabulary(place, exported):
    flags = ["--draft-vocab-size", "8", "--train-data", str(place / "other.jsonl")]
    fresh = draft(place, *flags)[0]
    model, teacher = draft(place, *flags, "--init-from", str(exported))
    start = load_draft(exported, dtype=torch.float32)
    assert not torch.equal(fresh.d2t, start.d2t)
    for name, value in start.state_dict().items():
        if name != "embed_tokens.weight":
            assert torch.equal(model.state_dict()[name], value), name
    assert torch.equal(teacher.draft_to_target, start.draft_to_target)
    # And it trains: the run's own checkpoints carry the kept vocabulary.
    rows = tiny.run_recipe(place, "goes-on", *TRIM, *flags, "--init-from", str(exported))
    assert rows[0]["loss"] is not None


def test_a_rebuilt_vocabulary_keeps_the_rows_of_shared_tokens(place, exported):
    flags = ["--draft-vocab-size", "8", "--train-data", str(place / "other.jsonl")]
    fresh = draft(place, *flags)[0]
    model, teacher = draft(place, *flags, "--init-from", str(exported), "--rebuild-vocab")
    start = load_draft(exported, dtype=torch.float32)
    assert torch.equal(model.d2t, fresh.d2t)
    old = start.draft_to_target.tolist()
    shared = 0
    for row, token in enumerate(model.draft_to_target.tolist()):
        wanted = start.lm_head.weight[old.index(token)] if token in old else teacher.head[token]
        assert torch.equal(model.lm_head.weight[row], wanted), token
        shared += token in old
    assert 0 < shared < 8
    assert torch.equal(model.fc.weight, start.fc.weight)


def test_what_does_not_fit_the_draft_to_go_on_from_is_said(place, exported, capsys):
    err = failing(place, capsys, "--init-from", str(exported))
    assert "draft_vocab_size = 8" in err and "64" in err and "--rebuild-vocab" in err
    assert "has no effect without init_from" in failing(place, capsys, "--rebuild-vocab")
    assert "no draft in" in failing(place, capsys, "--init-from", str(place))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--train-data", "{place}/other.jsonl"],
         "(train.jsonl is not read any more; other.jsonl was not read before)"),
        (["--train-data", "{place}/again/train.jsonl"], "(train.jsonl has other contents)"),
        (["--max-length", "333"], "(max_length 8192 -> 333)"),
        (["--supervise-turns", "last"], "(supervise_turns all -> last)"),
        (["--max-conversations", "3"], "(max_conversations None -> 3; seed None -> 0)"),
    ],
)  # fmt: skip
def test_resuming_on_other_data_says_what_changed(place, exported, capsys, flags, words):
    (place / "again").mkdir(exist_ok=True)
    (place / "again" / "train.jsonl").write_bytes((place / "other.jsonl").read_bytes())
    argv = ["--config", str(place / "recipe.yaml"), "--output-dir", str(place / "start"), *TRIM]
    argv += ["--draft-vocab-size", "8", *(flag.replace("{place}", str(place)) for flag in flags)]
    assert train_main(argv) == 2
    err = capsys.readouterr().err
    assert "was made with data" in err and "--init-from" in err
    assert words in err, err
    assert not re.search("[0-9a-f]{16}", err[err.index("error: ") :]), err


@pytest.mark.parametrize(
    "tied, dtype", [(True, "float32"), (True, "bfloat16"), (False, "float32")]
)  # fmt: skip
def test_a_tied_target_is_held_once_where_that_is_exact(place, tied, dtype):
    folder = tiny.save_tiny_target(place / f"tied-{tied}", tied=tied, seed=3)
    model, teacher = draft(place, "--target", str(folder), "--dtype", dtype)
    rows = load_file(folder / "model.safetensors")
    head = rows["model.embed_tokens.weight" if tied else "lm_head.weight"]
    assert torch.equal(teacher.head, head.to(getattr(torch, dtype)))
    once = teacher.head.data_ptr() == model.embed_tokens.weight.data_ptr()
    assert once == (tied and dtype == "float32")
    assert not teacher.head.requires_grad


def test_what_changed_in_the_data_by_hand():
    before = {"files": [["a", "1"], ["b", "2"]], "too_long": "drop"}
    assert changes(before, before) == changes({}, before) == changes(before, {}) == []
    swapped = {"files": [["b", "2"], ["a", "1"]], "too_long": "cut"}
    assert changes(before, swapped) == [
        "the same files in another order or number", "too_long drop -> cut"
    ]  # fmt: skip
    renamed = {**before, "files": [["c", "1"], ["b", "2"]]}
    assert changes(before, renamed) == []  # contents count
    edited = {**before, "files": [["a", "1"], ["b", "3"], ["c", "4"]]}
    assert changes(before, edited) == ["b has other contents", "c was not read before"]


@pytest.mark.parametrize(
    "flags", [("--objective", "tv"), ("--chain", "run"), ("--loss-decay", "0.5")], ids=" ".join
)
def test_resuming_under_another_loss_is_refused(place, exported, capsys, flags):
    argv = ["--config", str(place / "recipe.yaml"), "--output-dir", str(place / "start"), *TRIM]
    assert train_main([*argv, "--draft-vocab-size", "8", *flags]) == 2
    key = flags[0].removeprefix("--").replace("-", "_")
    assert f"was made with {key} = " in capsys.readouterr().err


def test_resuming_with_another_vocabulary_of_the_same_size_is_refused(place, capsys):
    """Head rows mean tokens: the same data and size, but other kept ids."""
    flags = ["--draft-vocab-size", "8", "--max-steps", "1", "--vocab-map"]
    for name, kept in (("low", torch.arange(100, 108)), ("high", torch.arange(101, 109))):
        t2d = torch.zeros(tiny.VOCAB_SIZE, dtype=torch.bool)
        t2d[kept] = True
        torch.save({"d2t": kept - torch.arange(8), "t2d": t2d}, place / f"{name}.pt")
    tiny.run_recipe(place, "mapped", *TRIM, *flags, str(place / "low.pt"))
    argv = ["--config", str(place / "recipe.yaml"), "--output-dir", str(place / "mapped"), *TRIM]
    assert train_main([*argv, *flags, str(place / "high.pt")]) == 2
    err = capsys.readouterr().err
    assert "was made with draft_vocab_tokens" in err and "--init-from" in err
