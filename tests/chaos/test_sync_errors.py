# SPDX-License-Identifier: Apache-2.0
"""An fsync that fails: the service promises nothing more and ends, and its next life holds all that
was promised before. A failed fsync is never tried again: the kernel may have dropped the pages."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.chaos.ack_log import AckLog
from tests.chaos.checker import check
from tests.chaos.load_generator import Load
from tests.chaos.processes import Services, commands, make_run
from tests.chaos.results_table import begin

FAULTS = int(os.environ.get("PENSTOCK_SYNC_FAULTS", "6"))
SEED = int(os.environ.get("PENSTOCK_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**9)
FILES = ("/segments/", "ledger.db")
"""Payload, then records: one of them is broken at a time."""
IN_FLIGHT_S = 0.5
"""Answers to what was synced before the fault have arrived by then."""

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(1800 + 30 * FAULTS),
    pytest.mark.skipif(shutil.which("cc") is None, reason="the fault is a C library; needs cc"),
]


def preload(folder: Path) -> Path:
    library = folder / "sync_fault.so"
    source = Path(__file__).with_name("sync_fault.c")
    words = ["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", library, source, "-ldl"]
    subprocess.run(words, check=True, timeout=60)
    return library


async def test_failed_syncs(tmp_path: Path) -> None:
    figures, rng = begin("failed fsync"), random.Random(SEED)
    print(f"PENSTOCK_CHAOS_SEED={SEED}")
    order, folder = tmp_path / "order", make_run(tmp_path / "run")
    env = {"LD_PRELOAD": str(preload(tmp_path)), "PENSTOCK_SYNC_FAULT": str(order)}
    with (
        AckLog(tmp_path / "history.jsonl") as history,
        Services(commands(folder), folder.logs, env) as services,
    ):
        await services.start_all()
        async with Load(folder, services, history, SEED) as load:
            for trial in range(FAULTS):
                await load.progress(rng.randrange(1, 100))
                await asyncio.sleep(rng.uniform(0.0, 0.1))
                order.write_text(FILES[trial % len(FILES)])
                await asyncio.sleep(IN_FLIGHT_S)
                acked = len(history.promises.rows)
                for name in services.names:
                    await services.wait_ended(name, timeout_s=300.0)
                if (more := len(history.promises.rows) - acked) > 0:
                    figures.lost.append(f"trial {trial}: {more} rows promised after a failed fsync")
                order.unlink()
                await services.start_all()
                figures.trials += 1
            await load.progress(50)
        check(figures, folder.path, history, load.trainer.twice())
    figures.require_clean()
