# SPDX-License-Identifier: Apache-2.0
"""How much resource time four pipelines leave idle over ratios of rollout to train: naive,
micro-batch, off-policy fill and multiplexed; predicted, and measured in virtual time over the real
dataflow core and the planner of real runs.

Dedicated pipelines divide the resources as the planner finds best for the ratio. Multiplexed ones
have resources with the tags `rollout` and `train`, beside none or some with `rollout` alone. Each
change between the two costs 2 % of a step, and counts as idle."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from benchmarks.bubbles_virtual import WORKLOAD, Point, TimeAccount, simulate
from benchmarks.harness import log_line, result
from benchmarks.overlap_workload import Workload
from penstock.fleet.idle_forecast import Pipeline, has_perfect_schedule, predict_idle

RATIOS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
QUICK_RATIOS = (1.0, 2.0)
ROLLOUT_ONLY = (0, 2, 4)
DISPATCH_RATIO = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    point: Point
    account: TimeAccount

    @property
    def predicted(self) -> float:
        point = self.point
        return predict_idle(
            point.pipeline,
            point.forecast_load(),
            point.tagging,
            batches_per_visit=point.batches_per_visit,
        )

    @property
    def error(self) -> float:
        return abs(self.account.idle - self.predicted)

    @property
    def has_perfect_schedule(self) -> bool:
        return has_perfect_schedule(self.point.load, self.point.tagging)


def points(ratios: Sequence[float], workload: Workload) -> Iterator[Point]:
    for ratio in ratios:
        for pipeline in Pipeline:
            is_multiplexed = pipeline is Pipeline.MULTIPLEXED
            for rollout_only in ROLLOUT_ONLY if is_multiplexed else (0,):
                yield Point(
                    pipeline=pipeline, ratio=ratio, rollout_only=rollout_only, workload=workload
                )


def measure(ratios: Sequence[float], workload: Workload) -> Iterator[Measured]:
    for point in points(ratios, workload):
        found = Measured(point=point, account=simulate(point))
        tags, account = found.point.tagging, found.account
        log_line(
            f"{point.pipeline}, rollout:train {point.ratio:g}, resources {tags.rollout} rollout "
            f"{tags.train} train {tags.both} both: idle {account.idle:.4f} "
            f"(predicted {found.predicted:.4f}), of it switching "
            f"{account.switch_s / account.total_s:.4f}"
            + ("" if found.has_perfect_schedule else "; no schedule is perfect here")
        )
        yield found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two ratios and half the steps")
    parser.add_argument("--folder", type=Path, help="not used: nothing is written")
    options = parser.parse_args()
    workload = replace(WORKLOAD, steps=WORKLOAD.steps // 2) if options.quick else WORKLOAD
    found = list(measure(QUICK_RATIOS if options.quick else RATIOS, workload))
    by_pipeline = {p: [one for one in found if one.point.pipeline is p] for p in Pipeline}
    multiplexed = [one for one in by_pipeline[Pipeline.MULTIPLEXED] if one.has_perfect_schedule]
    slots = {
        is_batch: simulate(
            Point(
                pipeline=Pipeline.OFF_POLICY,
                ratio=DISPATCH_RATIO,
                batch_dispatch=is_batch,
                workload=workload,
            )
        ).lane_idle
        for is_batch in (False, True)
    }
    result(
        idle_multiplexed=max(one.account.idle for one in multiplexed),
        **{
            f"idle_{p}": fmean(one.account.idle for one in by_pipeline[p])
            for p in Pipeline
            if p is not Pipeline.MULTIPLEXED
        },
        idle_multiplexed_mean=fmean(one.account.idle for one in multiplexed),
        prediction_error=max(one.error for one in found),
        prediction_error_multiplexed=max(one.error for one in multiplexed),
        slot_idle_stream=slots[False],
        slot_idle_batch=slots[True],
        points=len(found),
    )


if __name__ == "__main__":
    main()
