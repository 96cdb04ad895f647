# SPDX-License-Identifier: Apache-2.0
"""Directory of immutable blobs and manifests, each named by its BLAKE3, and of deltas, which are
blobs indexed by base and target.

Owns atomic, durable, create-if-absent writes, safe reads by digest, and the lock that keeps
deletion and writing apart. Does not know which version is current; only the ledger does. Files are
never overwritten except to replace a damaged one, and a half-written file is never visible under a
readable name.
"""

from __future__ import annotations

import fcntl
import filecmp
import os
import secrets
import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec
import structlog
from blake3 import blake3

from penstock.bounds import is_digest
from penstock.durable import is_regular, open_regular, read_regular, regular_descriptor, sync
from penstock.errors import WeightsError
from penstock.weights.deltas.chain import DeltaEntry, cheapest_chain
from penstock.weights.manifest import MAX_MANIFEST_BYTES, digest_of
from penstock.weights.tensors import Scan, Sink, scan

log = structlog.get_logger(__name__)

T = TypeVar("T")
READ_WINDOW_S = 120.0
"""A reader idle for this long has finished or given up; its blob may be deleted."""
ABANDONED_S = 86_400.0
"""A file still incoming after a day was left by a dead writer."""
READING_WAIT_S = 60.0
"""A deletion takes seconds."""
LOCK_POLL_S = 0.05
MAX_ENTRY_BYTES = 1 << 16
_entry_decoder = msgspec.json.Decoder(DeltaEntry)


