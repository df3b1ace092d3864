"""Bugs caught: a page that asks the network or logs an error; marks on other tokens than those of
the mask or the plan; characters of several tokens torn apart; data that writes into the markup.
"""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from chat_templates import assistant, chat_tokenizer, user

from specforge_trim.data.dataset import prepare
from specforge_trim.data.report.html import inspect_html
from specforge_trim.data.report.stats import Training, last_steps
from specforge_trim.data.report.terminal import inspect_terminal
from specforge_trim.plan.cost import DraftDims
from specforge_trim.plan.pack import build_trim_pack

DIMS = DraftDims(
    hidden=32, heads=4, kv_heads=2, head_dim=8, intermediate=64, draft_vocab=64, aux_width=96
)
TRAINING = Training(ttt_length=3, alignment="served", chain="shift", dims=DIMS, max_density=0.35)
MEMORY = {"one chunk": 3_000_000, "weights": 2_000_000}
EVIL = "<script>alert(1)</script> \u202e\x07 & \U0001f468\u200d\U0001f469 caf\u00e9\u2026"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("report")
    rows = [{"messages": [user("prompt " * 300), assistant(EVIL)]}]
    for i in range(40):
        rows.append({"messages": [user("q " * 7 * i), assistant("yes " * (i % 9 + 1))] * 2})
    path = folder / "data.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{<b>\n")
    tokenizer = chat_tokenizer()
    data = prepare(path, tokenizer, cache_dir=folder, max_length=8000, progress=False)
    return data, tokenizer, inspect_html(data, tokenizer, TRAINING, memory=MEMORY)


def articles(page: str) -> list[str]:
    return re.findall(r"<article>.*?</article>", page, re.S)


def spans(article: str) -> list[tuple[set[str], str]]:
    """(classes, text) of each painted span."""
    found = re.findall(r'<span class="(t[^"]*)" title="[^"]*">(.*?)</span>', article, re.S)
    return [(set(classes.split()), html.unescape(text)) for classes, text in found]


def test_marked_tokens_are_those_of_the_mask(prepared):
    _, _, page = prepared
    first = spans(articles(page)[0])
    loss = "".join(text for classes, text in first if "loss" in classes)
    assert loss == EVIL.replace("\u202e", "\\u202e").replace("\x07", "\\x07") + "<|im_end|>"
    assert "tokens without loss</span>" in articles(page)[0]


def test_marked_rows_are_those_of_the_plan(prepared):
    """served, K = 3: the answer's tokens stand at s..e, so rows s - 1 .. e - 2 emit the loss.

    Step i runs the rows from two before them to i before their end.
    """
    data, _, page = prepared
    tokens = data[0].loss_mask.nonzero().flatten()
    start, end = int(tokens[0]) - 1, int(tokens[-1])
    counts = {row: 0 for row in range(len(data[0].loss_mask))}
    for step in range(3):
        for row in range(start - 2, end - step - 1):
            counts[row] += 1
    painted = {}
    for classes, first, last in re.findall(
        r'<span class="(t[^"]*)" title="(\d+)(?:-(\d+))?">', articles(page)[0]
    ):
        kinds = [int(c[1:]) for c in classes.split() if c[0] == "k"]
        painted[int(first)] = kinds[0] if kinds else 0
        assert last or int(first) in counts
    assert painted == {row: counts[row] for row in painted} and max(painted.values()) == 3


def test_last_steps_of_a_known_mask():
    """Rows 4 and 5 with K = 3: R_0 = 2..5, R_1 = 2..4, R_2 = 2, 3 (shown for `inspect` too)."""
    mask = torch.zeros(10, dtype=torch.bool)
    mask[4:6] = True
    pack = build_trim_pack(mask, ttt_length=3)
    assert last_steps(pack).tolist() == [-1, -1, 2, 2, 1, 0, -1, -1, -1, -1]


def test_the_page_is_whole_and_asks_for_nothing(prepared):
    data, _, page = prepared
    assert "<script" not in page and "http" not in page.replace("http-equiv", "")
    assert not re.search(r"(src|href)=\"(?!data:,)", page) and "url(" not in page
    assert "\u202e" not in page and "\x07" not in page
    assert page.count("<svg") == 4 and len(articles(page)) == 8
    assert "line is not valid JSON" in page and "data.jsonl:42" in page
    assert (
        "Expected memory" in page
        and "<td>one chunk</td><td>3</td>" in page
        and "<td>all of it</td><td>5</td>" in page
        and str(len(data)) in page
    )


def test_terminal_paints_rows_and_shows_memory(prepared):
    data, tokenizer, _ = prepared
    text = inspect_terminal(
        data, tokenizer, TRAINING, color=False, paint="rows", memory=MEMORY, index=1
    )
    assert "[[1:1]]" in text and "[[3:3]]" in text  # the legend
    assert re.search(r"\[\[3:.*yes", text, re.S)
    assert "3 MB  one chunk" in text and "5 MB  all of it" in text
    coloured = inspect_terminal(data, tokenizer, TRAINING, color=True, paint="rows", index=1)
    assert "\x1b[38;5;203m" in coloured


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")


def console_of(page: Path, *flags: str) -> str:
    """What a page wrote to the console of headless Chromium without a network."""
    done = subprocess.run(
        [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
         "--host-resolver-rules=MAP * ~NOTFOUND", "--no-first-run", "--enable-logging=stderr",
         f"--user-data-dir={page.parent / 'profile'}", *flags, page.as_uri()],
        capture_output=True, text=True, timeout=90, check=True,
    )  # fmt: skip
    return "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: the report was opened in no browser")
def test_chromium_opens_the_page_without_a_word(prepared, tmp_path):
    noisy, page = tmp_path / "noisy.html", tmp_path / "report.html"
    noisy.write_text("<script>console.error('seen')</script>")
    page.write_text(prepared[2], encoding="utf-8")
    picture = tmp_path / "page.png"
    assert "seen" in console_of(noisy, "--dump-dom")  # or else silence proves nothing
    assert console_of(page, f"--screenshot={picture}", "--window-size=1100,2400") == ""
    assert picture.stat().st_size > 50_000
