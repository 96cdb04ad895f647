# SPDX-License-Identifier: Apache-2.0
"""Client used by nodes: pulls a version, verifies it and stages it for loading.

Owns the pull: fetch deltas or full files from any weight server that has them, verify every tensor,
repair damage, stage, rename. Engines do the loading. Every file in a folder returned by `pull` was
hashed during that call.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import structlog

from penstock.bounds import is_digest
from penstock.errors import WeightsError, WireError, wrap_errors
from penstock.types import PublishedVersion
from penstock.weights.deltas.chain import DeltaChain, DeltaEntry, is_valid_chain
from penstock.weights.manifest import (
    MAX_MANIFEST_BYTES,
    FileEntry,
    SnapshotManifest,
    digest_of,
    parse_manifest,
)
from penstock.weights.patches import ChangedFile, find_patch, patch_path, write_patch
from penstock.weights.pulling.cache import BlobCache, run_uncancelled
from penstock.weights.pulling.links import (
    LinkStats,
    Throughput,
    Transfer,
    WeightServerClient,
    prefers_delta,
    weight_server_clients,
)
from penstock.weights.pulling.partial import ByteRange, Partial
from penstock.weights.store import DirectoryStore
from penstock.weights.tensors import Scan, TensorEntry
from penstock.weights.update import KEPT_S, MAX_UPDATE_BYTES, Chains, read_update
from penstock.wire.client import AsyncServiceClient
from penstock.wire.held_token import Token

log = structlog.get_logger(__name__)
T = TypeVar("T")

MAX_TRIES = 3
"""Attempts per weight server when its data is damaged."""
NUM_FILES = 8
"""Files fetched concurrently."""
NUM_RANGES = 32
"""Concurrent requests, each on its own connection. They saturate a link of 20 Mbit/s and 300 ms at
1 % packet loss; a fast link needs fewer."""


def open_weight_server(url: str, token: Token) -> AsyncServiceClient:
    """For a node, whose next version may come minutes later. The caller closes it."""
    return AsyncServiceClient(url, token, idle_s=KEPT_S)


@dataclass(frozen=True, slots=True)
class _PulledVersion:
    manifest: SnapshotManifest
    mtimes_ns: Mapping[str, int]
    """mtime of each file before it was verified."""
    chains: Mapping[str, tuple[DeltaEntry, ...]]
    """Deltas from which files were rebuilt, by name."""


class Puller:
    """Pulls versions into one folder, and measures the speed of links and of this machine."""

    def __init__(
        self,
        cache: Path,
        *,
        transfer: Transfer = "auto",
        num_ranges: int = NUM_RANGES,
        store_root: Path | None = None,
    ) -> None:
        """store_root: the run's weight store, if it is on this machine. Its files are verified and
        linked; what cannot be linked comes from the weight servers."""
        self._cache = cache
        self._store = None if store_root is None else DirectoryStore(store_root)
        self._pulled: dict[Path, _PulledVersion] = {}
        """Of each staged version."""
        self._transfer: Transfer = transfer
        self._num_ranges = num_ranges
        self._links: dict[str, LinkStats] = {}
        self._rebuild_speed = Throughput(num_warmup=1)  # the first file includes JIT compilation

    async def pull(
        self, weight_servers: Sequence[AsyncServiceClient], target: PublishedVersion
    ) -> Path:
        """Pull a version into a Hugging Face folder, with every tensor verified.

        If a weight server lacks a blob or sends damaged data, the next one is tried; only the last
        is waited for during a long outage. Cached blobs are not fetched again, partial ones are
        resumed. Safe to cancel at any time. Several pulls, in tasks or processes, may share a
        cache.
        """
        what = f"pulling {target.policy}@{target.incarnation}.{target.number} into {self._cache}"
        with wrap_errors(WeightsError, what):
            blobs = BlobCache(self._cache)
            async with blobs.in_use():
                clients = weight_server_clients(weight_servers, self._links)
                have: list[str] = []
                if self._transfer != "full":
                    have = await asyncio.to_thread(blobs.largest_blobs)
                manifest, offered = await _first_success(
                    clients, lambda weight_server: _fetch_version(weight_server, target, have)
                )
                slots = asyncio.Semaphore(self._num_ranges)
                tensors = {tensor.name: tensor for tensor in manifest.tensors}
                pull = _Pull(
                    blobs,
                    clients,
                    tensors,
                    slots,
                    self._rebuild_speed,
                    self._transfer,
                    self._store,
                    offered,
                    _sole_file(manifest),
                )
                scans = await pull.fetch_all(manifest.files)
                _check_scans(manifest, tensors, scans)
                folder = await asyncio.to_thread(blobs.stage, target.manifest_digest, manifest)
                mtimes_ns = {
                    file.name: found.mtime_ns
                    for file, found in zip(manifest.files, scans, strict=True)
                }
                known = self._pulled.get(folder)
                chains = {**(known.chains if known else {}), **pull.chains}
                self._pulled[folder] = _PulledVersion(manifest, mtimes_ns, chains)
                return folder

    def require_unchanged(self, folder: Path) -> None:
        """Call after loading a pulled version. Raises WeightsError if a file was modified after its
        verification, because the loaded bytes are then unknown."""
        if folder not in self._pulled:
            raise WeightsError(f"{folder} was pruned while it was being loaded")
        for name, mtime_ns in self._pulled[folder].mtimes_ns.items():
            with wrap_errors(WeightsError, f"checking {folder / name} after loading"):
                is_same = (folder / name).stat().st_mtime_ns == mtime_ns
            if not is_same:
                raise WeightsError(
                    f"{folder / name} was written to between verification and load; only nodes may "
                    "write there; the next attempt verifies it again"
                )

    def make_patch(self, base: Path, folder: Path) -> Path | None:
        """The patch from one pulled version to another, for engines that have loaded the first;
        None if no proven deltas lead there, or if so much changed that a patch is not worth it.

        Deltas are proven if the file was rebuilt from them, which verified the result, or if they
        are in the run's own store on this machine. Blocking."""
        if (found := find_patch(base, folder)) is not None:
            return found
        before, after = self._pulled.get(base), self._pulled.get(folder)
        if before is None or after is None or after.manifest.is_adapter:
            return None
        bases = {file.name: file.blob for file in before.manifest.files}
        changed: list[ChangedFile] = []
        for file in after.manifest.files:
            if bases.get(file.name) == file.blob:
                continue
            deltas = self._proven_deltas(bases.get(file.name, ""), file, after)
            if not deltas:
                return None
            changed.append(ChangedFile(path=folder / file.name, deltas=deltas))
        path = patch_path(base, folder)
        with wrap_errors(WeightsError, f"making a patch from {base.name[:12]}"):
            num_bytes = write_patch(path, after.manifest.tensors, changed)
        return None if num_bytes is None else path

    def _proven_deltas(
        self, base: str, file: FileEntry, pulled: _PulledVersion
    ) -> list[tuple[DeltaEntry, Path]]:
        """Deltas from the file with digest `base`, in order; empty if there are none."""
        steps = pulled.chains.get(file.name, ())
        if steps and steps[0].base == base:
            blobs = BlobCache(self._cache)
            return [(step, blobs.delta_path(step)) for step in steps]
        if self._store is None or not is_digest(base):
            return []
        store = self._store
        return [
            (step, store.blob_path(step.blob))
            for step in store.chain_to(file.blob, file.bytes, [base])
        ]

    def prune(self, keep: Collection[str]) -> None:
        """Delete staged versions except those with these manifest digests, and blobs no longer
        used.

        Does nothing while a pull uses this cache; a later call will.
        """
        BlobCache(self._cache).prune(keep)
        self._pulled = {f: pulled for f, pulled in self._pulled.items() if f.name in keep}


