# SPDX-License-Identifier: Apache-2.0
"""Parallel ranges: received pieces are not fetched again, only damaged ranges are repaired, and
measured speeds decide whether to use deltas."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from tests.contract.test_weights_deltas import WEIGHTS, versions, weights_file, write_version
from tests.unit.rollout.polling import eventually
from tests.unit.weights.snapshot_folders import contents
from tests.unit.weights.weight_servers import listening, put_folder, tampering_server

from penstock.types import PublishedVersion
from penstock.weights import client
from penstock.weights.client import Puller
from penstock.weights.deltas.chain import DeltaEntry
from penstock.weights.manifest import FileEntry, TensorEntry
from penstock.weights.pulling import links
from penstock.weights.pulling import partial as partial_module
from penstock.weights.pulling.cache import BlobCache, run_uncancelled
from penstock.weights.pulling.links import Transfer
from penstock.weights.tensors import Scan, read_layout
from penstock.wire.client import AsyncServiceClient, connect

PIECE = 32 << 10
PULL = """
import asyncio, sys
from pathlib import Path
import msgspec
from penstock.types import PublishedVersion
from penstock.weights.pulling import partial
from penstock.weights.client import Puller
from penstock.wire.client import connect

async def main():
    partial.MIN_PIECE_BYTES = int(sys.argv[4])
    wanted = msgspec.json.decode(sys.argv[3], type=PublishedVersion)
    async with connect(sys.argv[1], "none") as caller:
        await Puller(Path(sys.argv[2])).pull([caller], wanted)

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partial_module, "MIN_PIECE_BYTES", PIECE)


def put_one(tmp_path: Path) -> PublishedVersion:
    return put_folder(tmp_path, write_version(tmp_path / "hf-0", 0), 0)


class Asked:
    """Ranges of one blob requested from a server, and how many concurrently."""

    def __init__(self, blob: str, together: int = 1) -> None:
        """The first answers wait until `together` requests are here."""
        self.blob = blob
        self._together = together
        self._are_here = asyncio.Event()
        self.byte_ranges: list[tuple[int, int]] = []
        self.num_now = 0
        self.most = 0

    async def note(self, request: Request, data: bytes) -> bytes:
        if self.blob in request.url.path and (asked := request.headers.get("range")):
            first, last = asked.removeprefix("bytes=").split("-")
            self.byte_ranges.append((int(first), int(last) + 1))
            self.num_now += 1
            self.most = max(self.most, self.num_now)
            if self.num_now == self._together:
                self._are_here.set()
            async with asyncio.timeout(60):
                await self._are_here.wait()
            await asyncio.sleep(0.01)
            self.num_now -= 1
        return data

    @property
    def num_bytes(self) -> int:
        return sum(end - start for start, end in self.byte_ranges)


