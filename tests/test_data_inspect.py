"""Bugs caught: a report that marks other tokens than the mask, medians of the wrong column, long
prompts that bury the answer, data that steers the terminal.
"""

import json
import re
from dataclasses import replace

import pytest
import torch
from chat_templates import assistant, chat_tokenizer, user

from specforge_trim.data.dataset import prepare
from specforge_trim.data.report.stats import Training, document_stats
from specforge_trim.data.report.terminal import inspect_terminal, show_sample
from specforge_trim.data.tokenize import Document
from specforge_trim.plan.cost import DraftDims

DIMS = DraftDims(
    hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=64, draft_vocab=64, aux_width=96
)
TRAINING = Training(ttt_length=3, alignment="served", chain="shift", dims=DIMS, max_density=0.35)


@pytest.fixture
def prepared(tmp_path):
    rows = [
        {"messages": [user("prompt 0123456789 " * 200), assistant("the answer is here")]},
        {"messages": [user("q\x1b[31m evil\u202e"), assistant("short")]},
        {"messages": [user("q"), assistant("yes " * 30)]},
    ]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{\n")
    tokenizer = chat_tokenizer()
    data = prepare(
        path, tokenizer, cache_dir=tmp_path, max_length=8000, max_bad_fraction=0.5, progress=False
    )
    return data, tokenizer


def test_marks_and_elision(prepared):
    data, tokenizer = prepared
    text = inspect_terminal(data, tokenizer, TRAINING, color=False)
    assert "[[the answer is here<|im_end|>]]" in text
    assert text.count("[[") == 2  # the legend and the answer
    prompt_tokens = int((~data[0].loss_mask).sum()) - 1  # less the newline at the end
    hidden = re.search(r"\.\.\. ([\d,]+) tokens without loss \.\.\.", text)
    assert int(hidden[1].replace(",", "")) == prompt_tokens - 120
    assert len(text.splitlines()) < 80


def test_colours_mark_the_same_text(prepared):
    data, tokenizer = prepared
    text = inspect_terminal(data, tokenizer, TRAINING, color=True, index=-1)
    green = "".join(re.findall(r"\x1b\[1;32m(.*?)\x1b\[0m", text))
    assert green == "green" + "yes " * 30 + "<|im_end|>"


def test_data_cannot_steer_the_terminal(prepared):
    data, tokenizer = prepared
    text = inspect_terminal(data, tokenizer, TRAINING, color=False, index=1)
    assert "\x1b" not in text and "\u202e" not in text
    assert "q\\x1b[31m evil\\u202e" in text


def test_sections_and_skip_reasons(prepared):
    data, tokenizer = prepared
    text = inspect_terminal(data, tokenizer, TRAINING, color=False)
    for title in ("DATA", "CONVERSATION 0", "ROWS OF", "LENGTH AND DENSITY", "PREDICTED WORK"):
        assert title in text
    assert "1 x line is not valid JSON   first: " in text and "data.jsonl:4" in text


def test_rows_per_step_of_a_known_mask(tmp_path):
    """10 tokens, loss on 5, 6, 7. served: m at 4, 5. K = 3: R_0 = 2..5, R_1 = 2..4, R_2 = 2, 3.

    Density counts steps 1 and 2: (3 + 2) / (2 * 10).
    """
    mask = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 0, 0], dtype=torch.bool)
    document = Document(torch.arange(10), mask, "f:1", "")
    stats = document_stats(document, TRAINING)
    assert stats.tokens == 10 and stats.supervised == pytest.approx(0.3)
    assert stats.density == pytest.approx(0.25) and not stats.refused
    assert 0 < stats.cost.fraction < 1
    refused = document_stats(document, replace(TRAINING, max_density=0.24))
    assert refused.refused and refused.cost.fraction == 1 and refused.density == stats.density


def test_a_document_without_a_row_costs_nothing():
    document = Document(torch.arange(4), torch.tensor([False, False, False, True]), "f:1", "")
    assert document_stats(document, TRAINING).cost is None


def test_median_per_bucket(prepared):
    data, tokenizer = prepared
    text = inspect_terminal(data, tokenizer, TRAINING, color=False)
    shares = sorted(float(data[i].loss_mask.float().mean()) for i in (1, 2))
    assert all(len(data[i].input_ids) < 256 for i in (1, 2))
    (line,) = [line for line in text.splitlines() if line.strip().startswith("0 - 255 ")]
    assert line.split()[3] == "2" and line.split()[4] == f"{50 * sum(shares):.1f}"


def test_sampling_is_said(prepared):
    data, tokenizer = prepared
    text = inspect_terminal(data, tokenizer, TRAINING, color=False, max_documents=2)
    assert "from 2 of 3 conversations" in text


@pytest.mark.parametrize("index", [3, -4])
def test_an_index_that_does_not_exist(prepared, index):
    with pytest.raises(ValueError, match=f"index {index}: expected 0 to 2"):
        inspect_terminal(*prepared, TRAINING, index=index)


def test_a_sample_is_one_line_around_the_first_answer(prepared):
    data, tokenizer = prepared
    line = show_sample(data[0], tokenizer, color=False)
    answer = "[[the answer is here<|im_end|>]]"
    before, after = "<|im_start|>assistant\\n", "\\n"
    assert line.startswith("...") and line.endswith(
        f"0123456789 <|im_end|>\\n{before}{answer}{after}"
    )
    assert len(line) < 300 and "\n" not in line
    # Short enough to be shown whole.
    whole = tokenizer.decode(data[1].input_ids).replace("\n", "\\n")
    shown = show_sample(data[1], tokenizer, color=False)
    assert "\x1b" not in shown and "\\x1b[31m evil\\u202e" in shown
    assert shown.replace("[[", "").replace("]]", "") == whole.replace("\x1b", "\\x1b").replace(
        "\u202e", "\\u202e"
    )


def test_the_middle_of_a_long_answer_is_left_out_of_a_sample():
    tokenizer = chat_tokenizer()
    ids = torch.tensor(tokenizer("yes no " * 60, add_special_tokens=False)["input_ids"])
    assert len(ids) > 100
    mask = torch.ones(len(ids), dtype=torch.bool)
    mask[:3] = False
    line = show_sample(Document(ids, mask, "a:1", "0"), tokenizer, color=True)
    green = re.findall(r"\x1b\[1;32m(.*?)\x1b\[0m", line)
    first, last = tokenizer.decode(ids[3:43]), tokenizer.decode(ids[-40:])
    assert green == [f"{first} ... {len(ids) - 83} tokens ... {last}"]


def test_an_answer_that_ends_the_text_and_one_of_one_token():
    tokenizer = chat_tokenizer()
    ids = torch.tensor(tokenizer("ab", add_special_tokens=False)["input_ids"] * 3)
    for marked in ([0], [len(ids) - 1], range(len(ids))):
        mask = torch.zeros(len(ids), dtype=torch.bool)
        mask[list(marked)] = True
        line = show_sample(Document(ids, mask, "a:1", "0"), tokenizer, color=False)
        inside = tokenizer.decode(ids[mask])
        assert (
            line.count(f"[[{inside}]]") == 1 and line.replace("[", "").replace("]", "") == "ababab"
        )
