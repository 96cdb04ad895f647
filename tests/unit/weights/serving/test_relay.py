# SPDX-License-Identifier: Apache-2.0
"""A relay as a source behind real servers: one copy from upstream, correct bytes in the end,
bounded space."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Collection
from pathlib import Path

import pytest
from tests.unit.weights.relay_doubles import (
    CHUNK,
    MB,
    TamperingSource,
    cached,
    flip,
    origin,
    put_blob,
    read_all,
    relay,
)
from tests.unit.weights.snapshot_folders import write_folder
from tests.unit.weights.weight_servers import put, put_folder

from penstock.errors import ConfigError, NotFound, Unreachable
from penstock.weights.deltas.chain import DeltaEntry
from penstock.weights.manifest import digest_of, parse_manifest
from penstock.weights.serving import relay as module
from penstock.weights.serving.piece_cache import PIECE_BYTES, CachedBlob
from penstock.weights.serving.sources import Blob
from penstock.weights.store import DirectoryStore

SIZE = 3 * PIECE_BYTES + 12_345


async def until_settled(tmp_path: Path) -> None:
    """A complete blob is verified in the background."""
    for _ in range(2000):
        if not list((tmp_path / "relay" / "incoming").iterdir()):
            return
        await asyncio.sleep(0.005)
    raise TimeoutError("the relay never took the digest")


# --- one copy ---------------------------------------------------------------------------------


async def test_many_readers_cost_one_copy(tmp_path: Path) -> None:
    digest, data = put_blob(tmp_path / "store", SIZE)
    weight_server = origin(tmp_path / "store")
    async with relay(tmp_path, weight_server) as passed:
        found = await asyncio.gather(*(read_all(passed, digest, 50_000) for _ in range(32)))
        assert all(each == data for each in found)
        assert weight_server.num_bytes == len(data)
        assert len(set(weight_server.reads)) == len(weight_server.reads)
        await until_settled(tmp_path)
        assert await read_all(passed, digest) == data
        assert weight_server.num_bytes == len(data)


async def test_a_read_waits_only_for_its_bytes(tmp_path: Path) -> None:
    digest, data = put_blob(tmp_path / "store", SIZE)
    opened = asyncio.Event()

    async def stall(_: str, start: int, chunk: bytes) -> bytes:
        if PIECE_BYTES + 3 * CHUNK <= start < 2 * PIECE_BYTES:
            await opened.wait()
        return chunk

    async with relay(tmp_path, origin(tmp_path / "store", stall)) as passed:
        blob = await passed.blob(digest)
        async with asyncio.timeout(60):
            for at in (0, PIECE_BYTES, PIECE_BYTES + 2 * CHUNK, 2 * PIECE_BYTES, SIZE - 1):
                piece = await blob.read(at, 1000)
                assert piece and piece == data[at : at + len(piece)]
        late = asyncio.create_task(blob.read(PIECE_BYTES + 3 * CHUNK, 1000))
        await asyncio.sleep(0.1)
        assert not late.done(), "it was there before upstream sent it"
        opened.set()
        assert data.startswith(await late, PIECE_BYTES + 3 * CHUNK)
        await blob.close()


async def test_a_disconnecting_reader_does_not_affect_others(tmp_path: Path) -> None:
    digest, data = put_blob(tmp_path / "store", SIZE)
    opened = asyncio.Event()

    async def wait(_: str, start: int, chunk: bytes) -> bytes:
        if start > CHUNK:
            await opened.wait()
        return chunk

    weight_server = origin(tmp_path / "store", wait)
    async with relay(tmp_path, weight_server) as passed:
        readers = [asyncio.create_task(read_all(passed, digest)) for _ in range(4)]
        await asyncio.sleep(0.1)
        readers[0].cancel()
        readers[3].cancel()
        await asyncio.sleep(0.05)
        opened.set()
        found = await asyncio.gather(*readers, return_exceptions=True)
        assert [isinstance(each, asyncio.CancelledError) for each in found] == [1, 0, 0, 1]
        assert found[1] == found[2] == data
        assert weight_server.num_bytes == len(data)


async def test_bytes_of_a_failed_upstream_are_kept(tmp_path: Path) -> None:
    digest, data = put_blob(tmp_path / "store", SIZE)

    async def fail(_: str, start: int, chunk: bytes) -> bytes:
        if start >= PIECE_BYTES + 4 * CHUNK:
            await asyncio.sleep(0.1)  # the server sends what it has in hand
            raise RuntimeError("this front falls over")
        return chunk

    near, long_gaps = origin(tmp_path / "store", fail), origin(tmp_path / "store")
    async with relay(tmp_path, near, long_gaps) as passed:
        assert await read_all(passed, digest) == data
        assert near.num_bytes > 0
        assert near.num_bytes + long_gaps.num_bytes == len(data)


async def test_an_empty_blob_is_a_blob(tmp_path: Path) -> None:
    async with relay(tmp_path, origin(tmp_path / "store")) as passed:
        assert await read_all(passed, digest_of(b"")) == b""


# --- damaged data -----------------------------------------------------------------------------


async def test_a_blob_with_a_wrong_digest_is_dropped_and_fetched_from_the_next(
    tmp_path: Path,
) -> None:
    digest, data = put_blob(tmp_path / "store", SIZE)
    bad, good = origin(tmp_path / "store", flip), origin(tmp_path / "store")
    async with relay(tmp_path, bad, good) as passed:
        assert await read_all(passed, digest) != data
        await until_settled(tmp_path)
        assert cached(tmp_path) == {}
        assert not good.reads
        assert await read_all(passed, digest) == data
        assert bad.num_bytes == len(data), "who sent wrong bytes was asked first again"


async def test_the_only_upstream_is_retried(tmp_path: Path) -> None:
    digest, data = put_blob(tmp_path / "store", SIZE)
    is_bad = True

    async def at_first(name: str, start: int, chunk: bytes) -> bytes:
        return await flip(name, start, chunk) if is_bad else chunk

    async with relay(tmp_path, origin(tmp_path / "store", at_first)) as passed:
        assert await read_all(passed, digest) != data
        await until_settled(tmp_path)
        is_bad = False
        assert await read_all(passed, digest) == data


async def test_a_short_blob_is_verified_before_it_is_passed_on(tmp_path: Path) -> None:
    digest, data = put_blob(tmp_path / "store", 100_000)
    bad = origin(tmp_path / "store", flip)
    async with relay(tmp_path, bad, origin(tmp_path / "store")) as passed:
        assert await read_all(passed, digest) == data
    async with relay(tmp_path, bad, cache="other") as passed:
        with pytest.raises(Unreachable, match="every upstream sent data that does not match"):
            await passed.blob(digest)


async def test_a_manifest_is_verified_then_cached(tmp_path: Path) -> None:
    digest = put(tmp_path).manifest_digest
    right = DirectoryStore(tmp_path / "store").read_manifest(digest)
    bad, good = origin(tmp_path / "store", flip), origin(tmp_path / "store")
    async with relay(tmp_path, bad, good) as passed:
        found = await asyncio.gather(*(passed.manifest(digest) for _ in range(8)))
        assert set(found) == {right}
    async with relay(tmp_path, bad) as passed:
        assert await passed.manifest(digest) == right
        path = tmp_path / "relay" / "whole" / f"{digest}.json"
        path.write_bytes(right.replace(b"policy", b"polizy"))
        with pytest.raises(Unreachable, match="a manifest that does not match"):
            await passed.manifest(digest)


async def test_a_size_mismatch_restarts_the_blob(tmp_path: Path) -> None:
    digest, data = put_blob(tmp_path / "store", SIZE)
    longer = tmp_path / "longer" / "blobs"
    longer.mkdir(parents=True)
    (longer / digest).write_bytes(data + b"more")
    is_away = False

    async def leave(_: str, start: int, chunk: bytes) -> bytes:
        if is_away:
            raise RuntimeError("gone")
        return chunk

    liar, weight_server = origin(tmp_path / "longer", leave), origin(tmp_path / "store")
    async with relay(tmp_path, liar, weight_server) as passed:
        blob = await passed.blob(digest)
        is_away = True
        with pytest.raises(Unreachable, match="another upstream said"):
            await blob.read(2 * PIECE_BYTES, 10)
        await blob.close()
        assert await read_all(passed, digest) == data


# --- cache space ------------------------------------------------------------------------------


async def test_the_cache_keeps_within_its_bound_and_what_is_used(tmp_path: Path) -> None:
    blobs = [put_blob(tmp_path / "store", MB, seed) for seed in range(8)]
    weight_server = origin(tmp_path / "store")
    async with relay(tmp_path, weight_server, max_bytes=3 * MB + 10) as passed:
        for digest, data in blobs:
            assert await read_all(passed, digest) == data
            await read_all(passed, blobs[0][0])
            await until_settled(tmp_path)
            assert sum(cached(tmp_path).values()) <= 3 * MB + 10
        assert set(cached(tmp_path)) == {blobs[each][0] for each in (0, 6, 7)}
        assert weight_server.num_bytes == 8 * MB


async def test_blobs_being_read_are_kept(tmp_path: Path) -> None:
    blobs = [put_blob(tmp_path / "store", MB, seed) for seed in range(3)]
    async with relay(tmp_path, origin(tmp_path / "store"), max_bytes=2 * MB) as passed:
        first, second = [await passed.blob(digest) for digest, _ in blobs[:2]]
        with pytest.raises(Unreachable, match="no space") as refused:
            await passed.blob(blobs[2][0])
        assert refused.value.retry_after_s, "room comes with time"
        await second.close()
        assert await read_all(passed, blobs[2][0]) == blobs[2][1]
        assert await first.read(MB - 10, 10) == blobs[0][1][-10:]
        await first.close()


async def test_a_blob_larger_than_the_cache_is_rejected(tmp_path: Path) -> None:
    digest, _ = put_blob(tmp_path / "store", SIZE)
    async with relay(tmp_path, origin(tmp_path / "store"), max_bytes=MB) as passed:
        with pytest.raises(NotFound, match="fetch this blob from the origin"):
            await passed.blob(digest)


async def test_a_cache_write_error_does_not_demote_upstreams(tmp_path: Path) -> None:
    digest, data = put_blob(tmp_path / "store", SIZE)
    manifest = put(tmp_path).manifest_digest
    async with relay(tmp_path, origin(tmp_path / "store")) as passed:
        shutil.rmtree(tmp_path / "relay" / "incoming")
        with pytest.raises(Unreachable, match="cannot write its cache"):
            await passed.blob(digest)
        assert await passed.manifest(manifest)
        (tmp_path / "relay" / "incoming").mkdir()
        assert await read_all(passed, digest) == data


# --- restarts and outages ---------------------------------------------------------------------


async def test_a_restarted_relay_has_what_it_verified(tmp_path: Path) -> None:
    digest, data = put_blob(tmp_path / "store", SIZE)
    unfinished, _ = put_blob(tmp_path / "store", SIZE, seed=1)
    weight_server = origin(tmp_path / "store")
    async with relay(tmp_path, weight_server) as passed:
        await read_all(passed, digest)
        await until_settled(tmp_path)
        await (await passed.blob(unfinished)).close()
        assert len(cached(tmp_path)) == 2
    weight_server.reads.clear()
    async with relay(tmp_path, weight_server) as passed:
        assert set(cached(tmp_path)) == {digest}
        assert await read_all(passed, digest) == data
        assert not weight_server.reads


async def test_blobs_damaged_between_restarts_are_fetched_again(tmp_path: Path) -> None:
    digest, data = put_blob(tmp_path / "store", SIZE)
    async with relay(tmp_path, origin(tmp_path / "store")) as passed:
        await read_all(passed, digest)
        await until_settled(tmp_path)
    path = tmp_path / "relay" / "whole" / digest
    path.write_bytes(data[:100] + b"?" + data[101:])
    async with relay(tmp_path, origin(tmp_path / "store")) as passed:
        assert await read_all(passed, digest) == data


async def test_a_smaller_bound_holds_from_the_start(tmp_path: Path) -> None:
    async with relay(tmp_path, origin(tmp_path / "store")) as passed:
        for seed in range(3):
            await read_all(passed, put_blob(tmp_path / "store", MB, seed)[0])
        await until_settled(tmp_path)
    async with relay(tmp_path, origin(tmp_path / "store"), max_bytes=MB):
        assert sum(cached(tmp_path).values()) == MB


async def test_two_relays_do_not_share_a_folder(tmp_path: Path) -> None:
    async with relay(tmp_path, origin(tmp_path / "store")):
        with pytest.raises(ConfigError, match="another running relay"):
            async with relay(tmp_path, origin(tmp_path / "store")):
                pass


async def test_without_upstream_only_cached_blobs_are_available(
    tmp_path: Path,
) -> None:
    digest, data = put_blob(tmp_path / "store", SIZE)
    other, _ = put_blob(tmp_path / "store", SIZE, seed=1)
    is_away = False

    async def leave(_: str, start: int, chunk: bytes) -> bytes:
        if is_away:
            raise RuntimeError("gone")
        return chunk

    async with relay(tmp_path, origin(tmp_path / "store", leave)) as passed:
        await read_all(passed, digest)
        begun = await passed.blob(other)
        is_away = True
        assert await read_all(passed, digest) == data
        assert await begun.read(0, 10)
        for ask in (begun.read(PIECE_BYTES, 10), passed.manifest("a" * 64)):
            with pytest.raises((Unreachable, NotFound)) as refused:
                await ask
            assert refused.value.retry_after_s is None, "who waits for it does not ask the origin"
        await begun.close()


async def test_retry_after_of_upstream_is_passed_on(tmp_path: Path) -> None:
    class Making(TamperingSource):
        async def blob(self, digest: str) -> Blob:
            raise Unreachable("it is being rebuilt", retry_after_s=0.25)

    digest, data = put_blob(tmp_path / "store", SIZE)
    making, weight_server = Making(origin(tmp_path / "store")), origin(tmp_path / "store")
    async with relay(tmp_path, making) as passed:
        with pytest.raises(Unreachable, match="being rebuilt") as refused:
            await passed.blob(digest)
        assert refused.value.retry_after_s == 0.25
    async with relay(tmp_path, making, weight_server) as passed:
        assert await read_all(passed, digest) == data


async def test_a_blob_missing_everywhere(tmp_path: Path) -> None:
    put_blob(tmp_path / "store", 10)
    async with relay(tmp_path, origin(tmp_path / "store"), origin(tmp_path / "store")) as passed:
        with pytest.raises(NotFound):
            await passed.blob("a" * 64)
        with pytest.raises(NotFound):
            await passed.manifest("a" * 64)


# --- delta chains -----------------------------------------------------------------------------


async def test_equal_questions_about_deltas_share_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = put(tmp_path)
    second = put_folder(tmp_path, write_folder(tmp_path / "hf-1", 1), 1, after=first)
    store = DirectoryStore(tmp_path / "store")
    old, new = [
        parse_manifest(store.read_manifest(each.manifest_digest)).files[3]
        for each in (first, second)
    ]
    step = DeltaEntry(base=old.blob, target=new.blob, blob="d" * 64, bytes=9)

    class Knowing(TamperingSource):
        async def chain(
            self, target: str, num_bytes: int, have: Collection[str]
        ) -> tuple[DeltaEntry, ...]:
            self.num_chain_queries += 1
            await asyncio.sleep(0.05)
            return (step,)

    weight_server = Knowing(origin(tmp_path / "store"))
    async with relay(tmp_path, weight_server) as passed:
        for _ in range(2):
            ask = (passed.chain(new.blob, new.bytes, [old.blob, "e" * 64]) for _ in range(8))
            assert set(await asyncio.gather(*ask)) == {(step,)}
        await passed.chain(new.blob, new.bytes, ["e" * 64, old.blob])
        assert weight_server.num_chain_queries == 1
        await passed.chain(new.blob, new.bytes, [old.blob])
        assert weight_server.num_chain_queries == 2
        monkeypatch.setattr(module, "CHAIN_TTL_S", 0.0)
        await passed.chain(new.blob, new.bytes + 1, [old.blob])
        await passed.chain(new.blob, new.bytes + 1, [old.blob])
        assert weight_server.num_chain_queries == 4


def test_cache_writes_follow_no_symlink(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(b"kept")
    (tmp_path / "link").symlink_to(outside)
    with pytest.raises(OSError):
        CachedBlob("a" * 64, tmp_path / "link", 4).write(0, b"lost")
    assert outside.read_bytes() == b"kept"
