"""Dense language models as drafts: a step against autograd, and the command from data to export.

Catches: a label or a teacher one row off, a weight of a loss that scales the other, rows without
loss that count, documents that see each other, head skipping that changes a gradient, a resumed
run that differs, ranks that average, an export that transformers reads as another model, a draft
whose cache keeps rejected tokens, an unknown key that is passed over.
"""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from lm_case import make_model, make_stream, reference_step
from lm_run import make_place, run
from ranks import run_world
from torch import nn
from transformers import AutoModelForCausalLM

from specforge_trim.cli.lm import train_lm_main
from specforge_trim.config.objective import parse_objective
from specforge_trim.config.options import ConfigError, build, read_yaml
from specforge_trim.decode.lm import evaluate_lm
from specforge_trim.drafts.lm.layers import RowSparseSettings, enable_row_sparse
from specforge_trim.drafts.lm.settings import LmConfig
from specforge_trim.loss.teacher import Teacher
from specforge_trim.ranks.gradients import FullySharded
from specforge_trim.train import lm_loop
from specforge_trim.train import lm_step as lm_step_module
from specforge_trim.train.lm_batch import LmPlan, make_lm_batch
from specforge_trim.train.lm_loop import _Replicated
from specforge_trim.train.lm_step import LmStepSettings, SoftTargets, lm_step
from specforge_trim.verifier.hf import HFTarget

ON = RowSparseSettings(stop_grad_context_tokens=True)
MASKS = ["000000111000110", "0001", "110000000011111100"]


class Document:
    def __init__(self, ids, mask):
        self.input_ids, self.loss_mask, self.source = ids, mask, "here"


def documents(stream):
    edges = stream.cu.tolist()
    return [
        Document(stream.ids[a:b], stream.mask[a:b])
        for a, b in zip(edges[:-1], edges[1:], strict=True)
    ]


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def assert_equal(found, expected):
    for name, want in expected.items():
        gap = float((found[name] - want).abs().max()) / max(1e-3, float(want.abs().max()))
        assert gap <= 1e-10, f"{name}: {gap:.2e}"


@pytest.mark.parametrize("skip_head", [True, False])
@pytest.mark.parametrize("cut", [True, False])
def test_fine_tuning_equals_the_dense_reference(cut, skip_head):
    if cut and not skip_head:
        return
    stream = make_stream(MASKS)
    count = int(stream.kept().sum())
    loss, expected = reference_step(make_model("qwen3"), stream, cut=cut, weight=2.0 / count)
    model = make_model("qwen3")
    settings = LmStepSettings(
        RowSparseSettings(skip_head, cut), label_weight=2.0, compute_dtype=torch.float64
    )
    enable_row_sparse(model, settings.row_sparse)
    batch = make_lm_batch(documents(stream), LmPlan(skip_head))
    assert batch.num_loss_rows == count
    assert batch.head_rows.shape[0] == (count if skip_head else len(stream.ids))
    result = lm_step(model, batch, num_loss_rows=float(count), settings=settings)
    assert abs(float(result.label_loss) * 2 / count - float(loss)) < 1e-12
    assert_equal(gradients(model), expected)


def test_bf16_errs_no_more_than_the_dense_computation_in_bf16():
    """Autocast on both sides; errors against fp64 of the same weights."""
    stream = make_stream(MASKS)
    count = int(stream.kept().sum())
    _, truth = reference_step(make_model("qwen3"), stream, weight=1 / count)
    with torch.autocast("cpu", torch.bfloat16):
        _, dense = reference_step(
            make_model("qwen3", dtype=torch.float32), stream, weight=1 / count
        )
    settings = LmStepSettings(ON, compute_dtype=torch.bfloat16)
    model = make_model("qwen3", dtype=torch.float32)
    enable_row_sparse(model, ON)
    batch = make_lm_batch(documents(stream), LmPlan())
    lm_step(model, batch, num_loss_rows=float(count), settings=settings)
    errors, controls = [], []
    for name, found in gradients(model).items():
        assert found.dtype == torch.float32
        scale = float(truth[name].norm())
        error, control = (float((g - truth[name]).norm()) / scale for g in (found, dense[name]))
        # One small sum errs by chance; all of them together do not.
        assert error <= 3 * control and error < 0.1, f"{name}: {error:.1e}, {control:.1e}"
        errors.append(error)
        controls.append(control)
    mean, control = sum(errors) / len(errors), sum(controls) / len(controls)
    assert mean <= 1.2 * control, f"{mean:.2e}, in the dense computation {control:.2e}"