async def _first_success(
    weight_servers: Sequence[WeightServerClient], get: Callable[[WeightServerClient], Awaitable[T]]
) -> T:
    """Result of the first weight server that succeeds; raises the last error if all fail."""
    for weight_server in weight_servers[:-1]:
        if weight_server.is_usable:
            try:
                return await get(weight_server)
            except (WeightsError, WireError) as error:
                log.warning(
                    "weight server failed, trying the next", url=weight_server.url, error=str(error)
                )
    return await get(weight_servers[-1])


async def _gather(coroutines: Iterable[Coroutine[None, None, T]]) -> list[T]:
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]


async def _fetch_version(
    weight_server: WeightServerClient, target: PublishedVersion, have: Sequence[str]
) -> tuple[SnapshotManifest, _OfferedChains | None]:
    """The manifest, and deltas from what we have, in one answer if the server gives it."""
    digest = target.manifest_digest
    if have and is_digest(digest):
        path = f"/v1/updates/{digest}?from={','.join(have)}"
        try:
            answer = await weight_server.ask(path, MAX_UPDATE_BYTES)
            data, chains = await asyncio.to_thread(read_update, answer.content, digest)
            return _parse_manifest(data, target), _OfferedChains(weight_server, chains)
        except (WeightsError, WireError) as error:
            log.debug("no update, asking for the manifest", error=str(error))
    return await _fetch_manifest(weight_server, target), None


