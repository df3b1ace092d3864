"""Settings of train_draft_lm.py: each reaches what it names, and bad ones are refused in time.

Catches: a flag that is parsed and passed on to nobody, a fraction of head rows that is that of
loss rows, ranks or micro-batches that weigh differently than one batch, held-out rows counted
twice, an export that one rank makes and its peers wait for in vain, a refusal after hours of
preparation, a folder of another run written into.
"""

import itertools
import json
import shutil
from types import SimpleNamespace

import pytest
import torch
from lm_run import run
from ranks import run_world
from test_lm_train import place  # noqa: F401
from tiny import write_conversations
from transformers import AutoModelForCausalLM, Gemma2Config, MistralConfig, MistralForCausalLM

from specforge_trim.cli.lm import train_lm_main
from specforge_trim.config.options import build, read_yaml
from specforge_trim.drafts.lm.layers import _Sparse
from specforge_trim.drafts.lm.settings import LmConfig
from specforge_trim.ranks.world import World
from specforge_trim.train import lm_run as lm_pipeline
from specforge_trim.train.checkpoint import check_identity

ALONE = World(rank=0, size=1, device=torch.device("cpu"))


def config_of(place, **values):  # noqa: F811
    return build(LmConfig, read_yaml(place / "recipe.yaml", LmConfig) | values)


def test_every_setting_reaches_the_step_and_the_model(place):  # noqa: F811
    config = config_of(
        place, label_weight=0.25, distill_weight=0.5, objective="lk_lambda", lk_eta=1.5,
        head_chunk_tokens=7, dtype="bfloat16", target_dtype="bfloat16", draft_layers=1,
        stop_grad_context_tokens=True, activation_checkpointing=True, attention_backend="sdpa",
    )  # fmt: skip
    step = lm_pipeline.step_settings(config)
    assert (step.label_weight, step.distill_weight) == (0.25, 0.5)
    assert step.objective.terms == (("lk_lambda", 1.0),) and step.objective.lk_eta == 1.5
    assert step.chunk_tokens == 7 and step.compute_dtype == torch.bfloat16
    assert step.row_sparse.stop_grad_context_tokens and step.row_sparse.attention.backend == "sdpa"
    models = lm_pipeline.open_lm(config, ALONE)
    model, targets = lm_pipeline.build_lm(config, models, ALONE)
    assert len(model.model.layers) == 1 and isinstance(model.model.layers[0], _Sparse)
    assert model.is_activation_checkpointing and model.training
    assert targets.teacher.head.dtype == torch.bfloat16
    plain = config_of(place)
    model, _ = lm_pipeline.build_lm(plain, lm_pipeline.open_lm(plain, ALONE), ALONE)
    assert len(model.model.layers) == 2 and not isinstance(model.model.layers[0], _Sparse)
    assert not model.is_activation_checkpointing
    assert lm_pipeline.step_settings(plain).chunk_tokens == 8192


def test_the_whole_head_trains_the_same_and_says_so(place):  # noqa: F811
    _, kept = run(place, "kept", "--label-weight", "0.5")
    _, whole = run(place, "head", "--label-weight", "0.5", "--no-skip-masked-lm-head-tokens")
    for a, b in zip(kept, whole, strict=True):
        assert b["perf/lm_head_token_fraction"] == 1.0 > a["perf/lm_head_token_fraction"]
        assert a["loss_rows"] == b["loss_rows"]
        for key in ("loss", "acceptance", "grad_norm"):  # fp32, and steps of Adam
            assert a[key] == pytest.approx(b[key], rel=1e-4), key


def test_checkpointing_trains_the_same(place):  # noqa: F811
    for flags in ([], ["--stop-grad-context-tokens"]):
        name = "-".join(["memory", *flags])
        _, stored = run(place, name, *flags, "--max-steps", "2")
        again = [*flags, "--max-steps", "2", "--activation-checkpointing"]
        _, computed = run(place, f"{name}-again", *again)
        assert [row["grad_norm"] for row in stored] == [row["grad_norm"] for row in computed]


