# SPDX-License-Identifier: Apache-2.0
"""What is on disk, and stays there after a power failure."""

from __future__ import annotations

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until the content of this file, or the names in this folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durably(path: Path, content: bytes) -> None:
    """On disk when this returns, and never half a file under this name."""
    temporary = path.with_name(f".new-{path.name}")
    temporary.unlink(missing_ok=True)
    # Never through a link: the folder may belong to another user.
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    with os.fdopen(descriptor, "wb") as out:
        out.write(content)
        out.flush()
        os.fsync(descriptor)
    temporary.rename(path)
    sync(path.parent)
