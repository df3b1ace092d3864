"""Rows that are not a list of messages: pairs, rendered text, token ids.

Bugs caught: rendered text whose header never matches and trains on nothing, a turn whose end is
taken from the next message, spans shifted by normalisation, labels read as ids, a row of two forms
read as one of them, an option that a row cannot follow and that is quietly ignored.
"""

import json

import chat_templates as chat
import pytest
from test_data_masks import supervised
from test_data_templates import EXPECTED, ROWS

from specforge_trim.data.conversation import parse_row, read_conversations
from specforge_trim.data.dataset import prepare
from specforge_trim.data.records import Conversation, RowError, TextRow, TokenRow
from specforge_trim.data.supervision import MaskOptions
from specforge_trim.data.tokenize import ChatTokenizer, Document

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
SYSTEM = {"role": "system", "content": "s"}
CHATML_TEXT = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"


def document(family: str, row: dict, *, options: MaskOptions | None = None):
    tokenizer = chat.family_tokenizer(family)
    found = ChatTokenizer(tokenizer, masks=options).document(parse_row(row, source="f:1"))
    return found, supervised(tokenizer, found)


FORMS = {
    "prompt and response": ({"prompt": "q", "response": "a"}, (USER, ASSISTANT)),
    "prompt and completion": ({"prompt": "q", "completion": "a"}, (USER, ASSISTANT)),
    "prompt alone": ({"prompt": "q"}, (USER,)),
    "lists of messages": ({"prompt": [SYSTEM, USER], "completion": [ASSISTANT]},
                          (SYSTEM, USER, ASSISTANT)),
    "system beside a pair": ({"system": "s", "prompt": "q", "response": "a"},
                             (SYSTEM, USER, ASSISTANT)),
    "system beside ShareGPT": (
        {"system": "s", "conversations": [{"from": "human", "value": "q"}]}, (SYSTEM, USER)),
    "no system": ({"system": None, "messages": [USER]}, (USER,)),
    "empty system": ({"system": "", "messages": [USER]}, (USER,)),
    "copy of the question": ({"prompt": "q", "messages": [USER, ASSISTANT]}, (USER, ASSISTANT)),
    "ShareGPT with tools": (
        {"conversations": [
            {"from": "human", "value": "q"},
            {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
            {"from": "observation", "value": "3"},
            {"from": "gpt", "value": "a"},
        ]},
        (
            USER,
            {"role": "assistant", "content": "", "tool_calls": [
                {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]},
            {"role": "tool", "content": "3"},
            ASSISTANT,
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_a_row_in_another_form_gives_the_same_messages(name):
    row, messages = FORMS[name]
    assert parse_row(row, source="f:1").messages == messages


BAD = {
    "two forms": ({"messages": [USER], "text": "q"}, "row has both 'messages' and 'text'"),
    "two chats": ({"messages": [USER], "conversations": []}, "row has both 'messages'"),
    "two answers": (
        {"prompt": "q", "response": "a", "completion": "a"},
        "row has both 'response'",
    ),
    "prompt is a number": ({"prompt": 5, "response": "a"}, "content is not text"),
    "empty response": ({"prompt": "q", "response": ""}, "empty assistant message"),
    "two systems": ({"system": "s", "messages": [SYSTEM, USER]}, "row has 'system' and"),
    "calls are a number": ({"messages": [USER, ASSISTANT | {"tool_calls": 5}]}, "tool_calls are"),
    "reasoning is a list": (
        {"messages": [USER, ASSISTANT | {"reasoning_content": ["r"]}]},
        "reasoning_content is not text",
    ),
    "call is no JSON": (
        {"conversations": [USER, {"from": "function_call", "value": "f(x)"}]},
        "function_call is not valid JSON",
    ),
    "call has no name": (
        {"conversations": [USER, {"from": "function_call", "value": "[]"}]},
        "function_call has no name",
    ),
    "blank text": ({"text": " \n"}, "text is empty"),
    "text is a list": ({"text": ["q"]}, "text is empty or not a string"),
    "spans are numbers": ({"text": "abc", "spans": [0, 2]}, "spans are not a list"),
    "span of one": ({"text": "abc", "spans": [[0]]}, "spans are not a list"),
    "span of booleans": ({"text": "abc", "spans": [[False, True]]}, "spans are not a list"),
    "span beyond": ({"text": "abc", "spans": [[1, 4]]}, "spans are not ascending"),
    "span before": ({"text": "abc", "spans": [[-1, 2]]}, "spans are not ascending"),
    "spans overlap": ({"text": "abc", "spans": [[0, 2], [1, 3]]}, "spans are not ascending"),
    "span backwards": ({"text": "abc", "spans": [[2, 1]]}, "spans are not ascending"),
    "ids are text": ({"input_ids": "abc", "loss_mask": [1]}, "input_ids are not a list"),
    "ids are nested": ({"input_ids": [[1, 2]], "loss_mask": [[0, 1]]}, "input_ids are not"),
    "ids are negative": ({"input_ids": [1, -1], "loss_mask": [0, 1]}, "input_ids are not"),
    "ids are booleans": ({"input_ids": [1, True], "loss_mask": [0, 1]}, "input_ids are not"),
    "no mask": ({"input_ids": [1, 2]}, "row has none of 'loss_mask'"),
    "two masks": ({"input_ids": [1], "loss_mask": [1], "labels": [1]}, "row has both 'loss_mask'"),
    "short mask": ({"input_ids": [1, 2], "loss_mask": [1]}, "loss_mask do not fit"),
    "mask is a number": ({"input_ids": [1, 2], "loss_mask": 1}, "loss_mask do not fit"),
    "mask of weights": ({"input_ids": [1, 2], "loss_mask": [0, 0.5]}, "loss_mask holds something"),
    "shifted labels": ({"input_ids": [1, 2], "labels": [2, -100]}, "labels differ from input_ids"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_refused_with_its_reason(name):
    row, reason = BAD[name]
    with pytest.raises(RowError) as caught:
        parse_row(row, source="f:1")
    assert caught.value.reason.startswith(reason), caught.value


# -- rendered text ------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["chatml", "llama3", "mistral", "gemma", "harmony"])
def test_rendered_text_gives_the_ids_and_mask_of_its_messages(family):
    tokenizer = chat.family_tokenizer(family)
    messages = parse_row({"messages": ROWS["turns"]}, source="f:1").messages
    text = tokenizer.apply_chat_template(list(messages), tokenize=False)
    found, runs = document(family, {"text": text})
    expected, _ = document(family, {"messages": ROWS["turns"]})
    assert runs == EXPECTED[family]["turns"]
    assert found.doc_id == expected.doc_id and found.source == "f:1"


def test_rendered_text_with_and_without_the_think_block_that_the_prompt_opens():
    start, end = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
    text = (
        f"{start}<｜User｜>Q<｜Assistant｜>A{end}"
        f"<｜User｜>R<｜Assistant｜><think>\nSo.\n</think>\n\nB{end}"
    )
    assert document("deepseek", {"text": text})[1] == ["A" + end, "So.\n</think>\n\nB" + end]


def test_rendered_tool_call_ends_with_its_own_token():
    """The result's end token is not the assistant's."""
    text = (
        "<|start|>user<|message|>q<|end|><|start|>assistant<|channel|>commentary to=functions.f"
        "<|message|>{}<|call|><|start|>functions.f to=assistant<|channel|>commentary<|message|>3"
        "<|end|><|start|>assistant<|channel|>final<|message|>a<|return|>"
    )
    assert document("harmony", {"text": text})[1] == [
        "<|channel|>commentary to=functions.f<|message|>{}<|call|>",
        "<|channel|>final<|message|>a<|return|>",
    ]


def test_spans_of_a_row_are_taken_as_they_are():
    at = CHATML_TEXT.index("a<|im_end|>")
    found, runs = document("chatml", {"text": CHATML_TEXT, "spans": [[0, 12], [at, at + 11]]})
    assert runs == ["<|im_start|>", "a<|im_end|>"]
    text = "e\u0301 " * 5 + "so"  # composed by the tokenizer: 10 characters become 5 less
    tokenizer = chat.chat_tokenizer(normalizer="NFC")
    row = parse_row({"text": text, "spans": [[15, 17]]}, source="f:1")
    assert supervised(tokenizer, ChatTokenizer(tokenizer).document(row)) == ["so"]


TEXTS = {
    "no header": ("Hello.", "text has no assistant header"),
    "cut off": (CHATML_TEXT[:-12], "no token ends the assistant's turn"),
    "header alone": ("<|im_start|>assistant\n", "no token ends the assistant's turn"),
    "cut in the middle": (
        CHATML_TEXT.replace("a<|im_end|>\n", "a\n") + CHATML_TEXT,
        "no token ends the assistant's turn",
    ),
    "surrogate": (CHATML_TEXT + "\ud800", "text has a lone surrogate"),
}


@pytest.mark.parametrize("name", TEXTS)
def test_doubtful_text_is_refused(name):
    text, reason = TEXTS[name]
    if name == "cut in the middle":  # the first turn's end is the next user's
        text = text.replace(
            "<|im_end|>\n<|im_start|>assistant\na\n", "\n<|im_start|>assistant\na\n"
        )
        text = text.replace("a\n<|im_start|>user\nq<|im_end|>\n", "a\n", 1)
    with pytest.raises(RowError) as caught:
        document("chatml", {"text": text})
    assert caught.value.reason == reason


def test_text_after_mistrals_tool_results_needs_spans():
    tokenizer = chat.family_tokenizer("mistral")
    messages = parse_row({"messages": ROWS["tools"]}, source="f:1").messages
    text = tokenizer.apply_chat_template(list(messages), tokenize=False)
    with pytest.raises(RowError, match="need spans"):
        document("mistral", {"text": text})


def test_another_models_header_stops_the_run_and_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": CHATML_TEXT}) + "\n")
    tokenizer = chat.family_tokenizer("llama3")
    with pytest.raises(ValueError, match="no usable") as caught:
        prepare(path, tokenizer, cache_dir=tmp_path, max_length=99, progress=False)
    assert f"{path}:1: text has no assistant header" in str(caught.value)
    assert repr("<|start_header_id|>assistant<|end_header_id|>\n\n") in str(caught.value)


# -- token ids ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "mask"),
    [
        ("loss_mask", [0, 1, 1, 0]),
        ("loss_mask", [False, True, True, False]),
        ("assistant_masks", [0, 1, 1, 0]),
        ("labels", [-100, 6, 7, -100]),
    ],
)
def test_ids_and_mask_are_taken_as_they_are(key, mask):
    found, _ = document("chatml", {"input_ids": [5, 6, 7, 8], key: mask})
    assert found.input_ids.tolist() == [5, 6, 7, 8]
    assert found.loss_mask.tolist() == [False, True, True, False]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"input_ids": [5, 10**6], "loss_mask": [0, 1]}, "an id the tokenizer does not have"),
        ({"input_ids": [5, 6], "loss_mask": [0, 0]}, "no supervised token"),
        ({"input_ids": [], "loss_mask": []}, "no supervised token"),
    ],
)
def test_ids_that_cannot_be_trained_on_are_refused(row, reason):
    with pytest.raises(RowError, match=reason):
        document("chatml", row)


def test_options_that_a_row_cannot_follow_refuse_it():
    text, ids = {"text": CHATML_TEXT * 2}, {"input_ids": [5, 6], "loss_mask": [0, 1]}
    assert document("chatml", text, options=MaskOptions(turns="last"))[1] == ["a<|im_end|>"]
    for row, options in (
        (text, MaskOptions(reasoning=False)),
        (text, MaskOptions(tool_calls=False)),
        (ids, MaskOptions(turns="last")),
        (ids, MaskOptions(reasoning=False)),
    ):
        with pytest.raises(RowError, match="cannot"):
            document("chatml", row, options=options)


# -- whole files --------------------------------------------------------------------------------


def test_all_forms_in_one_file_with_the_bad_ones_counted(tmp_path):
    calls = [ROWS["tools"], json.loads(json.dumps(ROWS["tools"]).replace('{"a": 1', '{"c": 1'))]
    calls[1][1]["tool_calls"][0]["function"]["arguments"] = '{"a": 1}'
    rows = [
        *({"messages": messages, "tools": None} for messages in calls),
        {"text": CHATML_TEXT},
        {"input_ids": [5, 6], "loss_mask": [0, 1]},
        {"prompt": "q", "response": "a"},
        {"messages": []},
        {"messages": [SYSTEM]},
        {"messages": [ASSISTANT]},
        {"messages": [USER, ASSISTANT | {"content": None}]},
        {"messages": [USER, ASSISTANT | {"content": ""}]},
        {"messages": [USER, {"role": "my-model", "content": "a"}]},
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer = chat.family_tokenizer("qwen3_thinking")
    data = prepare(
        path, tokenizer, cache_dir=tmp_path, max_length=999, max_bad_fraction=0.6, progress=False
    )
    assert [d.source for d in data] == [f"{path}:{n}" for n in (1, 2, 3, 4, 5)]
    assert data.skipped == {
        "no user message": 3,
        "empty assistant message": 2,
        "unknown role 'my-model'": 1,
    }


@pytest.mark.parametrize("family", ["chatml", "llama3", "mistral", "deepseek"])
def test_many_rows_at_once_are_what_each_is_alone(family):
    """Usual rows, cut anew (newlines that merge over the prompt's end), and refused, mixed."""
    chats = ChatTokenizer(chat.family_tokenizer(family))
    answers = [
        "fine",
        "\n\n\n  yes",
        "caf\u00e9 \U0001f468\u200d\U0001f469",
        "a \ud800",
        "\n",
        "end",
    ]
    rows = [
        parse_row({"messages": [USER, ASSISTANT | {"content": f"{text}{k}"}]}, source=f"f:{k}")
        for k, text in enumerate(answers * 2)
    ]
    rows.insert(3, parse_row({"input_ids": [1, 2], "loss_mask": [0, 1]}, source="f:ids"))
    rows.insert(5, parse_row({"text": "none", "spans": []}, source="f:none"))
    found = chats.documents(rows)
    assert any(isinstance(item, RowError) for item in found)
    assert sum(isinstance(item, Document) for item in found) >= 9
    first = chats.template.render(rows[0])
    assert None not in chats._masked_together([first] * 2, [chats._ids(first.text)] * 2)
    for row, item in zip(rows, found, strict=True):
        (alone,) = chats.documents([row])
        if isinstance(item, RowError):
            assert (item.reason, item.detail) == (alone.reason, alone.detail)
            continue
        if isinstance(row, Conversation):  # and the slow way
            text = chats.template.render(row)
            slow = chats._masked(text, chats._ids(text.text), source=row.source)
            assert slow.doc_id == item.doc_id
        assert (item.doc_id, item.source) == (alone.doc_id, row.source)
        assert item.input_ids.tolist() == alone.input_ids.tolist()
        assert item.loss_mask.tolist() == alone.loss_mask.tolist()


def test_options_are_part_of_what_is_cached(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": ROWS["turns"]}) + "\n")
    tokenizer = chat.family_tokenizer("chatml")
    counts = [
        prepare(
            path, tokenizer, cache_dir=tmp_path, max_length=999, masks=masks, progress=False
        ).num_supervised
        for masks in (None, MaskOptions(turns="last"), MaskOptions())
    ]
    assert counts[0] == counts[2] > counts[1] > 0


def test_rows_nested_too_deeply_are_refused(tmp_path):
    deep: object = "x"
    for _ in range(700):
        deep = {"a": deep}
    function = {"name": "f", "arguments": deep}
    answer = {"role": "assistant", "content": "", "tool_calls": [{"function": function}]}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": [USER, answer]}) + "\n")
    (row,) = read_conversations(path)
    with pytest.raises(RowError):
        ChatTokenizer(chat.family_tokenizer("chatml")).document(row)


def test_row_kinds_are_told_by_their_type():
    assert isinstance(parse_row({"text": "a"}, source="f:1"), TextRow)
    row = {"input_ids": [1], "loss_mask": [1]}
    assert isinstance(parse_row(row, source="f:1"), TokenRow)


@pytest.mark.slow
def test_one_row_of_30_megabytes_is_masked_exactly(tmp_path):
    question, answer = "the quick brown fox …… jumps\n" * 1_000_000, "yes " * 50
    path = tmp_path / "a.jsonl"
    messages = [USER | {"content": question}, ASSISTANT | {"content": answer}]
    path.write_text(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")
    assert path.stat().st_size > 30_000_000
    tokenizer = chat.family_tokenizer("chatml")
    (row,) = read_conversations(path)
    found = ChatTokenizer(tokenizer).document(row)
    assert supervised(tokenizer, found) == [answer + "<|im_end|>"]
