# SPDX-License-Identifier: Apache-2.0
"""Faults on the way of weights: processes killed at named points, stores and caches damaged, two
trainers. No node ever serves what is not exactly the version it names, and each recovers alone.

50 faults in CI; PENSTOCK_WEIGHTS_FAULTS for more. A failing campaign is repeated with its seed:
PENSTOCK_CHAOS_SEED=N."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import pytest
from tests.chaos.results_table import begin
from tests.chaos.weights_harness import World, world
from tests.chaos.weights_processes import POINTS

FAULTS = int(os.environ.get("PENSTOCK_WEIGHTS_FAULTS", "50"))
SEED = int(os.environ.get("PENSTOCK_CHAOS_SEED", "0")) or random.SystemRandom().randrange(1, 10**9)
RECOVERED_S = 300.0
"""Far more than a node needs, on a machine that does other things too."""

Fault = Callable[[World, random.Random], Awaitable[None]]

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(int(1800 + 5 * FAULTS))]


async def kill_trainer(made: World, draw: random.Random) -> None:
    await _kill_at(made, draw, "trainer")


async def kill_node(made: World, draw: random.Random) -> None:
    await _kill_at(made, draw, "node-a")


async def _kill_at(made: World, draw: random.Random, name: str) -> None:
    party = name.split("-", maxsplit=1)[0]
    point = draw.choice([point for point in POINTS if point.startswith(party)])
    made.kill(name)
    made.start(name, (point, draw.randint(1, 8)))
    await made.wait_ended([name], 3.0)
    made.kill(name)
    made.start(name)


async def kill_relay(made: World, draw: random.Random) -> None:
    await _kill_and_restart(made, draw, "relay")


async def kill_weight_server(made: World, draw: random.Random) -> None:
    await _kill_and_restart(made, draw, "weight_server")


async def _kill_and_restart(made: World, draw: random.Random, name: str) -> None:
    made.kill(name)
    await asyncio.sleep(draw.uniform(0.0, 0.5))
    made.start(name)


async def lose_deltas(made: World, draw: random.Random) -> None:
    for path in _blobs(made.root / "store" / "blobs", small=True):
        if draw.random() < 0.5:
            path.unlink(missing_ok=True)


async def damage_deltas(made: World, draw: random.Random) -> None:
    for path in _blobs(made.root / "store" / "blobs", small=True):
        _flip(path, draw)


async def swap_deltas(made: World, draw: random.Random) -> None:
    """Each entry names the delta of another base."""
    paths = [path for path in (made.root / "store" / "deltas").glob("*/*.json") if path.exists()]
    with suppress(OSError):
        texts = [path.read_bytes() for path in paths]
        for path, text in zip(paths, texts[1:] + texts[:1], strict=True):
            path.chmod(0o644)
            path.write_bytes(text)


async def damage_store(made: World, draw: random.Random) -> None:
    """Whole files too: a version is lost by that, and the next one is not."""
    for path in _blobs(made.root / "store" / "blobs"):
        _flip(path, draw)


async def damage_relay(made: World, draw: random.Random) -> None:
    for path in (made.root / "relay").rglob("*"):
        if path.is_file():
            _flip(path, draw)


async def damage_node(made: World, draw: random.Random) -> None:
    for path in _blobs(made.root / "node-b" / "blobs"):
        _flip(path, draw)


async def pause_node(made: World, draw: random.Random) -> None:
    """It wakes in the middle of something, many versions later."""
    made.signal("node-b", signal.SIGSTOP)
    await asyncio.sleep(draw.uniform(0.2, 1.5))
    made.signal("node-b", signal.SIGCONT)


async def two_trainers(made: World, draw: random.Random) -> None:
    """The old one sleeps while the new one takes over, and wakes in the middle of its work."""
    await asyncio.sleep(draw.uniform(0.0, 0.2))
    made.signal("trainer", signal.SIGSTOP)
    made.start("trainer-2")
    before = made.ledger.lineage.incarnation
    await made.ledger.until(
        lambda: made.ledger.lineage.incarnation > before, "a second trainer", RECOVERED_S
    )
    made.signal("trainer", signal.SIGCONT)
    # One that had not taken over yet when it fell asleep is the newer one of the two.
    assert await made.wait_ended(("trainer", "trainer-2"), 120.0), "both trainers go on"
    made.kill("trainer-2")
    made.kill("trainer")
    made.start("trainer")


KINDS: tuple[Fault, ...] = (
    kill_trainer,
    kill_trainer,
    kill_node,
    kill_node,
    kill_relay,
    kill_weight_server,
    lose_deltas,
    damage_deltas,
    swap_deltas,
    damage_store,
    damage_relay,
    damage_node,
    pause_node,
    two_trainers,
)


def _blobs(folder: Path, *, small: bool = False) -> list[Path]:
    found: list[Path] = []
    for path in folder.iterdir():
        with suppress(OSError):
            if not small or path.stat().st_size < 20_000:
                found.append(path)
    return found


def _flip(path: Path, draw: random.Random) -> None:
    with suppress(OSError):
        path.chmod(0o644)
        with path.open("r+b") as file:
            place = draw.randrange(max(1, path.stat().st_size))
            file.seek(place)
            byte = file.read(1) or b"\0"
            file.seek(place)
            file.write(bytes([byte[0] ^ (1 << draw.randrange(8))]))


async def test_no_node_serves_anything_but_the_version_it_names(tmp_path: Path) -> None:
    draw, figures, kinds = random.Random(SEED), begin("weights on their way"), Counter[str]()
    print(f"seed {SEED}")
    async with world(tmp_path) as made:
        ledger = made.ledger
        await ledger.until(lambda: len(ledger.served) == 2, "two nodes serve", RECOVERED_S)
        for _ in range(FAULTS):
            fault = draw.choice(KINDS)
            kinds[fault.__name__] += 1
            await fault(made, draw)
            newest = ledger.newest
            await ledger.until(
                lambda: min(ledger.served.values()) > newest,  # noqa: B023
                f"seed {SEED}: both nodes serve a newer version after {fault.__name__}",
                RECOVERED_S,
            )
            figures.trials += 1
            figures.acknowledged = ledger.num_served
            figures.duplicated = ledger.wrong
            assert not ledger.wrong, ledger.wrong[:3]
        figures.note = f"{ledger.newest} versions, {ledger.num_fenced} fenced, {len(kinds)} kinds"
    figures.require_clean()
