"""Files that appear whole or not at all: written beside their place, then renamed.

Nothing is ever staged outside the target folder, so a killed writer leaves its leftovers where the
next one finds and removes them.
"""

import os
import tempfile
import time
from pathlib import Path

STALE_SECONDS = 3600


class replaced:
    """A temporary path that takes the place of `path` when the block ends without an error."""

    def __init__(self, path: Path):
        self.path = path

    def __enter__(self) -> Path:
        handle, name = tempfile.mkstemp(prefix=f".tmp-{self.path.name}-", dir=self.path.parent)
        os.close(handle)
        self.temporary = Path(name)
        return self.temporary

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            os.chmod(self.temporary, 0o644)
            os.replace(self.temporary, self.path)
        else:
            self.temporary.unlink(missing_ok=True)


def remove_stale(folder: Path) -> None:
    """Remove what killed writers left; young files may belong to a writer at work."""
    for path in folder.glob(".tmp-*"):
        try:
            if time.time() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink()
        except FileNotFoundError:
            continue
