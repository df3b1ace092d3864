"""Runs begun and drafts exported before today's code go on with it (tests/golden/before).

Catches: a checkpoint, an identity or an export of an earlier version that is not read any more, or
is read as something else; a run that begins anew instead of going on; a command that moved.
The doors run in one process of their own, since a parent of forks must not have trained.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tokenizers
import transformers

HERE = Path(__file__).resolve().parent
BEFORE = HERE / "golden" / "before"
EXPECTED = json.loads((BEFORE / "expected.json").read_text(encoding="utf-8"))
VERSIONS = {"tokenizers": tokenizers.__version__, "transformers": transformers.__version__}
# Prepared data of other versions is other data, with which no run goes on.
pytestmark = pytest.mark.skipif(
    EXPECTED["versions"] != VERSIONS,
    reason=f"tests/golden/before was made with {EXPECTED['versions']}, here are {VERSIONS}",
)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("before") / "before"
    shutil.copytree(BEFORE, folder)
    command = [sys.executable, str(HERE / "golden" / "before.py"), "go-on", str(folder)]
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder


def rows(file):
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("kind", ["eagle3", "lm"])
def test_a_run_begun_before_goes_on_to_the_rows_it_would_have_had(place, kind):
    found = rows(place / f"{kind}-begun" / "metrics.jsonl")
    first = rows(BEFORE / f"{kind}-begun" / "metrics.jsonl")[:3]
    assert [row["step"] for row in found] == [1, 2, 3, 4, 5, 6]
    assert found[:3] == first  # to the second of their times: not trained again
    log = (place / f"{kind}-resumed.0.err").read_text()
    assert "resum" in log or "continu" in log, log
    for row, wanted in zip(found[3:], EXPECTED[kind], strict=True):
        assert set(wanted) <= set(row)
        for key, value in wanted.items():
            # fp32 sums in another order where the processor is another: 1e-7 of a value a sum,
            # grown by the three steps that build on each other.
            close = pytest.approx(value, rel=1e-5, abs=1e-6) if isinstance(value, float) else value
            assert row[key] == close, (row["step"], key)


@pytest.mark.parametrize("folder", ["eagle3-measured", "lm-done"])
def test_a_draft_exported_before_decodes(place, folder):
    """Four tokens for the one prompt, those of the target itself."""
    report = json.loads((place / folder / "evaluation.json").read_text())
    assert (report["prompts"], report["equal"]) == (1, 1)
    trained = report["sets"][0]["trained"]
    assert trained["tokens"] >= 1 and trained["passes"] >= 1, trained