async def _fetch_manifest(
    weight_server: WeightServerClient, target: PublishedVersion
) -> SnapshotManifest:
    digest = target.manifest_digest
    what = _manifest_name(target)
    if not is_digest(digest):
        raise WeightsError(f"{what}: {digest[:80]!r} is not a BLAKE3 digest")
    for _ in range(MAX_TRIES):
        async with weight_server.no_slower(0):
            data = await weight_server.get(f"/v1/manifests/{digest}", MAX_MANIFEST_BYTES, what)
        if digest_of(data) == digest:
            break
    else:
        raise WeightsError(
            f"{what}: {weight_server.url} sent data that does not match digest {digest} "
            f"({MAX_TRIES} attempts); check its store"
        )
    return _parse_manifest(data, target)


def _manifest_name(target: PublishedVersion) -> str:
    return f"manifest of {target.policy}@{target.incarnation}.{target.number}"


def _parse_manifest(data: bytes, target: PublishedVersion) -> SnapshotManifest:
    manifest = parse_manifest(data)
    if (manifest.policy, manifest.number) != (target.policy, target.number):
        raise WeightsError(
            f"{_manifest_name(target)} describes {manifest.policy} number {manifest.number}; "
            "the trainer published the wrong digest"
        )
    return manifest


@dataclass(frozen=True, slots=True)
class _OfferedChains:
    """Deltas that came with the manifest; not trusted."""

    weight_server: WeightServerClient
    chains: Chains


