# SPDX-License-Identifier: Apache-2.0
"""Durable deliveries of 72 KB trajectories over 16 connections, one and four per call, beside a
bare handler that appends and fdatasyncs the same bodies in groups."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import aiohttp

from benchmarks.client import Service, Tokens, check_stored, make_tokens
from benchmarks.harness import (
    CONNECTIONS,
    MIN_PAIRS,
    Round,
    Server,
    load,
    log_line,
    process,
    result,
    scratch,
)
from benchmarks.service import RUN
from penstock.wire.auth import Signer

PAYLOAD_BYTES = 72_000
GROUP_SIZE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    num_pairs: int
    num: int
    """Deliveries per round; a multiple of the group size."""
    slow_ms: float = 0.0
    """Our side sleeps so long per call."""
    connections: int = CONNECTIONS
    per_call: tuple[int, ...] = (1, 4)


@dataclass(slots=True)
class Pairs:
    """Interleaved rounds of both sides for one number of deliveries per call."""

    per_call: int
    ours: list[Round] = field(default_factory=list[Round])
    bare: list[Round] = field(default_factory=list[Round])

    @property
    def ratio(self) -> float:
        return median(
            ours.calls_per_s / bare.calls_per_s
            for ours, bare in zip(self.ours, self.bare, strict=True)
        )

    def figures(self) -> dict[str, float]:
        suffix = "" if self.per_call == 1 else f"_k{self.per_call}"
        k = self.per_call
        figures = {
            "throughput_per_s": median(k * r.calls_per_s for r in self.ours),
            "baseline_per_s": median(k * r.calls_per_s for r in self.bare),
            "ratio": self.ratio,
            "p99_ms": median(r.percentile_ms(0.99) for r in self.ours),
            "baseline_p99_ms": median(r.percentile_ms(0.99) for r in self.bare),
            "cpu_us": median(1e6 * r.cpu_s / r.calls / k for r in self.ours),
            "baseline_cpu_us": median(1e6 * r.cpu_s / r.calls / k for r in self.bare),
        }
        return {name + suffix: value for name, value in figures.items()}


async def _post(service: Service, bare: Server, bodies: list[bytes], connections: int) -> Round:
    async def call(body: bytes) -> None:
        async with service.http.post(f"{bare.url}/v1/trajectories", data=body) as answer:
            await answer.read()

    calls = [lambda body=body: call(body) for body in bodies]
    return await load(bare, calls, connections=connections)


async def _deliver(service: Service, bodies: list[bytes], plan: Plan) -> Round:
    answers: list[bytes] = []

    async def call(body: bytes) -> None:
        answers.append(await service.raw("POST", "/v1/trajectories", body))

    calls = [lambda body=body: call(body) for body in bodies]
    timed = await load(service.server, calls, connections=plan.connections)
    check_stored(answers, plan.num)
    return timed


async def _pair(
    service: Service, bare: Server, pairs: Pairs, tokens: list[Tokens], plan: Plan
) -> None:
    """The same bodies to both sides, in turns; then the trainer takes the batch out of the way."""
    bodies = service.bodies(await service.lease(plan.num), tokens, pairs.per_call)
    if len(pairs.ours) % 2:
        pairs.bare.append(await _post(service, bare, bodies, plan.connections))
        pairs.ours.append(await _deliver(service, bodies, plan))
    else:
        pairs.ours.append(await _deliver(service, bodies, plan))
        pairs.bare.append(await _post(service, bare, bodies, plan.connections))
    await service.seal()
    await service.commit(number=0, skipped="benchmark")
    ours, theirs = pairs.ours[-1], pairs.bare[-1]
    log_line(
        f"{pairs.per_call} per call: {ours.calls_per_s * pairs.per_call:6.0f}/s, "
        f"p99 {ours.percentile_ms(0.99):5.1f} ms | bare "
        f"{theirs.calls_per_s * pairs.per_call:6.0f}/s, p99 {theirs.percentile_ms(0.99):5.1f} ms"
    )


async def measure(folder: Path, plan: Plan) -> list[Pairs]:
    kinds = [Pairs(per_call=k) for k in plan.per_call]
    tokens = make_tokens(PAYLOAD_BYTES)
    signer = Signer.create(folder / "keys", RUN)
    with (
        process(
            "benchmarks.service",
            str(folder),
            *("--groups-per-batch", str(plan.num // GROUP_SIZE), "--group-size", str(GROUP_SIZE)),
            *("--slow-ms", str(plan.slow_ms)),
        ) as server,
        process("benchmarks.baselines.ingest", str(folder)) as bare,
    ):
        connector = aiohttp.TCPConnector(limit=CONNECTIONS)
        async with aiohttp.ClientSession(connector=connector) as http:
            service = Service(http=http, server=server, signer=signer)
            await service.incarnate()
            await service.register(service.node_id)
            for index in range(plan.num_pairs + 1):
                for pairs in kinds:
                    await _pair(service, bare, pairs, tokens, plan)
                if index == 0:  # both sides are warm now
                    kinds = [Pairs(per_call=k) for k in plan.per_call]
    return kinds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer pairs, for a look")
    parser.add_argument("--folder", type=Path, help="where both sides write; the temp folder")
    parser.add_argument("--slow-ms", type=float, default=0.0, help="our side sleeps per call")
    options = parser.parse_args()
    plan = Plan(
        num_pairs=4 if options.quick else MIN_PAIRS,
        num=1600 if options.quick else 2400,
        slow_ms=options.slow_ms,
    )
    with scratch(options.folder) as folder:
        kinds = asyncio.run(measure(folder, plan))
    figures = {name: value for pairs in kinds for name, value in pairs.figures().items()}
    result(**figures, pairs=plan.num_pairs)


if __name__ == "__main__":
    main()
