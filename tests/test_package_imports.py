"""Imports go one way, and importing the package is quiet and light.

Bugs caught: a planner that pulls in the model, a model that reaches into training, a cycle between
areas hidden inside a function, two attention kernels that import each other, an optional package
imported when a module loads, a print or a warning on import.
"""

import ast
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "specforge_trim"

# area -> areas it may import. An area is a sub-package or a module at the top of the package.
BASE = {"options", "loss_terms", "config", "config_checks", "config_training", "distributed"}
SIDE = BASE | {"plan"}
MAY_IMPORT = {
    "__init__": {"plan"},
    "options": set(),
    "loss_terms": set(),
    "summary": set(),
    "curves": set(),
    "config": {"options", "loss_terms", "config_checks", "config_sections", "config_training"},
    "config_sections": {"options", "loss_terms"},
    "config_training": {"options", "config_sections"},
    "lm_config": {"options", "loss_terms", "config_sections", "config_training", "config_checks"},
    "config_checks": {"options", "loss_terms", "config_training"},
    "provenance": {"options", "config_training"},
    "distributed": {"options", "config"},
    "plan": BASE,
    "parallel": BASE,
    "attention": SIDE | {"parallel"},
    "data": SIDE,
    "target": SIDE | {"data"},
    "model": SIDE | {"attention", "target"},
    "objective": SIDE | {"attention", "target"},
    "row_sparse": SIDE | {"attention", "objective"},
    "train": SIDE
    | {"row_sparse", "parallel", "attention", "model", "objective", "data", "target"},
    "model_card": {"model"},
    "export": SIDE | {"attention", "model", "objective", "data", "target", "model_card"},
    "decode_report": {"summary"},
    "sampled_decode": {"model", "target"},
    "decode_rounds": {"target"},
    "decode": {"decode_report", "decode_rounds", "sampled_decode", "model", "target"},
}
# Entry points: they may import everything, and nothing imports them.
ENTRY_POINTS = {
    "cli", "draft_commands", "draft_setup", "dry_run", "running", "quickstart", "feature_sources",
    "first_draft", "pipeline", "regeneration", "reports", "results", "lm_cli", "lm_dry_run",
    "lm_evaluate", "lm_pipeline", "lm_vocabulary", "training_decoding", "__main__",
}  # fmt: skip
OPTIONAL = {
    "flash_attn", "yunchang", "triton", "wandb", "tensorboard", "gguf", "accelerate", "pyarrow",
    "matplotlib",
}  # fmt: skip


def imported_modules(tree: ast.AST, module: str) -> list[tuple[int, str]]:
    """(line, dotted name) of every import in a module, relative ones resolved.

    `from a import b` gives both a and a.b, since b may be a module.
    """
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".")[: -node.level]
                base = ".".join(parent + ([base] if base else []))
            found.append((node.lineno, base))
            found += [(node.lineno, f"{base}.{alias.name}") for alias in node.names]
    return found


def area_of(dotted: str) -> str | None:
    """`specforge_trim.plan.rows` -> `plan`; the bare package and foreign names -> None."""
    parts = dotted.split(".")
    return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else None


def import_violations(root: Path) -> list[str]:
    """Every import in root/specforge_trim that goes against MAY_IMPORT."""
    package = root / PACKAGE
    areas = {p.stem if p.is_file() else p.name for p in package.iterdir()} - {"__pycache__"}
    problems = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(root)
        module = ".".join(relative.with_suffix("").parts)
        area = relative.parts[1].removesuffix(".py")
        if area in ENTRY_POINTS:
            continue
        if area not in MAY_IMPORT:
            problems.append(f"{relative}: area {area} has no rule in MAY_IMPORT")
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for line, name in imported_modules(tree, module):
            other = area_of(name)
            if other in areas and other != area and other not in MAY_IMPORT[area]:
                problems.append(f"{relative}:{line}: {area} imports {other}")
            same_kernels = relative.parts[2:3] == ("kernels",) and path.name != "__init__.py"
            if same_kernels and name.startswith(f"{PACKAGE}.attention.kernels."):
                problems.append(f"{relative}:{line}: a kernel imports a kernel ({name})")
    return problems


def eager_optional_imports(root: Path) -> list[str]:
    """Optional packages imported when a module loads, instead of inside a function."""
    problems = []
    for path in sorted((root / PACKAGE).rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        lazy = {
            id(inner)
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for inner in ast.walk(node)
        }
        for node in ast.walk(tree):
            if id(node) not in lazy and isinstance(node, ast.Import | ast.ImportFrom):
                for line, name in imported_modules(node, ""):
                    if name.split(".")[0] in OPTIONAL:
                        problems.append(f"{path.relative_to(root)}:{line}: {name}")
    return problems


def write_tree(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def test_imports_go_one_way():
    assert import_violations(ROOT) == []


def test_optional_packages_are_imported_lazily():
    assert eager_optional_imports(ROOT) == []


def test_the_table_itself_has_no_cycle():
    order: list[str] = []
    left = dict(MAY_IMPORT)
    while left:
        ready = [area for area, needs in left.items() if not (needs & set(left))]
        assert ready, f"cycle among {sorted(left)}"
        order += ready
        for area in ready:
            del left[area]
    assert order.index("plan") < order.index("attention") < order.index("model")
    assert order.index("objective") < order.index("train")
    assert not any("train" in needs for needs in MAY_IMPORT.values())


def test_every_kind_of_violation_is_seen(tmp_path):
    write_tree(
        tmp_path,
        {
            "__init__.py": "",
            "plan/rows.py": "import torch\nfrom specforge_trim.model import draft\n",
            "plan/fine.py": "from specforge_trim import distributed\nfrom . import rows\n",
            "distributed.py": "",
            "model/draft.py": "def f():\n    from ..train.loop import train\n",
            "train/loop.py": "from specforge_trim.model.draft import f\n",
            "attention/kernels/one.py": "from . import two\n",
            "attention/kernels/two.py": "",
            "cli.py": "import specforge_trim.train.loop\n",
            "novelty.py": "",
        },
    )
    text = "\n".join(import_violations(tmp_path))
    assert "plan/rows.py:2: plan imports model" in text
    assert "model/draft.py:2: model imports train" in text
    assert "kernels/one.py:1: a kernel imports a kernel" in text
    assert "novelty has no rule" in text
    assert "fine.py" not in text and "loop.py" not in text and "cli.py" not in text


def test_an_eager_optional_import_is_seen(tmp_path):
    write_tree(
        tmp_path,
        {
            "eager.py": "try:\n    import flash_attn.ops\nexcept ImportError:\n    pass\n",
            "lazy.py": "def kernel():\n    import triton\n    from yunchang import comm\n",
        },
    )
    found = eager_optional_imports(tmp_path)
    assert len(found) == 1 and "eager.py:2" in found[0], found


def test_import_is_quiet_and_asks_for_no_optional_package():
    # torch may look for triton by itself, so it loads before the recorder is put in place.
    script = textwrap.dedent(
        f"""
        import sys
        import torch
        asked = []
        class Recorder:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {sorted(OPTIONAL)!r}:
                    asked.append(name)
                return None
        sys.meta_path.insert(0, Recorder())
        import specforge_trim
        assert not asked, asked
        assert "transformers" not in sys.modules, "import specforge_trim loads transformers"
        """
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "" and done.stderr == ""
