# SPDX-License-Identifier: Apache-2.0
"""Power loss under load: what had reached the device at a random moment holds every promise made
until then. A SIGKILL cannot show this, for the page cache survives it.

The services write to an ext4 inside a file. At a random moment they are stopped, and the file is
copied: it holds the synced blocks and no dirty page. The copy is mounted, as after a power cut, and
checked. Not shown: a device that lies about its own cache, and torn or reordered writes inside one
unsynced group; the simulator's disk does those."""

from __future__ import annotations

import asyncio
import os
import random
import tempfile
from pathlib import Path

import pytest
from tests.chaos.ack_log import AckLog, Acknowledged
from tests.chaos.checker import check, check_disk, databases
from tests.chaos.filesystems import NO_LUCK, LoopDisk, make_image, mounted, needs_root, scratch
from tests.chaos.load_generator import Load
from tests.chaos.processes import Services, commands, make_run
from tests.chaos.results_table import Figures, begin

from penstock.dataflow.ledger.tables import open_tables

IMAGES = int(os.environ.get("PENSTOCK_IMAGES", "20"))
SEED = int(os.environ.get("PENSTOCK_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**9)
IMAGES_PER_RUN = 20
"""Then a new run begins on a new disk, so that the check of an image stays short."""

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800 + 10 * IMAGES), *needs_root]


async def test_power_loss(tmp_path: Path) -> None:
    figures, rng = begin("power loss"), random.Random(SEED)
    print(f"PENSTOCK_CHAOS_SEED={SEED}")
    with tempfile.TemporaryDirectory(prefix="penstock-power-", dir=scratch(tmp_path)) as name:
        while figures.trials < IMAGES:
            count = min(IMAGES_PER_RUN, IMAGES - figures.trials)
            await one_run(figures, Path(name), count, rng)
    figures.require_clean()


async def one_run(figures: Figures, work: Path, count: int, rng: random.Random) -> None:
    image = work / "disk.img"
    make_image(image)
    with (
        AckLog(work / "history.jsonl") as history,
        mounted(image, work / "live", NO_LUCK) as disk,
    ):
        folder = make_run(disk.point / "run")
        disk.sync()  # the folder itself was there before
        with Services(commands(folder), work) as services:
            await services.start_all()
            async with Load(folder, services, history, rng.randrange(10**9)) as load:
                for _ in range(count):
                    await load.progress(rng.randrange(20, 120))
                    await asyncio.sleep(rng.uniform(0.0, 0.1))
                    acked = await cut(services, disk, work / "cut.img", history)
                    await asyncio.to_thread(check_image, figures, work, acked)
            check(figures, folder.path, history, load.trainer.twice())


async def cut(services: Services, disk: LoopDisk, target: Path, history: AckLog) -> Acknowledged:
    """Copy the disk as it is at this moment; returns all that was promised before it."""
    for name in services.names:
        services.stop(name)
    try:
        await asyncio.sleep(0.02)  # answers that left before the stop arrive
        acked = history.promises.copy()
        await asyncio.to_thread(disk.copy_image, target)
    finally:
        for name in services.names:
            services.resume(name)
    return acked


def check_image(figures: Figures, work: Path, acked: Acknowledged) -> None:
    with mounted(work / "cut.img", work / "after") as disk:
        for database in databases(disk.point / "run"):
            open_tables(database.parent).close()  # the next life is not refused
        check_disk(figures, disk.point / "run", acked)
    figures.trials += 1
    assert acked.rows, "nothing was promised before the cut, so it proves nothing"
