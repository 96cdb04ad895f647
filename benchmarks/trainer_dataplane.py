# SPDX-License-Identifier: Apache-2.0
"""Rows of a sealed batch on their way to the ranks of a trainer: each rank draws its own, beside a
single controller through which all rows pass. Both designs run in the same processes, step about:
bytes through the busiest process, the time a step waits for its rows, the losses of both (they must
be the same bits), and the batch at which each runs out of a capped memory. Then, how uneven the
ranks' work is before and after balancing."""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from benchmarks.harness import log_line, result, scratch
from penstock.trainer.pass_cost import TYPICAL

if TYPE_CHECKING:
    from benchmarks.dataplane_ranks import World

KB, MB = 1 << 10, 1 << 20
NUM_PARTITIONS = 2
CAP_BYTES = 192 * MB
CAPPED_ROW_BYTES = 4 * MB
CAPPED_RANKS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One size, both designs."""

    num_ranks: int
    row_bytes: int
    ours_bytes: float
    """Payload through the busiest process, in and out, over all steps."""
    single_bytes: float
    share_bytes: float
    """A rank's own share."""
    ours_s: float
    """Median wait for rows, until the last rank has its own."""
    single_s: float
    is_bit_equal: bool


@contextmanager
def _partitions(folder: Path, largest_bytes: int) -> Generator[tuple[str, ...]]:
    from benchmarks.dataplane_ranks import serve

    paths = tuple(str(folder / f"partition.{number}") for number in range(NUM_PARTITIONS))
    children: list[int] = []
    for path in paths:
        child = os.fork()
        if child == 0:
            serve(path, largest_bytes)
        children.append(child)
    try:
        while not all(Path(path).exists() for path in paths):
            os.sched_yield()
        yield paths
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _point(world: World, folder: Path) -> Point:
    from benchmarks.dataplane_ranks import run

    ranks = run(world, folder)
    assert ranks is not None, "no cap was set"

    def busiest(design: str) -> float:
        return max(rank[design]["through_bytes"][0] for rank in ranks)

    def stall_s(design: str) -> float:
        by_step = zip(*(rank[design]["stall_s"] for rank in ranks), strict=True)
        return median([max(times) for times in by_step][1:])  # both are warm after the first

    losses = {name: {tuple(rank[name]["losses"]) for rank in ranks} for name in world.designs}
    point = Point(
        num_ranks=world.num_ranks,
        row_bytes=world.row_bytes,
        ours_bytes=busiest("ours"),
        single_bytes=busiest("single"),
        share_bytes=world.steps * world.num_rows * world.row_bytes / world.num_ranks,
        ours_s=stall_s("ours"),
        single_s=stall_s("single"),
        is_bit_equal=losses["ours"] == losses["single"] and len(losses["ours"]) == 1,
    )
    log_line(
        f"{point.num_ranks} ranks, rows of {point.row_bytes // KB:5d} KB: busiest process "
        f"{point.ours_bytes / MB:7.1f} MB | single controller {point.single_bytes / MB:7.1f} MB; "
        f"wait {1e3 * point.ours_s:7.1f} ms | {1e3 * point.single_s:7.1f} ms; "
        f"losses {'bit-equal' if point.is_bit_equal else 'DIFFER'}"
    )
    return point


def _largest_batch(world: World, folder: Path, design: str) -> int:
    """Rows of the largest batch that fits under the cap, by doubling."""
    from benchmarks.dataplane_ranks import run

    fits = 0
    num_rows = world.num_ranks
    while num_rows <= 1024:
        trial = replace(world, num_rows=num_rows, steps=2, designs=(design,), cap_bytes=CAP_BYTES)
        if run(trial, folder) is None:
            break
        fits, num_rows = num_rows, 2 * num_rows
    log_line(f"under a cap of {CAP_BYTES // MB} MB a rank, {design}: a batch of {fits} rows fits")
    return fits


def _imbalance(costs_R: npt.NDArray[np.float64], parts: list[list[int]]) -> float:
    """The most expensive part over the mean: 1.0 is perfect."""
    sums_P = np.array([costs_R[rows].sum() for rows in parts])
    return float(sums_P.max() / sums_P.mean())


def _balance(num_ranks: int, num_batches: int) -> tuple[float, float]:
    """Median load imbalance as rows are served, and as ranks share them; lengths are log-normal."""
    from penstock.trainer.ranks.row_fetch import assign_rows

    draw = np.random.default_rng(0)
    before: list[float] = []
    after: list[float] = []
    for _ in range(num_batches):
        lengths_R = np.clip(draw.lognormal(8.0, 1.0, 256), 16, 65536)
        costs_R = TYPICAL.rows(lengths_R, lengths_R**2, lengths_R)
        served = [list(range(rank, 256, num_ranks)) for rank in range(num_ranks)]
        shared = assign_rows(costs_R, np.arange(256) // 8, num_ranks, 1)
        before.append(_imbalance(costs_R, served))
        after.append(_imbalance(costs_R, shared))
    return median(before), median(after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer sizes and steps, for a look")
    parser.add_argument("--folder", type=Path, help="where sockets and results stand")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    from benchmarks.dataplane_ranks import World  # torch loads here, once for all ranks

    sizes = [8 * KB, MB] if options.quick else [8 * KB, 64 * KB, MB, 8 * MB]
    ranks = [2, 4] if options.quick else [2, 4, 8]
    steps = 6 if options.quick else 20
    with scratch(options.folder) as folder, _partitions(folder, max(sizes)) as partitions:

        def world(num_ranks: int, row_bytes: int) -> World:
            return World(
                num_ranks=num_ranks,
                num_rows=16 if row_bytes > MB else 64,
                row_bytes=row_bytes,
                steps=steps,
                partitions=partitions,
            )

        points = [_point(world(n, size), folder) for n in ranks for size in sizes]
        capped = world(CAPPED_RANKS, min(CAPPED_ROW_BYTES, max(sizes)))
        ours_rows = _largest_batch(capped, folder, "ours")
        single_rows = _largest_batch(capped, folder, "single")
    before, after = _balance(8, 20 if options.quick else 200)
    log_line(f"load imbalance over 8 ranks: {before:.3f} as served, {after:.4f} balanced")
    last = points[-1]
    result(
        busiest_over_share=max(p.ours_bytes / p.share_bytes for p in points),
        single_busiest_over_share=max(p.single_bytes / p.share_bytes for p in points),
        wait_ratio_largest=last.single_s / last.ours_s,
        wait_ratio_least=min(p.single_s / p.ours_s for p in points),
        losses_bit_equal=int(all(p.is_bit_equal for p in points)),
        capped_rows_ours=ours_rows,
        capped_rows_single=single_rows,
        imbalance_served=before,
        imbalance_balanced=after,
    )
    if not all(p.is_bit_equal for p in points):
        raise SystemExit("the losses of the two designs differ")


if __name__ == "__main__":
    main()
