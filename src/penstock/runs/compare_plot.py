# SPDX-License-Identifier: Apache-2.0
"""Draws a comparison as SVG or PNG: scores with their intervals, and reward by step.

Owns looks only. matplotlib loads when it is needed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.redaction import one_line
from penstock.runs.compare import Comparison, Side
from penstock.runs.curves import REWARD
from penstock.runs.plots import COLOURS, STYLE, TITLES, missing_library

SUFFIXES = (".svg", ".png")
WIDTH_INCHES = 8.0
SUITE_INCHES = 0.75
CURVE_INCHES = 3.4
MARGIN_INCHES = 0.12
GREY = "#666666"
MAX_NAME_CHARS = 60


def write_comparison(found: Comparison, path: Path) -> None:
    """Write the picture in the format of the file's suffix."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(f"cannot draw into {path}: its name must end in {' or '.join(SUFFIXES)}")
    with missing_library():
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    library: Any = matplotlib
    has_curves = bool(found.a.curves or found.b.curves)
    heights = [1.1 + SUITE_INCHES * len(found.suites)] if found.suites else []
    heights += [CURVE_INCHES] if has_curves else []
    with library.rc_context(STYLE):
        size = (WIDTH_INCHES, sum(heights) + 0.3)
        figure: Any = Figure(figsize=size, facecolor="white", layout="constrained")
        figure.get_layout_engine().set(w_pad=MARGIN_INCHES, h_pad=MARGIN_INCHES)
        FigureCanvasAgg(figure)
        grid: Any = figure.add_gridspec(len(heights), 1, height_ratios=heights)
        if found.suites:
            _draw_scores(figure.add_subplot(grid[0]), found)
        if has_curves:
            _draw_rewards(figure.add_subplot(grid[len(heights) - 1]), found)
        _draw_legend(figure, found)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else None
        try:
            figure.savefig(path, dpi=150, metadata=metadata)
        except OSError as error:
            raise ConfigError(
                f"cannot write {path}: {error.strerror}; choose another file with --svg"
            ) from None


def _draw_scores(axes: Any, found: Comparison) -> None:
    """A line for each suite: both scores with their intervals, and the difference."""
    for row, suite in enumerate(found.suites):
        for offset, colour, one in ((-0.14, COLOURS[0], suite.a), (0.14, COLOURS[1], suite.b)):
            low, high = (100 * bound for bound in one.interval)
            at = row + offset
            axes.plot([low, high], [at, at], color=colour, linewidth=2.2, solid_capstyle="round")
            axes.plot([100 * one.avg], [at], color=colour, marker="o", markersize=8)
        text = f"{100 * suite.difference:+.1f} points\n{p_text(suite.p_value)}"
        weight = "bold" if suite.is_significant else "normal"
        axes.text(
            1.02,
            row,
            text,
            transform=axes.get_yaxis_transform(),
            va="center",
            fontsize=10,
            color="black" if suite.is_significant else GREY,
            fontweight=weight,
        )
    names = [f"{_drawn(suite.suite)}\n{suite.a.questions:,} questions" for suite in found.suites]
    axes.set_yticks(range(len(found.suites)), names, fontsize=11)
    axes.set_ylim(len(found.suites) - 0.5, -0.5)
    axes.set_xlim(0, 100)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel("score in %, with 95 % interval")


def p_text(p_value: float) -> str:
    """`p = 0.031`, `p < 0.001`."""
    return "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}"


def _draw_rewards(axes: Any, found: Comparison) -> None:
    for colour, side in ((COLOURS[0], found.a), (COLOURS[1], found.b)):
        for number, curve in enumerate(side.curves):
            style = ("-", "--", ":", "-.")[number % 4]
            axes.plot(curve.steps, curve.values, color=colour, linestyle=style, linewidth=1.6)
    axes.set_xlabel("step")
    axes.set_ylabel(TITLES[REWARD])


def _draw_legend(figure: Any, found: Comparison) -> None:
    from matplotlib.lines import Line2D

    line: Any = Line2D
    names = [_drawn(label(found.a)), _drawn(label(found.b))]
    handles = [
        line([], [], color=colour, marker="o", markersize=7, linewidth=2.2)
        for colour in COLOURS[:2]
    ]
    figure.legend(handles, names, loc="outside upper left", ncols=2, frameon=False)


def _drawn(name: str) -> str:
    """A name as it is drawn: a dollar sign would begin a formula."""
    shown = one_line(name)
    cut = shown if len(shown) <= MAX_NAME_CHARS else f"{shown[: MAX_NAME_CHARS - 1]}…"
    return cut.replace("\\", "\N{SET MINUS}").replace("$", r"\$")


def label(side: Side) -> str:
    """The name, short: the last part of a path."""
    return side.name.rstrip("/").rpartition("/")[2]
