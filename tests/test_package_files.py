"""What the repository ships: short files, no private paths, public names, loadable configs.

Bugs caught: a file that grows past reading in one sitting, a path of somebody's machine left in a
tracked file, a contract name that is no longer importable, a draft config or a recipe that stopped
loading or carries a key the serving engines do not know, a recipe with an unexplained key.
"""

import ast
import json
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 600
MAX_FUNCTION_LINES = 60

# The keys serving engines read; a config that lacks one is completed by a silent wrong default.
REQUIRED_KEYS = set(
    """architectures model_type hidden_size intermediate_size num_hidden_layers
    num_attention_heads num_key_value_heads head_dim hidden_act rms_norm_eps
    attention_bias mlp_bias max_position_embeddings rope_theta
    rope_scaling rope_parameters vocab_size draft_vocab_size
    tie_word_embeddings bos_token_id eos_token_id pad_token_id torch_dtype dtype""".split()
)
OPTIONAL_KEYS = {
    "target_hidden_size",
    "fc_norm",
    "norm_output",
    "norm_before_residual",
    "eagle_config",
    "eagle_aux_hidden_state_layer_ids",
}
PRIVATE_PATH = re.compile(r"(?<![\w.)}\]/])/(?:home|root|work|mnt|opt|srv|Users)/\w")


def tracked_files() -> list[Path]:
    """Files under version control, or all files outside caches where there is no git."""
    try:
        out = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, timeout=60
        ).stdout.decode()
        names = [name for name in out.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        names = [str(p.relative_to(ROOT)) for p in ROOT.rglob("*") if p.is_file()]
    hidden = {".venv", ".git", "__pycache__", "build", "runs", ".quickstart"}
    paths = [ROOT / name for name in names if not hidden & set(Path(name).parts)]
    return [path for path in paths if path.is_file()]


def private_paths(text: str) -> list[str]:
    """Absolute paths in text that can only exist on the machine of whoever wrote it."""
    return PRIVATE_PATH.findall(text)


def test_source_files_stay_short():
    long = {
        str(path.relative_to(ROOT)): lines
        for path in tracked_files()
        if path.suffix == ".py"
        and (lines := len(path.read_text(encoding="utf-8").splitlines())) >= MAX_LINES
    }
    assert long == {}, f"files of {MAX_LINES} lines or more: split them by idea: {long}"


def long_functions(source: str) -> list[str]:
    """`name length` of every function above MAX_FUNCTION_LINES."""
    return [
        f"{node.name} {node.end_lineno - node.lineno + 1}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        and node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]


def test_functions_stay_short():
    found = {
        str(p): names
        for p in tracked_files()
        if p.suffix == ".py" and (names := long_functions((ROOT / p).read_text("utf-8")))
    }
    assert found == {}
    assert long_functions("def f():\n" + "    x = 1\n" * 60) == ["f 61"]


def test_no_private_path_in_tracked_files():
    # Data files quote documents, so a path in them is text and not ours.
    found = {}
    for path in tracked_files():
        if path.suffix in {".jsonl", ".gz", ".safetensors", ".png"}:
            continue
        hits = private_paths(path.read_text(encoding="utf-8", errors="replace"))
        if hits:
            found[str(path.relative_to(ROOT))] = hits
    assert found == {}


def test_private_paths_are_seen():
    slash = "/"
    assert private_paths(f"open('{slash}home/me/x')")
    assert private_paths(f"see {slash}root/a and b")
    assert not private_paths(f"a/work{slash}b, docs/home{slash}x, {slash}usr/bin/env")


def make(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        ["make", "--no-print-directory", *arguments], cwd=ROOT, capture_output=True, text=True
    )


def test_make_names_a_python_that_is_none(tmp_path):
    done = make("quickstart", "PYTHON=nope", f"VENV={tmp_path}/venv")
    assert done.returncode == 2
    assert done.stderr.startswith("error: PYTHON=nope: no such command"), done.stderr


def test_make_lets_waiting_threads_sleep_unless_told_otherwise(monkeypatch):
    show = ("--eval", "show: ; @echo $$OMP_WAIT_POLICY", "show")
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    assert make(*show).stdout == "PASSIVE\n"
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    assert make(*show).stdout == "ACTIVE\n"


def test_contract_names_are_importable():
    import specforge_trim

    for name in ("row_mask", "build_trim_pack", "dense_pack", "choose_pack"):
        assert callable(getattr(specforge_trim, name, None)), f"specforge_trim.{name} is missing"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.json")), ids=lambda p: p.stem)
def test_draft_configs_load_and_hold_the_served_keys(path):
    from specforge_trim.drafts.eagle3.sizes import DraftConfig

    values = json.loads(path.read_text())
    assert set(values) >= REQUIRED_KEYS, REQUIRED_KEYS - set(values)
    assert set(values) <= REQUIRED_KEYS | OPTIONAL_KEYS, set(values) - REQUIRED_KEYS
    assert values["num_hidden_layers"] == 1 and not values["tie_word_embeddings"]
    assert values["rope_theta"] == values["rope_parameters"]["rope_theta"]
    config = DraftConfig.from_json(path)
    assert config.hidden_size == values["hidden_size"]
    assert config.draft_vocab_size == values["draft_vocab_size"]


def test_the_smollm2_config_matches_its_target():
    values = json.loads((ROOT / "configs" / "smollm2-135m-eagle3.json").read_text())
    expected = {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e5,
        "vocab_size": 49152,
        "max_position_embeddings": 8192,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: values[key] for key in expected} == expected


def test_every_recipe_key_carries_a_comment():
    for path in sorted((ROOT / "examples").glob("*.yaml")):
        bare = [
            line
            for line in path.read_text().splitlines()
            if re.match(r"\s+\w+:", line) and "#" not in line
        ]
        assert bare == [], f"{path.name}: keys without a comment: {bare}"


def test_the_quickstart_recipe_loads_trims_and_names_every_setting():
    import yaml

    from specforge_trim.drafts.eagle3.settings import Config, load_config

    path = ROOT / "examples" / "quickstart.yaml"
    config = load_config(["--config", str(path)], prog="test", description="")
    assert config.trim.trim_loss_positions and config.trim.trim_backbone_rows
    named = {name: set(body) for name, body in yaml.safe_load(path.read_text()).items()}
    known = {name: set(body) for name, body in Config().to_dict().items()}
    assert named == known