def soft_targets(teacher_model):
    vocab = teacher_model.config.vocab_size
    head = teacher_model.lm_head.weight.detach()
    teacher = Teacher(head, torch.arange(vocab), torch.ones(vocab, dtype=torch.bool))
    return SoftTargets(teacher_model.model, teacher)


@pytest.mark.parametrize("skip_head", [True, False])
@pytest.mark.parametrize("masks", [MASKS, ["0000", "000"]], ids=["some", "none"])
def test_distillation_equals_autograd_on_the_targets_distribution(masks, skip_head, monkeypatch):
    monkeypatch.setattr(lm_step_module, "TABLE_ELEMENTS", {"cpu": 1})  # 16 rows of 37 at once
    stream = make_stream(masks)
    kept, count = stream.kept(), int(stream.kept().sum())
    target = make_model("llama", seed=3, num_hidden_layers=4, hidden_size=32)
    target.set_attn_implementation("plain_reference")
    student, plain = make_model("qwen3"), make_model("qwen3")
    plain.set_attn_implementation("plain_reference")
    total, accept, start = torch.zeros((), dtype=torch.float64), 0.0, 0
    correct = 0
    for n in stream.lengths:
        ids, keep = stream.ids[start : start + n], kept[start : start + n]
        with torch.no_grad():
            p = target(input_ids=ids[None]).logits[0].softmax(-1)
        q = plain(input_ids=ids[None]).logits[0].softmax(-1)
        for t in range(n):
            if keep[t]:
                row = 0.7 * -(p[t] * q[t].log()).sum() + 0.3 * (p[t] - q[t]).abs().sum() / 2
                total = total + (0.5 * row - 0.25 * q[t, ids[t + 1]].log()) / count
                accept += float(torch.minimum(p[t], q[t].detach()).sum())
                correct += int(q[t].argmax() == ids[t + 1])
        start += n
    if count:
        total.backward()
    settings = LmStepSettings(
        RowSparseSettings(skip_head), label_weight=0.25, distill_weight=0.5,
        objective=parse_objective("0.7*soft_ce+0.3*tv"), compute_dtype=torch.float64,
    )  # fmt: skip
    enable_row_sparse(student, settings.row_sparse)
    batch = make_lm_batch(documents(stream), LmPlan(skip_head))
    targets = soft_targets(target)
    result = lm_step(
        student, batch, num_loss_rows=float(count), settings=settings, targets=targets
    )
    found = 0.25 * float(result.label_loss) + 0.5 * float(result.distill_loss)
    assert abs(found / max(1, count) - float(total.detach())) < 1e-12
    assert abs(float(result.accept) - accept) < 1e-10
    assert int(result.correct) == correct
    expected = {
        n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in plain.named_parameters()
    }
    assert_equal(gradients(student), expected)
    before = gradients(student)
    again = lm_step(
        student, batch, num_loss_rows=1.0, settings=settings, targets=targets, learn=False
    )
    assert torch.allclose(again.distill_loss, result.distill_loss, rtol=1e-12)
    assert all(torch.equal(a, b) for a, b in zip(gradients(student).values(), before.values(),
                                                 strict=True))  # fmt: skip


@pytest.mark.parametrize("skip_head", [True, False])
def test_right_answers_count_at_rows_with_a_loss_only(skip_head):
    stream, model = make_stream(["000111001100"]), make_model("llama")
    model.set_attn_implementation("plain_reference")
    best = model(input_ids=stream.ids[None]).logits[0].argmax(-1)
    settings = LmStepSettings(RowSparseSettings(skip_head), compute_dtype=torch.float64)
    enable_row_sparse(model, settings.row_sparse)
    batch = make_lm_batch(documents(stream), LmPlan(skip_head))
    labels = best.clone()
    labels[3] += 1  # a kept row, wrong
    found = lm_step(
        model, replace(batch, labels=labels), num_loss_rows=1, settings=settings, learn=False
    )
    assert int(found.correct) == batch.num_loss_rows - 1 == 4


def two_ranks(world):
    for tied in (False, True):
        two_ranks_of(world, tied)


