# SPDX-License-Identifier: Apache-2.0
"""Interface of a source behind a weight server: a local store, object storage, or another server.

Sources are not trusted: manifests and blobs are named by their digest, and readers verify them.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from penstock.errors import NotFound
from penstock.weights.deltas.chain import DeltaEntry


class Blob(Protocol):
    """One blob, open for reading."""

    @property
    def num_bytes(self) -> int: ...

    async def read(self, start: int, num_bytes: int) -> bytes:
        """A prefix of these bytes; empty only at the end of the blob."""
        ...

    async def close(self) -> None: ...


class Source(Protocol):
    """Digests passed in are well-formed. Raises NotFound if the item does not exist, Unreachable
    with `retry_after_s` if it will be available soon, and Unreachable without it if the caller
    should try another source."""

    async def manifest(self, digest: str) -> bytes: ...

    async def blob(self, digest: str) -> Blob: ...

    async def chain(
        self, target: str, num_bytes: int, have: Collection[str]
    ) -> tuple[DeltaEntry, ...]:
        """Deltas from one of these blobs to the target of `num_bytes`; empty if they would not be
        smaller."""
        ...

    async def close(self) -> None: ...


def missing(kind: str, digest: str) -> NotFound:
    return NotFound(
        f"{kind} {digest} is not in this store; was the version published to another one?"
    )
