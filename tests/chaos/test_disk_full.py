# SPDX-License-Identifier: Apache-2.0
"""A disk that fills up under load and is freed again: deliveries are refused with 507 and the time
to come back, reading and committing go on, and the same process goes on when there is room."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest
from tests.chaos.ack_log import AckLog
from tests.chaos.checker import check
from tests.chaos.filesystems import memory_disk, needs_root
from tests.chaos.load_generator import Load, Probe
from tests.chaos.processes import GROUPS_PER_BATCH, Services, commands, make_run
from tests.chaos.results_table import begin

FILLS = int(os.environ.get("PENSTOCK_FILLS", "3"))
SEED = int(os.environ.get("PENSTOCK_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**9)
DISK_BYTES = 256 << 20
REFUSED_S = 60.0
TRIES = 8
"""Results held back; while each of them is taken, half a second apart, the disk is not full yet."""

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800 + 60 * FILLS), *needs_root]


async def test_disk_full_and_freed(tmp_path: Path) -> None:
    figures, rng = begin("disk full, then freed"), random.Random(SEED)
    print(f"PENSTOCK_CHAOS_SEED={SEED}")
    with (
        AckLog(tmp_path / "history.jsonl") as history,
        memory_disk(tmp_path / "disk", DISK_BYTES) as disk,
    ):
        folder = make_run(disk / "run")
        with Services(commands(folder), tmp_path) as services:
            await services.start_all()
            async with (
                Load(folder, services, history, SEED) as load,
                Probe(folder, history) as probe,
            ):
                for _ in range(FILLS):
                    await load.progress(rng.randrange(50, 150))
                    await one_fill(disk / "filler", load, probe, services)
                    figures.trials += 1
            check(figures, folder.path, history, load.trainer.twice())
    figures.require_clean()


async def one_fill(filler: Path, load: Load, probe: Probe, services: Services) -> None:
    await probe.hold(TRIES)
    async with load.trainer.gate:  # it holds still until the disk is full
        await load.trainer.wait_ready(GROUPS_PER_BATCH)
        fill(filler)
        await refused(probe, services)
        before = len(load.history.promises.commits)
        async with asyncio.timeout(REFUSED_S):
            while len(load.history.promises.commits) == before:
                await load.trainer.step()
    os.unlink(filler)
    services.require_alive()
    await load.progress(100)
    await probe.deliver()


def fill(filler: Path) -> None:
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 20, 4096):
            try:
                while True:
                    file.write(b"\0" * size)
            except OSError:
                continue


async def refused(probe: Probe, services: Services) -> None:
    """Soon every delivery is told to come back later, and when."""
    for _ in range(TRIES):
        retry_after_s = await probe.refusal()
        services.require_alive()
        if retry_after_s is not None:
            assert retry_after_s > 0, "507 without Retry-After"
            return
        await asyncio.sleep(0.5)
    raise AssertionError("deliveries are still taken on a full disk")