# ---------------------------------------------------------------------- ranks


def train_on_two(world, folder):
    for name, fsdp in (("sum", False), ("split", True)):
        values = {"output_dir": str(folder / name), "fsdp": fsdp, "eval_depth": 1}
        config = config_of(
            folder, stop_grad_context_tokens=True, held_out_every=1, max_steps=3, **values
        )
        lm_pipeline.train_lm_draft(config, world)


def test_two_ranks_train_as_one_that_accumulates(place, tmp_path):  # noqa: F811
    """Ranks hold different numbers of rows; held-out documents are shared out, three to two."""
    write_conversations(place / "held.jsonl", 3, seed=100)
    try:
        _, expected = run(
            place, "one", "--accumulate", "2", "--stop-grad-context-tokens",
            "--held-out-every", "1", "--max-steps", "3",
        )  # fmt: skip
        run_world(2, train_on_two, tmp_path, place)
    finally:
        write_conversations(place / "held.jsonl", 2, seed=100)
    weights = AutoModelForCausalLM.from_pretrained(place / "one/export").state_dict()
    for name in ("sum", "split"):
        for file in ("metrics", "heldout"):
            rows, others = (
                [json.loads(line) for line in (place / n / f"{file}.jsonl").read_text().split("\n")
                 if line]
                for n in ("one", name)
            )  # fmt: skip
            assert len(rows) == len(others) > 1
            for a, b in zip(rows, others, strict=True):
                for key in set(a) - {k for k in a if k.startswith(("perf/", "time/"))}:
                    assert b[key] == pytest.approx(a[key], rel=1e-4), (name, file, key)
        assert rows[0] != rows[-1]
        found = AutoModelForCausalLM.from_pretrained(place / name / "export").state_dict()
        for key, value in weights.items():
            torch.testing.assert_close(found[key], value, rtol=1e-3, atol=1e-4)


# ---------------------------------------------------------------------- bad input


def refused(place, capsys, *flags, out="no"):  # noqa: F811
    """What the command says before it exits with 2."""
    arguments = ["--config", f"{place}/recipe.yaml", "--output-dir", str(place / out), *flags]
    assert train_lm_main(arguments) == 2
    return capsys.readouterr().err


@pytest.fixture
def unprepared(monkeypatch):
    """Fails the test where data is prepared."""

    def prepare(*_, **__):
        raise AssertionError("data is prepared before the refusal")

    monkeypatch.setattr(lm_pipeline, "prepare_data", prepare)


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--label-weight", "-1"], "label_weight = -1.0, expected at least 0"),
        (["--distill-weight", "nan"], "distill_weight"),
        (["--distill-weight", "inf"], "distill_weight"),
        (["--draft-layers", "0"], "draft_layers = 0, expected at least 1"),
        (["--head-chunk-tokens", "0"], "head_chunk_tokens = 0, expected at least 1"),
        (["--eval-data", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--train-data", "nowhere.jsonl"], "nowhere.jsonl: no such file"),
        (["--draft", "nowhere/at/all/x"], "nowhere/at/all/x"),
        (["--target", "nowhere/at/all/x"], "nowhere/at/all/x"),
    ],
)
def test_bad_values_are_refused_before_the_data_is_prepared(
    place, flags, says, capsys, unprepared  # noqa: F811
):  # fmt: skip
    said = refused(place, capsys, *flags)
    assert says in said and len(said.strip().splitlines()) == 1, said
    assert not (place / "no").exists()


def test_a_draft_of_another_kind_is_refused_before_the_data_is_prepared(
    place, capsys, unprepared  # noqa: F811
):  # fmt: skip
    folder = place / "gemma"
    Gemma2Config(vocab_size=272, num_hidden_layers=1).save_pretrained(folder)
    said = refused(place, capsys, "--draft", str(folder))
    assert (
        "model type 'gemma2' is not supported: expected one of qwen3, qwen2, llama, mistral"
        in said
    )


