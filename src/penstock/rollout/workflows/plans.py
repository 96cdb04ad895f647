# SPDX-License-Identifier: Apache-2.0
"""The planner's replies: one JSON object with thought, action and action_input.

Owns the schema and its reading. A reply is parsed and not constrained: a grammar would change the
distribution that the tokens are sampled from, and such tokens cannot be trained. Reading never
raises: a reply that does not match is None."""

from __future__ import annotations

from typing import Literal

import msgspec

ACTIONS = ("think", "search", "code", "answer")
MAX_INPUT_CHARS = 100_000


class Plan(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One step of a planner."""

    thought: str
    action: Literal["think", "search", "code", "answer"]
    action_input: str


def read_plan(reply: str) -> Plan | None:
    """The plan in a reply: its outermost braces, with any text around them; None if it has none."""
    start, end = reply.find("{"), reply.rfind("}")
    if start < 0 or end < start:
        return None
    try:
        plan = msgspec.json.decode(reply[start : end + 1].encode(), type=Plan)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    return plan if len(plan.action_input) <= MAX_INPUT_CHARS else None
