# SPDX-License-Identifier: Apache-2.0
"""The turns of one session as a tree of text and token segments.

A request whose rendered text continues the whole context of an earlier turn extends that turn:
what was sampled stays exactly as it was sampled, only the rest is tokenised. History rewritten
by the agent or by the template starts a branch; nothing is repaired silently.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from penstock.types import PolicyName, Turn, view_ids

ROOT = -1


@dataclass(slots=True)
class _Segment:
    turn: Turn
    text: str
    """What this turn added to its parent's context: new prompt text, then the sampled text."""
    children: list[int]


class TurnTree:
    """Grows by one turn per model call; costs memory by distinct tokens."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._roots: list[int] = []

    def __len__(self) -> int:
        return len(self._segments)

    def __getitem__(self, index: int) -> Turn:
        return self._segments[index].turn

    def match(self, policy: PolicyName, text: str) -> tuple[int, int]:
        """The turn whose context `text` continues and the length of that context; (-1, 0) for
        none.

        Longest context wins, then the newest turn. Other policies' turns never match: their ids
        are of another tokenizer. Answers that never reached the agent do not either.
        """
        best, best_length = ROOT, 0
        open_nodes = [(index, 0) for index in self._roots]
        while open_nodes:
            index, start = open_nodes.pop()
            segment = self._segments[index]
            if segment.turn.policy != policy or not segment.turn.reached_agent:
                continue
            if not text.startswith(segment.text, start):
                continue
            end = start + len(segment.text)
            if (end, index) > (best_length, best):
                best, best_length = index, end
            open_nodes.extend((child, end) for child in segment.children)
        return best, best_length

    def context_ids(self, index: int) -> list[int]:
        """All ids of a turn's context, from the first prompt to its own sampled tokens."""
        chain: list[Turn] = []
        while index != ROOT:
            turn = self._segments[index].turn
            chain.append(turn)
            index = turn.parent
        ids: list[int] = []
        for turn in reversed(chain):
            ids.extend(view_ids(turn.prompt_ids))
            ids.extend(view_ids(turn.sampled_ids))
        return ids

    def add(self, turn: Turn, text: str) -> int:
        index = len(self._segments)
        self._segments.append(_Segment(turn, text, []))
        siblings = self._roots if turn.parent == ROOT else self._segments[turn.parent].children
        siblings.append(index)
        return index

    def mark_unreached(self, index: int) -> None:
        segment = self._segments[index]
        segment.turn = replace(segment.turn, reached_agent=False)

    def turns(self) -> tuple[Turn, ...]:
        return tuple(segment.turn for segment in self._segments)
