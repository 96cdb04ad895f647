# SPDX-License-Identifier: Apache-2.0
"""Charts as SVG text, for the documentation: no plotting library, the same bytes everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, LABEL, ROW, TOP = 720, 170, 34, 56
INK, BAR_FILL = "#444", "#4a7ebb"
STYLE = f"font-family:sans-serif;font-size:14px;fill:{INK}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    label: str
    value: float
    half_width: float
    """Of its confidence interval."""


def bars(title: str, values: Sequence[Bar], *, unit: str) -> str:
    """Horizontal bars from 0, each with its interval and its value."""
    height = TOP + ROW * len(values) + 12
    longest = max(bar.value + bar.half_width for bar in values)
    scale = (WIDTH - LABEL - 150) / longest
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'role="img" aria-label="{escape(title)}">',
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text x="12" y="24" style="{STYLE};font-weight:bold">{escape(title)}</text>',
        f'<text x="12" y="43" style="{STYLE};font-size:12px">{escape(unit)}</text>',
    ]
    for index, bar in enumerate(values):
        lines += _row(bar, TOP + ROW * index, scale)
    return "\n".join([*lines, "</svg>", ""])


def _row(bar: Bar, y: int, scale: float) -> Iterator[str]:
    middle = y + ROW // 2
    end = LABEL + bar.value * scale
    low, high = end - bar.half_width * scale, end + bar.half_width * scale
    yield (
        f'<text x="{LABEL - 8}" y="{middle + 5}" text-anchor="end" style="{STYLE}">'
        f"{escape(bar.label)}</text>"
    )
    yield (
        f'<rect x="{LABEL}" y="{y + 6}" width="{end - LABEL:.1f}" height="{ROW - 12}" '
        f'fill="{BAR_FILL}"/>'
    )
    yield (
        f'<path d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 5}v10M{high:.1f} '
        f'{middle - 5}v10" stroke="{INK}" stroke-width="1.5" fill="none"/>'
    )
    yield (
        f'<text x="{high + 8:.1f}" y="{middle + 5}" style="{STYLE};font-size:12px">'
        f"{bar.value:,.0f} ± {bar.half_width:,.0f}</text>"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    x: float
    y: float
    half_width: float
    """Of its confidence interval."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    label: str
    points: Sequence[Point]


HEIGHT, LEFT, RIGHT, BOTTOM = 400, 56, 170, 44
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#8f4a9e")
"""Told apart by people who see few colours; and each curve has a mark of its own."""
MARKS = (
    "M-4-4h8v8h-8z",
    "M0-5L5 4H-5z",
    "M-4.5 0a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0-9 0z",
    "M0-6L5 0L0 6L-5 0z",
)


def curves(title: str, values: Sequence[Curve], *, unit: str, x_label: str) -> str:
    """Lines over evenly spaced x, y from 0 to 1, each point with its interval."""
    xs = sorted({point.x for curve in values for point in curve.points})
    gap = (WIDTH - LEFT - RIGHT) / max(len(xs) - 1, 1)
    at = {x: LEFT + gap * index for index, x in enumerate(xs)}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" aria-label="{escape(title)}">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="12" y="24" style="{STYLE};font-weight:bold">{escape(title)}</text>',
        f'<text x="12" y="43" style="{STYLE};font-size:12px">{escape(unit)}</text>',
        *_axes(at, x_label),
    ]
    for index, curve in enumerate(values):
        lines += _curve(curve, at, index)
    return "\n".join([*lines, "</svg>", ""])


def _height(y: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * min(max(y, 0.0), 1.0)


def _axes(at: Mapping[float, float], x_label: str) -> Iterator[str]:
    end = WIDTH - RIGHT
    for y in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0):
        yield f'<path d="M{LEFT} {_height(y):.1f}H{end}" stroke="#ddd" fill="none"/>'
        yield (
            f'<text x="{LEFT - 8}" y="{_height(y) + 4:.1f}" text-anchor="end" '
            f'style="{STYLE};font-size:12px">{y:.1f}</text>'
        )
    for x, left in at.items():
        yield (
            f'<text x="{left:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle" '
            f'style="{STYLE};font-size:12px">{x:g}</text>'
        )
    yield (
        f'<text x="{(LEFT + end) / 2:.1f}" y="{HEIGHT - 8}" text-anchor="middle" '
        f'style="{STYLE};font-size:12px">{escape(x_label)}</text>'
    )


def _curve(curve: Curve, at: Mapping[float, float], index: int) -> Iterator[str]:
    colour, shift = COLOURS[index], 5.0 * index  # intervals of several curves at one x stay apart
    spots = [(at[point.x] + shift, point) for point in curve.points]
    path = "L".join(f"{left:.1f} {_height(point.y):.1f}" for left, point in spots)
    yield f'<path d="M{path}" stroke="{colour}" stroke-width="2" fill="none"/>'
    for left, point in spots:
        low, high = _height(point.y - point.half_width), _height(point.y + point.half_width)
        yield f'<path d="M{left:.1f} {low:.1f}V{high:.1f}" stroke="{colour}" fill="none"/>'
        yield _mark(index, left, _height(point.y))
    top = HEIGHT - BOTTOM - 90 + 20 * index
    yield _mark(index, WIDTH - RIGHT + 34, top)
    yield (
        f'<text x="{WIDTH - RIGHT + 44}" y="{top + 5}" style="{STYLE};font-size:13px">'
        f"{escape(curve.label)}</text>"
    )


def _mark(index: int, left: float, top: float) -> str:
    where = f"translate({left:.1f} {top:.1f})"
    return f'<path class="mark" transform="{where}" d="{MARKS[index]}" fill="{COLOURS[index]}"/>'
