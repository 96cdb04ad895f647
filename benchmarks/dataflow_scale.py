# SPDX-License-Identifier: Apache-2.0
"""Does the cost of a trajectory stay the same when a run grows? 1 and 8 partitions, 10 and 2,000
nodes; then memory under a slow trainer, and the lag of a heartbeat while 2 MB trajectories arrive.

How many bytes pass between the coordinator and the other partitions is counted, too.

Nodes are clients that only speak the protocol. Costs are processor seconds of all dataflow
processes, so that what else this machine does counts little."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.client import NODE, Service, Tokens, check_stored, make_tokens
from benchmarks.harness import log_line, result, scratch
from benchmarks.scale_bounds import CAP_MB, lag, memory
from benchmarks.scale_run import GROUP_SIZE, World, scale_config, world
from penstock.dataflow.core.leasing import Grant, RegisterRequest
from penstock.dataflow.service.nodes.messages import (
    DeliveryRequest,
    LeaseAnswer,
)
from penstock.types import NodeId
from penstock.wire.codec import decode, encode

PER_CALL = 8
LEASES_PER_CALL = 32
SMALL_BYTES, NORMAL_BYTES = 4_800, 72_000
NODE_GROUPS = 100
"""Per batch, and all that is issued at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Processor seconds of all dataflow processes in one round."""

    lease_s: float
    trajectory_s: float
    """From the issue of its group to the batch it is in, without the lease."""


# --- 1 and 8 partitions -----------------------------------------------------------------------


async def _partition_round(here: World, groups: int, tokens: Sequence[Tokens]) -> Cost:
    """Every partition leases and delivers the same number of groups; home seals them all."""
    begin_s = here.cpu_s()
    await asyncio.sleep(0.3)  # groups travel to their partitions
    num = groups * GROUP_SIZE
    leased_from_s = here.cpu_s()
    grants = await asyncio.gather(*(_lease(service, num) for service in here.services))
    leased_s = here.cpu_s() - leased_from_s
    bodies = [s.bodies(g, tokens, PER_CALL) for s, g in zip(here.services, grants, strict=True)]
    await asyncio.gather(*(_deliver(s, b, 4) for s, b in zip(here.services, bodies, strict=True)))
    if await here.coordinator.seal() != num * len(here.services):
        raise RuntimeError("the batch is not whole")
    await here.coordinator.commit(number=0, skipped="benchmark")
    total = num * len(here.services)
    spent_s = here.cpu_s() - begin_s - leased_s
    return Cost(lease_s=leased_s / total, trajectory_s=spent_s / total)


async def _lease(service: Service, num: int) -> list[Grant]:
    return [
        grant
        for start in range(0, num, LEASES_PER_CALL)
        for grant in await service.lease(min(LEASES_PER_CALL, num - start))
    ]


async def _deliver(service: Service, bodies: Sequence[bytes], connections: int) -> None:
    waiting = iter(bodies)
    answers: list[bytes] = []

    async def connection() -> None:
        for body in waiting:
            answers.append(await service.raw("POST", "/v1/trajectories", body))

    await asyncio.gather(*(connection() for _ in range(connections)))
    check_stored(answers, len(bodies) * PER_CALL)


async def partitions(folder: Path, *, most: int, groups: int, rounds: int) -> tuple[float, float]:
    """Growth of the cost per trajectory and per lease from one partition to `most`."""
    tokens = make_tokens(NORMAL_BYTES)
    costs: tuple[list[Cost], list[Cost]] = ([], [])
    async with (
        world(folder / "one", scale_config(groups_per_batch=groups), 1) as one,
        world(folder / "many", scale_config(groups_per_batch=groups * most), most) as many,
    ):
        for here in (one, many):
            for service in here.services:
                await service.register(service.node_id)
        for index in range(rounds + 1):
            for here in (one, many) if index % 2 else (many, one):
                cost = await _partition_round(here, groups, tokens)
                _log_cost(f"{len(here.services)} partitions", cost)
                if index:  # the first warms up
                    costs[here is many].append(cost)
    pairs = [*zip(*costs, strict=True)]
    return (
        median(b.trajectory_s / a.trajectory_s for a, b in pairs) - 1,
        median(b.lease_s / a.lease_s for a, b in pairs) - 1,
    )


async def link_bytes(folder: Path, num_partitions: int, *, groups: int, rounds: int) -> float:
    """Bytes between home and the further partitions for each of their trajectories of 72 KB."""
    tokens = make_tokens(NORMAL_BYTES)
    run = scale_config(groups_per_batch=groups * num_partitions)
    async with world(folder, run, num_partitions) as here:
        for service in here.services:
            await service.register(service.node_id)
        await _partition_round(here, groups, tokens)
        before = here.link_bytes()
        for _ in range(rounds):
            await _partition_round(here, groups, tokens)
        after = here.link_bytes()
    if missing := before.keys() - after.keys():
        raise RuntimeError(f"{len(missing)} connections closed, and what they carried is unknown")
    total = sum(after.values()) - sum(before.values())
    found = total / (rounds * groups * GROUP_SIZE * (num_partitions - 1))
    log_line(f"{num_partitions:>5} partitions: {found:6.0f} bytes at home per trajectory elsewhere")
    return found


def _log_cost(what: str, cost: Cost) -> None:
    log_line(
        f"{what:>16}: {1e6 * cost.trajectory_s:6.0f} us per trajectory, "
        f"{1e6 * cost.lease_s:5.0f} us per lease"
    )


# --- 10 and 2,000 nodes -----------------------------------------------------------------------


@dataclass(slots=True)
class Fleet:
    """So many nodes at one service, each with its own session and connection."""

    service: Service
    nodes: list[NodeId]
    num_leases: int = 0

    async def join(self) -> None:
        for start in range(0, len(self.nodes), 100):
            await asyncio.gather(*map(self._join, self.nodes[start : start + 100]))

    async def _join(self, node_id: NodeId) -> None:
        body = RegisterRequest(
            node_id=node_id, boot_id=self.service.boot_id, capacity=64, policies=()
        )
        await self.service.join(body)
        await self._beat(node_id)

    async def _beat(self, node_id: NodeId) -> None:
        await self.service.beat(node_id)

    async def work(self, turns: int, tokens: Sequence[Tokens]) -> None:
        """Every node takes its turns: a beat, a lease, a delivery."""
        await asyncio.gather(*(self._turns(node_id, turns, tokens) for node_id in self.nodes))

    async def _turns(self, node_id: NodeId, turns: int, tokens: Sequence[Tokens]) -> None:
        service = replace(self.service, node_id=node_id)
        for _ in range(turns):
            await self._beat(node_id)
            left = PER_CALL
            while left:
                body = service.lease_body(node_id, left)
                answer = decode(await service.raw("POST", "/v1/leases", body), LeaseAnswer)
                if not answer.grants:
                    continue  # polls again, as a node does
                left -= len(answer.grants)
                self.num_leases += len(answer.grants)
                made = tuple(service.delivery(grant, tokens) for grant in answer.grants)
                request = DeliveryRequest(node_id=node_id, boot_id=service.boot_id, deliveries=made)
                stored = await service.raw("POST", "/v1/trajectories", encode(request))
                check_stored([stored], len(made))


async def _train(service: Service, batches: int) -> None:
    for _ in range(batches):
        await service.seal()
        await service.commit(number=0, skipped="benchmark")


async def _node_round(here: World, fleet: Fleet, turns: int, tokens: Sequence[Tokens]) -> float:
    """So much work in all, however many nodes share it; far fewer slots than they ask for, so that
    most nodes of a large fleet wait for work all the time."""
    begin_s = here.cpu_s()
    num = turns * len(fleet.nodes) * PER_CALL
    batches = num // (NODE_GROUPS * GROUP_SIZE)
    await asyncio.gather(fleet.work(turns, tokens), _train(here.coordinator, batches))
    return (here.cpu_s() - begin_s) / num


async def nodes(folder: Path, *, few: int, many: int, rounds: int) -> float:
    """Growth of the cost per trajectory, its lease and beat included."""
    tokens = make_tokens(SMALL_BYTES)
    run = scale_config(groups_per_batch=NODE_GROUPS)
    costs: tuple[list[float], list[float]] = ([], [])
    async with (
        world(folder / "few", run, 1) as small,
        world(folder / "many", run, 1) as large,
    ):
        fleets: list[tuple[World, Fleet]] = []
        for here, num in ((small, few), (large, many)):
            fleet = Fleet(here.coordinator, [NodeId(f"{NODE}.{index}") for index in range(num)])
            await fleet.join()
            fleets.append((here, fleet))
        for index in range(rounds + 1):
            for here, fleet in fleets if index % 2 else reversed(fleets):
                cost_s = await _node_round(here, fleet, many // len(fleet.nodes), tokens)
                log_line(f"{len(fleet.nodes):>10} nodes: {1e6 * cost_s:6.0f} us per trajectory")
                if index:
                    costs[here is large].append(cost_s)
    return median(b / a for a, b in zip(*costs, strict=True)) - 1


# --- all of it --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    rounds: int
    groups: int
    """Per partition and round."""
    slow_trainer_s: float
    large: int
    """Trajectories of 2 MB."""
    few: int = 10
    many: int = 2_000
    partitions: int = 8


QUICK = Plan(rounds=2, groups=8, slow_trainer_s=20.0, large=40, many=500)
FULL = Plan(rounds=10, groups=32, slow_trainer_s=300.0, large=400)


async def measure(folder: Path, plan: Plan) -> dict[str, float]:
    trajectories, leases = await partitions(
        folder / "partitions", most=plan.partitions, groups=plan.groups, rounds=plan.rounds
    )
    grown = await nodes(folder / "nodes", few=plan.few, many=plan.many, rounds=plan.rounds)
    two, many = [
        await link_bytes(folder / f"bytes-{num}", num, groups=plan.groups, rounds=plan.rounds)
        for num in (2, plan.partitions)
    ]
    rss_mb = await memory(folder / "memory", seconds=plan.slow_trainer_s)
    idle_ms, lag_ms = await lag(folder / "lag", num=plan.large)
    return {
        "cpu_growth_partitions": max(trajectories, leases),
        "cpu_growth_partitions_trajectory": trajectories,
        "cpu_growth_partitions_lease": leases,
        "cpu_growth_nodes": grown,
        "coordinator_bytes": many,
        "coordinator_bytes_growth": many / two - 1,
        "rss_mb": rss_mb,
        "rss_cap_mb": CAP_MB,
        "lag_p99_ms": lag_ms,
        "lag_idle_p99_ms": idle_ms,
        "nodes": plan.many,
        "partitions": plan.partitions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer, smaller rounds, for a look")
    parser.add_argument("--folder", type=Path, help="where the services write; the temp folder")
    options = parser.parse_args()
    with scratch(options.folder) as folder:
        figures = asyncio.run(measure(folder, QUICK if options.quick else FULL))
    result(**figures)


if __name__ == "__main__":
    main()