def two_ranks_of(world, tied):
    """An all-masked batch on rank 1; the sum over ranks is rank 0's gradient."""
    streams = [make_stream(MASKS), make_stream(["00000", "000"], seed=1)]
    count = float(streams[0].kept().sum())
    make = lambda: make_model("qwen3", tie_word_embeddings=tied)  # noqa: E731
    _, expected = reference_step(make(), streams[0], weight=1 / count)
    model = make()
    settings = LmStepSettings(ON, compute_dtype=torch.float64)
    enable_row_sparse(model, ON)
    batch = make_lm_batch(documents(streams[world.rank]), LmPlan())
    for kind in (_Replicated, FullySharded):
        reducer = kind(model, world)
        reducer.begin()
        lm_step(model, batch, num_loss_rows=count, settings=settings, learn=False)
        lm_step(model, batch, num_loss_rows=count, settings=settings)
        reducer.finish()
        found = {
            n.removeprefix("draft."): g.full_tensor() if hasattr(g, "full_tensor") else g
            for n, g in gradients(model).items()
        }
        assert_equal(found, expected)
        model.zero_grad(set_to_none=True)


def test_a_rank_without_loss_rows(tmp_path):
    run_world(2, two_ranks, tmp_path)


# ---------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lm")
    return make_place(folder, evaluate={"eval_max_new_tokens": 6})


def test_the_command_distils_exports_and_measures(place, capsys):
    out, rows = run(place, "cut", "--stop-grad-context-tokens")
    assert len(rows) >= 4 and rows[-1]["distill_loss"] < rows[0]["distill_loss"]
    assert 0 < rows[0]["perf/lm_head_token_fraction"] < 0.7
    assert rows[0]["perf/lm_head_token_fraction"] == rows[0]["loss_rows"] / rows[0]["rows"]
    held = [json.loads(line) for line in (out / "heldout.jsonl").read_text().splitlines()]
    assert [row["step"] for row in held] == [0, rows[-1]["step"]]
    assert held[1]["distill_loss"] < held[0]["distill_loss"]
    draft = AutoModelForCausalLM.from_pretrained(out / "export", dtype=torch.float32)
    assert type(draft).__name__ == "LlamaForCausalLM" and len(draft.model.layers) == 2
    report = json.loads((out / "evaluation.json").read_text())
    assert report["sets"][0]["equal"] == 2 and not report["sets"][0]["different"]
    assert "acceptance" in capsys.readouterr().out
    # The flag changes the gradient, nothing else: same first loss, another end.
    _, whole = run(place, "whole", "--no-stop-grad-context-tokens")
    assert whole[0]["loss"] == rows[0]["loss"]
    assert whole[-1]["loss"] != rows[-1]["loss"]


def test_a_stopped_run_continues_with_the_same_losses(place):
    _, whole = run(place, "straight")
    run(place, "resumed", "--max-steps", "2")
    _, rows = run(place, "resumed")
    assert [row["loss"] for row in rows] == [row["loss"] for row in whole]


def test_a_gradient_that_is_not_finite_is_left_out_and_counted(place, monkeypatch, capsys):
    real = lm_loop.clip_gradients
    calls = []

    def clip(model, limit):
        calls.append(1)
        norm = real(model, limit)
        return norm * float("nan") if len(calls) in (2, 3) else norm

    monkeypatch.setattr(lm_loop, "clip_gradients", clip)
    _, rows = run(place, "odd", "--max-steps", "4")
    assert [row["non_finite_steps"] for row in rows] == [0, 1, 2, 2]
    assert [row["grad_norm"] is None for row in rows] == [False, True, True, False]
    assert "step 2 left out" in capsys.readouterr().err
    calls.clear()
    flags = ["--config", f"{place}/recipe.yaml", "--output-dir", f"{place}/odd2"]
    assert train_lm_main([*flags, "--max-non-finite-steps", "1"]) == 2
    assert "max_non_finite_steps 1" in capsys.readouterr().err


def test_held_out_losses_that_are_not_finite_are_said_and_null(place, monkeypatch, capsys):
    real = lm_loop.measure

    def spoilt(*arguments):
        return real(*arguments) | {"loss": float("nan")}

    monkeypatch.setattr(lm_loop, "measure", spoilt)
    out, rows = run(place, "spoilt", "--max-steps", "1")
    held = [json.loads(line) for line in (out / "heldout.jsonl").read_text().splitlines()]
    assert [(row["step"], row["loss"]) for row in held] == [(0, None), (1, None)]
    assert rows[-1]["eval/loss"] is None and held[0]["accuracy"] is not None
    assert capsys.readouterr().err.count("held-out loss after step") == 2


