# SPDX-License-Identifier: Apache-2.0
"""Turns as steps: decoded, and judged for their form. The same for stored rows and for rows of a
running run, so a step has the same text in both.

Owns what counts as malformed. Rates nothing."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from penstock.trainer.prm.traces import Step
from penstock.types import FinishReason, ToolUse, Trajectory

if TYPE_CHECKING:
    from penstock.runs.decoded import DecodedTurn, Decoder

EMPTY = "empty: no text and no tool call"
CUT_OFF = "cut off before it was finished"
NOT_JSON = "the arguments of a tool call are not a JSON object"
BROKEN_CALL = "a tool call that cannot be parsed"
UNKNOWN_TOOL = "a call of a tool that does not exist"
_NO_TOOL = "there is no tool "
"""How the tools of an attempt answer a call of one that they do not have."""


def steps_of(
    trajectory: Trajectory, decoder: Decoder, policies: Collection[str]
) -> tuple[Step, ...]:
    """All its turns; a turn of one of `policies` that reached its agent is scored."""
    turns = decoder.turns(trajectory)
    uses = trajectory.tool_uses
    return tuple(
        Step(
            prompt=decoded.prompt,
            action=decoded.raw_answer,
            parent=decoded.parent,
            is_scored=turn.policy in policies and turn.reached_agent,
            malformed=why_malformed(decoded, [use for use in uses if use.turn == index]),
        )
        for index, (turn, decoded) in enumerate(zip(trajectory.turns, turns, strict=True))
    )


def why_malformed(turn: DecodedTurn, uses: Sequence[ToolUse]) -> str:
    """Why this turn is not a valid action; empty if it is. `uses`: its tool calls, as recorded."""
    if turn.finish != FinishReason.STOP:
        return CUT_OFF
    if not turn.answer.strip() and not turn.tool_calls:
        return EMPTY
    if not all(_is_object(call.arguments) for call in turn.tool_calls):
        return NOT_JSON
    if "<tool_call>" in turn.answer:
        return BROKEN_CALL
    if any(use.is_error and use.result.startswith(_NO_TOOL) for use in uses):
        return UNKNOWN_TOOL
    return ""


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
