# SPDX-License-Identifier: Apache-2.0
"""A plan as an SVG: stages from left to right, columns on the edges, placement as frames.

Owns every coordinate. One lane per trainer and one for the services; a stage's column is the length
of its longest path, and an edge that passes a stage gets its own track below it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape

from penstock.config.pipeline import PipelineStageConfig
from penstock.config.stage_graph import find_edges
from penstock.trainer.pipeline.graph import depths
from penstock.trainer.pipeline.memory_estimate import size_text
from penstock.trainer.pipeline.plan import Chain, Plan

BOX_W, LINE_H, PORT_H, TRACK_H = 178, 16, 18, 18
GAP_Y, PAD, HEAD_H, MARGIN, BEND = 20, 18, 28, 16, 40
CHAR_W = 6.4
"""Width of a character of a label, a little generous."""
COLOURS = {"infer": "#dbeafe", "compute": "#fef3c7", "train": "#dcfce7"}
INK, GREY, FRAME, GROUND = "#1f2937", "#6b7280", "#9ca3af", "#f9fafb"

Point = tuple[float, float]


@dataclass(slots=True)
class _Box:
    """A stage and its place; ports are counted from its top."""

    stage: PipelineStageConfig
    badge: str
    column: int
    given_columns: str
    """Columns it reads that every batch has; at the first port, if there are any."""
    num_in: int = 0
    num_out: int = 0
    x: float = 0.0
    y: float = 0.0

    @property
    def height(self) -> float:
        return max(4 * LINE_H + 10, PORT_H * (max(self.num_in, self.num_out) + 1))


@dataclass(slots=True)
class _Lane:
    """One frame: a trainer, or the services."""

    title: str
    is_service: bool
    boxes: list[_Box]
    top: float = 0.0
    bottom: float = 0.0


@dataclass(slots=True, kw_only=True)
class _Line:
    """An edge between two boxes."""

    source: _Box
    target: _Box
    label: str
    """Its columns; empty if only `after` orders the two."""
    lane: int
    """The lane in which it ends and passes other stages."""
    out_port: int
    in_port: int
    tracks: list[float] = field(default_factory=list[float])
    """Its y in each column that it passes."""


def to_svg(plan: Plan, title: str) -> str:
    """The plan as SVG text."""
    lanes = _lanes(plan)
    lines = _lines(plan, lanes)
    boxes = [box for lane in lanes for box in lane.boxes]
    labels = [*(line.label for line in lines), *(box.given_columns for box in boxes), "after"]
    pitch = BOX_W + 2 * BEND + CHAR_W * max(map(len, labels))
    left = MARGIN + PAD + pitch - BOX_W - BEND
    bottom = float(MARGIN + HEAD_H)
    for number, lane in enumerate(lanes):
        _place(lane, [line for line in lines if line.lane == number], left, pitch, bottom)
        bottom = lane.bottom + GAP_Y
    right = left + pitch * max(box.column for box in boxes) + BOX_W + PAD
    parts = [
        *(_frame(lane, right) for lane in lanes),
        *(_curve(line, left, pitch) for line in lines),
        *(_title(lane) for lane in lanes),
        *(_stub(box) for box in boxes if box.given_columns),
        *(_stage(box) for box in boxes),
    ]
    return _document(title, right + MARGIN, bottom, parts)


# --- boxes and lines ------------------------------------------------------------------------------


def _lanes(plan: Plan) -> list[_Lane]:
    """The services first, then one lane per trainer."""
    services = [service.stage for service in plan.services]
    stages = [*services, *(stage for chain in plan.chains for stage in chain.stages)]
    written = {column for stage in stages for column in stage.writes}

    def boxes(stages: Sequence[PipelineStageConfig], badges: Sequence[str]) -> list[_Box]:
        return [
            _Box(stage, badge, depth[stage.id], given_columns, num_in=bool(given_columns))
            for stage, badge in zip(stages, badges, strict=True)
            for given_columns in (
                ", ".join(column for column in stage.reads if column not in written),
            )
        ]

    lanes: list[_Lane] = []
    for chain in plan.chains:
        depth = depths([*services, *chain.stages])
        badges = [str(number) for number in range(1, len(chain.stages) + 1)]
        lanes.append(_Lane(_trainer_title(chain), False, boxes(chain.stages, badges)))
    if services:
        depth = depths(services)
        badges = [", ".join(service.hosts) for service in plan.services]
        title = "services: consumers of the ledger, row by row"
        lanes.insert(0, _Lane(title, True, boxes(services, badges)))
    return lanes


def _trainer_title(chain: Chain) -> str:
    ranks = f"{chain.num_ranks} rank{'' if chain.num_ranks == 1 else 's'}"
    title = f"trainer for {chain.policy}: {ranks}, one stage after another"
    if chain.memory.total_bytes:
        title += f" · models {size_text(chain.memory.total_bytes)} a rank"
    if chain.hosts:
        title += f" · on {', '.join(chain.hosts)}"
    return title


def _lines(plan: Plan, lanes: Sequence[_Lane]) -> list[_Line]:
    """Every edge once, each with its own port at both ends."""
    services = [service.stage for service in plan.services]
    first = 1 if services else 0
    of_services = {box.stage.id: (0, box) for box in lanes[0].boxes} if services else {}
    found: dict[tuple[int, int], _Line] = {}
    for number, chain in enumerate(plan.chains, first):
        boxes = of_services | {box.stage.id: (number, box) for box in lanes[number].boxes}
        for edge in find_edges([*services, *chain.stages]):
            (_, source), (lane, target) = boxes[edge.source], boxes[edge.target]
            if (id(source), id(target)) in found:
                continue
            source.num_out, target.num_in = source.num_out + 1, target.num_in + 1
            found[id(source), id(target)] = _Line(
                source=source,
                target=target,
                label=", ".join(edge.columns),
                lane=lane,
                out_port=source.num_out,
                in_port=target.num_in,
            )
    return [*found.values()]


def _place(lane: _Lane, ending: Sequence[_Line], left: float, pitch: float, top: float) -> None:
    """Boxes one below the other in their columns, then a track for each edge that passes."""
    lane.top = top
    heights: dict[int, float] = {}
    start = top + HEAD_H + PAD / 2
    for box in lane.boxes:
        box.x = left + pitch * box.column
        box.y = heights.get(box.column, start)
        heights[box.column] = box.y + box.height + GAP_Y
    for line in ending:
        for column in range(line.source.column + 1, line.target.column):
            height = heights.get(column, start)
            line.tracks.append(height)
            heights[column] = height + TRACK_H
    lane.bottom = max(heights.values()) - GAP_Y / 2


# --- drawing --------------------------------------------------------------------------------------


def _frame(lane: _Lane, right: float) -> str:
    dash = ' stroke-dasharray="6 4"' if lane.is_service else ""
    height = lane.bottom - lane.top
    return (
        f'<rect x="{MARGIN}" y="{lane.top:.1f}" width="{right - MARGIN:.1f}" '
        f'height="{height:.1f}" rx="10" fill="{GROUND}" stroke="{FRAME}"{dash}/>'
    )


def _title(lane: _Lane) -> str:
    """Drawn over lines from other lanes, with an outline in the background colour."""
    text = _text((MARGIN + PAD, lane.top + 19), lane.title, GREY, weight="600")
    rim = f'<g paint-order="stroke" stroke="{GROUND}" stroke-width="5">'
    return f"{rim}{text}</g>"


def _curve(line: _Line, left: float, pitch: float) -> str:
    """Through its tracks, to an arrow with the columns above it."""
    source, target = line.source, line.target
    points = [(source.x + BOX_W, source.y + PORT_H * line.out_port)]
    for column, y in enumerate(line.tracks, source.column + 1):
        x = left + pitch * column
        points += [(x, y), (x + BOX_W, y)]
    end = (target.x - 7, target.y + PORT_H * line.in_port)
    dash = "" if line.label else ' stroke-dasharray="4 3"'
    path = f'<path d="{_path([*points, end])}" fill="none" stroke="{INK}"{dash} '
    return path + 'marker-end="url(#ink)"/>' + _above(end, line.label or "after", INK)


def _path(points: Sequence[Point]) -> str:
    """Level at every point; the bend is right after the point that it leaves."""
    (x, y), *rest = points
    words = [f"M {x:.1f} {y:.1f}"]
    for next_x, next_y in rest:
        if abs(next_y - y) > 0.5:
            middle, level = x + BEND / 2, x + BEND
            words.append(
                f"C {middle:.1f} {y:.1f} {middle:.1f} {next_y:.1f} {level:.1f} {next_y:.1f}"
            )
        words.append(f"L {next_x:.1f} {next_y:.1f}")
        x, y = next_x, next_y
    return " ".join(words)


def _stub(box: _Box) -> str:
    """An edge without a source, for columns that every batch has."""
    end = (box.x - 7, box.y + PORT_H)
    x = end[0] - CHAR_W * len(box.given_columns) - 14
    return (
        f'<circle cx="{x:.1f}" cy="{end[1]:.1f}" r="2.5" fill="{GREY}"/>'
        f'<path d="M {x:.1f} {end[1]:.1f} L {end[0]:.1f} {end[1]:.1f}" stroke="{GREY}" '
        'marker-end="url(#grey)"/>' + _above(end, box.given_columns, GREY)
    )


def _stage(box: _Box) -> str:
    stage, x, y = box.stage, box.x, box.y
    below = f"{stage.parallel.num_ranks} ranks" if stage.parallel.num_ranks > 1 else ""
    if stage.place:
        below = f"[{', '.join(stage.place)}]" + (f" {box.badge}" if box.badge else "")
    name = stage.id if stage.place else f"{box.badge}. {stage.id}"
    what = stage.fn.rpartition(":")[2] if stage.fn else ""
    middle = x + BOX_W / 2
    lines = [f"{stage.type} · {stage.role}", *filter(None, (what, below))]
    return (
        f'<rect x="{x:.1f}" y="{y:.1f}" width="{BOX_W}" height="{box.height:.1f}" rx="7" '
        f'fill="{COLOURS[stage.type]}" stroke="{INK}"/>'
        + _text((middle, y + 19), name, INK, anchor="middle", weight="600", size=13)
        + "".join(
            _text((middle, y + 19 + LINE_H * n), text[:28], GREY, anchor="middle")
            for n, text in enumerate(lines, 1)
        )
    )


def _above(end: Point, label: str, colour: str) -> str:
    """Right-aligned over the end of a line, so that labels of one stage never meet."""
    return _text((end[0] - 8, end[1] - 4), label, colour, anchor="end")


def _text(
    at: Point, text: str, colour: str, *, anchor: str = "start", weight: str = "400", size: int = 11
) -> str:
    return (
        f'<text x="{at[0]:.1f}" y="{at[1]:.1f}" fill="{colour}" text-anchor="{anchor}" '
        f'font-weight="{weight}" font-size="{size}">{escape(text)}</text>'
    )


def _document(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" font-family="system-ui, sans-serif">',
            f"<title>{escape(title)}</title>",
            '<rect width="100%" height="100%" fill="white"/>',
            f"<defs>{''.join(_arrowheads())}</defs>",
            _text((MARGIN, MARGIN + 12), title, INK, weight="700", size=15),
            *parts,
            "</svg>\n",
        ]
    )


def _arrowheads() -> Iterator[str]:
    for name, colour in {"ink": INK, "grey": GREY}.items():
        yield (
            f'<marker id="{name}" viewBox="0 0 8 8" refX="2" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto"><path d="M 0 0 L 8 4 L 0 8 z" fill="{colour}"/>'
            "</marker>"
        )
