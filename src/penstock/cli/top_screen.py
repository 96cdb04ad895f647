# SPDX-License-Identifier: Apache-2.0
"""The screen of `penstock top`: flow, curves and fleet of a run, as large as the terminal.

Draws a RunView. Owns what is left out where the terminal is small, and the rate of each node,
which is counted from one view to the next."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from penstock.cli.console import SafeConsole
from penstock.cli.live_panel import STALL_S, UNREACHABLE_S, sparkline
from penstock.cli.output import format_clock, format_duration, pluralise, printable
from penstock.dataflow.service.operators.messages import NodeStatus, Status
from penstock.runs.bottleneck import NODES, TRAINER, bottleneck
from penstock.runs.monitor import RunView

BLOCKS = " ▁▂▃▄▅▆▇█"
HINT = "Ctrl-C leaves, the run goes on"
MIN_CURVE_LINES, MAX_CURVE_LINES = 3, 20
FIXED_LINES = 9
"""Title, the three lines of the flow, three rules, the head of the fleet, the last line."""


@dataclass(slots=True)
class NodeRates:
    """Trajectories per second of each node, over the last seconds."""

    window_s: float = 20.0
    _seen: dict[str, list[tuple[float, int]]] = field(
        default_factory=dict[str, list[tuple[float, int]]]
    )

    def add(self, status: Status, now: float) -> dict[str, float]:
        live = {str(node.node_id): node.delivered for node in status.nodes}
        self._seen = {name: self._seen.get(name, []) for name in live}
        for name, delivered in live.items():
            seen = self._seen[name]
            if seen and delivered < seen[-1][1]:
                seen.clear()  # it has joined again
            seen.append((now, delivered))
            while len(seen) > 2 and seen[1][0] <= now - self.window_s:
                seen.pop(0)
        return {name: _rate(seen) for name, seen in self._seen.items()}


def _rate(seen: list[tuple[float, int]]) -> float:
    (since, before), (now, delivered) = seen[0], seen[-1]
    return (delivered - before) / (now - since) if now > since else 0.0


class TopScreen:
    """The whole terminal, until the run ends or the user leaves."""

    def __init__(
        self, console: Console | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console = console or SafeConsole()
        self._clock = clock
        self._live = Live(console=self._console, auto_refresh=False, screen=True)
        self._rates = NodeRates()

    def update(self, view: RunView) -> None:
        if not self._live.is_started:
            self._live.start()
        rates = {} if view.status is None else self._rates.add(view.status, self._clock())
        width, height = self._console.size
        self._live.update(draw(view, rates, width, height), refresh=True)

    def notify(self, text: str) -> None:
        """The last one is in the view."""

    def close(self) -> None:
        self._live.stop()


def draw(
    view: RunView, rates: Mapping[str, float], width: int, height: int, hint: str = HINT
) -> RenderableType:
    """At most `height` lines. Curves get what the fleet leaves, and at least a few lines."""
    status = view.status
    if status is None:
        return Text("starting: services are loading and connecting …", style="dim")
    policies = [_policy_line(view, number, width) for number in range(len(status.policies))]
    policies = policies[: max(1, height // 4)]
    room = max(2, height - FIXED_LINES - len(policies))
    num_nodes = min(max(1, len(status.nodes)), max(1, room - max(MIN_CURVE_LINES, room // 3)))
    num_curve_lines = min(room - num_nodes, MAX_CURVE_LINES)
    parts: list[RenderableType] = [_title(view), _flow(status), _rule("policies"), *policies]
    parts += [_rule("reward"), *_curve(view, width, num_curve_lines)]
    parts += [_rule("fleet"), _fleet(status, rates, num_nodes), _last_line(view, hint)]
    return Group(*parts)


def _rule(title: str) -> Rule:
    return Rule(title, style="cyan", align="left", characters="─")


def _title(view: RunView) -> Text:
    assert view.status is not None
    left = f" · about {format_clock(view.eta_s)} left" if view.eta_s is not None else ""
    ended = " · finished" if view.status.finished else left
    return _line(
        ("penstock top", "bold cyan"),
        (f" · {printable(view.name)}", "bold"),
        (f" · {format_clock(view.elapsed_s)}{ended}", "dim"),
    )


def _flow(status: Status) -> Table:
    """The way of the data, from left to right, with what waits at each place."""
    policies, live = status.policies, [node for node in status.nodes if node.state == "live"]
    slots = f"{sum(n.num_leases for n in status.nodes)}/{sum(n.capacity for n in status.nodes)}"
    served = [version.number for node in live for version in node.live]
    wasted = sum(status.wasted_tokens.values())
    share = wasted / status.sampled_tokens if status.sampled_tokens else 0.0
    places = {
        "in flight": (pluralise(sum(p.issued for p in policies), "group"), f"{slots} slots"),
        NODES: (f"{len(live)} of {len(status.nodes)} live", f"{status.tokens_per_s:,.0f} tok/s"),
        "ready": (pluralise(sum(p.ready for p in policies), "group"), f"{share:.1%} waste"),
        "sealed": (pluralise(sum(p.sealed for p in policies), "batch", "batches"), ""),
        TRAINER: (f"{sum(p.number for p in policies)}/{sum(p.steps for p in policies)}", ""),
        "weights": (
            f"v{max((p.published for p in policies), default=0)}",
            f"served v{min(served)}" if served else "not served",
        ),
    }
    slow, table = bottleneck(status), _grid(2 * len(places) - 1, gap=1)
    head: list[Text] = []
    for number, name in enumerate(places):
        if number:
            head.append(Text("→", style="dim"))
        is_slow = name == slow
        head.append(
            Text(f"{name} ◀ slowest" if is_slow else name, "bold yellow" if is_slow else "")
        )
    table.add_row(*head)
    for row in range(2):
        cells = [Text(lines[row], style="dim" if row else "bold") for lines in places.values()]
        table.add_row(*[cell for one in cells for cell in (one, Text(""))][:-1])
    return table


def _policy_line(view: RunView, number: int, width: int) -> Text:
    assert view.status is not None
    policy = view.status.policies[number]
    reward = "–" if policy.reward_mean is None else f"{policy.reward_mean:.3f}"
    stale = "–" if policy.staleness_mean is None else f"{policy.staleness_mean:.1f}"
    curve = view.curves.get(policy.policy, [])
    room = max(0, min(width, 120) - 62)
    return _line(
        (f"{policy.policy:<12.12}", "bold"),
        (f" step {policy.number}/{policy.steps}", ""),
        ("  reward ", "dim"),
        (reward, "bold green"),
        ("  staleness ", "dim"),
        (stale, ""),
        (f"  skipped {policy.skipped}" if policy.skipped else "", "yellow"),
        (f"  {sparkline(curve, room)}" if len(view.status.policies) > 1 else "", "green"),
    )


def _curve(view: RunView, width: int, num_lines: int) -> list[Text]:
    """The reward of the first policy, as wide as all its steps; the others have their line."""
    assert view.status is not None
    names = [policy.policy for policy in view.status.policies]
    values = view.curves.get(names[0], []) if names else []
    if len(values) < 2:
        empty = [Text("after the second step", style="dim")]
        return empty + [Text("")] * (num_lines - 1)
    low, high, room = min(values), max(values), max(10, width - 9)
    times = max(1, room // max(len(values), view.status.policies[0].steps))
    lines = block_chart([value for value in values for _ in range(times)], room, num_lines)
    labels = [""] * num_lines
    labels[-1], labels[0] = f"{low:.3f}", f"{high:.3f}"
    return [
        _line((f"{label:>7} ", "dim"), (line, "green"))
        for label, line in zip(labels, lines, strict=True)
    ]


def block_chart(values: list[float], width: int, height: int) -> list[str]:
    """The curve as columns, each the mean of its share of the steps, from the top line down."""
    num_columns = min(width, len(values))
    edges = [round(i * len(values) / num_columns) for i in range(num_columns + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = min(means), max(means)
    scale = (8 * height - 1) / (high - low) if high > low else 0.0
    levels = [1 + round((mean - low) * scale) for mean in means]
    return [
        "".join(BLOCKS[max(0, min(8, level - 8 * line))] for level in levels)
        for line in reversed(range(height))
    ]


def _fleet(status: Status, rates: Mapping[str, float], num_lines: int) -> RenderableType:
    if not status.nodes:
        return Text("no node has joined yet", style="dim")
    heads = ("node", "state", "version", "slots", "delivered", "per second", "")
    table = _grid(len(heads), gap=2)
    table.add_row(*(Text(head, style="dim") for head in heads))
    shown = sorted(status.nodes, key=_urgency)
    is_cut = len(shown) > num_lines
    for node in shown[: num_lines - is_cut]:
        table.add_row(*_node_cells(node, rates.get(str(node.node_id), 0.0)))
    if not is_cut:
        return table
    return Group(table, Text(f"… and {len(shown) - num_lines + 1} more", style="dim"))


def _urgency(node: NodeStatus) -> tuple[bool, str]:
    """Those that need a look come first."""
    return node.state == "live" and node.silent_s <= STALL_S, str(node.node_id)


def _node_cells(node: NodeStatus, rate: float) -> list[Text]:
    style = {"live": "green", "starting": "dim", "draining": "yellow"}.get(node.state, "red")
    silent = f"silent for {format_duration(node.silent_s)}" if node.silent_s > STALL_S else ""
    return [
        Text(printable(node.node_id), style="bold"),
        Text(node.state, style=style),
        Text(", ".join(f"v{version.number}" for version in node.live) or "–"),
        Text(f"{node.num_leases}/{node.capacity}"),
        Text(f"{node.delivered:,}"),
        Text(f"{rate:.1f}"),
        Text(silent, style="yellow"),
    ]


def _last_line(view: RunView, hint: str) -> Text:
    """What needs attention most, else how to leave."""
    status = view.status
    assert status is not None
    if view.unreachable_s > UNREACHABLE_S:
        text = f"no response from the dataflow for {format_duration(view.unreachable_s)}"
        return _line((text, "yellow"))
    long = [one for one in status.waiting if one.since_s >= STALL_S]
    waits = [f"{one.who} waits for {one.on}, {format_duration(one.since_s)}" for one in long]
    for text in (view.note, *status.alarms, *waits):
        if text:
            return _line((printable(text), "yellow"))
    return _line((hint, "dim"))


def _grid(num_columns: int, *, gap: int) -> Table:
    """One line for each row, however narrow the terminal is."""
    grid = Table.grid(padding=(0, gap))
    for _ in range(num_columns):
        grid.add_column(no_wrap=True, overflow="ellipsis")
    return grid


def _line(*parts: tuple[str, str]) -> Text:
    return Text.assemble(*parts, overflow="ellipsis", no_wrap=True)