async def test_pieces_are_fetched_in_parallel_and_once(tmp_path: Path) -> None:
    wanted = put_one(tmp_path)
    file = weights_file(tmp_path, wanted)
    asked = Asked(file.blob, together=5)
    async with tampering_server(tmp_path / "store", asked.note) as caller:
        folder = await Puller(tmp_path / "cache", num_ranges=5).pull([caller], wanted)
    assert contents(folder) == contents(tmp_path / "hf-0")
    assert asked.most == 5
    assert asked.num_bytes == file.bytes and len(asked.byte_ranges) == -(-file.bytes // PIECE)


def num_marked(cache: Path, blob: str, num_bytes: int) -> int:
    path = cache / "blobs" / f"{blob}.partial"
    return path.read_bytes()[num_bytes + 8 :].count(1) if path.exists() else 0


async def test_another_process_resumes_where_one_was_killed(tmp_path: Path) -> None:
    wanted = put_one(tmp_path)
    file = weights_file(tmp_path, wanted)
    asked = Asked(file.blob)
    is_stalling = True

    async def stall(request: Request, data: bytes) -> bytes:
        data = await asked.note(request, data)
        if is_stalling and request.headers.get("range", "").startswith(f"bytes={3 * PIECE}-"):
            await asyncio.sleep(300)
        return data

    num_pieces = -(-file.bytes // PIECE)
    async with tampering_server(tmp_path / "store", stall) as caller:
        words = (caller.base_url, str(tmp_path / "cache"), msgspec.json.encode(wanted).decode())
        child = await asyncio.create_subprocess_exec(sys.executable, "-c", PULL, *words, str(PIECE))
        await eventually(
            lambda: num_marked(tmp_path / "cache", file.blob, file.bytes) == num_pieces - 1
        )
        child.send_signal(signal.SIGKILL)
        await child.wait()
        is_stalling = False
        asked.byte_ranges.clear()
        folder = await Puller(tmp_path / "cache").pull([caller], wanted)
        assert asked.byte_ranges == [(3 * PIECE, 4 * PIECE)]
    assert contents(folder) == contents(tmp_path / "hf-0")


async def test_a_cancelled_pull_is_resumed(tmp_path: Path) -> None:
    wanted = put_one(tmp_path)
    file = weights_file(tmp_path, wanted)
    asked = Asked(file.blob)
    async with tampering_server(tmp_path / "store", asked.note) as caller:
        puller = Puller(tmp_path / "cache", num_ranges=1)
        task = asyncio.create_task(puller.pull([caller], wanted))
        await eventually(lambda: len(asked.byte_ranges) >= 5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        folder = await puller.pull([caller], wanted)
    assert contents(folder) == contents(tmp_path / "hf-0")
    assert asked.num_bytes <= file.bytes + PIECE


@asynccontextmanager
async def breaking(
    store: Path, num_breaks: int
) -> AsyncGenerator[tuple[AsyncServiceClient, list[str]]]:
    """A server whose first connections break mid-response; yields the requested ranges too."""
    asked: list[str] = []

    async def answer(request: Request) -> Response:
        path = store / request.url.path.removeprefix("/v1/")
        if path.parent.name == "manifests":
            return Response(path.with_suffix(".json").read_bytes())
        if path.parent.name == "deltas":
            return Response(status_code=404)
        first, last = request.headers["range"].removeprefix("bytes=").split("-")
        data = path.read_bytes()[int(first) : int(last) + 1]
        asked.append(request.headers["range"])
        if len(asked) > num_breaks:
            return Response(data, status_code=206)

        async def half() -> AsyncIterator[bytes]:
            yield data[: len(data) // 2]
            await asyncio.sleep(0.05)
            raise ConnectionError("the line is cut")

        return StreamingResponse(half(), 206, {"content-length": str(len(data))})

    app = Starlette(routes=[Route("/v1/{kind}/{digest}", answer)])
    async with listening(app) as url, connect(url, "none") as caller:
        yield caller, asked


async def test_a_broken_connection_costs_its_piece(tmp_path: Path) -> None:
    wanted = put_one(tmp_path)
    async with breaking(tmp_path / "store", 4) as (caller, asked):
        folder = await Puller(tmp_path / "cache").pull([caller], wanted)
    assert contents(folder) == contents(tmp_path / "hf-0")
    assert len(asked) == len(set(asked)) + 4


# --- repair -------------------------------------------------------------------------------------


def spans_of(path: Path) -> dict[str, tuple[int, int]]:
    data = path.read_bytes()
    layout = read_layout(io.BytesIO(data), WEIGHTS)
    tensors = {
        name: (byte_range.start, byte_range.end) for name, byte_range in layout.byte_ranges.items()
    }
    return {"": (0, len(layout.head)), **tensors}


@pytest.mark.parametrize("part", ["", "a.weight", "b.weight"])
async def test_only_the_damaged_tensor_is_fetched_again(tmp_path: Path, part: str) -> None:
    wanted = put_one(tmp_path)
    file = weights_file(tmp_path, wanted)
    start, end = spans_of(tmp_path / "hf-0" / WEIGHTS)[part]
    place = start + 30 if part == "" else end - 1  # in the head, a letter of its metadata
    asked = Asked(file.blob)
    num_flipped = 0

    async def flip_once(request: Request, data: bytes) -> bytes:
        nonlocal num_flipped
        data = await asked.note(request, data)
        if file.blob in request.url.path and not num_flipped:
            first = int(request.headers["range"].removeprefix("bytes=").split("-")[0])
            if first <= place < first + len(data):
                num_flipped += 1
                at = place - first
                return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
        return data

    async with tampering_server(tmp_path / "store", flip_once) as caller:
        folder = await Puller(tmp_path / "cache").pull([caller], wanted)
    assert contents(folder) == contents(tmp_path / "hf-0")
    assert num_flipped == 1
    again = asked.byte_ranges[-(-file.bytes // PIECE) :]
    assert (min(again)[0], max(again)[1]) == (start, end)
    assert sum(last - first for first, last in again) == end - start


@pytest.mark.parametrize("where", ["file", "base"])
async def test_rot_in_the_cache_costs_one_tensor(tmp_path: Path, where: str) -> None:
    """Damage in the target file, or in the base of a delta."""
    made = versions(tmp_path, 2)
    rotten = weights_file(tmp_path, made[0])
    wanted = made[0] if where == "file" else made[1]
    asked = Asked(weights_file(tmp_path, wanted).blob)
    start, end = spans_of(tmp_path / "hf-0" / WEIGHTS)["b.weight"]
    async with tampering_server(tmp_path / "store", asked.note) as caller:
        puller = Puller(tmp_path / "cache", transfer="delta")
        first = await puller.pull([caller], made[0])
        path = tmp_path / "cache" / "blobs" / rotten.blob
        os.chmod(path, 0o644)
        with path.open("r+b") as file:
            file.seek(end - 1)
            file.write(bytes([path.read_bytes()[end - 1] ^ 1]))
        served = (first / WEIGHTS).read_bytes()
        asked.byte_ranges.clear()
        descriptor = os.open(first / WEIGHTS, os.O_RDONLY)  # as an engine holds it open
        folder = await puller.pull([caller], wanted)
        assert os.pread(descriptor, len(served), 0) == served, "nobody writes where an engine reads"
        os.close(descriptor)
    assert contents(folder) == contents(tmp_path / f"hf-{wanted.number}")
    assert asked.byte_ranges == [(start, end)]
    puller.prune({wanted.manifest_digest})
    assert not list((tmp_path / "cache").rglob("*.wrong"))


# --- deltas or full files -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("transfer", "is_slow", "kinds"),
    [
        ("full", "", ["full"] * 3),
        ("delta", "rebuild", ["delta"] * 3),
        # The first sample is ignored: it includes compilation.
        ("auto", "rebuild", ["delta", "delta", "full"]),
        ("auto", "link", ["delta"] * 3),
    ],
)
async def test_measured_speeds_choose_deltas_or_full_files(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    transfer: Transfer,
    is_slow: str,
    kinds: list[str],
) -> None:
    monkeypatch.setattr(links, "MIN_SAMPLE_BYTES", PIECE)
    monkeypatch.setattr(client, "NUM_FILES", 1)
    made = versions(tmp_path, 4)
    asked: list[str] = []
    rebuild = BlobCache.rebuild

    def slow_rebuild(
        blobs: BlobCache,
        file: FileEntry,
        steps: Sequence[DeltaEntry],
        sole: Sequence[TensorEntry],
    ) -> Scan:
        time.sleep(1.0 if is_slow == "rebuild" else 0.0)
        return rebuild(blobs, file, steps, sole)

    async def note(request: Request, data: bytes) -> bytes:
        asked.append(f"{request.path_params['kind']} {request.path_params['digest']}")
        if is_slow == "link" and len(data) == PIECE:
            await asyncio.sleep(1.0)
        return data

    monkeypatch.setattr(BlobCache, "rebuild", slow_rebuild)
    async with tampering_server(tmp_path / "store", note) as caller:
        puller = Puller(tmp_path / "cache", transfer=transfer)
        await puller.pull([caller], made[0])
        for wanted, kind in zip(made[1:], kinds, strict=True):
            asked.clear()
            folder = await puller.pull([caller], wanted)
            assert contents(folder) == contents(tmp_path / f"hf-{wanted.number}")
            blob = weights_file(tmp_path, wanted).blob
            assert (f"blobs {blob}" in asked) is (kind == "full")
            assert (f"updates {wanted.manifest_digest}" in asked) is (transfer != "full")


async def test_a_cancelled_writer_finishes_before_releasing_its_lock() -> None:
    is_done, has_begun, may_end = False, threading.Event(), threading.Event()

    def write() -> None:
        nonlocal is_done
        has_begun.set()
        may_end.wait(60)
        is_done = True

    task = asyncio.create_task(run_uncancelled(write))
    await asyncio.to_thread(has_begun.wait, 60)
    task.cancel()
    await asyncio.sleep(0.05)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert is_done
