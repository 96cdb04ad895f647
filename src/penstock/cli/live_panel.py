# SPDX-License-Identifier: Apache-2.0
"""The live panel of `penstock run` on a terminal: shows at a glance whether a run is healthy.

Draws a RunView; knows nothing about processes. Every number comes from the dataflow's status.
"""

from __future__ import annotations

import sys
import termios
from itertools import pairwise
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel as Box
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from penstock.cli.console import SafeConsole
from penstock.cli.output import format_clock, format_duration, pluralise, printable
from penstock.cli.progress_lines import evaluation_text
from penstock.dataflow.service.operators.messages import PolicyStatus, Status
from penstock.runs.monitor import RunView, resume_note

BLOCKS = "▁▂▃▄▅▆▇█"
UNREACHABLE_S = 3.0
STALL_S = 10.0
"""Waits longer than this are shown as a warning."""
MAX_NODES = 8
MAX_PARTS = 8
LIVE_HINT = "Ctrl-C stops; run again to resume"


class LivePanel:
    """A panel that redraws itself in place, from the first update on."""

    def __init__(self, console: Console | None = None, *, hint: str = LIVE_HINT) -> None:
        self._hint = hint
        self._console = console or SafeConsole(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, transient=False)
        self._terminal: list[Any] | None = None

    def update(self, view: RunView) -> None:
        if not self._live.is_started:
            self._terminal = _hide_control_characters()
            self._live.start()
        self._live.update(draw(view, self._console.width, self._hint), refresh=True)

    def notify(self, text: str) -> None:
        self._live.console.print(text)

    def close(self) -> None:
        self._live.stop()
        if self._terminal is not None:
            termios.tcsetattr(sys.stdin, termios.TCSANOW, self._terminal)


def _hide_control_characters() -> list[Any] | None:
    """Keep `^C` from being echoed into the panel; returns the previous terminal settings."""
    try:
        before = termios.tcgetattr(sys.stdin)
    except (termios.error, ValueError):
        return None
    quiet = [*before]
    quiet[3] &= ~termios.ECHOCTL
    termios.tcsetattr(sys.stdin, termios.TCSANOW, quiet)
    return before


def draw(view: RunView, width: int, hint: str = LIVE_HINT) -> RenderableType:
    """`hint`: how to stop the run from where this is shown."""
    parts: list[RenderableType] = []
    status = view.status
    if status is None:
        parts.append(Text("starting: services are loading and connecting …", style="dim"))
    else:
        for policy in status.policies:
            if len(status.policies) > 1:
                parts.append(Text(policy.policy, style="bold cyan"))
            parts.append(_policy(policy, view.curves.get(policy.policy, []), width))
        parts += [_flow(status), *_evaluation(status), Text(""), _nodes(status)]
        parts += [Text(printable(f"\n{alarm}"), style="yellow") for alarm in status.alarms]
    if status is not None and view.unreachable_s > UNREACHABLE_S:
        text = f"no response from the dataflow for {format_duration(view.unreachable_s)}"
        parts.append(Text(text, style="yellow"))
    if view.note:
        parts += [Text(""), _note(view.note)]
    return Box(
        Group(*parts),
        title=Text.assemble(("penstock", "bold cyan"), (f" · {view.name}", "bold")),
        title_align="left",
        subtitle=_elapsed_text(view, hint),
        subtitle_align="right",
        border_style="cyan",
        padding=(0, 1),
        width=min(width, 110),
    )


def _note(text: str) -> Text:
    return Text(printable(text), style="yellow", overflow="ellipsis", no_wrap=True)


