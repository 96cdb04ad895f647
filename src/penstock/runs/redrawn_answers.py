# SPDX-License-Identifier: Apache-2.0
"""Draws the tokens of a recorded row again, as far as one version of each policy drew them.

Owns the answer to each call of a repetition. Tokens of the checked versions are drawn again, after
the tokens that came before them. Tokens of other versions are taken from the row: so a row of
several versions can be checked one version at a time, and none of its claims keeps it from being
checked. Where an answer differs, the repetition goes on with what the engine drew, and so differs
from the row."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from penstock.gateway.generation import Completion, Generate, GenerationRequest
from penstock.gateway.salvaged_answers import SalvagedAnswers
from penstock.types import PolicyName, Trajectory, Version, VersionSpan, view_ids


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
        for span in recorded.spans:
            if version_of_span(request.policy, span) != self._checked.get(request.policy):
                continue
            given = ids[: span.start]
            again = await self._generate(replace(request, given=given, on_chunk=None))
            drawn, is_last = view_ids(again.sampled_ids).tolist(), span.end == len(ids)
            if drawn[: span.end] != ids[: span.end]:
                return again
            if is_last and (len(drawn), again.finish) != (len(ids), recorded.finish):
                return again
        return recorded
