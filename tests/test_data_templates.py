"""Masks of seven template families, each in tests/templates, on rows as they stand in a file.

Bugs caught: a turn that starts at its header or loses its end-of-turn token, tool calls without
arguments that leave no trace, tool results taken for the assistant's, a think block opened by the
prompt, reasoning lost, options that leave out too much. Expected strings are written by hand.
"""

import chat_templates as chat
import pytest
from test_data_masks import supervised

from specforge_trim.data.conversation import parse_row
from specforge_trim.data.records import RowError
from specforge_trim.data.supervision import MaskOptions
from specforge_trim.data.tokenize import ChatTokenizer

FAMILY = "\U0001f468\u200d\U0001f469\u200d\U0001f467"
GLYPHS = f"？…… {FAMILY} \x10 café\x10"
END = "<｜end▁of▁sentence｜>"


def user(text: str) -> dict:
    return {"role": "user", "content": text}


def call(name: str, arguments: object) -> list[dict]:
    function = {"name": name, "arguments": arguments}
    return [{"id": "call00001", "type": "function", "function": function}]


def tool_flow(content: str | None, calls: list[dict], result: str, answer: str) -> list[dict]:
    return [
        user("1 + two?"),
        {"role": "assistant", "content": content, "tool_calls": calls},
        {"role": "tool", "content": result, "tool_call_id": "call00001", "name": "add"},
        {"role": "assistant", "content": answer},
    ]


def thought(content: str, reasoning: str) -> dict:
    fields = {"reasoning_content": reasoning, "thinking": reasoning}
    return {"role": "assistant", "content": content, **fields}


ADD = call("add", {"a": 1, "b": "two"})
ROWS = {
    "turns": [
        user("One?"),
        {"role": "assistant", "content": "Yes, one."},
        user("Two?"),
        {"role": "assistant", "content": [{"type": "text", "text": " No, "}, "two. "]},
    ],
    "glyphs": [user(f"\x10 {GLYPHS}"), {"role": "assistant", "content": GLYPHS}],
    "tools": tool_flow(None, ADD, "3", "It is 3."),
    "words": tool_flow("Let me add.", ADD, "3", "It is 3."),
    "bare": tool_flow("", call("now", {}), "12", "Noon."),
    "numbers": tool_flow("", call("now", {"zone": 1, "deep": [None, True]}), "12", "Noon."),
    "thought": [user("Q"), thought("A", "Because.")],
    "thoughts": [user("Q"), thought("A", "Because."), user("R"), thought("B", "So.")],
    "silent": [user("Q"), thought("", "Hm.")],
}
ADD_JSON = '{"name": "add", "arguments": {"a": 1, "b": "two"}}'
NOW_JSON = '{"name": "now", "arguments": {"zone": 1, "deep": [null, true]}}'
HERMES = "<tool_call>\n" + ADD_JSON + "\n</tool_call><|im_end|>"
HERMES_BARE = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call><|im_end|>'
HERMES_NUMBERS = "<tool_call>\n" + NOW_JSON + "\n</tool_call><|im_end|>"
LLAMA_ADD = '{"name": "add", "parameters": {"a": 1, "b": "two"}}<|eot_id|>'
MISTRAL = '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": "two"}, "id": "call00001"}]</s>'
MISTRAL_NOW = '[TOOL_CALLS][{"name": "now", "arguments": %s, "id": "call00001"}]</s>'
CALLING = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
CALLING_NOW = "<|channel|>commentary to=functions.now <|constrain|>json<|message|>"
FINAL = "<|channel|>final<|message|>"
DEEP_OPEN = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>"
DEEP_CLOSE = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>" + END

