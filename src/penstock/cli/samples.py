# SPDX-License-Identifier: Apache-2.0
"""`penstock samples`: what the model said."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

if TYPE_CHECKING:
    from penstock.runs.history import Run
    from penstock.runs.samples import SampleList
    from penstock.types import OutcomeKind

DEFAULT_COUNT = 5


def samples(
    run: Path,
    /,
    *,
    step: str = "",
    best: int = 0,
    worst: int = 0,
    failed: bool = False,
    node: str = "",
    eval: bool = False,
    number: Annotated[int, Parameter(name=["--number", "-n"])] = DEFAULT_COUNT,
    follow: bool = False,
    html: Path | None = None,
    json: bool = False,
) -> int:
    """Show what the model said: prompts, answers, tool calls and rewards, decoded.

    Args:
        run: Run folder, or its config file; running, stopped or finished.
        step: Only what step N trained, or the steps N:M.
        best: Show the N trajectories with the highest rewards.
        worst: Show the N trajectories with the lowest rewards.
        failed: Only failed rollouts, with the reason.
        node: Only of this node.
        eval: Answers to questions of evaluations, instead of training.
        number: How many to show; the newest first.
        follow: Show new ones as they arrive, until the run ends.
        html: Write one self-contained HTML file instead.
        json: Print one JSON object as the last line.
    """
    from penstock.errors import ConfigError
    from penstock.runs.history import open_run
    from penstock.runs.samples import choose
    from penstock.types import OutcomeKind

    outcome = OutcomeKind.FAILED if failed else None
    steps = parse_steps(step)
    if follow and (steps or best or worst or html or node):
        others = "--step, --best, --worst, --node and --html"
        raise ConfigError(f"--follow shows what arrives from now on; remove {others}")
    if eval and (steps or follow):
        raise ConfigError("--eval shows answers that no step trained; remove --step and --follow")
    if min(number, best + 1, worst + 1) < 1:
        raise ConfigError("-n, --best and --worst are numbers of samples; use 1 or more")
    with open_run(run) as opened:
        if follow:
            return _follow(opened, number, outcome, json=json)
        select = partial(
            choose, opened, steps=steps, outcome=outcome, node=node or None, evaluations=eval
        )
        found = _choose(select, number, best=best, worst=worst)
        return _show(opened, found, html, json=json)


def parse_steps(text: str) -> tuple[int | None, int | None] | None:
    """Step N, or the steps N:M; None for no text."""
    from penstock.errors import ConfigError

    first, colon, last = text.partition(":")
    if not re.fullmatch(r"(\d+(:\d*)?|:\d+)?", text):
        raise ConfigError(f"--step {text}: write one step (12) or a range (1:5, 100:)")
    low, high = (int(part) if part else None for part in (first, last))
    return (low, high if colon else low) if text else None


def _choose(select: Callable[..., SampleList], number: int, *, best: int, worst: int) -> SampleList:
    from penstock.runs.samples import SampleList

    if not best and not worst:
        return select(count=number)
    orders = ((best, "best"), (worst, "worst"))
    parts = [select(count=count, order=order) for count, order in orders if count]
    return SampleList(
        samples=tuple(sample for part in parts for sample in part.samples),
        num_without_text=sum(part.num_without_text for part in parts),
    )


def _show(run: Run, found: SampleList, html: Path | None, *, json: bool) -> int:
    from penstock.cli.output import pluralise, print_json, print_note
    from penstock.cli.sample_lines import print_samples
    from penstock.runs.samples import explain_freed

    note = explain_freed(run)
    if html is not None:
        from penstock.runs.samples_page import render_page

        html.write_text(render_page(f"Samples of {run.config.name}", found.samples, note))
        print_note(f"wrote {pluralise(len(found.samples), 'sample')} to {html}")
    elif not json:
        print_samples(found.samples)
        if not found.samples:
            print_note("no trajectory matches")
    if note:
        print_note(note)
    if json:
        print_json(
            {
                "run": str(run.folder.path),
                "samples": found.samples,
                "passed_over": found.num_without_text,
                "freed": run.num_freed(),
                "trajectories": run.num_trajectories(),
            }
        )
    return 0


def _follow(run: Run, number: int, kind: OutcomeKind | None, *, json: bool) -> int:
    from penstock.cli.output import print_json, print_note
    from penstock.cli.sample_lines import print_samples
    from penstock.runs.samples import follow

    if not run.is_running:
        print_note(f"{run.folder.path} is not running; without --follow its samples are shown")
    num_shown = 0
    for found, num_others in follow(run, count=number, outcome=kind):
        num_shown += len(found)
        if json:
            for sample in found:
                print_json(sample)
        else:
            print_samples(found)
            if num_others:
                print_note(f"… and {num_others:,} more arrived; -n shows more of them")
    if json:
        print_json({"run": str(run.folder.path), "shown": num_shown})
    return 0
