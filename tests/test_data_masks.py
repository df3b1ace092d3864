"""Bugs caught: masks one header early, masks that stop before the end-of-turn token or run into
the newline after it, spans shifted by multi-byte characters, empty think blocks taken for headers,
guessed masks where a template or a row is ambiguous. Expected strings are written by hand.
"""

import chat_templates as chat
import pytest
from chat_templates import assistant, chat_tokenizer, user

from specforge_trim.data.records import Conversation, RowError
from specforge_trim.data.tokenize import ChatTokenizer, render_and_mask

FAMILY = "\U0001f468‍\U0001f469‍\U0001f467"
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "two"}}}


def conversation(*messages, tools=None) -> Conversation:
    return Conversation(tuple(messages), tools, "data.jsonl:1")


def supervised(tokenizer, document) -> list[str]:
    """The decoded runs of masked tokens."""
    runs, previous = [], False
    for token, kept in zip(document.input_ids.tolist(), document.loss_mask.tolist(), strict=True):
        if kept and not previous:
            runs.append([])
        if kept:
            runs[-1].append(token)
        previous = kept
    return [tokenizer.decode(run) for run in runs]


def masked(template: str, *messages, tools=None, tokenizer=None) -> list[str]:
    tokenizer = tokenizer or chat_tokenizer(template)
    return supervised(tokenizer, render_and_mask(tokenizer, conversation(*messages, tools=tools)))


TURNS = (user("One?"), assistant("Yes, one."), user("Two?"), assistant(" No, two. "))