def sparkline(values: list[float], width: int) -> str:
    """The curve in `width` characters; each is the mean of its share of the steps."""
    if not values or width < 1:
        return ""
    num_chars = min(width, len(values))
    edges = [round(i * len(values) / num_chars) for i in range(num_chars + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in pairwise(edges) if b > a]
    low, high = min(means), max(means)
    scale = (len(BLOCKS) - 1) / (high - low) if high > low else 0.0
    return "".join(BLOCKS[round((mean - low) * scale)] for mean in means)


def _policy(policy: PolicyStatus, rewards: list[float], width: int) -> RenderableType:
    grid = _grid()
    bar_width = max(10, min(width, 110) - 40)
    grid.add_row(
        "step",
        _value_and_bar(
            Text(f"{policy.number}/{policy.steps}", style="bold"),
            ProgressBar(total=policy.steps, completed=policy.number, width=bar_width),
        ),
    )
    if policy.reward_mean is not None:
        shown = Text(f"{policy.reward_mean:.3f}", style="bold green")
        curve = sparkline(rewards, bar_width) if len(rewards) > 1 else ""
        grid.add_row("reward", _value_and_bar(shown, Text(curve, style="green")))
    if policy.staleness_mean is not None:
        text = f"{policy.staleness_mean:.2f} mean · {policy.staleness_max} max"
        grid.add_row(
            "staleness",
            Text.assemble(
                text,
                ("   ready ", "dim"),
                pluralise(policy.ready, "group"),
                ("   in flight ", "dim"),
                f"{policy.issued}",
                ("   room ", "dim"),
                f"{policy.room}",
            ),
        )
    _add_parts(grid, policy)
    if policy.skipped:
        batches = pluralise(policy.skipped, "batch", "batches")
        why = printable(policy.last_skip.replace("_", " "))
        grid.add_row("skipped", Text(f"{batches}, the last one because of {why}", style="yellow"))
    if policy.number < policy.repeats_to:
        grid.add_row("", Text(resume_note(policy), style="yellow"))
    return grid


def _add_parts(grid: Table, policy: PolicyStatus) -> None:
    """One line per role and source, where there is more than one of either or roles have names."""
    if len(policy.parts) < 2 and not any(part.role for part in policy.parts):
        return
    sources = {part.source for part in policy.parts}
    for part in policy.parts[:MAX_PARTS]:
        name = part.role or ("" if len(sources) > 1 else "no role")
        where = part.source if len(sources) > 1 else ""
        reward = "–" if part.reward_mean is None else f"{part.reward_mean:.3f}"
        dropped = ", ".join(f"{why} {num:,}" for why, num in sorted(part.dropped.items()))
        text = f"{part.tokens:,} tokens   {pluralise(part.groups, 'group')}"
        text += f", dropped: {dropped}" if dropped else ""
        line = Text(overflow="ellipsis", no_wrap=True)
        line.append(" · ".join(filter(None, (name, where))), style="bold")
        line.append(f"  reward {reward}   {text}", style="dim")
        grid.add_row("", line)
    if len(policy.parts) > MAX_PARTS:
        grid.add_row("", Text(f"… and {len(policy.parts) - MAX_PARTS} more", style="dim"))


def _flow(status: Status) -> RenderableType:
    wasted = sum(status.wasted_tokens.values())
    share = wasted / status.sampled_tokens if status.sampled_tokens else 0.0
    reasons = ", ".join(f"{why} {num:,}" for why, num in status.wasted_tokens.items() if num)
    grid = _grid()
    grid.add_row(
        "flow",
        Text.assemble(
            (f"{status.trajectories:,}", "bold"),
            (" trajectories   ", "dim"),
            (f"{status.tokens_per_s:,.0f}", "bold"),
            (" tokens/s", "dim"),
        ),
    )
    grid.add_row(
        "waste",
        Text.assemble(
            (f"{share:.1%}", "bold" if share < 0.1 else "bold yellow"),
            (f" of tokens never trained{f'  ({reasons})' if reasons else ''}", "dim"),
        )
        if status.sampled_tokens
        else Text("–", style="dim"),
    )
    grid.add_row("waiting", _waiting(status))
    return grid


def _evaluation(status: Status) -> list[RenderableType]:
    if status.evaluation is None:
        return []
    grid = _grid()
    text = evaluation_text(status.evaluation)
    grid.add_row("evaluation", Text(text, overflow="ellipsis", no_wrap=True))
    return [grid]


def _nodes(status: Status) -> RenderableType:
    nodes = status.nodes
    table = Table.grid(padding=(0, 2))
    if not nodes:
        had_some = status.trajectories > 0
        return Text("no nodes connected" if had_some else "no node has joined yet", style="dim")
    for node in sorted(nodes, key=lambda node: node.node_id)[:MAX_NODES]:
        live = ", ".join(f"v{version.number}" for version in node.live) or "–"
        style = {"live": "green", "starting": "dim", "draining": "yellow"}.get(node.state, "red")
        silent = f"silent for {format_duration(node.silent_s)}" if node.silent_s > STALL_S else ""
        table.add_row(
            Text(node.node_id, style="bold"),
            Text(node.state, style=style),
            Text(live),
            Text(f"{node.num_leases}/{node.capacity} slots"),
            Text(f"{node.delivered:,} delivered", style="dim"),
            Text(silent, style="yellow"),
        )
    if len(nodes) > MAX_NODES:
        table.add_row(Text(f"… and {len(nodes) - MAX_NODES} more", style="dim"))
    return table


def _waiting(status: Status) -> Text:
    """Who waits, for what, how long. Always one line, so that the panel keeps its height."""
    if status.finished or not status.waiting:
        return Text("none", style="dim")
    longest = max(status.waiting, key=lambda waiting: waiting.since_s)
    who = ", ".join(waiting.who for waiting in status.waiting if waiting.on == longest.on)
    style = "yellow" if longest.since_s >= STALL_S else "dim"
    text = f"{who} for {longest.on}, {format_duration(longest.since_s)}"
    return Text(text, style=style, overflow="ellipsis", no_wrap=True)


def _elapsed_text(view: RunView, hint: str) -> Text:
    if view.status is not None and view.status.finished:
        return Text(f"finished in {format_clock(view.elapsed_s)}", style="bold green")
    left = f" · about {format_clock(view.eta_s)} left" if view.eta_s is not None else ""
    return Text(f"{format_clock(view.elapsed_s)}{left} · {hint}", style="dim")


def _grid() -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=10, style="dim")
    grid.add_column()
    return grid


def _value_and_bar(first: RenderableType, second: RenderableType) -> Table:
    grid = Table.grid(padding=(0, 1))
    grid.add_column(width=9)
    grid.add_row(first, second)
    return grid
