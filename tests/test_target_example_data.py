"""Catches: a page, a section of it or a task on both sides of the split; degenerate answers in the
committed data; prompts that are not long, or answers that are not short beside them."""

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent.parent / "examples" / "data"
NAMES = (
    "long_prompt.train",
    "long_prompt.heldout",
    "humaneval.train",
    "humaneval.heldout",
)


def rows(name):
    with (FOLDER / f"{name}.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def prompts(name):
    return [row["messages"][0]["content"] for row in rows(name)]


def paragraphs(text):
    found = (" ".join(part.split()) for part in re.split(r"\n\s*\n", text))
    return {part for part in found if len(part) >= 100}


@pytest.mark.parametrize("name", NAMES)
def test_one_question_one_answer(name):
    for row in rows(name):
        assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
        assert all(message["content"].strip() for message in row["messages"])


@pytest.mark.parametrize("name", NAMES)
def test_no_answer_says_eight_words_twice_or_echoes(name):
    for row in rows(name):
        request, answer = (message["content"].lower().split() for message in row["messages"])
        runs = [tuple(answer[i : i + 8]) for i in range(len(answer) - 7)]
        assert len(runs) == len(set(runs)), row["section"]
        assert " ".join(answer) not in " ".join(request), row["section"]


def test_numbers_of_conversations():
    assert 100 <= len(rows("long_prompt.train")) + len(rows("long_prompt.heldout")) <= 150
    assert len(rows("long_prompt.heldout")) >= 8 and len(rows("humaneval.heldout")) >= 8
    assert len(set(prompts("long_prompt.train"))) == len(rows("long_prompt.train"))


def test_prompts_are_long_and_some_very_long():
    """About four characters make a token; README.md has the counts of tokens."""
    lengths = [len(p) for name in NAMES[:2] for p in prompts(name)]
    answers = [len(row["messages"][1]["content"]) for name in NAMES[:2] for row in rows(name)]
    assert min(lengths) > 1200 and max(lengths) < 7500 * 4
    assert sum(length > 4100 * 4 for length in lengths) >= 2
    assert sum(answers) < 0.1 * sum(lengths)


def test_no_page_on_both_sides():
    train, heldout = (
        {row["section"].rpartition("/")[0] for row in rows(name)} for name in NAMES[:2]
    )
    assert len(heldout) >= 8 and not train & heldout
    shared = set().union(*map(paragraphs, prompts("long_prompt.train"))) & set().union(
        *map(paragraphs, prompts("long_prompt.heldout"))
    )
    assert {text for text in shared if not text.startswith("Question:")} == set()


def test_no_task_on_both_sides():
    train, heldout = ({row["section"] for row in rows(name)} for name in NAMES[2:])
    assert not train & heldout
    tasks = {int(section.rpartition("/")[2]) for section in train | heldout}
    assert tasks <= set(range(100))
