# SPDX-License-Identifier: Apache-2.0
"""The same rows put and got by key through penstock and through TransferQueue 0.1.11 with its
SimpleStorage, in turns; and what each has lost after a consumer was killed.

Ours are durable when a put returns, theirs are in memory."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import httpx2

from benchmarks.baselines.group_fsync import append_and_read
from benchmarks.harness import (
    CONNECTIONS,
    MIN_PAIRS,
    ROOT,
    Server,
    log_line,
    process,
    result,
    scratch,
)
from benchmarks.killed_reader import COLUMN, NAME, SPACE, TTL_S
from benchmarks.service import RUN
from benchmarks.transferqueue import TransferQueue, environment, transferqueue
from penstock.dataflow.client.rows import RowsClient
from penstock.wire.auth import Audience, Role, Signer

SIZES = (1 << 10, 16 << 10, 64 << 10)
KILLED_ROWS, HELD_ROWS = 256, 64
IDLE_S = 5 * TTL_S
"""A second consumer that gets nothing for so long has seen all there is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One point of the grid."""

    size: int
    batch: int
    connections: int
    max_bytes: int
    """Of all rows of one round."""

    @property
    def num(self) -> int:
        """A few calls per connection at least."""
        calls = max(2 * self.connections, 64 if self.batch == 1 else 4)
        most = max(self.batch, self.max_bytes // self.size // self.batch * self.batch)
        return min(most, max(calls * self.batch, min(most, 256)))


@dataclass(slots=True)
class Rounds:
    """Seconds per round of one cell: put and got back. `theirs` is empty without TransferQueue."""

    cell: Cell
    ours: list[float] = field(default_factory=list[float])
    theirs: list[float] = field(default_factory=list[float])
    limit: list[float] = field(default_factory=list[float])
    """The slower of bare HTTP and bare group fsync; bulk only."""

    @property
    def ratio(self) -> float:
        return median(t / o for o, t in zip(self.ours, self.theirs, strict=True))

    @property
    def ratio_limit(self) -> float:
        return median(b / o for o, b in zip(self.ours, self.limit, strict=True))

    def __str__(self) -> str:
        cell, num = self.cell, self.cell.num
        theirs = f" | TransferQueue {num / median(self.theirs):7.0f}/s" if self.theirs else ""
        limit = f" | limit {num / median(self.limit):7.0f}/s" if self.limit else ""
        return (
            f"{cell.size:6} B x {cell.batch:3}, {cell.connections:2} at a time: "
            f"{num / median(self.ours):7.0f}/s{theirs}{limit}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """All that takes rows."""

    client: RowsClient
    theirs: TransferQueue | None
    http: httpx2.AsyncClient
    bare: Server
    folder: Path


async def _spread(calls: Sequence[Callable[[], Awaitable[None]]], connections: int) -> float:
    waiting = iter(calls)

    async def connection() -> None:
        for call in waiting:
            await call()

    began_at = time.perf_counter()
    await asyncio.gather(*(connection() for _ in range(connections)))
    return time.perf_counter() - began_at


async def _ours(client: RowsClient, cell: Cell, rows: dict[str, bytes]) -> float:
    parts = _parts([*rows], cell.batch)

    async def put(keys: list[str]) -> None:
        if await client.put(SPACE, {key: {COLUMN: rows[key]} for key in keys}):
            raise RuntimeError("a row was there before")

    async def get(keys: list[str]) -> None:
        found = await client.get(SPACE, keys, [COLUMN])
        if any(found[key].columns[COLUMN] != rows[key] for key in keys):
            raise RuntimeError("a row came back changed")

    took_s = await _spread([lambda p=p: put(p) for p in parts], cell.connections)
    took_s += await _spread([lambda p=p: get(p) for p in parts], cell.connections)
    await client.clear(SPACE)
    return took_s


async def _theirs(theirs: TransferQueue, cell: Cell, keys: list[str]) -> float:
    took_s = 0.0
    for what in ("put", "get"):
        took_s += await asyncio.to_thread(
            theirs.run, what, keys, cell.size, cell.batch, cell.connections
        )
    await asyncio.to_thread(theirs.run, "clear", keys, cell.size, 256, 1)
    return took_s


async def _limit(sides: Sides, cell: Cell, rows: dict[str, bytes]) -> float:
    """Bare HTTP with the same client library, and bare appends synced in groups as large as ours
    can ever be; whichever is slower."""
    bodies = [b"".join(rows[key] for key in part) for part in _parts([*rows], cell.batch)]

    async def put(number: int) -> None:
        await sides.http.post(f"{sides.bare.url}/rows/{number}", content=bodies[number])

    async def get(number: int) -> None:
        answer = await sides.http.get(f"{sides.bare.url}/rows/{number}")
        if answer.content != bodies[number]:
            raise RuntimeError("the bare side gave back something else")

    numbers = range(len(bodies))
    http_s = await _spread([lambda n=n: put(n) for n in numbers], cell.connections)
    http_s += await _spread([lambda n=n: get(n) for n in numbers], cell.connections)
    per_group = cell.batch * cell.connections
    path = sides.folder / "bare"
    fsync_s = await asyncio.to_thread(append_and_read, path, [*rows.values()], per_group)
    path.unlink()
    return max(http_s, fsync_s)


def _parts(keys: list[str], batch: int) -> list[list[str]]:
    return [keys[start : start + batch] for start in range(0, len(keys), batch)]


async def _round(sides: Sides, rounds: Rounds, number: int) -> None:
    """The same rows through every side, in turns."""
    cell = rounds.cell
    value = bytes(range(256)) * (cell.size // 256)
    rows = {f"{number}-{cell.batch}-{index}": value for index in range(cell.num)}
    if number % 2:
        await _other_sides(sides, rounds, rows)
        rounds.ours.append(await _ours(sides.client, cell, rows))
    else:
        rounds.ours.append(await _ours(sides.client, cell, rows))
        await _other_sides(sides, rounds, rows)


async def _other_sides(sides: Sides, rounds: Rounds, rows: dict[str, bytes]) -> None:
    if sides.theirs is not None:
        rounds.theirs.append(await _theirs(sides.theirs, rounds.cell, [*rows]))
    if rounds.cell.batch > 1:
        rounds.limit.append(await _limit(sides, rounds.cell, rows))


# --- a consumer is killed ---------------------------------------------------------------------


def _lease_then_kill(url: str, token: str) -> int:
    """How many rows a consumer had in hand when it was killed."""
    command = [sys.executable, "-m", "benchmarks.killed_reader", url, token, str(HELD_ROWS)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as doomed:
        assert doomed.stdout is not None
        held = int(doomed.stdout.readline())
        doomed.kill()
    return held


async def _lost_ours(client: RowsClient, url: str, token: str) -> int:
    """Rows that no living consumer ever gets, after one that held rows was killed."""
    await client.put(SPACE, {f"row-{n}": {COLUMN: b"tokens"} for n in range(KILLED_ROWS)})
    held = await asyncio.to_thread(_lease_then_kill, url, token)
    assert held == HELD_ROWS, "it held rows when it was killed"
    used: set[str] = set()
    reader = await client.reader(NAME, reads=[COLUMN], space=SPACE, ttl_s=TTL_S)
    stream = reader.stream(max_rows=HELD_ROWS)
    with contextlib.suppress(TimeoutError):
        while len(used) < KILLED_ROWS:
            row = await asyncio.wait_for(anext(stream), IDLE_S)
            used.add(row.key)
    await stream.aclose()
    await client.clear(SPACE)
    return KILLED_ROWS - len(used)


def _lost_theirs(theirs: TransferQueue, python: Path, folder: Path) -> int:
    theirs.run("put", [f"row-{n}" for n in range(KILLED_ROWS)], 1024, KILLED_ROWS, 1)
    with transferqueue(python, folder, theirs.cluster) as doomed:
        held = doomed.fetch(HELD_ROWS)
        doomed.kill()
    assert held == HELD_ROWS, "it held rows when it was killed"
    used, idle_since = 0, time.monotonic()
    while used < KILLED_ROWS and time.monotonic() < idle_since + IDLE_S:
        got = theirs.fetch(HELD_ROWS)
        used, idle_since = used + got, time.monotonic() if got else idle_since
    return KILLED_ROWS - used


# --- all of it --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    rounds: list[Rounds]
    lost_ours: int = 0
    lost_theirs: int = 0


async def measure_bulk(folder: Path, cells: Sequence[Cell], *, num_pairs: int) -> Outcome:
    """Only ours and the limit: TransferQueue is neither needed nor started."""
    token = Signer.create(folder / "keys", RUN).mint(Role.ADMIN, [Audience.DATAFLOW], ttl_s=7200)
    with (
        process("benchmarks.service", str(folder)) as server,
        process("benchmarks.baselines.memory") as bare,
    ):
        async with RowsClient(server.url, token) as client, httpx2.AsyncClient() as http:
            sides = Sides(client=client, theirs=None, http=http, bare=bare, folder=folder)
            return Outcome(rounds=await _rounds(sides, cells, num_pairs))


async def _rounds(sides: Sides, cells: Sequence[Cell], num_pairs: int) -> list[Rounds]:
    kept = [Rounds(cell=cell) for cell in cells]
    for rounds in kept:
        await _round(sides, Rounds(cell=rounds.cell), -1)  # all sides are warm then
        for number in range(num_pairs):
            await _round(sides, rounds, number)
        log_line(str(rounds))
    return kept


async def measure(folder: Path, cells: Sequence[Cell], *, num_pairs: int) -> Outcome:
    python = await asyncio.to_thread(environment)
    token = Signer.create(folder / "keys", RUN).mint(Role.ADMIN, [Audience.DATAFLOW], ttl_s=7200)
    with (
        process("benchmarks.service", str(folder)) as server,
        process("benchmarks.baselines.memory") as bare,
        transferqueue(python, folder) as theirs,
    ):
        async with RowsClient(server.url, token) as client, httpx2.AsyncClient() as http:
            sides = Sides(client=client, theirs=theirs, http=http, bare=bare, folder=folder)
            kept = await _rounds(sides, cells, num_pairs)
            lost_ours = await _lost_ours(client, server.url, token)
            lost_theirs = await asyncio.to_thread(_lost_theirs, theirs, python, folder)
    log_line(f"killed with {HELD_ROWS} rows in hand: ours lost {lost_ours}, theirs {lost_theirs}")
    return Outcome(rounds=kept, lost_ours=lost_ours, lost_theirs=lost_theirs)


def grid(*, quick: bool) -> list[Cell]:
    max_bytes = (4 << 20) if quick else (16 << 20)
    single = [(size, 1, n) for size in SIZES for n in (1, CONNECTIONS)]
    bulk = [(size, batch, 4) for size in SIZES for batch in (16, 64, 256)]
    return [
        Cell(size=size, batch=batch, connections=connections, max_bytes=max_bytes)
        for size, batch, connections in (*single, *bulk)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller rounds, for a look")
    parser.add_argument("--folder", type=Path, help="where penstock writes; the temp folder")
    parser.add_argument("--bulk", action="store_true", help="only bulk cells, no TransferQueue")
    options = parser.parse_args()
    num_pairs = 3 if options.quick else MIN_PAIRS
    cells = grid(quick=options.quick)
    with scratch(options.folder) as folder:
        if options.bulk:
            cells = [cell for cell in cells if cell.batch > 1]
            found = asyncio.run(measure_bulk(folder, cells, num_pairs=num_pairs))
            result(**_of_bulk(found.rounds), pairs=num_pairs)
            return
        found = asyncio.run(measure(folder, cells, num_pairs=num_pairs))
    single = [rounds for rounds in found.rounds if rounds.cell.batch == 1]
    bulk = [rounds for rounds in found.rounds if rounds.cell.batch > 1]
    result(
        ratio=min(rounds.ratio for rounds in single),
        ratio_median=median(rounds.ratio for rounds in single),
        **_of_bulk(bulk),
        ratio_bulk_theirs=median(rounds.ratio for rounds in bulk),
        lost_ours=found.lost_ours,
        lost_theirs=found.lost_theirs,
        pairs=num_pairs,
    )


def _of_bulk(bulk: Sequence[Rounds]) -> dict[str, float]:
    """Apart for rows of 1 KB: the limit moves 256 of them as one body and knows no rows."""
    large = [rounds.ratio_limit for rounds in bulk if rounds.cell.size > SIZES[0]]
    small = [rounds.ratio_limit for rounds in bulk if rounds.cell.size == SIZES[0]]
    return {
        "ratio_bulk": min(large),
        "ratio_bulk_median": median(large),
        "ratio_bulk_1kb": min(small),
    }


if __name__ == "__main__":
    main()