def test_fine_tuning_needs_no_target_pass(place, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the target is loaded")

    monkeypatch.setattr("specforge_trim.train.lm_run.soft_targets", refuse)
    _, rows = run(place, "tuned", "--label-weight", "1", "--distill-weight", "0")
    assert rows[-1]["label_loss"] < rows[0]["label_loss"]
    assert "distill_loss" not in rows[0]


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--no-skip-masked-lm-head-tokens", "--stop-grad-context-tokens"], "needs skip_masked"),
        (["--distill-weight", "0"], "nothing to learn"),
        (["--draft-layers", "9"], "draft_layers = 9: the draft has 3 layers"),
        (["--objective", "kl"], "unknown term 'kl'"),
        (["--stop-grad"], "unknown argument --stop-grad"),
        (["--fsdp"], "fsdp = True splits the weights"),
        (["--run-name", "x"], "run_name = 'x' has no effect"),
        (["--eval-data", "no.jsonl", "--target", "no/such"], "data file no.jsonl: no such file"),
        (["--eval-max-new-tokens", "4096"], "eval_max_new_tokens = 4096 leaves no room"),
        (["--eval-max-new-tokens", "4090"], "max_new_tokens=4090"),
    ],
)
def test_settings_that_cannot_work_are_named(place, flags, says, capsys, monkeypatch):
    """Before a model is loaded."""
    monkeypatch.setattr("specforge_trim.train.lm_run.build_lm", lambda *_: pytest.fail("trains"))
    arguments = ["--config", f"{place}/recipe.yaml", "--output-dir", f"{place}/no", *flags]
    assert train_lm_main(arguments) == 2
    assert says in capsys.readouterr().err


def test_the_recipe_names_every_setting_with_a_comment():
    path = Path(__file__).resolve().parents[1] / "examples" / "draft_lm" / "smollm2.yaml"
    values = read_yaml(path, LmConfig)
    config = build(LmConfig, values)
    assert set(values) == {key for body in config.to_dict().values() for key in body}
    bare = [s for s in path.read_text().splitlines() if re.match(r"\s+\w+:", s) and "#" not in s]
    assert bare == []


def test_an_unknown_key_is_an_error(place, capsys):
    bad = place / "bad.yaml"
    bad.write_text("trim: {trim_backbone_rows: true}\n")
    assert train_lm_main(["--config", str(bad)]) == 2
    assert "unknown key 'trim.trim_backbone_rows'" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="label_weight"):
        build(LmConfig, {"label_weight": 0.0})


def test_a_draft_equal_to_its_target_is_always_accepted(place):
    target = HFTarget.load(place / "target", dtype=torch.float32, aux_layers=(1,))
    draft = AutoModelForCausalLM.from_pretrained(place / "target", dtype=torch.float32).eval()
    other = AutoModelForCausalLM.from_pretrained(place / "target", dtype=torch.float32).eval()
    with torch.no_grad():
        nn.init.normal_(other.model.layers[0].mlp.down_proj.weight)
    prompts = {"set": [torch.randint(3, 200, (9,)), torch.randint(3, 200, (14,))]}
    report = evaluate_lm(target, draft, prompts, untrained=other, depth=3, max_new_tokens=9)
    found = report.sets[0]
    assert found.equal == 2
    assert found.trained.accepted == found.trained.tried
    assert found.trained.tokens == found.untrained.tokens
    assert found.untrained.passes > found.trained.passes
    # The same counts by hand: the greedy answers, and at each place how far the draft agrees.
    passes = 0
    for ids in prompts["set"]:
        own = target.model.generate(ids[None], max_new_tokens=9, do_sample=False)[0].tolist()
        at = len(ids) + 1
        while at < len(own):
            seen, agreed = own[:at], 0
            while agreed < 3 and at + agreed < len(own):
                guess = int(other(torch.tensor([seen])).logits[0, -1].argmax())
                if guess != own[at + agreed]:
                    break
                seen, agreed = [*seen, guess], agreed + 1
            passes += 1
            at += agreed + 1
    assert found.untrained.passes == passes
