# SPDX-License-Identifier: Apache-2.0
"""SIGKILLs of the services at random moments under load: nothing promised is lost, counted twice
or trained twice, and work goes on after each.

Repeat a plan with `PENSTOCK_CHAOS_SEED=… make chaos KILLS=…`; processes keep their own timing."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest
from tests.chaos.ack_log import AckLog, Acknowledged
from tests.chaos.checker import check, missing
from tests.chaos.load_generator import Load
from tests.chaos.processes import Services, commands, make_run
from tests.chaos.results_table import begin

KILLS = int(os.environ.get("PENSTOCK_SERVICE_KILLS", "30"))
SEED = int(os.environ.get("PENSTOCK_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**9)
CAMPAIGNS = [("the one service", 1, 0.4), ("home or a partition", 3, 0.6)]
START_SHARE = 0.2
"""Of the kills that meet a service during its start."""

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800 + 10 * KILLS)]


@pytest.mark.parametrize(("fault", "num_partitions", "share"), CAMPAIGNS)
async def test_kills_of_the_services(
    tmp_path: Path, fault: str, num_partitions: int, share: float
) -> None:
    figures, rng, kills = begin(f"kill -9 of {fault}"), random.Random(SEED), round(KILLS * share)
    print(f"PENSTOCK_CHAOS_SEED={SEED}")
    folder = make_run(tmp_path / "run", num_partitions=num_partitions)
    with (
        AckLog(tmp_path / "history.jsonl") as history,
        Services(commands(folder), folder.logs) as services,
    ):
        await services.start_all()
        async with Load(folder, services, history, SEED) as load:
            while figures.trials < kills:
                before = len(history.promises.rows)
                await load.progress(rng.randrange(1, 60))
                await asyncio.sleep(rng.uniform(0.0, 0.1))
                name = rng.choice(services.names)
                figures.trials += 1 + await kill(services, name, rng)
                await services.wait_ready(name)
                recent = Acknowledged(rows=dict(list(history.promises.rows.items())[before:]))
                figures.lost += await asyncio.to_thread(missing, folder.path, recent)
            await load.progress(100)
        check(figures, folder.path, history, load.trainer.twice())
    figures.require_clean()


async def kill(services: Services, name: str, rng: random.Random) -> bool:
    """Once, or once more during its start; True then."""
    services.kill(name)
    services.start(name)
    if rng.random() > START_SHARE:
        return False
    await asyncio.sleep(rng.uniform(0.0, 0.2))
    services.kill(name)
    services.start(name)
    return True