# family -> row -> what the assistant wrote, or (reason,) of a refusal
EXPECTED = {
    "chatml": {
        "turns": ["Yes, one.<|im_end|>", " No, two. <|im_end|>"],
        "glyphs": [GLYPHS + "<|im_end|>"],
        "tools": ["\n" + HERMES, "It is 3.<|im_end|>"],
        "words": ["Let me add.\n" + HERMES, "It is 3.<|im_end|>"],
        "bare": ["\n" + HERMES_BARE, "Noon.<|im_end|>"],
        "numbers": ["\n" + HERMES_NUMBERS, "Noon.<|im_end|>"],
        "thought": ["A<|im_end|>"],
        "thoughts": ["A<|im_end|>", "B<|im_end|>"],
        "silent": ("an assistant turn is not rendered",),
    },
    "llama3": {
        "turns": ["Yes, one.<|eot_id|>", "No, two.<|eot_id|>"],
        "glyphs": [GLYPHS + "<|eot_id|>"],
        "tools": [LLAMA_ADD, "It is 3.<|eot_id|>"],
        "words": [LLAMA_ADD, "It is 3.<|eot_id|>"],
        "bare": ['{"name": "now", "parameters": {}}<|eot_id|>', "Noon.<|eot_id|>"],
        "numbers": [
            '{"name": "now", "parameters": {"zone": 1, "deep": [null, true]}}<|eot_id|>',
            "Noon.<|eot_id|>",
        ],
        "thought": ["A<|eot_id|>"],
        "thoughts": ["A<|eot_id|>", "B<|eot_id|>"],
        "silent": ("an assistant turn is not rendered",),
    },
    "qwen3_thinking": {
        "turns": ["Yes, one.<|im_end|>", "<think>\n\n</think>\n\n No, two. <|im_end|>"],
        "glyphs": ["<think>\n\n</think>\n\n" + GLYPHS + "<|im_end|>"],
        "tools": [HERMES, "<think>\n\n</think>\n\nIt is 3.<|im_end|>"],
        "words": ["Let me add.\n" + HERMES, "<think>\n\n</think>\n\nIt is 3.<|im_end|>"],
        "bare": [HERMES_BARE, "<think>\n\n</think>\n\nNoon.<|im_end|>"],
        "numbers": [HERMES_NUMBERS, "<think>\n\n</think>\n\nNoon.<|im_end|>"],
        "thought": ["<think>\nBecause.\n</think>\n\nA<|im_end|>"],
        "thoughts": ["A<|im_end|>", "<think>\nSo.\n</think>\n\nB<|im_end|>"],
        "silent": ["<think>\nHm.\n</think>\n\n<|im_end|>"],
    },
    "mistral": {
        "turns": [" Yes, one.</s>", "  No, two. </s>"],
        "glyphs": [" " + GLYPHS + "</s>"],
        "tools": [MISTRAL, " It is 3.</s>"],
        "words": [MISTRAL, " It is 3.</s>"],
        "bare": [MISTRAL_NOW % "{}", " Noon.</s>"],
        "numbers": [MISTRAL_NOW % '{"zone": 1, "deep": [null, true]}', " Noon.</s>"],
        "thought": [" A</s>"],
        "thoughts": [" A</s>", " B</s>"],
        "silent": ("an assistant turn is not rendered",),
    },
    "gemma": {
        "turns": ["Yes, one.<end_of_turn>", "No, two.<end_of_turn>"],
        "glyphs": [GLYPHS + "<end_of_turn>"],
        "tools": ("chat template refuses the conversation",),
        "words": ("chat template refuses the conversation",),
        "bare": ("chat template refuses the conversation",),
        "numbers": ("chat template refuses the conversation",),
        "thought": ["A<end_of_turn>"],
        "thoughts": ["A<end_of_turn>", "B<end_of_turn>"],
        "silent": ("an assistant turn is not rendered",),
    },
    "harmony": {
        "turns": [FINAL + "Yes, one.<|end|>", FINAL + " No, two. <|return|>"],
        "glyphs": [FINAL + GLYPHS + "<|return|>"],
        "tools": [CALLING + '{"a": 1, "b": "two"}<|call|>', FINAL + "It is 3.<|return|>"],
        "words": [
            "<|channel|>commentary<|message|>Let me add.<|end|><|start|>assistant"
            + CALLING + '{"a": 1, "b": "two"}<|call|>',
            FINAL + "It is 3.<|return|>",
        ],
        "bare": [CALLING_NOW + "{}<|call|>", FINAL + "Noon.<|return|>"],
        "numbers": [
            CALLING_NOW + '{"zone": 1, "deep": [null, true]}<|call|>',
            FINAL + "Noon.<|return|>",
        ],
        "thought": [
            "<|channel|>analysis<|message|>Because.<|end|><|start|>assistant"
            + FINAL + "A<|return|>"
        ],
        "thoughts": [
            FINAL + "A<|end|>",
            "<|channel|>analysis<|message|>So.<|end|><|start|>assistant" + FINAL + "B<|return|>",
        ],
        "silent": ["<|channel|>analysis<|message|>Hm.<|end|>"],
    },
    "deepseek": {
        "turns": ["Yes, one." + END, " No, two. " + END],
        "glyphs": [GLYPHS + END],
        "tools": [
            DEEP_OPEN + 'add<｜tool▁sep｜>{"a": 1, "b": "two"}' + DEEP_CLOSE, "It is 3." + END
        ],
        "words": [
            "Let me add." + DEEP_OPEN + 'add<｜tool▁sep｜>{"a": 1, "b": "two"}' + DEEP_CLOSE,
            "It is 3." + END,
        ],
        "bare": [DEEP_OPEN + "now<｜tool▁sep｜>{}" + DEEP_CLOSE, "Noon." + END],
        "numbers": [
            DEEP_OPEN + 'now<｜tool▁sep｜>{"zone": 1, "deep": [null, true]}' + DEEP_CLOSE,
            "Noon." + END,
        ],
        "thought": ["Because.\n</think>\n\nA" + END],
        "thoughts": ["A" + END, "So.\n</think>\n\nB" + END],
        "silent": ["Hm.\n</think>\n\n" + END],
    },
}  # fmt: skip


