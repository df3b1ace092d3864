"""Files that appear whole or not at all: written beside their place, then renamed.

Nothing is ever staged outside the target folder, so a killed writer leaves its leftovers where the
next one finds and removes them.
"""

import os
import tempfile
import time
from pathlib import Path

from safetensors import SafetensorError

STALE_SECONDS = 3600


class replaced:
    """A temporary path that takes the place of `path` when the block, which writes it, ends.

    An error leaves `path` as it was. That of a safetensors file becomes an OSError naming `path`:
    the library does not tell a full disk from a damaged file by type.
    """

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> Path:
        handle, name = tempfile.mkstemp(prefix=f".tmp-{self.path.name}-", dir=self.path.parent)
        os.close(handle)
        self.temporary = Path(name)
        return self.temporary

    def __exit__(self, kind: object, error: object, _: object) -> None:
        if kind is None:
            os.chmod(self.temporary, 0o644)
            os.replace(self.temporary, self.path)
        else:
            self.temporary.unlink(missing_ok=True)
            if isinstance(error, SafetensorError):
                raise OSError(f"{self.path} cannot be written: {error}") from None


def remove_stale(folder: Path) -> None:
    """Remove what killed writers left; young files may belong to a writer at work."""
    for path in folder.glob(".tmp-*"):
        try:
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()
        except FileNotFoundError:
            continue
