# SPDX-License-Identifier: Apache-2.0
"""Draws curves of one or more runs: as SVG, PNG or CSV by the suffix of a file, or as text.

Owns looks only; `runs.curves` decides what a curve is. matplotlib and plotext load when they are
needed."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError
from penstock.redaction import one_line
from penstock.runs.curves import (
    REWARD,
    Curve,
    make_curves,
    metric_names,
    read_records,
    resolve_metric,
)

if TYPE_CHECKING:
    from collections.abc import Generator

    from penstock.fleet.run_folder import RunFolder

SUFFIXES = (".svg", ".png", ".csv")
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
"""Okabe and Ito's, which colour-blind people can tell apart."""
TEXT_COLOURS = ("blue+", "red+", "green+", "magenta+", "orange", "cyan+", "default")
PLAIN_MARKERS = ("●", "○", "▲", "△", "■", "□")
"""Tell curves apart without colours."""
TITLES = {REWARD: "mean reward"}
PANEL_INCHES = (8.0, 4.2)
STYLE: dict[str, Any] = {
    "font.size": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#666666",
    "axes.grid": True,
    "grid.color": "#e3e3e3",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "penstock",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """The curves of some runs, by metric in the order asked for."""

    panels: dict[str, list[Curve]]
    """A metric, and one curve for each run and policy that has it."""
    without: dict[str, list[str]]
    """Runs that lack a metric, by metric."""


def make_plot(folders: Sequence[RunFolder], metrics: Sequence[str] = ()) -> Plot:
    """The curves of these metrics of these runs; without a metric, of the reward."""
    labels = _labels(folders)
    known = sorted({name for folder in folders for name in _known(folder)})
    names = list(dict.fromkeys(resolve_metric(name, known) for name in metrics or ("reward",)))
    records = [read_records(folder.metrics, names) for folder in folders]
    runs = dict(zip(labels, records, strict=True))
    panels: dict[str, list[Curve]] = {}
    without: dict[str, list[str]] = {}
    for name in names:
        for run, found in runs.items():
            curves = make_curves(run, found, name)
            panels.setdefault(name, []).extend(curves)
            if not curves:
                without.setdefault(name, []).append(run)
    return Plot(panels=panels, without=without)


def _known(folder: RunFolder) -> set[str]:
    names = metric_names(folder.metrics)
    if not names:
        raise ConfigError(
            f"{folder.metrics} has no metrics yet: the trainer writes them after each step. "
            f"`penstock status {folder.path}` shows how far the run is"
        )
    return names


def _labels(folders: Sequence[RunFolder]) -> list[str]:
    """Short names that differ: as many last parts of the paths as that needs."""
    paths = [folder.path.resolve() for folder in folders]
    if len(set(paths)) < len(paths):
        raise ConfigError("the same run is given twice; give each run once")
    for num_parts in range(1, max((len(path.parts) for path in paths), default=1) + 1):
        names = ["/".join(path.parts[-num_parts:]) for path in paths]
        if len(set(names)) == len(names):
            return names
    return [str(path) for path in paths]


def curve_name(curve: Curve, curves: Sequence[Curve]) -> str:
    """The run, with its policy where that is not the only one."""
    policies = {other.policy for other in curves}
    name = f"{curve.run} · {curve.policy}" if len(policies) > 1 else curve.run
    return one_line(name)


def write_plot(plot: Plot, path: Path) -> None:
    """Write the plot in the format of the file's suffix."""
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise ConfigError(f"cannot plot into {path}: its name must end in {', '.join(SUFFIXES)}")
    try:
        if suffix == ".csv":
            _write_csv(plot, path)
        else:
            _write_picture(plot, path)
    except OSError as error:
        raise ConfigError(
            f"cannot write {path}: {error.strerror}; choose another file with --out"
        ) from None


def _write_csv(plot: Plot, path: Path) -> None:
    """A line per run, policy and step, a column per metric."""
    rows: dict[tuple[str, str, int], dict[str, float]] = {}
    for metric, curves in plot.panels.items():
        for curve in curves:
            for step, value, at in zip(curve.steps, curve.values, curve.times, strict=True):
                row = rows.setdefault((curve.run, curve.policy, step), {"time": at})
                row[metric] = value
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        columns = ["time", *plot.panels]
        writer.writerow(["run", "policy", "step", *columns])
        for key, row in rows.items():
            writer.writerow([*key, *(row.get(column, "") for column in columns)])


def _write_picture(plot: Plot, path: Path) -> None:
    with missing_library():
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import MaxNLocator
    library: Any = matplotlib
    width, height = PANEL_INCHES
    with library.rc_context(STYLE):
        figure: Any = Figure(
            figsize=(width, height * len(plot.panels)), facecolor="white", layout="constrained"
        )
        FigureCanvasAgg(figure)
        for number, (metric, curves) in enumerate(plot.panels.items(), start=1):
            axes: Any = figure.add_subplot(len(plot.panels), 1, number)
            for index, curve in enumerate(curves):
                axes.plot(
                    curve.steps,
                    curve.values,
                    label=curve_name(curve, curves),
                    color=COLOURS[index % len(COLOURS)],
                    linewidth=1.8,
                    marker="o" if len(curve.steps) < 2 else None,
                )
            axes.set_xlabel("step")
            axes.set_ylabel(TITLES.get(metric, one_line(metric)))
            axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
            if len(curves) > 1:
                axes.legend()
            elif number == 1 and curves:
                axes.set_title(curve_name(curves[0], curves), loc="left", fontsize=12)
        figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)


def plot_text(plot: Plot, *, width: int, height: int, colour: bool) -> str:
    """The plot as text, one panel of this size per metric."""
    with missing_library():
        import plotext  # pyright: ignore[reportMissingTypeStubs]
    library: Any = plotext
    panels: list[str] = []
    for metric, curves in plot.panels.items():
        figure = library.figure
        figure.clear()
        figure.theme("simple")
        figure.canvas("default")
        figure.plot_size(width, height)
        what = TITLES.get(metric, one_line(metric))
        figure.title(f"{curve_name(curves[0], curves)}: {what}" if len(curves) == 1 else what)
        figure.label("step", "x")
        ticks = step_ticks([step for curve in curves for step in curve.steps])
        figure.ruler("x").ticks(ticks, [f"{tick:,}" for tick in ticks])
        for index, curve in enumerate(curves):
            if colour or len(curves) == 1:
                marker = library.marker("braille", TEXT_COLOURS[index % len(TEXT_COLOURS)])
            else:
                marker = PLAIN_MARKERS[index % len(PLAIN_MARKERS)]
            signal = figure.signal(curve.steps, curve.values, marker=marker)
            signal.lines()
            if len(curves) > 1:
                signal.label(curve_name(curve, curves))
            figure.draw(signal)
        text = str(figure.build())
        panels.append(text if colour else library.uncolorize(text))
    return "\n".join(panels)


def step_ticks(steps: Sequence[int]) -> list[int]:
    """At most eight whole numbers across the steps, at distances of 1, 2 or 5 times a power of
    ten."""
    first, last = min(steps), max(steps)
    distances = (factor * 10**power for power in range(12) for factor in (1, 2, 5))
    distance = next(found for found in distances if (last - first) // found < 8)
    return list(range(-(-first // distance) * distance, last + 1, distance))


@contextmanager
def missing_library() -> Generator[None]:
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"plots need {error.name}: install the extra `plot` (pip install 'penstock-rl[plot]'), "
            "or write a CSV file with --out curve.csv"
        ) from None