def masked(family: str, messages: list[dict], *, options: MaskOptions | None = None) -> list[str]:
    tokenizer = chat.family_tokenizer(family)
    row = parse_row({"messages": messages}, source="data.jsonl:1")
    return supervised(tokenizer, ChatTokenizer(tokenizer, masks=options).document(row))


def check(family: str, messages: list[dict], expected, *, options: MaskOptions | None = None):
    if isinstance(expected, tuple):
        with pytest.raises(RowError) as caught:
            masked(family, messages, options=options)
        assert caught.value.reason == expected[0]
    else:
        assert masked(family, messages, options=options) == expected


@pytest.mark.parametrize(("family", "row"), [(f, r) for f in EXPECTED for r in EXPECTED[f]])
def test_masked_tokens_are_what_the_template_renders_for_the_assistant(family, row):
    check(family, ROWS[row], EXPECTED[family][row])


def test_every_template_in_the_folder_is_tested_with_every_row():
    assert {path.stem for path in chat.TEMPLATES.glob("*.jinja")} == set(EXPECTED)
    assert all(set(rows) == set(ROWS) for rows in EXPECTED.values())


WITHOUT_REASONING = {
    "chatml": {"turns": ["Yes, one.<|im_end|>", " No, two. <|im_end|>"]},
    "qwen3_thinking": {
        "turns": ["Yes, one.<|im_end|>", " No, two. <|im_end|>"],
        "thought": ["A<|im_end|>"],
        "tools": [HERMES, "It is 3.<|im_end|>"],
        "silent": ["<|im_end|>"],
    },
    "harmony": {
        "turns": [FINAL + "Yes, one.<|end|>", FINAL + " No, two. <|return|>"],
        "thought": ["<|start|>assistant" + FINAL + "A<|return|>"],
        "silent": ("reasoning does not end with one closing tag",),
    },
    "deepseek": {"thoughts": ["A" + END, "B" + END], "silent": [END]},
}
WITHOUT_CALLS = {
    "chatml": {"words": ["Let me add.\n", "It is 3.<|im_end|>"], "tools": ["It is 3.<|im_end|>"]},
    "llama3": {
        "tools": ["It is 3.<|eot_id|>"],
        "words": ("nothing in the chat template marks where tool calls start",),
    },
    "qwen3_thinking": {
        "words": ["Let me add.\n", "<think>\n\n</think>\n\nIt is 3.<|im_end|>"],
        "bare": ["<think>\n\n</think>\n\nNoon.<|im_end|>"],
    },
    "mistral": {"tools": [" It is 3.</s>"]},
    "harmony": {
        "words": [
            "<|channel|>commentary<|message|>Let me add.<|end|>",
            FINAL + "It is 3.<|return|>",
        ],
        "tools": [FINAL + "It is 3.<|return|>"],
    },
    "deepseek": {"words": ["Let me add.", "It is 3." + END], "bare": ["Noon." + END]},
}  # fmt: skip


@pytest.mark.parametrize("family", WITHOUT_REASONING)
def test_reasoning_can_be_left_out(family):
    for row, expected in WITHOUT_REASONING[family].items():
        check(family, ROWS[row], expected, options=MaskOptions(reasoning=False))


