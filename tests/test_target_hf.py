"""Catches: hooks one layer off, the final norm missing before the head, ids in the wrong
numbering, repeated ids on shallow targets, a head or embedding read from the wrong tensor, and
logit post-operations forgotten (Cohere, Granite, Gemma 2)."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import VOCAB_SIZE, random_ids_and_mask, randomise, save_tiny_target
from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    LlamaConfig,
    Qwen3Config,
)

from specforge_trim.verifier.aux_layers import (
    exported_aux_keys,
    from_sglang,
    resolve_aux_layers,
    to_sglang,
)
from specforge_trim.verifier.hf import HFTarget, load_embedding_and_head, target_fingerprint

SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 40,
    "intermediate_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": 0,
}
FAMILIES = {
    "llama": LlamaConfig(**SHAPE),
    "qwen3": Qwen3Config(**SHAPE, tie_word_embeddings=True),
    "cohere": CohereConfig(**{**SHAPE, "head_dim": 10}, logit_scale=0.0625),
    "cohere2": Cohere2Config(**SHAPE, logit_scale=0.25),
    "granite": GraniteConfig(**{**SHAPE, "head_dim": 10}, logits_scaling=8.0),
    "gemma2": Gemma2Config(**SHAPE, final_logit_softcapping=3.0),
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request, tmp_path_factory):
    """A saved random target of each family."""
    folder = tmp_path_factory.mktemp(request.param)
    randomise(AutoModelForCausalLM.from_config(FAMILIES[request.param])).save_pretrained(folder)
    return folder


def test_hooks_equal_hidden_states_tuple_bit_for_bit(family):
    target = HFTarget.load(family, dtype=torch.float32)
    ids, _ = random_ids_and_mask(37)
    aux, last = target.features(ids)
    whole = target.model(input_ids=ids[None], output_hidden_states=True, use_cache=False)
    assert target.aux_layers == (2, 4, 5)
    assert torch.equal(aux, torch.cat([whole.hidden_states[k][0] for k in (2, 4, 5)], dim=-1))
    assert torch.equal(last, whole.hidden_states[-1][0])
    assert target.hidden_size == 40 and target.vocab_size == VOCAB_SIZE
    assert target.eos_token_ids == (2, 3)


def test_any_number_of_aux_layers(family):
    target = HFTarget.load(family, dtype=torch.float32, aux_layers=[1, 3, 6, 7])
    ids, _ = random_ids_and_mask(9)
    whole = target.model(input_ids=ids[None], output_hidden_states=True, use_cache=False)
    expected = torch.cat([whole.hidden_states[k][0] for k in (1, 3, 6, 7)], dim=-1)
    assert torch.equal(target.features(ids).aux, expected)


def test_hooks_are_removed(family):
    target = HFTarget.load(family, dtype=torch.float32)
    target.features(torch.tensor([5, 6, 7]))
    assert not any(layer._forward_hooks for layer in target.decoder.layers)


def test_features_can_be_trained_on_as_they_are(family):
    """Online training hands them to fc: inference tensors cannot be saved for its backward."""
    target = HFTarget.load(family, dtype=torch.float32)
    aux, _ = target.features(torch.tensor([5, 6, 7]))
    fc = torch.nn.Linear(aux.shape[1], 2, bias=False, dtype=aux.dtype)
    fc(aux).sum().backward()
    assert bool(fc.weight.grad.any())


def test_head_of_last_equals_the_real_logits(family):
    target = HFTarget.load(family, dtype=torch.float32)
    head = load_embedding_and_head(family)
    ids, _ = random_ids_and_mask(21)
    real = target.model(input_ids=ids[None], use_cache=False).logits[0]
    found = head.logits(target.features(ids).last)
    error = (found - real).abs().max().item()
    assert error <= 1e-5 * real.abs().max().item(), f"max error {error}"
    target.check_head(head, ids)


def test_unknown_post_operation_is_refused(family):
    target = HFTarget.load(family, dtype=torch.float32)
    head = load_embedding_and_head(family)
    spoiled = type(head)(head.embed, head.head * 1.1, head.tied, head.logit_post, 272, 40)
    with pytest.raises(ValueError, match="logits are not head"):
        target.check_head(spoiled, torch.tensor([5, 6, 7]))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("shard", ["50GB", "40KB"])
def test_embedding_and_head_of_sharded_and_single_files(tmp_path, tied, shard):
    saved = save_tiny_target(tmp_path / "target", tied=tied)
    model = AutoModelForCausalLM.from_pretrained(saved)
    model.save_pretrained(tmp_path / "again", max_shard_size=shard)
    head = load_embedding_and_head(tmp_path / "again")
    assert ((tmp_path / "again" / "model.safetensors.index.json").exists()) == (shard == "40KB")
    assert head.tied is tied
    assert torch.equal(head.embed, model.model.embed_tokens.weight)
    assert torch.equal(head.head, model.lm_head.weight)
    assert torch.equal(head.embed, head.head) is tied
    assert head.logit_post is None and (head.vocab_size, head.hidden_size) == (VOCAB_SIZE, 40)


@pytest.mark.parametrize("prefix", ["", "model.", "language_model.model.", "model.text_model."])
def test_embedding_is_found_under_any_prefix(tmp_path, prefix):
    folder = save_tiny_target(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    renamed = {k.replace("model.", prefix, 1): v for k, v in tensors.items()}
    renamed["vision_tower.embed_tokens.weight"] = torch.zeros(4, 4)  # not the text embedding
    save_file(renamed, folder / "model.safetensors")
    expected = tensors["model.embed_tokens.weight"]
    assert torch.equal(load_embedding_and_head(folder).embed, expected)


def test_unknown_embedding_lists_the_keys(tmp_path):
    folder = save_tiny_target(tmp_path)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.tokens.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.tokens\.weight"):
        load_embedding_and_head(folder)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


def test_damaged_files_of_a_target_are_named(tmp_path):
    model = AutoModelForCausalLM.from_pretrained(save_tiny_target(tmp_path / "target"))
    folder = tmp_path / "shards"
    model.save_pretrained(folder, max_shard_size="40KB")
    index = folder / "model.safetensors.index.json"
    names = json.loads(index.read_text())["weight_map"]
    shard = folder / names["model.embed_tokens.weight"]
    good = {path: path.read_bytes() for path in (index, shard)}
    elsewhere = next(n for n in names.values() if n != shard.name)
    wrong = names | {"model.embed_tokens.weight": elsewhere}
    for path, content, reason in (
        (shard, good[shard][:-100], "not fully covered"),
        (shard, b"", "header"),
        (shard, POINTER, "Git LFS pointer"),
        (index, b'{"weight', "no weight_map"),
        (index, b'{"metadata": {}}', "no weight_map"),
        (index, json.dumps({"weight_map": wrong}).encode(), "does not contain tensor"),
    ):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=reason) as info:
            load_embedding_and_head(folder)
        named = elsewhere if reason.startswith("does not") else path.name
        assert str(folder / named) in str(info.value)
        for kept, content in good.items():
            kept.write_bytes(content)
    shard.unlink()
    with pytest.raises(ValueError, match=f"{shard.name}, which holds .* is missing"):
        load_embedding_and_head(folder)


def test_head_with_bias_and_untied_without_head_are_refused(tmp_path):
    folder = save_tiny_target(tmp_path, tied=False)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | {"lm_head.bias": torch.zeros(VOCAB_SIZE)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="bias"):
        load_embedding_and_head(folder)
    del tensors["lm_head.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match="no head"):
        load_embedding_and_head(folder)


def test_default_aux_layers():
    assert resolve_aux_layers(7) == (2, 3, 4)
    assert resolve_aux_layers(30) == (2, 15, 27)  # SmolLM2-135M
    assert resolve_aux_layers(32) == (2, 16, 29)  # Llama-3-8B


@pytest.mark.parametrize("layers", [2, 4, 5, 6])
def test_shallow_targets_need_explicit_ids(tmp_path, layers):
    with pytest.raises(ValueError, match=f"{layers} layers"):
        resolve_aux_layers(layers)
    folder = save_tiny_target(tmp_path, num_layers=layers)
    with pytest.raises(ValueError, match="aux_layers"):
        HFTarget.load(folder)
    assert HFTarget.load(folder, aux_layers=[1, 2]).aux_layers == (1, 2)


@pytest.mark.parametrize("ids", [[], [2, 2, 5], [5, 2], [0, 1], [3, 9], [1.0, 2], [True, 2]])
def test_bad_aux_layers_are_refused(ids):
    with pytest.raises(ValueError, match="aux_layers"):
        resolve_aux_layers(8, ids)


def test_numberings():
    assert to_sglang((2, 16, 29)) == (1, 15, 28) and from_sglang((1, 15, 28)) == (2, 16, 29)
    assert exported_aux_keys(32, (2, 16, 29)) == {}
    assert exported_aux_keys(32, (4, 20, 30)) == {
        "eagle_aux_hidden_state_layer_ids": [4, 20, 30],
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [3, 19, 29],
        },
    }
    assert exported_aux_keys(4, (1, 2, 3))["eagle_aux_hidden_state_layer_ids"] == [1, 2, 3]


def test_fingerprint_follows_the_weights(tmp_path):
    first = save_tiny_target(tmp_path / "a", seed=0)
    same = save_tiny_target(tmp_path / "b", seed=0)
    other = save_tiny_target(tmp_path / "c", seed=1)
    assert target_fingerprint(first) == target_fingerprint(same) != target_fingerprint(other)
