"""The documents say what is so.

Catches: a flag or command in a page that does not exist here, a flag shown with a command that
does not take it, a link to nothing, a recipe or file that is not in the repository, a drawing that
is no picture.
"""

import re
import xml.etree.ElementTree as ET
from functools import cache
from pathlib import Path

import pytest

from specforge_trim.cli import main as cli
from specforge_trim.cli import quickstart
from specforge_trim.cli.main import COMMANDS
from specforge_trim.drafts.eagle3.settings import config_parser
from specforge_trim.drafts.lm.settings import LmConfig

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    str(path.relative_to(ROOT))
    for folder in (".", "docs", "configs", "examples/data", "benchmarks")
    for path in (ROOT / folder).glob("*.md")
)
FOREIGN = set(
    """--nproc_per_node --nnodes --rdzv-backend --rdzv-endpoint --rdzv-id --no-python
    --shutdown-timeout --speculative-config --speculative-algorithm --speculative-num-steps
    --speculative-draft-model-path --speculative-eagle-topk --speculative-num-draft-tokens
    --model-path --extra_llm_api_options""".split()
)
# Not checked here: pages whose second half is about other trainers' flags (`make peers` checks
# the table), and measurements with scripts of their own.
MANY_FOREIGN = ("docs/flags.md", "docs/capture.md", "docs/LOG.md", "benchmarks/RESULTS.md")


# Flags of scripts that a page names, and names of files that are made or another program's.
SCRIPTS = {
    "docs/draft_lm.md": {"--arm"},
    "docs/config.md": {"--x", "--no-x"},
    "examples/data/README.md": {"--human-eval", "--no-deps", "--per-section", "--tokenizer"},
}
PRODUCTS = {"NAME-eagle3.json", "targets/NAME.json", "meta.json", "config.json", "best.json"}


class Shown(Exception):
    """Carries a parser out of the command that made it."""


@cache
def flags_of(command):
    """The flags that a command's own parser knows."""

    def stop(parser, *_, **__):
        raise Shown(parser)

    run = {"train_eagle3.py": cli.train_command, "quickstart": quickstart.command, **COMMANDS}
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Shown) as shown:
        patch.setattr("argparse.ArgumentParser.parse_args", stop)
        run[command]([])
    return frozenset(shown.value.args[0]._option_string_actions)


def dense_flags():
    dense = config_parser("test", "", config_class=LmConfig)._option_string_actions
    return {"--evaluate-only", *dense}


def known_flags():
    ours = [flags_of(name) for name in ("train_eagle3.py", "quickstart", *COMMANDS)]
    return dense_flags().union(*ours)


def shown_commands(text):
    """(command, flags after it) of every line that shows one; `\\` at its end joins the next."""
    for line in text.replace("\\\n", " ").splitlines():
        for part in re.split(r"`|\(|\)|\|", line):
            found = re.search(r"specforge-trim ([a-z][a-z-]+)|\b(train_\w+\.py)", part)
            if found:
                after = part[found.end() :]
                yield found[1] or found[2], set(re.findall(r"(?<![\w-])--[a-z][\w-]+", after))


@pytest.mark.parametrize("name", PAGES)
def test_commands_and_files_of_a_page_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    if name not in MANY_FOREIGN:
        flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", text))
        odd = flags - known_flags() - FOREIGN - SCRIPTS.get(name, set())
        assert not odd, sorted(odd)
    for command, flags in shown_commands(text):
        takes = dense_flags() if command == "train_draft_lm.py" else flags_of(command)
        assert flags <= takes, (command, sorted(flags - takes))
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    here = (ROOT / name).parent
    assert not [link for link in links if "://" not in link and not (here / link).exists()]
    inside = r"(?<![\w/.-])((?:benchmarks|configs|docs|examples|specforge_trim|tests)/[\w./*-]*\w)"
    assert not [path for path in re.findall(inside, text) if not any(ROOT.glob(path))]
    if name == "docs/LOG.md":  # findings of their day, and files of other projects
        return
    for file in re.findall(r"`([\w./-]+\.(?:md|yaml|py|sh|txt|json))`", text):
        places = (ROOT, here, ROOT / "specforge_trim", ROOT / "docs")
        assert file in PRODUCTS or any((place / file).exists() for place in places), file


def test_our_column_of_the_flag_table_exists():
    rows = (ROOT / "docs" / "flags.md").read_text(encoding="utf-8").splitlines()
    ours = [row.split("|")[1] for row in rows if row.startswith("| `")]
    assert len(ours) > 20
    flags = set(re.findall(r"--[a-z][\w-]+", " ".join(ours)))
    assert flags <= known_flags(), sorted(flags - known_flags())


@pytest.mark.parametrize("name", ["kept_rows.svg", "row_keys.svg", "stages.svg"])
def test_drawings_are_pictures(name):
    root = ET.parse(ROOT / "docs" / name).getroot()
    width, height = int(root.attrib["width"]), int(root.attrib["height"])
    boxes = root.findall("{http://www.w3.org/2000/svg}rect")
    assert len(boxes) > 5
    for box in boxes:  # nothing is cut off
        assert float(box.attrib["x"]) + float(box.attrib["width"]) <= width
        assert float(box.attrib["y"]) + float(box.attrib["height"]) <= height
