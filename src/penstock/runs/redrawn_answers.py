# SPDX-License-Identifier: Apache-2.0
"""Draws the tokens of a recorded row again, as far as one version of each policy drew them.

Owns the answer to each call of a repetition. Tokens of the checked versions are drawn again, after
the tokens that came before them. Tokens of other versions are taken from the row: so a row of
several versions can be checked one version at a time, and none of its claims keeps it from being
checked. Where an answer differs, the repetition goes on with what the engine drew, and so differs
from the row."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from penstock.gateway.generation import Completion, Generate, GenerationRequest
from penstock.gateway.salvaged_answers import SalvagedAnswers
from penstock.types import PolicyName, Trajectory, Version, VersionSpan, view_ids

MAX_PIECES = 4
"""Of one version in one answer. An honest node interrupts an answer a few times, so an answer of
more pieces is drawn again as a whole: its check costs no more than another's."""


def version_of_span(policy: PolicyName, span: VersionSpan) -> Version:
    return Version(policy=policy, incarnation=span.incarnation, number=span.number)


class RedrawnAnswers:
    """The engines, as the gateway of a repetition calls them."""

    def __init__(self, generate: Generate) -> None:
        self._generate = generate
        self._recorded = SalvagedAnswers()
        self._checked: Mapping[PolicyName, Version] = {}

    def expect(self, trajectory: Trajectory, checked: Mapping[PolicyName, Version]) -> None:
        """The next calls repeat this row; tokens of `checked` are drawn again."""
        # An engine does not know which sub-agent calls; the repetition itself compares that.
        self._recorded = SalvagedAnswers([replace(turn, agent="") for turn in trajectory.turns])
        self._checked = checked

    async def __call__(self, request: GenerationRequest) -> Completion:
        recorded = self._recorded.pop(request.policy, request.sampling, request.prompt_ids)
        if recorded is None:
            return await self._generate(request)
        return await self._redraw(request, recorded)

    async def _redraw(self, request: GenerationRequest, recorded: Completion) -> Completion:
        ids = view_ids(recorded.sampled_ids).tolist()
        pieces = [
            span
            for span in merged(recorded.spans)
            if version_of_span(request.policy, span) == self._checked.get(request.policy)
        ]
        if len(pieces) > MAX_PIECES or not ids:  # an answer without tokens names no version
            return await self._generate(request)
        for span in pieces:
            given = ids[: span.start]
            again = await self._generate(replace(request, given=given, on_chunk=None))
            drawn, is_last = view_ids(again.sampled_ids).tolist(), span.end == len(ids)
            if drawn[: span.end] != ids[: span.end]:
                return again
            if is_last and (len(drawn), again.finish) != (len(ids), recorded.finish):
                return again
            if not is_last and len(drawn) == span.end:
                return again  # the engine ended the answer here, and the row goes on
        return recorded


def merged(spans: Sequence[VersionSpan]) -> list[VersionSpan]:
    """The same tokens, with adjacent spans of one version as one."""
    found: list[VersionSpan] = []
    for span in spans:
        if found and replace(found[-1], start=span.start, end=span.end) == span:
            span = replace(found.pop(), end=span.end)
        found.append(span)
    return found
