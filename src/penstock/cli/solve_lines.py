# SPDX-License-Identifier: Apache-2.0
"""The work of an agent as text that grows: who speaks on the left, what on the right.

Breaks lines between words at the width of a terminal; without one it breaks none and uses no
colour. Removes control characters, whatever the model or a tool wrote."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, TextIO

from penstock.cli.output import format_duration, pluralise, printable
from penstock.types import FailureKind, FinishReason, OutcomeKind, Trajectory, view_ids

if TYPE_CHECKING:
    from penstock.runs.solve import SolveEvent

NAME_WIDTH = 11
"""Columns for who speaks."""
MAX_WIDTH = 100
STYLES = {"text": "\x1b[36m", "reasoning": "\x1b[2;3m", "calls": "\x1b[35m", "message": ""}
DIM, RESET = "\x1b[2m", "\x1b[0m"


class EventWriter:
    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._has_colour = out.isatty()
        columns = min(MAX_WIDTH, shutil.get_terminal_size().columns)
        self._width = columns - 1 if out.isatty() else 0
        self._block = ("", "")
        self._column = 0

    def write(self, event: SolveEvent) -> None:
        """Continue the block of this speaker, or begin another."""
        if event.kind == "end":
            self._end_block()
            return
        name = {"reasoning": "thinks", "calls": "calls"}.get(event.kind, event.who)
        block = (event.kind, event.who)
        if block != self._block or event.kind in ("message", "calls"):
            self._end_block()
            self._begin_block(name)
            self._block = block
        self._write_text(event.text, STYLES[event.kind])
        self._out.flush()

    def _begin_block(self, name: str) -> None:
        shown = printable(name)[: NAME_WIDTH - 2].ljust(NAME_WIDTH)
        self._out.write(f"{DIM}{shown}{RESET}" if self._has_colour else shown)
        self._column = NAME_WIDTH

    def _end_block(self) -> None:
        if self._block != ("", ""):
            self._out.write("\n")
        self._block = ("", "")

    def _write_text(self, text: str, style: str) -> None:
        if self._has_colour and style:
            self._out.write(style)
        for piece in re.split(r"(\n|[ \t]+)", printable(text)):
            if piece == "\n" or (self._width and self._column + len(piece) > self._width):
                self._out.write("\n" + " " * NAME_WIDTH)
                self._column = NAME_WIDTH
                piece = "" if piece.isspace() else piece
            self._out.write(piece)
            self._column += len(piece)
        if self._has_colour and style:
            self._out.write(RESET)


def ending_lines(ended: Trajectory, *, has_answer: bool) -> Iterator[str]:
    """How it ended: outcome, reward, counts; tools, where no message showed them."""
    tokens = sum(len(view_ids(turn.sampled_ids)) for turn in ended.turns)
    facts = [
        pluralise(len(ended.turns), "turn"),
        pluralise(len(ended.tool_uses), "tool call") if ended.tool_uses else "",
        pluralise(tokens, "token") if tokens else "",
        format_duration(ended.ended_at - ended.started_at),
        "no reward" if ended.reward is None else f"reward {ended.reward:.4g}",
    ]
    for use in ended.tool_uses:
        mark = "failed" if use.is_error else "ok"
        yield printable(f"  {use.name}: {mark}, {use.seconds:.2f} s")
    is_bad = is_failure(ended, has_answer=has_answer)
    yield f"--- {_ending(ended, is_bad=is_bad)}: {', '.join(filter(None, facts))}"
    if is_bad:
        yield from (f"  ! {line}" for line in printable(ended.outcome.detail).splitlines())
    elif ended.reward is None and not has_answer:
        yield "    not scored; give the expected answer with --answer"


def _ending(ended: Trajectory, *, is_bad: bool) -> str:
    """As if it had been scored, where only the expected answer is missing."""
    outcome = ended.outcome
    if is_bad or outcome.kind is not OutcomeKind.FAILED:
        return outcome.kind.value + (f" ({outcome.reason})" if outcome.reason else "")
    is_cut_off = bool(ended.turns) and ended.turns[-1].finish is FinishReason.LENGTH
    return "truncated (length)" if is_cut_off else "completed"


def is_failure(ended: Trajectory, *, has_answer: bool) -> bool:
    """Without the expected answer a reward may be unable to score; the work did not fail."""
    is_unscored = ended.outcome.reason == FailureKind.REWARD and not has_answer
    return ended.outcome.kind is OutcomeKind.FAILED and not is_unscored
