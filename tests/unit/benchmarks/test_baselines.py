# SPDX-License-Identifier: Apache-2.0
"""A baseline is worth something only while it is bare, and a ratio only while it can fall."""

from __future__ import annotations

import ast
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path

import aiohttp
import pytest
from benchmarks import baselines
from benchmarks.client import Service, check_stored, make_tokens
from benchmarks.harness import Server, process
from benchmarks.service import RUN

from penstock.wire.auth import Signer

FILES = sorted(Path(baselines.__file__).parent.glob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_baseline_is_short_and_knows_nothing_of_penstock(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 60
    imported = [
        name
        for node in ast.walk(ast.parse(text))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in (
            [node.module or ""]
            if isinstance(node, ast.ImportFrom)
            else [a.name for a in node.names]
        )
    ]
    assert not [name for name in imported if name.split(".")[0] in ("penstock", "benchmarks")]


def test_there_are_baselines() -> None:
    names = {path.name for path in FILES}
    assert names >= {"ingest.py", "range_read.py", "memory.py", "group_fsync.py"}
    assert "transferqueue.py" in names


SLEEP_MS = 1.0
CALLS = 240


async def _one_by_one(services: Sequence[Service], bare: Server) -> list[list[float]]:
    """Milliseconds of the same call to each service and to the bare side, in turns: whatever else
    the machine does falls on all of them."""
    tokens = make_tokens(72_000)
    bodies = [s.bodies(await s.lease(CALLS), tokens, 1) for s in services]
    answers: list[list[bytes]] = [[] for _ in services]
    took_ms: list[list[float]] = [[] for _ in (*services, bare)]
    http = services[0].http

    async def call(side: int, number: int) -> None:
        began_at = time.perf_counter()
        if side < len(services):
            body = bodies[side][number]
            answers[side].append(await services[side].raw("POST", "/v1/trajectories", body))
        else:
            async with http.post(f"{bare.url}/v1/trajectories", data=bodies[0][number]) as answer:
                await answer.read()
        took_ms[side].append(1e3 * (time.perf_counter() - began_at))

    sides = range(len(took_ms))
    for number in range(CALLS):
        for side in (*sides[number % len(sides) :], *sides[: number % len(sides)]):
            await call(side, number)
    for found in answers:
        check_stored(found, CALLS)
    return took_ms


@contextlib.asynccontextmanager
async def _service(
    folder: Path, http: aiohttp.ClientSession, slow_ms: float
) -> AsyncGenerator[Service]:
    signer = Signer.create(folder / "keys", RUN)
    words = ("--groups-per-batch", str(CALLS // 8), "--slow-ms", str(slow_ms))
    with process("benchmarks.service", str(folder), *words) as server:
        service = Service(http=http, server=server, signer=signer)
        await service.incarnate()
        await service.register(service.node_id)
        yield service


@pytest.mark.slow
async def test_the_ratio_falls_when_our_side_sleeps(tmp_path: Path) -> None:
    """1 ms on the service's event loop per call, and nothing else differs. Of the calls the tenth
    that nothing disturbed: a busy machine hides a millisecond in the rest."""
    async with (
        aiohttp.ClientSession() as http,
        _service(tmp_path / "fast", http, 0.0) as fast,
        _service(tmp_path / "slow", http, SLEEP_MS) as slow,
    ):
        with process("benchmarks.baselines.ingest", str(tmp_path)) as bare:
            found = await _one_by_one([fast, slow], bare)
    fast_ms, slow_ms, bare_ms = (sorted(took_ms)[CALLS // 10] for took_ms in found)
    assert slow_ms - fast_ms > SLEEP_MS / 2, (fast_ms, slow_ms)
    assert bare_ms / slow_ms < bare_ms / fast_ms
