# SPDX-License-Identifier: Apache-2.0
"""Adapters on an engine: each on the model it was trained on, the newest for new requests, an older
one until its last request has ended.

Owns that bookkeeping and the check of bases. How weights get into memory is the engine's business.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol

import structlog

from penstock.errors import PenstockError, WeightsError
from penstock.types import PolicyName
from penstock.weights.manifest import SnapshotManifest

log = structlog.get_logger(__name__)


class Loadable(Protocol):
    """An engine that serves one model and any number of adapters on it."""

    async def load(self, folder: Path) -> None:
        """Serve this model; raises and keeps the old one if it cannot."""
        ...

    async def load_adapter(self, name: str, folder: Path) -> None:
        """Serve this adapter under a name, beside all others; raises if it cannot."""
        ...

    async def unload_adapter(self, name: str) -> None: ...


class Adapters:
    """One engine's model and adapters, of verified folders and their manifests."""

    def __init__(self, engine: Loadable) -> None:
        self._engine = engine
        self._base = ""
        self._newest: dict[PolicyName, str] = {}
        self._live: set[str] = set()
        self._uses: Counter[str] = Counter()
        self._loading = asyncio.Lock()

    @property
    def live(self) -> frozenset[str]:
        """Names of the adapters that the engine holds."""
        return frozenset(self._live)

    async def load(self, manifest: SnapshotManifest, folder: Path) -> None:
        """A model; the adapters on the one before must be gone, for they fit no other."""
        if manifest.is_adapter:
            raise WeightsError(
                f"{_title(manifest)} is an adapter of {manifest.base}; load that model first"
            )
        async with self._loading:
            if self._live and manifest.weights_digest != self._base:
                raise WeightsError(
                    f"{_title(manifest)} is another model than {self._base}, and adapters of that "
                    f"are loaded ({', '.join(sorted(self._live))}); release them first"
                )
            await self._engine.load(folder)
            self._base = manifest.weights_digest

    async def load_adapter(self, manifest: SnapshotManifest, folder: Path) -> str:
        """New requests of its policy use it from now on; its name. Running ones keep theirs."""
        async with self._loading:
            if manifest.base != self._base or not self._base:
                raise WeightsError(
                    f"adapter {_title(manifest)} belongs to the model {manifest.base or 'none'}, "
                    f"and this engine serves {self._base or 'none'}; load its model first"
                )
            name = f"{_title(manifest)}.{manifest.weights_digest[:12]}"
            if name not in self._live:
                await self._engine.load_adapter(name, folder)
                self._live.add(name)
            before = self._newest.get(manifest.policy, name)
            self._newest[manifest.policy] = name
            if before != name:
                await self._retire(before)
            return name

    @asynccontextmanager
    async def newest(self, policy: PolicyName) -> AsyncGenerator[str]:
        """The name of the adapter that a request uses; it stays loaded until the request ends."""
        name = self._newest.get(policy)
        if name is None:
            raise WeightsError(f"no adapter of {policy} is loaded")
        self._uses[name] += 1
        try:
            yield name
        finally:
            self._uses[name] -= 1
            await self._retire(name)

    async def release(self, policy: PolicyName) -> None:
        """New requests of this policy find none; its last adapter goes with its last request."""
        if (name := self._newest.pop(policy, None)) is not None:
            await self._retire(name)

    async def _retire(self, name: str) -> None:
        if self._uses[name] or name in self._newest.values() or name not in self._live:
            return
        self._live.discard(name)
        del self._uses[name]
        try:
            await self._engine.unload_adapter(name)
        except PenstockError as error:
            log.warning("an old adapter stays in memory", name=name, why=str(error))


def _title(manifest: SnapshotManifest) -> str:
    return f"{manifest.policy}@{manifest.number}"