class DirectoryStore:
    def __init__(self, root: Path) -> None:
        self._root = root
        self._blobs = root / "blobs"
        self._manifests = root / "manifests"
        self._deltas = root / "deltas"
        self._incoming = root / "incoming"
        self._reading = root / "reading"
        self.rebuilt_folder = root / "rebuilt"
        """Of the server of these weights."""

    def prepare(self) -> None:
        """Create the folders and remove files of dead writers. Readers need not call this."""
        if not self._manifests.is_dir():
            for folder in (self._blobs, self._deltas, self._incoming, self._manifests):
                folder.mkdir(parents=True, exist_ok=True)
            sync(self._root)
            sync(self._root.parent)
        for path in self._incoming.iterdir():
            with suppress(FileNotFoundError):  # another trainer finished it meanwhile
                if time.time() - path.stat().st_mtime > ABANDONED_S:
                    path.unlink()

    @contextmanager
    def writing(self) -> Generator[None]:
        """Protects files written in this block, and everything they refer to, from deletion."""
        with self._lock_file() as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
            yield

    @contextmanager
    def reading(self) -> Generator[None]:
        """Protects files that are read in this block from deletion, if anybody has ever written
        here. Creates nothing, since the store may belong to another user, who may also hold the
        lock permanently."""
        with open_regular(self._root / "lock") as lock:
            give_up_at = time.monotonic() + READING_WAIT_S
            while not try_lock(lock.fileno(), fcntl.LOCK_SH):
                if time.monotonic() >= give_up_at:
                    raise WeightsError(
                        f"{self._root} is locked for a deletion for {READING_WAIT_S:g} s; end the "
                        "process that has the lock"
                    )
                time.sleep(LOCK_POLL_S)
            yield

    @contextmanager
    def deleting(self) -> Generator[bool]:
        """Yields False while a writer holds the lock; the caller retries later."""
        with self._lock_file() as descriptor:
            yield try_lock(descriptor, fcntl.LOCK_EX)

    @contextmanager
    def _lock_file(self) -> Generator[int]:
        descriptor = regular_descriptor(self._root / "lock", os.O_RDWR | os.O_CREAT, 0o666)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def put_blob(self, source: BinaryIO, name: str) -> Scan:
        """Copy a file into the store, hashing it on the way. Durable only after `sync_blobs`."""
        return self._write(
            lambda sink: scan(source, name, sink), lambda found: self._blobs / found.blob
        )

    def incoming_path(self, name: str) -> Path:
        """For a file that others write, before it is a blob."""
        return self._incoming / name

    def put_incoming(self, path: Path, digest: str) -> None:
        """Turn a durable file at an `incoming_path`, which has this digest, into a blob without
        copying it. The blob is durable only after `sync_blobs`."""
        path.chmod(0o444)  # nodes hard-link such files into the folders that engines open
        self._link(path, self.blob_path(digest))
        path.unlink(missing_ok=True)

    def sync_blobs(self) -> None:
        sync(self._blobs)

    def put_manifest(self, data: bytes) -> str:
        """The last write of a version, after `sync_blobs`. Durable when this returns."""

        def write(sink: Sink) -> str:
            sink(data)
            return digest_of(data)

        digest = self._write(write, lambda digest: self._manifests / f"{digest}.json")
        sync(self._manifests)
        return digest

    def put_delta(
        self, base: str, target: str, write: Callable[[DigestingWriter], None]
    ) -> DeltaEntry:
        """Store the output of `write` as the delta between these blobs. Durable when this
        returns."""

        def fill(sink: Sink) -> DigestingWriter:
            out = DigestingWriter(sink)
            write(out)
            return out

        out = self._write(fill, lambda out: self._blobs / out.digest)
        sync(self._blobs)
        entry = DeltaEntry(base=base, target=target, blob=out.digest, bytes=out.num_bytes)
        folder = self._deltas / _require_digest(target)
        folder.mkdir(parents=True, exist_ok=True)
        self._write(
            lambda sink: sink(msgspec.json.encode(entry, order="sorted")),
            lambda _: folder / f"{_require_digest(base)}.json",
        )
        return entry

    def deltas_to(self, target: str) -> list[DeltaEntry]:
        """Deltas to this blob whose data is in the store."""
        return [entry for entry in self.entries_to(target) if self.has_blob(entry.blob)]

    def entries_to(self, target: str) -> list[DeltaEntry]:
        """All delta entries to this blob, even if their data is gone. Damaged entries are
        skipped."""
        found: list[DeltaEntry] = []
        with suppress(OSError):
            for path in sorted((self._deltas / _require_digest(target)).iterdir()):
                with suppress(msgspec.MsgspecError, OSError):
                    found.append(_entry_decoder.decode(read_regular(path, MAX_ENTRY_BYTES)))
        return found

    def chain_to(self, file: str, num_bytes: int, have: Collection[str]) -> tuple[DeltaEntry, ...]:
        """Deltas from one of these blobs to this file, if they are smaller than the file."""
        return cheapest_chain(file, lambda blob: blob in have, self.deltas_to, below=num_bytes)

    def blob_path(self, digest: str) -> Path:
        return self._blobs / _require_digest(digest)

    def has_blob(self, digest: str) -> bool:
        return is_regular(self.blob_path(digest))

    def make_blob(self, digest: str, fill: Callable[[Path], object]) -> None:
        """Store the file that `fill` creates at a path, if it matches this digest."""
        temporary = self._incoming / secrets.token_hex(16)
        try:
            fill(temporary)
            with open_regular(temporary) as file:
                found = scan(file, "")
                if found.blob != digest:
                    raise WeightsError(f"rebuilt file for {digest} has digest {found.blob}")
                os.fsync(file.fileno())
            temporary.chmod(0o444)
            with suppress(FileExistsError):
                os.link(temporary, self.blob_path(digest))
            sync(self._blobs)
        finally:
            temporary.unlink(missing_ok=True)

    # --- listing ------------------------------------------------------------------------------

    def manifests(self) -> Iterator[str]:
        yield from (path.stem for path in _files(self._manifests) if is_digest(path.stem))

    def blobs(self) -> Iterator[tuple[str, int]]:
        """Digests and sizes."""
        for path in filter(lambda path: is_digest(path.name), _files(self._blobs)):
            with suppress(FileNotFoundError):
                yield path.name, path.stat().st_size

    def deltas(self) -> Iterator[DeltaEntry]:
        for folder in filter(lambda path: is_digest(path.name), _files(self._deltas)):
            yield from self.entries_to(folder.name)

    def mark_read(self, digest: str) -> None:
        """Record that this blob is being read."""
        path = self._reading / _require_digest(digest)
        with suppress(OSError):  # a full disk must not fail a read
            self._reading.mkdir(exist_ok=True)
            path.touch()

    def recently_read(self) -> list[str]:
        """Blobs read within the last minutes, the latest first; older records are dropped."""
        found: list[tuple[float, str]] = []
        for path in _files(self._reading):
            with suppress(FileNotFoundError):
                read_at = path.stat().st_mtime
                if time.time() - read_at < READ_WINDOW_S:
                    found.append((read_at, path.name))
                else:
                    path.unlink()
        return [name for _, name in sorted(found, reverse=True)]

    def age_s(self, manifest: str) -> float:
        """Seconds since the manifest was written."""
        return time.time() - (self._manifests / f"{manifest}.json").stat().st_mtime

    # --- deletion; only inside `deleting()` ---------------------------------------------------

    def delete_manifest(self, digest: str) -> None:
        (self._manifests / f"{_require_digest(digest)}.json").unlink(missing_ok=True)

    def delete_blob(self, digest: str) -> None:
        self.blob_path(digest).unlink(missing_ok=True)

    def delete_delta(self, entry: DeltaEntry) -> None:
        """Delete only the entry; its data is a blob."""
        folder = self._deltas / _require_digest(entry.target)
        (folder / f"{_require_digest(entry.base)}.json").unlink(missing_ok=True)
        with suppress(OSError):  # other deltas have the same target
            folder.rmdir()

    def open_blob(self, digest: str) -> BinaryIO:
        return _open(self._blobs, digest, "")

    def read_manifest(self, digest: str) -> bytes:
        with _open(self._manifests, digest, ".json") as file:
            data = file.read(MAX_MANIFEST_BYTES + 1)
        if digest_of(data) != digest:
            raise WeightsError(
                f"{self._manifests}/{digest}.json is damaged (digest mismatch); "
                "delete it and publish the version again"
            )
        return data

    def _write(self, fill: Callable[[Sink], T], path_for: Callable[[T], Path]) -> T:
        temporary = self._incoming / secrets.token_hex(16)
        # Created read-only: nodes hard-link such files into the folders that engines open.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            with open(os.open(temporary, flags, 0o444), "wb", buffering=0) as file:
                filled = fill(lambda piece: _write_all(file.fileno(), piece))
                final = path_for(filled)
                if _is_same(temporary, final):
                    return filled
                os.fsync(file.fileno())
            self._link(temporary, final)
            return filled
        finally:
            temporary.unlink(missing_ok=True)

    def _link(self, made: Path, final: Path) -> None:
        """Give a durable file its final name; a damaged one of this name is replaced."""
        try:
            os.link(made, final)
        except FileExistsError:
            if not _is_same(made, final):
                log.error("replacing a damaged file in the store", path=str(final))
                made.rename(final)


