"""The documents say what is so.

Catches: a flag or command in docs/ that does not exist here, a recipe or file named there that is
not in the repository, a drawing that is no picture.
"""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from specforge_trim.cli import COMMANDS
from specforge_trim.config import config_parser
from specforge_trim.lm_config import LmConfig

ROOT = Path(__file__).resolve().parent.parent
PAGES = ("guide.md", "watching.md", "acceptance.md", "trimming.md", "draft_lm.md")
# Flags of the commands themselves and of the programs that the pages start.
OTHERS = set(
    """--nproc_per_node --dry-run --index --out --server --layout --export-dtype --prune-vocab
    --help --draft --speculative-config --speculative-algorithm --speculative-draft-model-path
    --speculative-num-steps --speculative-eagle-topk --speculative-num-draft-tokens --model-path
    --extra_llm_api_options --draft-vocab-size --x --no-x --evaluate-only --cut --work
    --checkpoint""".split()
)


def known_flags():
    dense = config_parser("test", "", config_class=LmConfig)._option_string_actions
    return set(config_parser("test", "")._option_string_actions) | set(dense) | OTHERS


@pytest.mark.parametrize("name", PAGES)
def test_flags_commands_and_files_of_a_page_exist(name):
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", text))
    assert flags <= known_flags(), sorted(flags - known_flags())
    commands = set(re.findall(r"specforge-trim ([a-z][a-z-]+)", text))
    assert commands <= set(COMMANDS), commands - set(COMMANDS)
    for link in re.findall(r"\]\((\S+?)\)|`([\w./-]+\.(?:md|yaml))`", text):
        path = next(filter(None, link))
        found = (ROOT / path).exists() or (ROOT / "docs" / path).exists() or path == "README.md"
        assert found or path in ("eagle3.yaml",), path


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
