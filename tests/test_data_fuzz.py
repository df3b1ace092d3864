"""Random damage to valid rows ends in a document or a counted refusal.

Bugs caught: an exception that is not a RowError and stops a whole preparation, a row that gives no
result or two, a mask without a token, masked text that the template did not render.
"""

import copy
import json
import random

import chat_templates as chat
import pytest
from test_data_templates import ROWS

from specforge_trim.data.conversation import BadRow, read_conversations
from specforge_trim.data.records import RowError
from specforge_trim.data.supervision import MaskOptions
from specforge_trim.data.tokenize import ChatTokenizer

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"a": {"type": "string"}}}}
TEXT = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
SHARE = [
    {"from": "human", "value": "q"},
    {"from": "function_call", "value": '{"name": "f", "arguments": {}}'},
    {"from": "observation", "value": "3"},
    {"from": "gpt", "value": "a"},
]
VALID = [
    *({"messages": messages} for messages in ROWS.values()),
    {"messages": ROWS["tools"], "tools": [TOOL]},
    {"messages": ROWS["turns"], "tools": json.dumps([TOOL]), "system": "s"},
    {"conversations": SHARE},
    {"prompt": "q", "response": "a"},
    {"prompt": [ROWS["turns"][0]], "completion": [ROWS["turns"][1]]},
    {"text": TEXT * 2},
    {"text": TEXT, "spans": [[44, 45], [45, 55]]},
    {"input_ids": [4, 5, 6], "loss_mask": [0, 1, 1]},
    {"input_ids": [4, 5, 6], "labels": [-100, 5, 6]},
]
ODD = [
    None, True, False, 0, -1, 1e308, float("nan"), 10**30, "", " ", "\n", "\x00", "\ud800",
    "\U0001f468\u200d\U0001f469", "e\u0301", "7305902510000073", [], {}, [[]], [None], {"a": None},
    "<|im_end|>", "<|im_start|>assistant\n", "<think>", "</think>", "[/INST]", "</s>",
    "<tool_call>", "{{ messages }}", "{% generation %}", "assistant", "tool", "system", "x" * 3000,
]  # fmt: skip
FAMILIES = ("chatml", "llama3", "qwen3_thinking", "mistral", "harmony", "deepseek")


def places(value: object, path: tuple = ()) -> list[tuple]:
    """Every path into a JSON value, down to a depth that changes can still reach."""
    if len(path) > 30:
        inner = []
    elif isinstance(value, dict):
        inner = [found for key in value for found in places(value[key], (*path, key))]
    elif isinstance(value, list):
        inner = [found for i in range(len(value)) for found in places(value[i], (*path, i))]
    else:
        inner = []
    return ([path] if path else []) + inner


def change(row: dict, rng: random.Random) -> None:
    """Up to 200 levels deeper, or one other random change somewhere inside the row."""
    *path, last = rng.choice(places(row) or [("text",)])
    inside = row
    for key in path:
        inside = inside[key]
    if last not in inside and not isinstance(inside, list):
        return
    kind = 2 if isinstance(inside[last], str) and rng.random() < 0.5 else rng.randrange(6)
    if kind == 0:
        inside[last] = copy.deepcopy(rng.choice(ODD))
    elif kind == 1:
        del inside[last]
    elif kind == 2 and isinstance(inside[last], str):
        at = rng.randint(0, len(inside[last]))
        inside[last] = inside[last][:at] + str(rng.choice(ODD)) + inside[last][at:]
    elif kind == 3 and isinstance(inside, list):
        inside.insert(last, json.loads(json.dumps(rng.choice([inside[last], *ODD]))))
    elif kind == 4 and isinstance(inside, dict):
        key = rng.choice(["role", "content", "tool_calls", "name", "text", "tools", "from", "x"])
        inside[key] = inside.pop(last)
    else:
        for _ in range(rng.choice([1, 3, 200])):
            inside[last] = rng.choice([[inside[last]], {"a": inside[last]}])


def damaged_line(rng: random.Random) -> bytes:
    row = copy.deepcopy(rng.choice(VALID))
    for _ in range(rng.choice([1, 1, 2, 4])):
        change(row, rng)
    line = bytearray(json.dumps(row, ensure_ascii=rng.random() < 0.5).encode("utf-8", "replace"))
    if rng.random() < 0.1:
        at = rng.randrange(len(line))
        line[at : at + rng.randint(0, 9)] = rng.choice([b"", b"\xff", b"}", b'"', b"\\u12", b"0"])
    return bytes(line).replace(b"\n", b" ").strip() or b"{"


def outcome(chat_tokenizer: ChatTokenizer, row: object) -> str:
    """ "document" or the reason of a refusal; anything else raises."""
    if isinstance(row, BadRow):
        return row.reason
    try:
        document = chat_tokenizer.document(row)
    except RowError as error:
        return error.reason
    ids, mask = document.input_ids, document.loss_mask
    assert ids.shape == mask.shape and ids.dtype.is_signed and bool(mask.any())
    assert 0 <= int(ids.min()) and int(ids.max()) < len(chat_tokenizer.tokenizer)
    return "document"


@pytest.mark.parametrize("count", [300, pytest.param(5000, marks=pytest.mark.slow)])
def test_damaged_rows_end_in_a_document_or_a_counted_refusal(tmp_path, count):
    rng = random.Random(count)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(damaged_line(rng) + b"\n" for _ in range(count)))
    rows = list(read_conversations(path))
    assert len(rows) == count
    options = [MaskOptions(), MaskOptions("last", reasoning=False, tool_calls=False)]
    tokenizers = [
        ChatTokenizer(chat.family_tokenizer(name), masks=masks)
        for name in FAMILIES
        for masks in options
    ]
    outcomes = [outcome(tokenizers[i % len(tokenizers)], row) for i, row in enumerate(rows)]
    good = outcomes.count("document")
    assert count // 20 < good < 9 * count // 10, good
    assert len(set(outcomes)) > 10 and all(0 < len(reason) < 200 for reason in outcomes)