class DigestingWriter:
    """Passes written bytes to a sink and hashes them."""

    def __init__(self, sink: Sink) -> None:
        self.num_bytes = 0
        self._sink = sink
        self._hash = blake3()

    def write(self, piece: bytes | memoryview) -> int:
        self.num_bytes += len(piece)
        self._hash.update(piece)
        self._sink(bytes(piece))
        return len(piece)

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


def _files(folder: Path) -> Iterator[Path]:
    with suppress(FileNotFoundError):
        yield from sorted(folder.iterdir())


def _require_digest(text: str) -> str:
    """The only way from a name to a path."""
    if not is_digest(text):
        raise ValueError(f"{text[:80]!r} is not a BLAKE3 digest (64 lowercase hex characters)")
    return text


def _open(folder: Path, digest: str, suffix: str) -> BinaryIO:
    return open_regular(folder / f"{_require_digest(digest)}{suffix}")


def try_lock(descriptor: int, kind: int) -> bool:
    """False if another process holds the lock."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _write_all(descriptor: int, piece: bytes) -> None:
    view = memoryview(piece)
    while view:
        view = view[os.write(descriptor, view) :]


def _is_same(new: Path, known: Path) -> bool:
    """Same name means same bytes, unless the disk corrupted some."""
    try:
        return filecmp.cmp(new, known, shallow=False)
    except FileNotFoundError:
        return False