def test_documents_beyond_the_drafts_reach_are_refused_before_training(
    place, capsys, monkeypatch  # noqa: F811
):  # fmt: skip
    monkeypatch.setattr(lm_pipeline, "train_lm", None)
    small = MistralConfig(
        vocab_size=272, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, sliding_window=32,
    )  # fmt: skip
    MistralForCausalLM(small).save_pretrained(place / "windowed")
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(place / "target" / file, place / "windowed" / file)
    said = refused(place, capsys, "--draft", str(place / "windowed"))
    assert "exceeds the sliding window of 32" in said
    small.sliding_window, small.max_position_embeddings = None, 40
    MistralForCausalLM(small).save_pretrained(place / "windowed")
    said = refused(place, capsys, "--draft", str(place / "windowed"))
    assert "exceeds the draft's 40 positions" in said


def test_data_without_anything_to_learn_is_refused(place, tmp_path, capsys):  # noqa: F811
    def said_of(rows):
        file = tmp_path / "odd.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return refused(place, capsys, "--train-data", str(file))

    assert "odd.jsonl" in said_of([])
    assert "odd.jsonl" in said_of([{"messages": [{"role": "user", "content": "only asks"}]}])
    content = {"role": "assistant", "content": float("nan")}
    said = said_of([{"messages": [{"role": "user", "content": "hello"}, content]}])
    assert "odd.jsonl" in said, said


@pytest.mark.parametrize(
    "flags",
    [
        ["--label-weight", "0.5"], ["--objective", "tv"], ["--seed", "3"],
        ["--draft-layers", "1"], ["--stop-grad-context-tokens"], ["--tokens-per-batch", "500"],
    ],
)  # fmt: skip
def test_another_runs_folder_is_refused(place, flags, capsys):  # noqa: F811
    if not (place / "held-by-one").exists():
        run(place, "held-by-one", "--max-steps", "2")
    before = (place / "held-by-one/metrics.jsonl").read_text()
    said = refused(place, capsys, *flags, out="held-by-one")
    key = flags[0].removeprefix("--").replace("-", "_")
    assert key in said and "--no-resume" in said, said
    assert "(--draft goes on from an exported draft there)" in said, said
    assert (place / "held-by-one/metrics.jsonl").read_text() == before


def test_folders_of_another_kind_are_named(place, capsys):  # noqa: F811
    said = refused(place, capsys, "--evaluate-only", out="empty")
    assert f"no exported draft in {place}/empty/export: train one first" in said
    assert not (place / "empty").exists()
    (place / "not-a-model").mkdir()
    said = refused(place, capsys, "--draft", str(place / "not-a-model"))
    assert f"draft '{place}/not-a-model' is a folder without config.json" in said
    made = {"an EAGLE draft": {"aux_layers": [1]}, "a dense draft": {"draft_layers": 2}}
    for (one, saved), (other, wanted) in itertools.permutations(made.items(), 2):
        found = SimpleNamespace(path="step-2", meta={"identity": saved})
        with pytest.raises(ValueError, match=f"step-2 is of {one}, this run trains {other}"):
            check_identity(found, wanted)
        check_identity(found, saved)


def test_measuring_nothing_is_an_error(place, tmp_path, capsys):  # noqa: F811
    bare = tmp_path / "bare.yaml"
    bare.write_text((place / "recipe.yaml").read_text().partition("evaluate:")[0])
    assert train_lm_main(["--config", str(bare), "--evaluate-only"]) == 2
    assert "nothing to measure on: pass --eval-data FILE" in capsys.readouterr().err


def test_bf16_trains(place):  # noqa: F811
    flags = ["--dtype", "bfloat16", "--label-weight", "0.5", "--stop-grad-context-tokens"]
    out, rows = run(place, "low", *flags)
    assert rows[-1]["loss"] < rows[0]["loss"]
    _, exact = run(place, "high", *flags[2:])
    assert rows[0]["loss"] == pytest.approx(exact[0]["loss"], rel=0.02)
    assert rows[0]["loss"] != exact[0]["loss"]
    exported = AutoModelForCausalLM.from_pretrained(out / "export")
    assert next(exported.parameters()).dtype == torch.float32
