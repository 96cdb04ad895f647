# SPDX-License-Identifier: Apache-2.0
"""Answers grow three times as long in the course of a run: the rollout pool that its first steps
need, the one that its longest answers need, the autoscaler, and a schedule that knows the growth.
In virtual time, over shapes of growth and seeds.

Node-hours count the trainer's GPUs as well: a pool that is too small makes them wait. Without them
no schedule could beat a small pool that is always busy."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from benchmarks.autoscale_virtual import (
    SHAPES,
    PoolResult,
    Scenario,
    fixed,
    make_autoscaler,
    make_oracle,
    simulate,
)
from benchmarks.harness import log_line, result
from benchmarks.plot import BAR_FILL, COLOURS, INK, STYLE, WIDTH
from penstock.dataflow.report.figures import BalanceSettings

QUICK_SHAPES = ("linear", "sudden")
REVERSALS: Mapping[str, int] = {"rise and fall": 1}
"""Changes of direction that the load itself demands."""
HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 320, 56, 150, 56, 44


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The same run on four pools."""

    scenario: Scenario
    small: PoolResult
    large: PoolResult
    scaled: PoolResult
    oracle: PoolResult

    @property
    def cheaper_hours(self) -> float:
        """Of the fixed pool that takes fewer node-hours."""
        return min(self.small.node_hours, self.large.node_hours)

    @property
    def saved(self) -> float:
        return 1 - self.scaled.node_hours / self.cheaper_hours

    @property
    def oracle_saved(self) -> float:
        return 1 - self.oracle.node_hours / self.cheaper_hours

    @property
    def wall_ratio(self) -> float:
        return self.scaled.seconds / self.large.seconds

    @property
    def needless_reversals(self) -> int:
        return max(0, self.scaled.reversals - REVERSALS.get(self.scenario.shape, 0))


def compare(scenario: Scenario, terms: BalanceSettings | None = None) -> Comparison:
    """With the default thresholds unless the caller has others."""
    terms = replace(terms or BalanceSettings(), max_gpus=scenario.large)
    return Comparison(
        scenario=scenario,
        small=simulate(scenario, scenario.small, fixed, terms),
        large=simulate(scenario, scenario.large, fixed, terms),
        scaled=simulate(scenario, scenario.small, make_autoscaler(), terms),
        oracle=simulate(scenario, scenario.small, make_oracle(scenario), terms),
    )


def measure(shapes: Sequence[str], seeds: Sequence[int]) -> Iterator[Comparison]:
    base = Scenario()
    for shape in shapes:
        for seed in seeds:
            workload = replace(base.workload, seed=seed)
            found = compare(replace(base, shape=shape, workload=workload))
            sizes = [size for _, size in found.scaled.sizes][base.small - 1 :]
            log_line(
                f"{shape}, seed {seed}: saved {found.saved:.3f} (oracle {found.oracle_saved:.3f}), "
                f"wall time {found.wall_ratio:.3f}, trainer waits {found.scaled.wait_fraction:.3f} "
                f"(small {found.small.wait_fraction:.3f}, large {found.large.wait_fraction:.3f}), "
                f"sizes {sizes}"
            )
            yield found


# --- the plot -------------------------------------------------------------------------------------


def draw(found: Comparison) -> str:
    """Nodes over virtual hours: what was needed, ordered by the autoscaler, and fixed."""
    scenario = found.scenario
    hours = found.scaled.seconds / 3600

    def x(seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * seconds / 3600 / hours

    def y(nodes: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * nodes / (scenario.large + 1)

    def steps(sizes: Sequence[tuple[float, int]]) -> str:
        path = f"M{x(sizes[0][0]):.1f} {y(sizes[0][1]):.1f}"
        for at, size in sizes[1:]:
            path += f"H{x(at):.1f}V{y(size):.1f}"
        return f"{path}H{x(found.scaled.seconds):.1f}"

    def line(path: str, colour: str, width: float = 2.0) -> str:
        return f'<path d="{path}" stroke="{colour}" stroke-width="{width}" fill="none"/>'

    def label(text: str, nodes: float, colour: str) -> str:
        left, top = WIDTH - RIGHT + 6, y(nodes) + 4
        return f'<text x="{left}" y="{top:.1f}" style="{STYLE};fill:{colour}">{text}</text>'

    title = f"Rollout nodes while answers grow three times as long ({scenario.shape})"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{title}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="12" y="24" style="{STYLE};font-weight:bold">{title}</text>',
        f'<text x="12" y="43" style="{STYLE};font-size:12px">nodes over virtual hours</text>',
    ]
    for nodes in range(0, scenario.large + 1, 4):
        lines.append(line(f"M{LEFT} {y(nodes):.1f}H{WIDTH - RIGHT}", "#ddd", 1.0))
        lines.append(f'<text x="{LEFT - 22}" y="{y(nodes) + 5:.1f}" style="{STYLE}">{nodes}</text>')
    for hour in range(int(hours) + 1):
        top = HEIGHT - BOTTOM + 18
        lines.append(f'<text x="{x(3600 * hour):.1f}" y="{top}" style="{STYLE}">{hour}</text>')
    end = found.scaled.seconds
    for nodes, name in ((scenario.small, "fixed small"), (scenario.large, "fixed large")):
        lines.append(line(f"M{x(0):.1f} {y(nodes):.1f}H{x(end):.1f}", INK, 1.0))
        lines.append(label(name, nodes, INK))
    lines += [
        line(steps(found.oracle.sizes), COLOURS[1]),
        line(steps(found.scaled.sizes), BAR_FILL),
    ]
    lines += [label("autoscaler", 8.5, BAR_FILL), label("knows the future", 7, COLOURS[1])]
    return "\n".join([*lines, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two shapes and one seed, for a look")
    parser.add_argument("--folder", type=Path, help="not used: nothing is written")
    parser.add_argument("--plot", type=Path, help="an SVG of the first shape")
    options = parser.parse_args()
    shapes, seeds = (QUICK_SHAPES, (0,)) if options.quick else (tuple(SHAPES), (0, 1, 2))
    found = list(measure(shapes, seeds))
    if options.plot is not None:
        options.plot.write_text(draw(found[0]), encoding="utf-8")
    result(
        node_hours_saved=fmean(one.saved for one in found),
        node_hours_saved_worst=min(one.saved for one in found),
        wall_time_ratio=fmean(one.wall_ratio for one in found),
        wall_time_ratio_worst=max(one.wall_ratio for one in found),
        oracle_saved=fmean(one.oracle_saved for one in found),
        wait_fraction=fmean(one.scaled.wait_fraction for one in found),
        wait_fraction_small=fmean(one.small.wait_fraction for one in found),
        wait_fraction_large=fmean(one.large.wait_fraction for one in found),
        needless_reversals=max(one.needless_reversals for one in found),
        runs=len(found),
    )


if __name__ == "__main__":
    main()
