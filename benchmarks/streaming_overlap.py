# SPDX-License-Identifier: Apache-2.0
"""Reward, reference and trainer on the same rows: as a stream, where each takes a row as soon as
its columns are there, and with a row-complete barrier, where each waits until the one before has
done all rows. In turns, over the real service; work is simulated by sleeping, and its lengths are
log-normal, as those of answers are."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.harness import MIN_PAIRS, log_line, process, result, scratch
from benchmarks.service import RUN
from penstock.dataflow.client.rows import RowsClient
from penstock.wire.auth import Audience, Role, Signer

HELD = 4
"""Rows a worker has in hand; more would be a small barrier of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()


STAGES = (
    Stage(name="reward", reads=("tokens",), writes=("reward",)),
    Stage(name="reference", reads=("tokens", "reward"), writes=("reference",)),
    Stage(name="trainer", reads=("tokens", "reward", "reference")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    num_rows: int = 64
    work_s: float = 0.02
    """Median of one row in one stage."""
    sigma: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    streamed_s: float
    stages_s: tuple[float, ...]
    """Each with the barrier before it."""

    @property
    def overlap(self) -> float:
        """Of what the barrier serialises beside the longest stage, the share that the stream did
        at the same time."""
        serial_s = sum(self.stages_s)
        return (serial_s - self.streamed_s) / (serial_s - max(self.stages_s))


async def _work(client: RowsClient, space: str, stage: Stage, works_s: Mapping[str, float]) -> None:
    """One worker of a stage, until it has done all rows."""
    reader = await client.reader(
        f"{space}-{stage.name}", reads=stage.reads, writes=stage.writes, space=space
    )
    left = {*works_s}
    async with contextlib.aclosing(reader.stream(max_rows=HELD)) as rows:
        async for row in rows:
            await asyncio.sleep(works_s[row.key])
            if stage.writes:
                await row.write(**dict.fromkeys(stage.writes, b"values"))
            left.discard(row.key)
            if not left:
                await row.done()
                return


async def _timed(*works: asyncio.Task[None]) -> float:
    began_at = time.perf_counter()
    await asyncio.gather(*works)
    return time.perf_counter() - began_at


async def _pair(client: RowsClient, setting: Setting, number: int) -> Pair:
    rng = random.Random(number)
    spaces = f"stream-{number}", f"barrier-{number}"
    works_s = {
        f"row-{n}": setting.work_s * rng.lognormvariate(0.0, setting.sigma)
        for n in range(setting.num_rows)
    }
    for space in spaces:
        await client.put(space, {key: {"tokens": b"ids"} for key in works_s})

    def start(space: str, stage: Stage) -> asyncio.Task[None]:
        return asyncio.create_task(_work(client, space, stage, works_s), name=stage.name)

    streamed_s = await _timed(*(start(spaces[0], stage) for stage in STAGES))
    stages_s = [await _timed(start(spaces[1], stage)) for stage in STAGES]
    return Pair(streamed_s=streamed_s, stages_s=tuple(stages_s))


async def measure(folder: Path, setting: Setting, *, num_pairs: int) -> list[Pair]:
    token = Signer.create(folder / "keys", RUN).mint(Role.ADMIN, [Audience.DATAFLOW], ttl_s=7200)
    pairs: list[Pair] = []
    with process("benchmarks.service", str(folder)) as server:
        async with RowsClient(server.url, token) as client:
            for number in range(num_pairs):
                pair = await _pair(client, setting, number)
                stages = " + ".join(f"{s:.2f}" for s in pair.stages_s)
                log_line(f"barrier {stages} s | stream {pair.streamed_s:.2f} s: {pair.overlap:.2f}")
                pairs.append(pair)
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds, for a look")
    parser.add_argument("--folder", type=Path, help="where penstock writes; the temp folder")
    options = parser.parse_args()
    num_pairs = 3 if options.quick else MIN_PAIRS
    with scratch(options.folder) as folder:
        pairs = asyncio.run(measure(folder, Setting(), num_pairs=num_pairs))
    result(
        overlap=median(pair.overlap for pair in pairs),
        streamed_s=median(pair.streamed_s for pair in pairs),
        barrier_s=median(sum(pair.stages_s) for pair in pairs),
        pairs=num_pairs,
    )


if __name__ == "__main__":
    main()
