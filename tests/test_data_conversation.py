"""Bugs caught: rows that vanish uncounted, one row that stops the whole file, tool schemas that
change type on the way, line numbers that are off, role names that drop a turn.
"""

import json
import random

import pytest

from specforge_trim.data.conversation import BadRow, Conversation, read_conversations

USER, ASSISTANT = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
GOOD = {"messages": [USER, ASSISTANT]}


def read(tmp_path, *rows) -> list[Conversation | BadRow]:
    """Rows are objects, or bytes taken as they are; one per line."""
    path = tmp_path / "data.jsonl"
    path.write_bytes(
        b"".join((r if isinstance(r, bytes) else json.dumps(r).encode()) + b"\n" for r in rows)
    )
    return list(read_conversations(path))


def test_messages_and_sharegpt_read_alike(tmp_path):
    share = {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}
    one, two = read(tmp_path, GOOD, share)
    assert one.messages == two.messages == (USER, ASSISTANT)
    assert one.tools is None and two.tools is None
    path = tmp_path / "data.jsonl"
    assert (one.source, two.source) == (f"{path}:1", f"{path}:2")


def test_tools_as_string_list_null_or_absent(tmp_path):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"a": [None, 1.5]}}}
    rows = read(
        tmp_path,
        GOOD | {"tools": json.dumps([tool])},
        GOOD | {"tools": [tool]},
        GOOD | {"tools": None},
        GOOD,
    )
    assert [row.tools for row in rows] == [(tool,), (tool,), None, None]


