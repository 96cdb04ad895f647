# SPDX-License-Identifier: Apache-2.0
"""Where a weights front takes what it serves from: a store on this machine, object storage, or
another front.

No source is trusted by whoever reads from it: a manifest and a blob are named by their own digest.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from penstock.weights.deltas.chain import DeltaEntry


class Blob(Protocol):
    """One blob, open for reading."""

    @property
    def num_bytes(self) -> int: ...

    async def read(self, start: int, num_bytes: int) -> bytes:
        """Some of these bytes, from the first on; empty only when the blob ends there."""
        ...

    async def close(self) -> None: ...


class Source(Protocol):
    """Digests are valid when they come here. What is not there is NotFound; what will be soon is
    Unreachable, with a hint when to ask again; what this source cannot get now is Unreachable
    without one, and to be asked for elsewhere."""

    async def manifest(self, digest: str) -> bytes: ...

    async def blob(self, digest: str) -> Blob: ...

    async def chain(
        self, target: str, num_bytes: int, have: Collection[str]
    ) -> tuple[DeltaEntry, ...]:
        """Deltas from one of these blobs to the target, of so many bytes; none when they would not
        be smaller."""
        ...

    async def close(self) -> None: ...
