"""Bugs caught: a direct render that differs from apply_chat_template (reasoning under its other
names, tools, special tokens, the error a template raises), one that stays in use where it differs,
and one that is quietly never used.
"""

import chat_templates as chat
import pytest
from chat_templates import assistant, chat_tokenizer, user
from transformers.utils import chat_template_utils

from specforge_trim.data.render import Renderer

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"é": [1, None, True]}}}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "ü\n"}}}
ROWS = [
    [user("One?"), assistant("Yes.")],
    [user("  x "), assistant(""), user("y"), assistant("\x10 …… ")],
    [{"role": "system", "content": "s"}, user("One?"), assistant("Yes.")],
    [user("q"), assistant("a") | {"reasoning": "because"}],
    [user("q"), assistant("a") | {"thinking": "hm"}],
    [user("q"), assistant("a") | {"reasoning_content": "so"}],
    [
        user("1 + 2?"),
        assistant("") | {"tool_calls": [CALL]},
        {"role": "tool", "content": "3", "tool_call_id": "call00001", "name": "add"},
        assistant("It is 3."),
    ],
]
# Prints whatever a template may read.
EVERYTHING = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson(indent=1) }}{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ m.reasoning_content }}{{ m.thinking }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    "{{ documents }}{% if add_generation_prompt %}<assistant>{% endif %}{{ unknown }}"
)
SOURCES = {
    "everything": EVERYTHING,
    **{path.stem: path.read_text() for path in sorted(chat.TEMPLATES.glob("*.jinja"))},
}


def public(tokenizer, messages, tools, prompt) -> str:
    options = {"tools": tools, "tokenize": False, "add_generation_prompt": prompt}
    try:
        return tokenizer.apply_chat_template(messages, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def ours(renderer, messages, tools, prompt) -> str:
    try:
        return renderer(messages, tools, generation_prompt=prompt)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def test_there_are_the_families():
    assert len(SOURCES) == 1 + 7, sorted(SOURCES)


@pytest.mark.parametrize("name", SOURCES)
def test_it_gives_what_apply_chat_template_gives(name):
    """Twice: the second time no message has new keys."""
    tokenizer = chat_tokenizer(SOURCES[name])
    renderer = Renderer(tokenizer)
    for _ in range(2):
        for row in ROWS:
            for tools in (None, [TOOL]):
                for prompt in (False, True):
                    expected = public(tokenizer, row, tools, prompt)
                    assert ours(renderer, row, tools, prompt) == expected


def test_the_second_row_does_not_ask_transformers(monkeypatch):
    tokenizer = chat_tokenizer(EVERYTHING)
    renderer = Renderer(tokenizer)
    expected = [public(tokenizer, row, [TOOL], False) for row in ROWS]
    assert [ours(renderer, row, [TOOL], False) for row in ROWS] == expected
    monkeypatch.setattr(type(tokenizer), "apply_chat_template", None)
    assert [ours(renderer, row, [TOOL], False) for row in ROWS] == expected
    with pytest.raises(TypeError, match="not callable"):
        renderer([user("q") | {"name": "new key"}], None)


@pytest.mark.parametrize("other", ["no", "{{ raise_exception('no') }}", None])
def test_where_it_would_differ_transformers_has_the_word(monkeypatch, other):
    """As in another version: its compiled template gives something else, or cannot be had."""
    tokenizer = chat_tokenizer(chat.CHATML)
    expected = [public(tokenizer, row, None, False) for row in ROWS]
    real = chat_template_utils._compile_jinja_template
    seen = None if other is None else lambda source: real(other)
    apply = tokenizer.apply_chat_template

    def untouched(*args, **options):  # transformers itself has the real one
        monkeypatch.setattr(chat_template_utils, "_compile_jinja_template", real)
        text = apply(*args, **options)
        monkeypatch.setattr(chat_template_utils, "_compile_jinja_template", seen)
        return text

    monkeypatch.setattr(tokenizer, "apply_chat_template", untouched)
    monkeypatch.setattr(chat_template_utils, "_compile_jinja_template", seen)
    renderer = Renderer(tokenizer)
    for _ in range(2):
        assert [ours(renderer, row, None, False) for row in ROWS] == expected


def test_templates_by_name_are_told_apart_by_tools():
    tokenizer = chat_tokenizer(chat.CHATML)
    tagged = "{% generation %}{{ messages | length }}{% endgeneration %}"
    tokenizer.chat_template = {"default": "plain {{ messages | length }}", "tool_use": tagged}
    renderer = Renderer(tokenizer)
    for _ in range(2):
        assert renderer(ROWS[0], None) == "plain 2"
        assert renderer(ROWS[0], [TOOL]) == "2"
    assert not renderer.has_generation_tags(None)
    assert renderer.has_generation_tags([TOOL])
