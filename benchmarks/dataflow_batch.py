# SPDX-License-Identifier: Apache-2.0
"""A batch of 256 rows of 64 KB: sealed, fetched by two ranks and committed, beside a bare handler
that answers two ranges of one file of the same bytes. Both sides are timed until the last byte of
their answers is there; what a client decodes comes after."""

from __future__ import annotations

import argparse
import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import aiohttp

from benchmarks.client import POLICY, Service, Tokens, check_stored, make_tokens
from benchmarks.harness import MIN_PAIRS, Server, log_line, process, result, scratch
from benchmarks.service import RUN
from penstock.dataflow.service.trainers.messages import BatchRowsRequest, RowsAnswer
from penstock.wire.auth import Signer
from penstock.wire.codec import decode, encode

PAYLOAD_BYTES = 64_000
GROUP_SIZE = 8
GROUPS = 32
ROWS = GROUP_SIZE * GROUPS
RANKS = 2
SHARES = [
    encode(BatchRowsRequest(indexes=tuple(range(rank, ROWS, RANKS)))) for rank in range(RANKS)
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    ours_s: float
    bare_s: float
    seal_s: float
    fetch_s: float
    commit_s: float


async def _deliver(service: Service, tokens: list[Tokens]) -> list[bytes]:
    """Fill the next batch; returns its payloads."""
    grants = await service.lease(ROWS)
    answers = [
        await service.raw("POST", "/v1/trajectories", body)
        for body in service.bodies(grants, tokens, 16)
    ]
    check_stored(answers, ROWS)
    return [bytes(service.delivery(grant, tokens).payload) for grant in grants]


async def _ours(service: Service, number: int) -> tuple[float, float, float, list[bytes]]:
    """Seconds to seal, to fetch and to commit, and what the ranks got."""
    seal = service.seal_body()
    began_at = time.perf_counter()
    manifest = await service.raw("POST", "/v1/batches", seal)
    sealed_at = time.perf_counter()
    path = f"/v1/batches/{POLICY}.{service.seq}/rows"
    parts = await asyncio.gather(*(service.raw("POST", path, share) for share in SHARES))
    fetched_at = time.perf_counter()
    await service.commit(number=number)
    ended_at = time.perf_counter()
    if service.num_rows(manifest) != ROWS:
        raise RuntimeError("the batch has not all its rows")
    return sealed_at - began_at, fetched_at - sealed_at, ended_at - fetched_at, parts


async def _bare(http: aiohttp.ClientSession, bare: Server) -> tuple[float, int]:
    async def get(rank: int) -> int:
        async with http.get(f"{bare.url}/rows?rank={rank}&of={RANKS}") as answer:
            return len(await answer.read())

    began_at = time.perf_counter()
    sizes = await asyncio.gather(*map(get, range(RANKS)))
    return time.perf_counter() - began_at, sum(sizes)


def _check_rows(parts: list[bytes], payloads: list[bytes]) -> None:
    got = [row.payload for part in parts for row in decode(part, RowsAnswer).rows]
    if sorted(p for p in got if p is not None) != sorted(payloads):
        raise RuntimeError("the ranks did not get the rows as they were delivered")


def _rewrite(whole: Path, payloads: list[bytes]) -> None:
    """In place: the bare side keeps the file open and reads what is new."""
    whole.write_bytes(b"".join(payloads))


async def _pair(
    service: Service, bare: Server, tokens: list[Tokens], number: int, whole: Path
) -> Pair:
    payloads = await _deliver(service, tokens)
    _rewrite(whole, payloads)
    if number % 2:
        seal_s, fetch_s, commit_s, parts = await _ours(service, number)
        bare_s, num_bytes = await _bare(service.http, bare)
    else:
        bare_s, num_bytes = await _bare(service.http, bare)
        seal_s, fetch_s, commit_s, parts = await _ours(service, number)
    _check_rows(parts, payloads)
    assert num_bytes == sum(map(len, payloads)), "the bare side answers the same bytes"
    ours_s = seal_s + fetch_s + commit_s
    log_line(
        f"sealed {1e3 * seal_s:5.1f} ms, fetched {1e3 * fetch_s:5.1f} ms, committed "
        f"{1e3 * commit_s:5.1f} ms | bare {1e3 * bare_s:5.1f} ms"
    )
    return Pair(ours_s=ours_s, bare_s=bare_s, seal_s=seal_s, fetch_s=fetch_s, commit_s=commit_s)


async def measure(folder: Path, *, num_pairs: int, slow_ms: float) -> list[Pair]:
    tokens = make_tokens(PAYLOAD_BYTES)
    signer = Signer.create(folder / "keys", RUN)
    whole = folder / "whole"
    whole.write_bytes(b"")
    with (
        process(
            "benchmarks.service",
            str(folder),
            *("--groups-per-batch", str(GROUPS), "--group-size", str(GROUP_SIZE)),
            *("--max-staleness", str(num_pairs + 2), "--slow-ms", str(slow_ms)),
        ) as server,
        process("benchmarks.baselines.range_read", str(whole)) as bare,
    ):
        async with aiohttp.ClientSession() as http:
            service = Service(http=http, server=server, signer=signer)
            await service.incarnate()
            await service.register(service.node_id)
            pairs = [
                await _pair(service, bare, tokens, number, whole)
                for number in range(1, num_pairs + 2)
            ]
    return pairs[1:]  # both sides are warm after the first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer pairs, for a look")
    parser.add_argument("--folder", type=Path, help="where both sides write; the temp folder")
    parser.add_argument("--slow-ms", type=float, default=0.0, help="our side sleeps per call")
    options = parser.parse_args()
    num_pairs = MIN_PAIRS if options.quick else 3 * MIN_PAIRS
    with scratch(options.folder) as folder:
        pairs = asyncio.run(measure(folder, num_pairs=num_pairs, slow_ms=options.slow_ms))
    result(
        ratio=median(pair.bare_s / pair.ours_s for pair in pairs),
        batch_ms=1e3 * median(pair.ours_s for pair in pairs),
        baseline_ms=1e3 * median(pair.bare_s for pair in pairs),
        seal_ms=1e3 * median(pair.seal_s for pair in pairs),
        fetch_ms=1e3 * median(pair.fetch_s for pair in pairs),
        commit_ms=1e3 * median(pair.commit_s for pair in pairs),
        pairs=num_pairs,
    )


if __name__ == "__main__":
    main()
