"""Imports go one way, and importing the package is quiet and light.

Bugs caught: a planner that pulls in the model, a model that reaches into training, a cycle between
areas hidden inside a function, two attention kernels that import each other, an optional package
imported when a module loads, a print or a warning on import.
"""

import ast
import itertools
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "specforge_trim"

# A folder imports from itself and from those before it. Nothing is exempt.
ORDER = (
    "common", "config", "plan", "loss", "ranks", "attention", "data", "verifier", "drafts",
    "decode", "train", "cli",
)  # fmt: skip
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
    """Every import in root/specforge_trim that goes against ORDER."""
    package = root / PACKAGE
    problems = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(root)
        module = ".".join(relative.with_suffix("").parts)
        area = relative.parts[1].removesuffix(".py")
        # The package's own __init__ names its public functions by module, and imports none.
        before = ORDER.index(area) if area in ORDER else -1
        if before < 0 and area != "__init__":
            problems.append(f"{relative}: {area} has no place in ORDER")
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for line, name in imported_modules(tree, module):
            other = area_of(name)
            if other in ORDER and ORDER.index(other) > before:
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


def test_every_folder_has_its_place_and_none_is_exempt():
    folders = {path.parent.name for path in (ROOT / PACKAGE).glob("*/__init__.py")}
    assert folders == set(ORDER) and len(ORDER) == 12


@pytest.mark.parametrize(("before", "after"), list(itertools.combinations(ORDER, 2)))
def test_one_import_against_the_order_is_seen(before, after, tmp_path):
    files = {f"{before}/a.py": "", f"{after}/b.py": f"from specforge_trim.{before} import a\n"}
    write_tree(tmp_path, files)
    assert import_violations(tmp_path) == []
    write_tree(tmp_path, {f"{before}/a.py": f"def f():\n    from ..{after}.b import x\n"})
    assert f"{before}/a.py:2: {before} imports {after}" in "\n".join(import_violations(tmp_path))


def test_every_kind_of_violation_is_seen(tmp_path):
    write_tree(
        tmp_path,
        {
            "__init__.py": "from specforge_trim.plan import rows\n",
            "attention/kernels/one.py": "from . import two\n",
            "attention/kernels/two.py": "",
            "novelty.py": "",
            "plan/rows.py": "import torch\nfrom . import pack\n",
        },
    )
    text = "\n".join(import_violations(tmp_path))
    assert "__init__.py:1: __init__ imports plan" in text
    assert "kernels/one.py:1: a kernel imports a kernel" in text
    assert "novelty has no place" in text
    assert "rows.py" not in text


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
