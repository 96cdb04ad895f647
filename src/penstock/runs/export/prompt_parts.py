# SPDX-License-Identifier: Apache-2.0
"""The text of a recorded prompt in parts: system prompt, tools, and what was asked.

A run records prompts as tokens. Their text is cut where the policy's own chat template puts its
marks; the marks are found by rendering a few messages. For people only: a template without marks
yields one part, and nothing here becomes tokens again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from penstock.errors import BadRequest, PenstockError
from penstock.runs.decoded import DecodedTurn, Decoder
from penstock.types import JsonObject, PolicyName, Trajectory

if TYPE_CHECKING:
    from penstock.gateway.renderer import Renderer

_SYSTEM, _USER, _ANSWER, _NEXT = "xSYSTEMx", "xUSERx", "xANSWERx", "xNEXTx"
_TOOLS = re.compile(r"<tools>((?:(?!<tools>).)*?)</tools>", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptParts:
    """One prompt, or what a turn added to one."""

    system: str
    """With everything that the template adds to it; empty if there is none."""
    tools: tuple[JsonObject, ...]
    """Definitions of tools in the system prompt."""
    rest: str
    """What was asked, without the marks at both ends."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrajectoryTexts:
    turns: tuple[DecodedTurn, ...]
    """Empty if the tokens cannot be decoded."""
    prompts: tuple[PromptParts, ...]
    """One for each turn."""
    problem: str = ""
    """Why there is no text."""

    @property
    def system(self) -> str:
        return next((parts.system for parts in self.prompts if parts.system), "")

    @property
    def tools(self) -> tuple[JsonObject, ...]:
        return next((parts.tools for parts in self.prompts if parts.tools), ())


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What a template writes around messages."""

    before_system: str = ""
    system_to_user: str = ""
    answer_to_user: str = ""
    after_user: str = ""


class PromptReader:
    """Decodes trajectories of one run."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self._marks: dict[PolicyName, Marks | str] = {}
        """Of each policy, or why its tokens cannot be decoded."""

    def read(self, trajectory: Trajectory) -> TrajectoryTexts:
        for policy in {turn.policy for turn in trajectory.turns}:
            if isinstance(problem := self._find(policy), str):
                return TrajectoryTexts(turns=(), prompts=(), problem=problem)
        turns = self._decoder.turns(trajectory)
        pairs = zip(trajectory.turns, turns, strict=True)
        prompts = tuple(self._parts(turn.policy, decoded) for turn, decoded in pairs)
        return TrajectoryTexts(turns=turns, prompts=prompts)

    def _parts(self, policy: PolicyName, turn: DecodedTurn) -> PromptParts:
        marks = self._find(policy)
        assert not isinstance(marks, str), "such a trajectory has no text"
        return split_prompt(turn.prompt, marks, is_first=turn.parent < 0)

    def _find(self, policy: PolicyName) -> Marks | str:
        found = self._marks.get(policy)
        if found is None:
            try:
                found = find_marks(self._decoder.renderer(policy))
            except PenstockError as error:
                found = str(error)
            self._marks[policy] = found
        return found


def split_prompt(text: str, marks: Marks, *, is_first: bool) -> PromptParts:
    system, rest = "", text
    if is_first and marks.before_system and text.startswith(marks.before_system):
        found, mark, after = text.removeprefix(marks.before_system).partition(marks.system_to_user)
        if mark:
            system, rest = found, after
    if not is_first:
        rest = _without_end_of_answer(rest, marks.answer_to_user)
    rest = rest.removesuffix(marks.after_user)
    return PromptParts(system=system, tools=_read_tools(system), rest=rest)


def _without_end_of_answer(text: str, mark: str) -> str:
    """The model itself may have sampled the first tokens of the mark."""
    tails = (mark[at:] for at in range(len(mark)))
    return text.removeprefix(next(filter(text.startswith, tails), ""))


def _read_tools(system: str) -> tuple[JsonObject, ...]:
    """Definitions between <tools> tags, one JSON object a line, as common templates write them."""
    found: list[JsonObject] = []
    for block in _TOOLS.findall(system):
        for line in block.strip().splitlines():
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                found.append(cast(JsonObject, value))
    return tuple(found)


def find_marks(renderer: Renderer) -> Marks:
    system, user, answer, next_user = (
        {"role": role, "content": text}
        for role, text in (
            ("system", _SYSTEM),
            ("user", _USER),
            ("assistant", _ANSWER),
            ("user", _NEXT),
        )
    )
    first = _between(renderer, (system, user), (_SYSTEM, _USER))
    later = _between(renderer, (user, answer, next_user), (_USER, _ANSWER, _NEXT))
    if later is None:
        return Marks()
    has_system = first is not None and bool(first[0]) and bool(first[1])
    return Marks(
        before_system=first[0] if first and has_system else "",
        system_to_user=first[1] if first and has_system else "",
        answer_to_user=later[2],
        after_user=later[3],
    )


def _between(
    renderer: Renderer, messages: tuple[Mapping[str, Any], ...], texts: tuple[str, ...]
) -> list[str] | None:
    """What stands before, between and after these texts; None if the template changes them."""
    try:
        rest = renderer.render([dict(message) for message in messages])
    except BadRequest:
        return None
    found: list[str] = []
    for text in texts:
        before, mark, rest = rest.partition(text)
        if not mark:
            return None
        found.append(before)
    return [*found, rest]
