# SPDX-License-Identifier: Apache-2.0
"""Two policies share one flow with `pace: any`; the trainer of one stops for ever.

Its own budget fills up, and then it declines groups by itself. The rate at which groups are issued
for the other must not fall: it is measured before the stop and after the budget is full, on the
real service with trainers that sleep instead of training."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.harness import log_line, result, scratch
from benchmarks.local_run import LocalNode, LocalTrainer, quiet, run_config
from penstock.dataflow.service.build import build
from penstock.dataflow.service.coordinator import DataflowService
from penstock.types import DropReason, PolicyName

STOPS, GOES_ON = PolicyName("stops"), PolicyName("goes-on")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    pace: str = "any"
    train_s: float = 0.1
    window_s: float = 2.0
    groups_per_batch: int = 8
    group_size: int = 4
    max_staleness: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Groups issued per second."""

    before: float
    after: float
    num_outpaced: int
    """Groups that the stopped policy declined: its budget was exhausted."""

    @property
    def ratio(self) -> float:
        return self.after / self.before


async def measure(setting: Setting, folder: Path) -> Rates:
    config = run_config(
        policies=(STOPS, GOES_ON),
        group_size=setting.group_size,
        groups_per_batch=setting.groups_per_batch,
        max_staleness=setting.max_staleness,
        pace=setting.pace,
    )
    service = build(config, folder / "ledger")
    node = LocalNode(service, lambda task, grant, live: grant.slot / setting.group_size)
    trainers = [LocalTrainer(service, policy) for policy in (STOPS, GOES_ON)]
    try:
        for trainer in trainers:
            await trainer.take_over()
        await node.join()
        async with asyncio.TaskGroup() as loops:
            rollouts = loops.create_task(_roll_out(node))
            stopping, going_on = [loops.create_task(_train(t, setting)) for t in trainers]
            before = await _rate(service, setting)
            stopping.cancel()
            await _until_exhausted(service, setting)
            after = await _rate(service, setting)
            for loop in (rollouts, going_on):
                loop.cancel()
        outpaced = "SELECT count(*) FROM fates WHERE consumer = :policy AND reason = :reason"
        declined = service.process.ledger.tables.scalar(
            outpaced, policy=STOPS, reason=DropReason.OUTPACED.value
        )
    finally:
        service.close()
    return Rates(before=before, after=after, num_outpaced=int(declined))


async def _roll_out(node: LocalNode) -> None:
    while True:
        await node.work(wait_s=1.0)


async def _train(trainer: LocalTrainer, setting: Setting) -> None:
    while True:
        if await trainer.batch(wait_s=1.0) is not None:
            await asyncio.sleep(setting.train_s)
            await trainer.commit()


async def _rate(service: DataflowService, setting: Setting) -> float:
    """From commit to commit of the policy that goes on, so that no window cuts a burst in two."""
    clock = service.process.clock
    await _next_commit(service, setting)
    began_at, num_before = clock(), _num_issued(service)
    await asyncio.sleep(setting.window_s)
    await _next_commit(service, setting)
    return (_num_issued(service) - num_before) / (clock() - began_at)


async def _next_commit(service: DataflowService, setting: Setting) -> None:
    lineage = service.coordinator.consumers[GOES_ON].lineage
    number, give_up_at = lineage.number, service.process.clock() + 20 * setting.train_s
    while lineage.number == number and service.process.clock() < give_up_at:
        await service.process.wait_for(service.process.changed, give_up_at)


def _num_issued(service: DataflowService) -> int:
    return int(service.process.ledger.tables.scalar("SELECT max(issue) FROM groups"))


async def _until_exhausted(service: DataflowService, setting: Setting) -> None:
    """The stopped policy holds all that its bound has room for, and has declined a batch more."""
    coordinator = service.coordinator
    budget = (setting.max_staleness + 1) * setting.groups_per_batch
    give_up_at = service.process.clock() + 50 * setting.train_s
    while service.process.clock() < give_up_at:
        levels = coordinator.consumers[STOPS].levels()
        if levels.admitted + levels.sealed >= budget:
            break
        await asyncio.sleep(setting.train_s / 10)
    await asyncio.sleep(5 * setting.train_s)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--folder", type=Path, help="where the ledgers are written")
    options = parser.parse_args()
    quiet()
    setting = Setting()
    rounds: list[Rates] = []
    for number in range(3 if options.quick else 10):
        with scratch(options.folder) as folder:
            rates = asyncio.run(measure(setting, folder))
        rounds.append(rates)
        log_line(
            f"round {number + 1}: {rates.before:.1f} groups/s before, {rates.after:.1f} after, "
            f"{rates.num_outpaced} declined by the policy that stopped"
        )
    result(
        ratio=median(rates.ratio for rates in rounds),
        before_per_s=median(rates.before for rates in rounds),
        after_per_s=median(rates.after for rates in rounds),
        declined=min(rates.num_outpaced for rates in rounds),
        rounds=len(rounds),
    )


if __name__ == "__main__":
    main()