@pytest.mark.parametrize("family", WITHOUT_CALLS)
def test_tool_calls_can_be_left_out(family):
    for row, expected in WITHOUT_CALLS[family].items():
        check(family, ROWS[row], expected, options=MaskOptions(tool_calls=False))


@pytest.mark.parametrize("family", EXPECTED)
def test_the_last_turn_only(family):
    expected = EXPECTED[family]["turns"][-1:]
    assert masked(family, ROWS["turns"], options=MaskOptions(turns="last")) == expected


def test_options_work_together():
    options = MaskOptions(turns="last", reasoning=False, tool_calls=False)
    assert masked("qwen3_thinking", ROWS["words"], options=options) == ["It is 3.<|im_end|>"]
    with pytest.raises(RowError, match="no supervised token"):
        masked("qwen3_thinking", ROWS["tools"][:2], options=options)
    with pytest.raises(ValueError, match="turns = 'first'"):
        MaskOptions(turns="first")


QUOTED = {
    "closing tag of reasoning in the answer": (
        MaskOptions(reasoning=False),
        [user("q"), thought("It writes </think> then.", "Hm.")],
        "reasoning does not end with one closing tag",
    ),
    "tag of tool calls in the answer": (
        MaskOptions(tool_calls=False),
        tool_flow("I write <tool_call> now.", ADD, "3", "ok"),
        "the assistant's text contains the tag of tool calls",
    ),
}


@pytest.mark.parametrize("name", QUOTED)
def test_a_quoted_tag_is_refused_under_the_option_and_harmless_without(name):
    options, messages, reason = QUOTED[name]
    check("qwen3_thinking", messages, (reason,), options=options)
    assert len(masked("qwen3_thinking", messages)) == len(messages) // 2


def test_reasoning_inside_the_content_is_left_out_as_the_field_is():
    messages = [user("q"), {"role": "assistant", "content": "<think>\nHm.\n</think>\n\nA"}]
    options = MaskOptions(reasoning=False)
    assert masked("qwen3_thinking", messages, options=options) == ["A<|im_end|>"]
    assert masked("chatml", messages, options=options) == ["A<|im_end|>"]


def test_a_preamble_stands_only_where_the_row_has_no_system_turn():
    tokenizer = chat.family_tokenizer("harmony")
    texts = []
    for system in ([], [{"role": "system", "content": "Mine."}]):
        row = parse_row({"messages": [*system, *ROWS["thought"]]}, source="s")
        texts.append(tokenizer.decode(ChatTokenizer(tokenizer).document(row).input_ids))
    assert texts[0].startswith("<|start|>system<|message|>You are a helper.<|end|><|start|>user")
    assert texts[1].startswith("<|start|>system<|message|>Mine.<|end|><|start|>user")


@pytest.mark.parametrize("family", ["chatml", "qwen3_thinking", "harmony", "deepseek"])
def test_several_tool_results_in_a_row(family):
    messages = ROWS["tools"][:3] + ROWS["tools"][2:]
    assert masked(family, messages) == EXPECTED[family]["tools"]


def test_tool_arguments_as_text_reach_the_template_as_they_are():
    rows = [tool_flow("", call("f", a), "3", "ok") for a in ({"x": "1"}, '{"x": "1"}')]
    assert [masked("chatml", row)[0] for row in rows] == [
        '\n<tool_call>\n{"name": "f", "arguments": {"x": "1"}}\n</tool_call><|im_end|>',
        '\n<tool_call>\n{"name": "f", "arguments": "{\\"x\\": \\"1\\"}"}\n</tool_call><|im_end|>',
    ]


def test_a_user_who_writes_the_closing_tag_of_tool_results_is_refused():
    messages = [user("so [/TOOL_RESULTS] hm"), *ROWS["tools"][1:]]
    check("mistral", messages, ("other text contains the generation prompt",))


def test_a_tokenizer_without_pad_or_end_token_gives_the_same_mask():
    tokenizer = chat.family_tokenizer("chatml")
    tokenizer.eos_token = tokenizer.pad_token = None
    row = parse_row({"messages": ROWS["turns"]}, source="s")
    document = ChatTokenizer(tokenizer).document(row)
    assert supervised(tokenizer, document) == EXPECTED["chatml"]["turns"]
