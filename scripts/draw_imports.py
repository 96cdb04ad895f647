# SPDX-License-Identifier: Apache-2.0
"""Draw the packages of penstock, and the layers of its dataflow, from the imports in src.

Writes docs/img/packages.svg and docs/img/dataflow-layers.svg; with `--check` it only fails when a
drawing is out of date. A row is a layer of the import contracts: its parts do not import one
another, and arrows go down only. An arrow that longer ones imply is left out, to keep the picture
readable."""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from xml.sax.saxutils import escape

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.import_graph import ROOT, parts_of, read_graph

DRAWINGS = {"penstock": "packages.svg", "penstock.dataflow": "dataflow-layers.svg"}
BOX_WIDTH, BOX_HEIGHT, GAP_X, GAP_Y, MARGIN = 132, 36, 28, 54, 24

Edges = Mapping[str, set[str]]
Point = tuple[float, float]


def layers(container: str) -> list[list[str]]:
    """Top row first, as the import contracts in pyproject.toml declare them."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    for contract in settings["tool"]["importlinter"]["contracts"]:
        if contract["type"] == "layers" and contract["containers"] == [container]:
            names = [[name.strip() for name in row.split("|")] for row in contract["layers"]]
            return [[f"{container}.{n}" for n in row if not n.startswith("(")] for row in names]
    raise ValueError(f"pyproject.toml declares no layers for {container}")


def without_implied(edges: Edges) -> dict[str, set[str]]:
    """Only the arrows that no longer path makes redundant."""

    def reaches(start: str, goal: str) -> bool:
        return any(step == goal or reaches(step, goal) for step in edges[start])

    return {
        part: {t for t in below if not any(reaches(o, t) for o in below if o != t)}
        for part, below in edges.items()
    }


def draw(container: str, edges: Edges) -> str:
    rows = layers(container)
    width = 2 * MARGIN + max(len(row) for row in rows) * (BOX_WIDTH + GAP_X) - GAP_X
    height = 2 * MARGIN + len(rows) * (BOX_HEIGHT + GAP_Y) - GAP_Y
    at: dict[str, tuple[float, float]] = {}
    for level, row in enumerate(rows):
        left = (width - len(row) * (BOX_WIDTH + GAP_X) + GAP_X) / 2
        for place, part in enumerate(row):
            at[part] = (
                left + place * (BOX_WIDTH + GAP_X),
                MARGIN + level * (BOX_HEIGHT + GAP_Y),
            )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="13">',
        f"<title>{container}: arrows point at what a part imports</title>",
        '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path d="M0 0L8 4L0 8z" fill="#64748b"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    for part, below in sorted(without_implied(edges).items()):
        for target in sorted(below):
            (x1, y1), (x2, y2) = at[part], at[target]
            start = (x1 + BOX_WIDTH / 2, y1 + BOX_HEIGHT)
            end = (x2 + BOX_WIDTH / 2, y2)
            lines.append(_arrow(start, end, _is_blocked(start, end, at)))
    for part, (x, y) in sorted(at.items()):
        name = escape(part.removeprefix(f"{container}."))
        lines.append(
            f'<rect x="{x:g}" y="{y:g}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="6" '
            'fill="#eff6ff" stroke="#3b82f6"/>'
            f'<text x="{x + BOX_WIDTH / 2:g}" y="{y + BOX_HEIGHT / 2 + 4.5:g}" '
            f'text-anchor="middle" fill="#0f172a">{name}</text>'
        )
    return "\n".join([*lines, "</svg>", ""])


def _is_blocked(start: Point, end: Point, at: Mapping[str, Point]) -> bool:
    """Whether a straight arrow would pass behind a box."""
    for x, y in at.values():
        if start[1] < y + BOX_HEIGHT / 2 < end[1]:
            share = (y + BOX_HEIGHT / 2 - start[1]) / (end[1] - start[1])
            if x - GAP_X / 2 < start[0] + share * (end[0] - start[0]) < x + BOX_WIDTH + GAP_X / 2:
                return True
    return False


def _arrow(start: Point, end: Point, is_blocked: bool) -> str:
    """A curve from box to box; around the boxes between them if one is in the way."""
    bend = GAP_Y * 0.6
    side = (BOX_WIDTH + GAP_X) * (0.75 if end[0] >= start[0] else -0.75) if is_blocked else 0.0
    points = f"{start[0] + side:g} {start[1] + bend:g} {end[0] + side:g} {end[1] - bend:g}"
    return (
        f'<path d="M{start[0]:g} {start[1]:g}C{points} {end[0]:g} {end[1] - 2:g}" fill="none" '
        'stroke="#64748b" stroke-width="1.2" marker-end="url(#head)"/>'
    )


def main() -> int:
    graph = read_graph()
    stale: list[str] = []
    for container, file in DRAWINGS.items():
        path = ROOT / "docs" / "img" / file
        edges = parts_of(graph, container)
        edges = {part: below for part, below in edges.items() if not part.endswith("__main__")}
        drawing = draw(container, edges)
        if "--check" in sys.argv:
            if not path.exists() or path.read_text(encoding="utf-8") != drawing:
                stale.append(file)
        else:
            path.write_text(drawing, encoding="utf-8")
            print(f"draw_imports: wrote docs/img/{file}")
    if stale:
        print(f"draw_imports: out of date: {', '.join(stale)}; run scripts/draw_imports.py")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