@dataclass(frozen=True, slots=True)
class _Pull:
    """The pull of one version."""

    blobs: BlobCache
    weight_servers: Sequence[WeightServerClient]
    tensors: Mapping[str, TensorEntry]
    slots: asyncio.Semaphore
    rebuild_speed: Throughput
    transfer: Transfer
    store: DirectoryStore | None
    offered: _OfferedChains | None
    sole_file: str
    """Name of the version's file with weights, if it has only one."""
    chains: dict[str, tuple[DeltaEntry, ...]] = field(
        default_factory=dict[str, tuple[DeltaEntry, ...]]
    )
    """Deltas from which files were rebuilt, by name."""

    async def fetch_all(self, files: Iterable[FileEntry]) -> list[Scan]:
        file_slots = asyncio.Semaphore(NUM_FILES)

        async def fetch(file: FileEntry) -> Scan:
            async with file_slots:
                return await self._fetch(file)

        return await _gather(map(fetch, files))

    async def _fetch(self, file: FileEntry) -> Scan:
        """Put the verified blob into the cache: already there, linked, rebuilt from deltas, or
        fetched in full."""
        sole = self._sole(file)
        if (found := await asyncio.to_thread(self.blobs.check, file, sole)) is not None:
            return found
        if self.store is not None:
            found = await asyncio.to_thread(self.blobs.link, file, self.store, sole)
            if found is not None:
                return found
        try:
            if (found := await self._fetch_deltas(file)) is not None:
                return found
        except WeightsError as error:
            log.warning("delta failed, fetching the full file", file=file.name, error=str(error))
        return await _first_success(
            self.weight_servers, lambda weight_server: self._fetch_full(weight_server, file)
        )

    async def _fetch_deltas(self, file: FileEntry) -> Scan | None:
        """Rebuild from a cached file and deltas; None if that is impossible or not worth it."""
        steps = await self._find_chain(file)
        if not steps:
            return None
        await self.fetch_all(
            FileEntry(name=f"{file.name} from {step.base[:12]}", blob=step.blob, bytes=step.bytes)
            for step in steps
        )
        started_at = time.monotonic()
        found = await asyncio.to_thread(self.blobs.rebuild, file, steps, self._sole(file))
        self.rebuild_speed.add(file.bytes, time.monotonic() - started_at)
        self.chains[file.name] = steps
        return found

    def _sole(self, file: FileEntry) -> tuple[TensorEntry, ...]:
        """All tensors, if they can only be in this file."""
        return tuple(self.tensors.values()) if file.name == self.sole_file else ()

    async def _find_chain(self, file: FileEntry) -> tuple[DeltaEntry, ...]:
        if self.transfer == "full":
            return ()
        have = await asyncio.to_thread(self.blobs.possible_bases, file)
        if not have:
            return ()
        path = f"/v1/deltas/{file.blob}?bytes={file.bytes}&from={','.join(have)}"
        for weight_server in self.weight_servers:
            if not weight_server.is_usable:
                continue
            if self.offered is not None and weight_server is self.offered.weight_server:
                steps = self.offered.chains.get(file.blob, ())
            else:
                try:
                    steps = (await weight_server.request(path, DeltaChain)).steps
                except WireError:
                    continue  # no deltas or no response: fetch the full file instead
            if is_valid_chain(file.blob, steps, have, below=file.bytes):
                return steps if self._is_delta_faster(weight_server, steps, file) else ()
        return ()

    def _is_delta_faster(
        self, weight_server: WeightServerClient, steps: Sequence[DeltaEntry], file: FileEntry
    ) -> bool:
        is_faster = prefers_delta(
            self.transfer,
            delta_bytes=sum(step.bytes for step in steps),
            file_bytes=file.bytes,
            link_bytes_per_s=weight_server.link.speed.bytes_per_s,
            rebuild_bytes_per_s=self.rebuild_speed.bytes_per_s,
        )
        if not is_faster:
            self.rebuild_speed.decay()
        return is_faster

    async def _fetch_full(self, weight_server: WeightServerClient, file: FileEntry) -> Scan:
        """Fetch the missing parts from one weight server."""
        async with self.blobs.partial(file, self.tensors) as partial:
            # Another pull may have fetched it while this one waited for the lock.
            if (found := await run_uncancelled(self.blobs.check, file)) is not None:
                partial.drop()
                return found
            if partial.is_complete:  # left by a pull that could not repair it
                found = await run_uncancelled(partial.finish)
            for _ in range(MAX_TRIES):
                if found is not None:
                    return found
                missing = await run_uncancelled(partial.missing)
                await _gather(
                    self._fetch_range(weight_server, partial, byte_range) for byte_range in missing
                )
                found = await run_uncancelled(partial.finish)
        if found is not None:
            return found
        raise WeightsError(
            f"{file.name}: {weight_server.url} sent data that does not match digest {file.blob} "
            f"({MAX_TRIES} attempts); check its store; the last verified version stays in use"
        )

    async def _fetch_range(
        self, weight_server: WeightServerClient, partial: Partial, byte_range: ByteRange
    ) -> None:
        file = partial.file
        start, end = byte_range
        what = f"blob of {file.name}"
        data = b""
        async with self.slots, weight_server.no_slower(end - start):
            while (at := start + len(data)) < end:
                headers = {"range": f"bytes={at}-{end - 1}"}
                piece = await weight_server.get(f"/v1/blobs/{file.blob}", end - at, what, headers)
                if not piece:
                    raise WeightsError(f"{what}: {weight_server.url} sent no data for byte {at}")
                data += piece
            await run_uncancelled(partial.write, start, data)


def _sole_file(manifest: SnapshotManifest) -> str:
    names = [file.name for file in manifest.files if file.name.endswith(".safetensors")]
    return names[0] if len(names) == 1 else ""


def _check_scans(
    manifest: SnapshotManifest, tensors: Mapping[str, TensorEntry], scans: list[Scan]
) -> None:
    """Check that each tensor of the manifest is in exactly one file, with its dtype, shape and
    digest."""
    expected = dict(tensors)
    problem = ""
    for tensor in (tensor for found in scans for tensor in found.tensors):
        if expected.pop(tensor.name, None) != tensor:
            shape = "x".join(map(str, tensor.shape))
            problem = (
                f"tensor {tensor.name} ({tensor.dtype}, {shape}) differs from the manifest, "
                "although the file matches its digest"
            )
            break
    if not problem and expected:
        problem = f"no file contains tensor {min(expected)}"
    if problem:
        raise WeightsError(
            f"{manifest.policy} number {manifest.number}: {problem}; the manifest is inconsistent "
            "with its files; publish the version again"
        )