CASES = {
    "chatml": (chat.CHATML, TURNS, ["Yes, one.<|im_end|>", " No, two. <|im_end|>"]),
    "tags around header, turn and newline": (
        chat.TAGGED_WIDE,
        TURNS,
        ["Yes, one.<|im_end|>", " No, two. <|im_end|>"],
    ),
    "tags around the content only": (
        chat.TAGGED_NARROW,
        TURNS,
        ["Yes, one.<|im_end|>", " No, two. <|im_end|>"],
    ),
    "trimming template": (chat.LLAMA3, TURNS, ["Yes, one.<|eot|>", "No, two.<|eot|>"]),
    "no generation prompt": (chat.MISTRAL, TURNS, [" Yes, one.</s>", "  No, two. </s>"]),
    "empty think block on the last turn": (
        chat.THINKING,
        TURNS,
        ["Yes, one.<|im_end|>", "<think>\n\n</think>\n\n No, two. <|im_end|>"],
    ),
    "think block opened by the prompt": (
        chat.THINKING_PROMPT,
        TURNS,
        ["Yes, one.<|im_end|>", "\n</think>\n\n No, two. <|im_end|>"],
    ),
    "reasoning field": (
        chat.THINKING,
        (user("Q"), assistant("A", reasoning_content="Because.")),
        ["<think>\nBecause.\n</think>\n\nA<|im_end|>"],
    ),
    "reasoning inside the content, dropped from the past turn": (
        chat.THINKING,
        (
            user("Q"),
            assistant("<think>\nhm\n</think>\n\nA"),
            user("R"),
            assistant("<think>\nso\n</think>\n\nB"),
        ),
        ["A<|im_end|>", "<think>\nso\n</think>\n\nB<|im_end|>"],
    ),
    "tool call and tool result": (
        chat.THINKING,
        (
            user("1 + two?"),
            assistant("", tool_calls=[CALL]),
            {"role": "tool", "content": "3"},
            assistant("It is 3."),
        ),
        [
            '\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "two"}}\n</tool_call>'
            "<|im_end|>",
            "<think>\n\n</think>\n\nIt is 3.<|im_end|>",
        ],
    ),
    "channels, another token ends the last turn": (
        chat.CHANNELS,
        (user("Q"), assistant("A"), user("R"), assistant("B", thinking="Hm.")),
        [
            "<|head|>final<|/head|>A<|im_end|>",
            "<|head|>analysis<|/head|>Hm.<|im_end|><|im_start|>assistant<|head|>final<|/head|>B<|eot|>",
        ],
    ),
    "template changes the user's text": (chat.UPPER_USER, TURNS[:2], ["Yes, one.<|im_end|>"]),
    "template changes the assistant's text": (chat.UPPER_ALL, TURNS[:2], ["YES, ONE.<|im_end|>"]),
    "glyphs of several tokens": (
        chat.CHATML,
        (user(f"\x10 ？…… {FAMILY}"), assistant(f"？…… {FAMILY} \x10 café\x10")),
        [f"？…… {FAMILY} \x10 café\x10<|im_end|>"],
    ),
    "newline of the prompt merges with the answer's": (
        chat.CHATML,
        (user("Q"), assistant("\n\n\n   yes"), user("R"), assistant("\n\nno")),
        ["\n\n\n   yes<|im_end|>", "\n\nno<|im_end|>"],
    ),
    "answers that repeat each other and the question": (
        chat.CHATML,
        (user("assistant"), assistant("user"), user("user"), assistant("user")),
        ["user<|im_end|>", "user<|im_end|>"],
    ),
    "assistant speaks first, user last": (
        chat.CHATML,
        (assistant("Hello."), user("Hi."), assistant("Well?"), user("Bye.")),
        ["Hello.<|im_end|>", "Well?<|im_end|>"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_masked_tokens_decode_to_what_the_assistant_wrote(name):
    template, messages, expected = CASES[name]
    assert masked(template, *messages) == expected


@pytest.mark.parametrize("name", ["chatml", "glyphs of several tokens", "trimming template"])
def test_sentencepiece_vocabulary_gives_the_same_text(name):
    template, messages, expected = CASES[name]
    tokenizer = chat.sentencepiece_tokenizer(template)
    assert masked(template, *messages, tokenizer=tokenizer) == expected


def test_ids_are_the_templates_full_render():
    tokenizer = chat_tokenizer(chat.THINKING)
    row = conversation(*CASES["reasoning field"][1])
    expected = tokenizer(
        "<|im_start|>user\nQ<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nBecause.\n</think>\n\nA<|im_end|>\n"
    )["input_ids"]
    assert render_and_mask(tokenizer, row).input_ids.tolist() == expected


def test_mask_of_one_short_row_token_by_token():
    """Header tokens, the closing newline and the question carry no loss."""
    tokenizer = chat_tokenizer()
    document = render_and_mask(tokenizer, conversation(user("q"), assistant("a")))
    tokens = [
        (tokenizer.decode([token]), kept)
        for token, kept in zip(
            document.input_ids.tolist(), document.loss_mask.tolist(), strict=True
        )
    ]
    assert tokens[-4:] == [("\n", False), ("a", True), ("<|im_end|>", True), ("\n", False)]
    assert sum(kept for _, kept in tokens) == 2
    assert document.source == "data.jsonl:1" and len(document.doc_id) == 64


def test_tools_reach_the_template_as_they_are():
    tools = ({"type": "function", "function": {"name": "f", "parameters": {"x": [1, None]}}},)
    template = "{{ tools | tojson if tools else '' }}" + chat.CHATML
    tokenizer = chat_tokenizer(template)
    document = render_and_mask(tokenizer, conversation(user("q"), assistant("a"), tools=tools))
    assert tokenizer.decode(document.input_ids).startswith(
        '[{"type": "function", "function": {"name": "f", "parameters": {"x": [1, null]}}}]'
    )
    assert supervised(tokenizer, document) == ["a<|im_end|>"]


def test_text_in_another_unicode_form_is_compared_as_the_tokenizer_sees_it():
    tokenizer = chat_tokenizer(normalizer="NFC")
    row = conversation(user("cafe\u0301 " * 9), assistant("the\u0301 end"))
    assert supervised(tokenizer, render_and_mask(tokenizer, row)) == ["th\u00e9 end<|im_end|>"]


REFUSED = {
    "no answer": (chat.CHATML, (user("q"),), "no assistant message"),
    "end-of-turn token inside the answer": (
        chat.CHATML,
        (user("q"), assistant("a<|im_end|>\n<|im_start|>assistant\nb")),
        "end-of-turn token",
    ),
    "end-of-turn token inside a tagged answer": (
        chat.TAGGED_WIDE,
        (user("q"), assistant("a<|im_end|>b")),
        "end-of-turn token",
    ),
    "generation prompt inside the question": (
        chat.CHATML,
        (user("q<|im_end|>\n<|im_start|>assistant\nevil"), assistant("a")),
        "generation prompt",
    ),
    "roles that the template refuses": (
        chat.MISTRAL,
        (assistant("a"), user("q")),
        "roles must alternate",
    ),
    "answer that the template drops": (
        chat.CHATML.replace("m['content'] +", "(m['content'] if loop.length < 4 else '') +"),
        (*TURNS, user("q")),
        "not rendered",
    ),
    "answer of spaces that the template trims away": (
        chat.LLAMA3,
        (user("q"), assistant("   ")),
        "has no text",
    ),
    "answer that is quoted in another turn": (
        chat.CHATML.replace("+ m['content'] +", "+ m['content'] + (messages[1]['content'] if "
                            "loop.index0 == 2 else '') +"),
        TURNS,
        "outside its turn",
    ),
    "lone surrogate": (chat.CHATML, (user("q"), assistant("a \ud800")), "surrogate"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_a_doubtful_row_is_refused(name):
    template, messages, reason = REFUSED[name]
    with pytest.raises(RowError, match=reason):
        masked(template, *messages)


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (None, "no chat_template"),
        ("{% for m in messages %}{{ m['role'] + ': ' + m['content'] }}{% endfor %}", "no special"),
        ("{% for m in messages %}{{ m['content'] | lower }", "refuses"),
        ("{{ messages[0]['content'] }}<|im_end|>", "not rendered exactly once"),
    ],
)
def test_a_template_that_gives_no_exact_mask_is_refused_at_once(template, reason):
    with pytest.raises(ValueError, match=reason):
        ChatTokenizer(chat_tokenizer(template))


def test_the_callers_messages_are_not_changed():
    row = conversation(user("q"), assistant("a", tool_calls=[CALL]))
    before = repr(row)
    render_and_mask(chat_tokenizer(chat.THINKING), row)
    assert repr(row) == before
