"""What a run of training leaves for an engine: the folder after the whole way to it.

Catches: the training length exported as the position limit; head_dim taken for width / heads
somewhere between training, export and reload; embedding rows that are random or in another dtype;
a tensor name or a key that SGLang or TensorRT-LLM does not take up; accuracy in training that
decoding does not deliver.
"""

import json

import pytest
import test_target_families as families
import torch
from safetensors.torch import load_file
from test_export_folder import draft
from test_export_formats import export
from tiny import run_recipe, tiny_config, training_place

from specforge_trim.cli.main import main
from specforge_trim.decode.prompts import speculate
from specforge_trim.drafts.eagle3 import step as stages
from specforge_trim.drafts.eagle3.batch import PlanSettings, make_batch
from specforge_trim.drafts.eagle3.for_target import draft_for_target
from specforge_trim.drafts.eagle3.writing import load_draft
from specforge_trim.loss.teacher import Teacher
from specforge_trim.verifier.hf import load_embedding_and_head

# Width 40 is no multiple of 6 heads, and 16 is not 40 / 6; positions as if training were short.
ODD = {"num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16,
       "max_position_embeddings": 64}  # fmt: skip


def test_odd_heads_and_a_short_training_length_reach_the_engine_right(tmp_path, capfd):
    place = training_place(tmp_path)
    plain = draft_for_target(tiny_config(), draft_vocab_size=64).to_dict()
    (place / "draft.json").write_text(json.dumps(plain | ODD))
    flags = ["--draft-config", str(place / "draft.json")]
    run_recipe(place, "run", *flags, "--max-steps", "1")
    recipe = ["--config", str(place / "recipe.yaml"), "--output-dir", str(place / "run"), *flags]
    assert main(["export", *recipe]) == 0
    assert "max_position_embeddings=64; exporting the target's 4096" in capfd.readouterr().err
    out = place / "run" / "export"
    config, tensors = (
        json.loads((out / "config.json").read_text()),
        load_file(out / "model.safetensors"),
    )
    assert config["max_position_embeddings"] == 4096
    assert {key: config[key] for key in ODD if key != "max_position_embeddings"} == {
        "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 16,
    }  # fmt: skip
    shapes = {n: tuple(tensors[f"midlayer.self_attn.{n}_proj.weight"].shape) for n in "qkvo"}
    assert shapes == {"q": (96, 80), "k": (48, 80), "v": (48, 80), "o": (40, 96)}
    assert config["dtype"] == config["torch_dtype"] == "bfloat16"
    floats = {name for name, value in tensors.items() if value.dtype == torch.bfloat16}
    assert floats == set(tensors) - {"d2t", "t2d"}
    target = load_embedding_and_head(place / "target")
    assert torch.equal(tensors["embed_tokens.weight"], target.embed.bfloat16())
    assert load_draft(out).config.head_dim == 16
    assert main(["evaluate", *recipe]) == 0  # and drafts for the target


# Parameters of the serving classes, stacked projections as they stack them; both were read in the
# engines' loaders.  SGLang looks a name up as it is, then under model.; d2t and t2d are its own.
SGLANG = {
    "lm_head.weight", "model.embed_tokens.weight", "model.fc.weight", "model.norm.weight",
    "model.midlayer.input_layernorm.weight", "model.midlayer.hidden_norm.weight",
    "model.midlayer.post_attention_layernorm.weight", "model.midlayer.self_attn.qkv_proj.weight",
    "model.midlayer.self_attn.o_proj.weight", "model.midlayer.mlp.gate_up_proj.weight",
    "model.midlayer.mlp.down_proj.weight",
}  # fmt: skip


def sglang_name(name):
    for part in ("q_proj", "k_proj", "v_proj"):
        name = name.replace(f".{part}", ".qkv_proj")
    for part in ("gate_proj", "up_proj"):
        name = name.replace(f".{part}", ".gate_up_proj")
    return name if name in SGLANG else f"model.{name}"


@pytest.mark.parametrize("switches", [{}, {"fc_norm": True, "norm_output": True}])
def test_sglang_and_tensorrt_take_up_every_tensor_and_miss_none(tmp_path, switches):
    """What SGLang does not know it skips without a word."""
    out, config = export(tmp_path, draft(**switches))
    names = set(load_file(out / "model.safetensors")) - {"d2t", "t2d"}
    norms = {f"model.fc_norm.{i}.weight" for i in range(3)} if switches else set()
    assert {sglang_name(name) for name in names} == SGLANG | norms
    # TensorRT-LLM: model. before all but the head; the target's own embedding where widths agree.
    tensorrt = {name if "lm_head" in name else f"model.{name}" for name in names}
    assert {sglang_name(n.removeprefix("model.")) for n in tensorrt} == SGLANG | norms
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]  # SGLang's class by name
    assert config["tie_word_embeddings"] is False and config["draft_vocab_size"] == 12
    assert "mlp_bias" in config and config["num_hidden_layers"] == 1


@pytest.mark.parametrize("steps", [10, 60])
def test_what_training_counts_is_what_decoding_accepts(tmp_path, monkeypatch, steps):
    """A sample learned by heart: rounds walked over training's right answers, then real ones."""
    monkeypatch.setattr(families, "STEPS", steps)
    target = families.saved_target("llama", tmp_path / "target")
    head = load_embedding_and_head(tmp_path / "target")
    prompt, answer = families.answered(target)
    ids = torch.cat((prompt, torch.tensor(answer)))
    document = families.Document(ids, torch.arange(len(ids)) >= len(prompt), "test:1", "d")
    model = families.untrained(target, head, document)
    settings = PlanSettings(families.K, trim_loss_positions=True, trim_backbone_rows=True)
    batch = make_batch([document], [families.captured(target, document)], settings)
    families.train(model, head, batch)

    right, real = [], stages.linear_loss
    with monkeypatch.context() as patch:
        patch.setattr(stages, "linear_loss", lambda *a, **k: recorded(right, real(*a, **k)))
        teacher = Teacher(head.head, model.draft_to_target, model.t2d, head.logit_post)
        stages.ttt_step(
            model, batch, teacher=teacher, denominators=torch.ones(families.K),
            settings=stages.StepSettings(),
        )  # fmt: skip
    assert len(batch.chunks) == 1
    rows = [step.loss_rows.tolist() for step in batch.pack.steps]
    hit = {(i, t): r for i, ts in enumerate(rows) for t, r in zip(ts, right[i], strict=True)}

    known, passes = len(prompt), 0  # the prompt's own pass gave the answer's first token
    while known < len(ids) - 1:
        agreed = 0
        while agreed < families.K and hit.get((agreed, known - 1), False):
            agreed += 1
        known, passes = known + agreed + 1, passes + 1
    decoded = speculate(target, model, prompt, depth=families.K, max_new_tokens=len(answer))
    assert decoded.tokens == tuple(answer)
    assert decoded.passes == passes
    if steps == 60:  # by heart: more than 1.5 tokens a pass
        assert passes < len(answer) / 1.5


def recorded(right, result):
    right.append([bool(x) for x in result[1].right])
    return result
