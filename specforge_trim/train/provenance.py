"""How a result came about: commit, versions, command line, resolved configuration."""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from specforge_trim.config.training import RunConfig


def provenance(config: RunConfig, data: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept beside checkpoints and exports; JSON values.

    data: what the training data was made from.
    """
    return {
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": package_versions(),
        "arguments": sys.argv[1:],
        "config": config.to_dict(),
        "data": dict(data),
    }


def package_versions() -> dict[str, str]:
    """Package -> installed version, of what decides a result."""
    packages = {}
    for name in ("specforge_trim", "torch", "transformers", "safetensors"):
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            packages[name] = "not installed"
    return packages


def _commit() -> str | None:
    """The commit of the source tree this package runs from; None outside of one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40"],
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
