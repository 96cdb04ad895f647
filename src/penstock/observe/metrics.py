# SPDX-License-Identifier: Apache-2.0
"""Metrics as JSON lines: one append per record, complete lines only, readable while it grows.

An export for plots and scripts. No service reads it back; the ledger has the facts.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path

Value = float | int | str | bool | None


class MetricsFile:
    """Appends records to one file. Several processes may share it, because a line is one write."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def append(self, record: Mapping[str, Value]) -> None:
        """Add one line, with the time of writing; NaN and infinities become null."""
        line = {"time": round(time.time(), 3), **{k: _finite_or_none(v) for k, v in record.items()}}
        os.write(self._descriptor, (json.dumps(line, allow_nan=False) + "\n").encode())

    def close(self) -> None:
        os.close(self._descriptor)


def _finite_or_none(value: Value) -> Value:
    return None if isinstance(value, float) and not math.isfinite(value) else value
