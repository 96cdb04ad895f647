# SPDX-License-Identifier: Apache-2.0
"""Bar charts as SVG text, for the documentation: no plotting library, the same bytes everywhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
