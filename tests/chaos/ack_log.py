# SPDX-License-Identifier: Apache-2.0
"""What the clients of a run were promised: an append-only JSONL file, and the same in memory.

Written by clients after each answer, never by the service, so it is the witness against it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class Acknowledged:
    """All that was acknowledged up to one moment."""

    rows: dict[str, str] = field(default_factory=dict[str, str])
    """Digest by row id."""
    batches: dict[int, str] = field(default_factory=dict[int, str])
    """Digest of the manifest by seq, as it was first served."""
    commits: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    """Number by (seq, incarnation)."""

    @property
    def num(self) -> int:
        return len(self.rows) + len(self.batches) + len(self.commits)

    def copy(self) -> Acknowledged:
        return Acknowledged(
            rows=dict(self.rows), batches=dict(self.batches), commits=dict(self.commits)
        )


class AckLog:
    def __init__(self, path: Path) -> None:
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self.promises = Acknowledged()
        self.lost: list[str] = []
        self.duplicated: list[str] = []
        self.trained_twice: list[str] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _write(self, **facts: object) -> None:
        self._file.write(json.dumps(facts) + "\n")

    def delivered(self, row_id: str, digest: str) -> None:
        self.promises.rows[row_id] = digest
        self._write(delivered=row_id, digest=digest)

    def sealed(self, seq: int, digest: str) -> None:
        """A batch served again must be the one served first."""
        first = self.promises.batches.setdefault(seq, digest)
        if first != digest:
            self.duplicated.append(f"batch {seq} came as {first[:12]}, then as {digest[:12]}")
        self._write(sealed=seq, digest=digest)

    def committed(self, seq: int, incarnation: int, number: int) -> None:
        self.promises.commits[seq, incarnation] = number
        self._write(committed=seq, incarnation=incarnation, number=number)
