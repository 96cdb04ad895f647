# SPDX-License-Identifier: Apache-2.0
"""How much faster asynchronous training is than synchronous, why, and how near to what no schedule
can beat: synchronous colocated, one-step-off and penstock over the same answers.

Overlap gain: one-step-off over synchronous; the barrier stays, generation and training coincide.
Tail gain: penstock over one-step-off; no slot waits for the longest answer. Penstock is the real
core of the dataflow in virtual time; one point runs on the clock with the real service and real
nodes. docs/benchmarks.md has the formula of the bound."""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.harness import log_line, result, scratch
from benchmarks.local_run import quiet
from benchmarks.overlap_real import WallClockResult, run_on_wall_clock
from benchmarks.overlap_virtual import OverlapResult, flow
from benchmarks.overlap_workload import Workload, barrier_s, one_step_off_s, synchronous_s

SEED_SPEEDUP = 2.7
"""AstraFlow's figure: a full synchronous cycle of another system over a step of its own."""
SIGMAS = (0.0, 0.5, 1.0, 1.5)
RATIOS: Mapping[str, float] = {"4:1": 4.0, "2:1": 2.0, "1:1": 1.0, "1:2": 0.5, "1:4": 0.25}
"""Rollout to train."""
HEADLINE = (1.0, "2:1")
ANSWERS_PER_SLOT = (1, 2, 8)
"""In one batch, beside the usual 4."""
QUICK_SIGMAS = (0.0, 1.0, 1.5)
QUICK_STEPS, FULL_STEPS = 25, 150


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Three schedules of one workload, each from its first answer to its last commit."""

    synchronous_s: float
    one_step_off_s: float
    overlapped: OverlapResult

    @property
    def speedup(self) -> float:
        return self.synchronous_s / self.overlapped.seconds

    @property
    def overlap_gain(self) -> float:
        return self.synchronous_s / self.one_step_off_s

    @property
    def tail_gain(self) -> float:
        return self.one_step_off_s / self.overlapped.seconds


def point(workload: Workload, *, call_s: float = 0.0) -> Point:
    generations_s = [barrier_s(answers, workload.num_slots) for answers in workload.batches()]
    return Point(
        synchronous_s=synchronous_s(generations_s, workload.train_s),
        one_step_off_s=one_step_off_s(generations_s, workload.train_s),
        overlapped=flow(workload, call_s=call_s),
    )


def equal_machines(balanced: Point, ratio: float) -> float:
    """Speed-up over a synchronous run that has penstock's machines of both kinds in each phase,
    when work is rollout:train = `ratio` and penstock's machines are divided like the work.

    Penstock's slots and trainer then take equally long, as in `balanced`; the other has
    (1 + ratio) / ratio times the slots and trains 1 + ratio times as fast."""
    workload = balanced.overlapped.workload
    num_slots = round(workload.num_slots * (1 + ratio) / ratio)
    generations_s = [barrier_s(answers, num_slots) for answers in workload.batches()]
    train_s = workload.train_s / (1 + ratio)
    return synchronous_s(generations_s, train_s) / balanced.overlapped.seconds


def per_slot(workload: Workload, answers_per_slot: int) -> Workload:
    """The same number of answers in batches of this size, with as much staleness as the longest
    answer needs: versions pass while it is generated."""
    groups = answers_per_slot * workload.num_slots // workload.group_size
    longest = workload.max_tokens / workload.expected_tokens / answers_per_slot
    return replace(
        workload,
        groups_per_batch=groups,
        steps=workload.steps * workload.groups_per_batch // groups,
        max_staleness=max(workload.max_staleness, math.ceil(1.5 * longest)),
    )


Curve = Mapping[tuple[float, str], Point]


def measure_curve(workload: Workload, sigmas: Sequence[float], call_s: float) -> Curve:
    curve: dict[tuple[float, str], Point] = {}
    for sigma in sigmas:
        for name, ratio in RATIOS.items():
            here = replace(workload, sigma=sigma, rollout_to_train=ratio)
            found = curve[sigma, name] = point(here, call_s=call_s)
            overlapped = found.overlapped
            log_line(
                f"sigma {sigma:g}, rollout:train {name}: {found.speedup:.2f} x synchronous = "
                f"overlap {found.overlap_gain:.2f} x tail {found.tail_gain:.2f}; "
                f"{overlapped.fraction:.4f} of the bound, {overlapped.whole_fraction:.4f} with "
                "filling and "
                f"draining; slots idle {overlapped.idle:.1%}, lost {abs(overlapped.lost):.1%}"
            )
    return curve


def curve_figures(curve: Curve) -> dict[str, float | str]:
    """One key of each kind per point, the worst fractions and the best speed-up."""
    best = max(curve, key=lambda at: curve[at].speedup)
    figures: dict[str, float | str] = {
        "bound_fraction": min(found.overlapped.fraction for found in curve.values()),
        "bound_fraction_whole": min(found.overlapped.whole_fraction for found in curve.values()),
        "lost": max(found.overlapped.lost for found in curve.values()),
        "speedup_over_sync": curve[HEADLINE].speedup,
        "overlap_gain": curve[HEADLINE].overlap_gain,
        "tail_gain": curve[HEADLINE].tail_gain,
        "best_speedup": curve[best].speedup,
        "best_at": f"sigma {best[0]:g}, rollout:train {best[1]}",
        "seed_speedup": SEED_SPEEDUP,
    }
    for name, ratio in RATIOS.items():
        figures[f"speedup_equal_machines_{name}"] = equal_machines(curve[1.0, "1:1"], ratio)
    for (sigma, name), found in curve.items():
        figures[f"speedup_{sigma:g}_{name}"] = found.speedup
        figures[f"overlap_gain_{sigma:g}_{name}"] = found.overlap_gain
        figures[f"tail_gain_{sigma:g}_{name}"] = found.tail_gain
    return figures


def batch_sizes(workload: Workload) -> dict[str, float]:
    """The headline with other batches: the shorter a batch, the more its longest answer weighs."""
    figures: dict[str, float] = {}
    for answers_per_slot in ANSWERS_PER_SLOT:
        here = per_slot(workload, answers_per_slot)
        found = point(here)
        log_line(
            f"{answers_per_slot} answers per slot and batch, max_staleness {here.max_staleness}: "
            f"{found.speedup:.2f} x synchronous, {found.overlapped.fraction:.4f} of the bound"
        )
        figures[f"speedup_{answers_per_slot}_per_slot"] = found.speedup
        figures[f"bound_fraction_{answers_per_slot}_per_slot"] = found.overlapped.fraction
    return figures


def wall_clock_headline(
    workload: Workload, folder: Path | None, *, is_quick: bool
) -> WallClockResult:
    """The headline on the clock, with answers of 3 s in the mean, or 8 s."""
    token_s, steps = (0.03, 5) if is_quick else (0.08, 6)
    here = replace(workload, mean_tokens=100, max_tokens=1000, steps=steps)
    with scratch(folder) as own:
        found = run_on_wall_clock(own, here, token_s=token_s)
    log_line(
        f"on the clock, answers of {here.expected_tokens * token_s:.1f} s: {found.fraction:.4f} "
        f"of the bound; a slot is idle for {found.gap_ms:.0f} ms per answer"
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer batches and points")
    parser.add_argument("--folder", type=Path, help="where the service on the clock writes")
    parser.add_argument("--slow-ms", type=float, default=0.0, help="our side sleeps per call")
    parser.add_argument("--virtual", action="store_true", help="without the point on the clock")
    options = parser.parse_args()
    quiet()
    workload = Workload(steps=QUICK_STEPS if options.quick else FULL_STEPS)
    sigmas = QUICK_SIGMAS if options.quick else SIGMAS
    figures = curve_figures(measure_curve(workload, sigmas, options.slow_ms / 1e3))
    if not options.quick:
        figures |= batch_sizes(workload)
    if not options.virtual:
        reality = wall_clock_headline(workload, options.folder, is_quick=options.quick)
        figures |= {"bound_fraction_real": reality.fraction, "gap_ms_real": reality.gap_ms}
    result(**figures, steps=workload.steps, slots=workload.num_slots)


if __name__ == "__main__":
    main()
