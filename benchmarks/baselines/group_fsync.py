# SPDX-License-Identifier: Apache-2.0
"""Rows appended to a file in groups, each group synced once, then read back: what durability costs
without a service."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path


def append_and_read(path: Path, rows: Sequence[bytes], per_group: int) -> float:
    """Seconds for all of them."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    offset = os.fstat(descriptor).st_size
    began_at = time.perf_counter()
    for start in range(0, len(rows), per_group):
        group = b"".join(rows[start : start + per_group])
        os.write(descriptor, group)
        os.fdatasync(descriptor)
    for row in rows:
        if os.pread(descriptor, len(row), offset) != row:
            raise RuntimeError("what was read is not what was written")
        offset += len(row)
    took_s = time.perf_counter() - began_at
    os.close(descriptor)
    return took_s