def test_tool_arguments_keep_their_type(tmp_path):
    def call(arguments):
        calls = [{"type": "function", "function": {"name": "f", "arguments": arguments}}]
        return {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": calls}]}

    rows = read(tmp_path, call({"a": 1}), call('{"a": 1}'))
    arguments = [r.messages[1]["tool_calls"][0]["function"]["arguments"] for r in rows]
    assert arguments == [{"a": 1}, '{"a": 1}']
    assert rows[0].messages[1]["content"] == ""


def test_other_keys_of_a_message_are_kept_and_nulls_left_out(tmp_path):
    answer = ASSISTANT | {"reasoning_content": "r", "name": "n", "tool_calls": None}
    (row,) = read(tmp_path, {"messages": [USER, answer]})
    assert row.messages[1] == ASSISTANT | {"reasoning_content": "r", "name": "n"}


def test_a_question_without_an_answer_is_a_conversation(tmp_path):
    """Answers can be written by the target later; only training refuses such a row."""
    (row,) = read(tmp_path, {"messages": [USER]})
    assert row.messages == (USER,)


def test_text_parts_are_joined(tmp_path):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    (row,) = read(tmp_path, {"messages": [USER, {"role": "assistant", "content": parts}]})
    assert row.messages[1]["content"] == "ab"


BAD = {
    "not JSON": (b'{"messages": [', "line is not valid JSON"),
    "not UTF-8": (b'{"messages": "\xff"}', "line is not UTF-8"),
    "nested too deeply": (b"[" * 200_000 + b"]" * 200_000, "line is not valid JSON"),
    "huge number": (b'{"a": ' + b"9" * 5000 + b"}", "line is not valid JSON"),
    "a list": (b"5", "row is not a JSON object"),
    "none of the keys": ({"chat": "q"}, "row has none of 'messages', 'conversations'"),
    "messages are text": ({"messages": "q"}, "messages are not a list"),
    "message is text": ({"messages": ["q"]}, "message is not an object"),
    "no messages": ({"messages": []}, "no user message"),
    "system only": ({"messages": [{"role": "system", "content": "s"}]}, "no user message"),
    "assistant only": ({"messages": [ASSISTANT]}, "no user message"),
    "null question": ({"messages": [USER | {"content": None}, ASSISTANT]}, "empty user message"),
    "null answer": (
        {"messages": [USER, ASSISTANT | {"content": None}]},
        "empty assistant message",
    ),
    "empty answer": ({"messages": [USER, ASSISTANT | {"content": ""}]}, "empty assistant message"),
    "blank answer": ({"messages": [USER, ASSISTANT | {"content": " \n"}]}, "empty assistant"),
    "number as content": ({"messages": [USER, ASSISTANT | {"content": 5}]}, "content is not text"),
    "image": (
        {"messages": [USER | {"content": [{"type": "image", "url": "u"}]}, ASSISTANT]},
        "content has a part that is not text",
    ),
    "no role": ({"messages": [{"content": "q"}, ASSISTANT]}, "message has no role"),
    "the model's own name as role": (
        {"messages": [USER, {"role": "my-model", "content": "a"}]},
        "unknown role 'my-model'",
    ),
    "tools are not JSON": (GOOD | {"tools": "{"}, "tools are a string that is not valid JSON"),
    "tool calls are a number": (
        {"messages": [USER, ASSISTANT | {"tool_calls": 5}]},
        "tool_calls are not a list of objects",
    ),
    "a tool call is text": (
        {"messages": [USER, ASSISTANT | {"tool_calls": ["f()"]}]},
        "tool_calls are not a list of objects",
    ),
    "tools are an object": (GOOD | {"tools": {"a": 1}}, "tools are not a list of objects"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_row_is_told_with_its_line_and_does_not_stop_the_file(tmp_path, name):
    row, reason = BAD[name]
    before, bad, after = read(tmp_path, GOOD, row, GOOD)
    assert isinstance(before, Conversation) and isinstance(after, Conversation)
    assert isinstance(bad, BadRow) and bad.reason.startswith(reason), bad
    assert bad.source == f"{tmp_path / 'data.jsonl'}:2"
    assert str(bad).startswith(f"{bad.source}: {reason}")


def test_blank_lines_byte_order_mark_and_crlf(tmp_path):
    line = json.dumps(GOOD).encode()
    rows = read(tmp_path, b"\xef\xbb\xbf" + line + b"\r", b"", b"  ", line)
    assert [row.messages for row in rows] == [(USER, ASSISTANT)] * 2
    assert [row.source.rpartition(":")[2] for row in rows] == ["1", "4"]


def test_null_columns_that_become_text_later_and_one_long_line(tmp_path):
    long = "x" * 30_000_000
    rows = read(
        tmp_path,
        *([GOOD | {"id": None}] * 10_000),
        GOOD | {"id": "text"},
        {"messages": [USER | {"content": long}, ASSISTANT]},
    )
    assert all(isinstance(row, Conversation) for row in rows) and len(rows) == 10_002
    assert rows[-1].messages[0]["content"] == long


@pytest.mark.parametrize(
    ("content", "message"), [(b"[\n{}]", "JSON array"), (b"\x28\xb5\x2f\xfd", "zstd")]
)
def test_another_kind_of_file_is_one_error(tmp_path, content, message):
    path = tmp_path / "data.json"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_conversations(path))


def test_a_missing_file_is_an_os_error_that_names_it(tmp_path):
    with pytest.raises(OSError, match=r"nothing\.jsonl"):
        list(read_conversations(tmp_path / "nothing.jsonl"))


def test_random_damage_ends_in_a_row_or_a_refusal(tmp_path):
    """Bytes flipped, cut and doubled: every line gives exactly one result, none raises."""
    rng = random.Random(0)
    base = json.dumps(GOOD | {"tools": [{"a": {"b": 1}}], "conversations": None}).encode()
    lines = []
    for _ in range(500):
        line = bytearray(base)
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(line))
            kind = rng.randrange(3)
            if kind == 0:
                line[at] = rng.choice(b'{}[]",:0aN\\ \xff')
            elif kind == 1:
                del line[at : at + rng.randint(1, 9)]
            else:
                line[at:at] = line[at : at + rng.randint(1, 9)]
            line = line or bytearray(b"{")
        lines.append(bytes(line).replace(b"\n", b" ").strip() or b"{")
    rows = read(tmp_path, *lines)
    assert len(rows) == 500
    assert {type(row) for row in rows} == {Conversation, BadRow}
