# SPDX-License-Identifier: Apache-2.0
"""A blob has its name only when all of it is there, synced and hashed; uploads can be resumed."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import pytest
from blake3 import blake3

from penstock.dataflow.ledger.blobs import BlobStore
from penstock.errors import BadRequest, Busy, Conflict, NotFound, TooLarge

DATA = bytes(range(256)) * 20_000
DIGEST = blake3(DATA).hexdigest()


@pytest.fixture
def store(tmp_path: Path) -> BlobStore:
    return BlobStore(tmp_path / "blobs")


def upload(store: BlobStore, data: bytes, digest: str, *, offset: int = 0, end: int = -1) -> int:
    """Part of an upload, as one connection sends it; returns where it stopped."""
    descriptor = store.begin(digest, offset, len(data))
    try:
        return store.write(descriptor, offset, data[offset : end if end >= 0 else len(data)])
    finally:
        os.close(descriptor)


def test_an_upload_is_resumed_and_named_at_the_end(store: BlobStore) -> None:
    assert store.held(DIGEST) == (0, False)
    upload(store, DATA, DIGEST, end=1000)
    assert store.held(DIGEST) == (1000, False)
    assert not store.path(DIGEST).exists()
    upload(store, DATA, DIGEST, offset=1000)
    store.finish(DIGEST, len(DATA))
    assert store.held(DIGEST) == (len(DATA), True)
    assert store.read(DIGEST) == DATA and store.claim(DIGEST) == len(DATA)
    store.finish(DIGEST, len(DATA))  # the answer was lost, the call comes again


def test_other_bytes_than_named_are_not_kept(store: BlobStore) -> None:
    upload(store, DATA[:-1] + b"!", DIGEST)
    with pytest.raises(BadRequest, match="start again at offset 0"):
        store.finish(DIGEST, len(DATA))
    assert store.held(DIGEST) == (0, False)
    upload(store, DATA, DIGEST, end=10)
    with pytest.raises(BadRequest):
        store.finish(DIGEST, len(DATA))


def test_no_holes_no_strange_names_no_endless_ones(store: BlobStore, tmp_path: Path) -> None:
    with pytest.raises(Conflict, match="continue at offset 0"):
        store.begin(DIGEST, 10, 100)
    for name in ("", "../../etc/passwd", DIGEST.upper(), DIGEST[:-1] + "/"):
        with pytest.raises(BadRequest, match="BLAKE3"):
            store.begin(name, 0, 100)
    with pytest.raises(TooLarge):
        store.begin(DIGEST, 0, 1 << 60)
    with pytest.raises(BadRequest, match="first"):
        store.claim(DIGEST)
    with pytest.raises(NotFound):
        store.read(DIGEST)


def test_damage_on_disk_is_found(store: BlobStore) -> None:
    upload(store, DATA, DIGEST)
    store.finish(DIGEST, len(DATA))
    path = store.path(DIGEST)
    path.chmod(0o600)
    path.write_bytes(DATA[:-1] + b"!")
    with pytest.raises(NotFound, match="damaged"):
        store.read(DIGEST)


def test_only_what_rests_for_a_day_unnamed_is_swept(store: BlobStore) -> None:
    named, unnamed, fresh = (blake3(data).hexdigest() for data in (b"1", b"2", b"3"))
    for data, digest in ((b"1", named), (b"2", unnamed), (b"3", fresh)):
        upload(store, data, digest)
        store.finish(digest, 1)
    upload(store, DATA, DIGEST, end=10)
    partial = store.path(DIGEST).parent.parent / "partial" / DIGEST
    for path in (store.path(named), store.path(unnamed), partial):
        os.utime(path, (1.0, 1.0))
    assert store.sweep(lambda digests: {named} & set(digests)) == 2
    assert store.held(named)[1] and store.held(fresh)[1]
    assert store.held(unnamed) == (0, False) and store.held(DIGEST) == (0, False)


def test_who_asks_for_a_blob_keeps_it_for_another_day(store: BlobStore) -> None:
    upload(store, DATA, DIGEST)
    store.finish(DIGEST, len(DATA))
    os.utime(store.path(DIGEST), (1.0, 1.0))
    store.claim(DIGEST)
    assert store.sweep(lambda digests: set()) == 0


def test_it_is_on_disk_before_it_has_its_name(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    sync, rename = os.fsync, os.replace

    def watched_sync(descriptor: int) -> None:
        events.append("sync")
        sync(descriptor)

    def watched_rename(source: Path, target: Path) -> None:
        events.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", watched_sync)
    monkeypatch.setattr(os, "replace", watched_rename)
    upload(store, DATA, DIGEST)
    store.finish(DIGEST, len(DATA))
    assert events == ["sync", "rename", "sync", "sync"]


def test_an_upload_has_one_writer_who_is_gone_when_it_is_published(store: BlobStore) -> None:
    """A node opened its upload twice, published it by one and changed it by the other: a reader of
    the row found a damaged blob."""
    early = store.begin(DIGEST, 0, len(DATA))
    for _ in range(2):
        with pytest.raises(Busy, match="another upload"):
            store.begin(DIGEST, 0, len(DATA))
    store.write(early, 0, DATA)
    with pytest.raises(Busy):
        store.finish(DIGEST, len(DATA))
    os.close(early)
    store.finish(DIGEST, len(DATA))
    assert store.read(DIGEST) == DATA


def test_an_upload_that_was_published_meanwhile_is_not_opened(
    store: BlobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its opening and its lock."""
    upload(store, DATA, DIGEST)
    lock = fcntl.flock

    def publish_first(descriptor: int, operation: int) -> None:
        monkeypatch.setattr(fcntl, "flock", lock)
        store.finish(DIGEST, len(DATA))
        lock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", publish_first)
    with pytest.raises(Busy):
        store.begin(DIGEST, 0, len(DATA))
    assert store.read(DIGEST) == DATA
