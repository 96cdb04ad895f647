# SPDX-License-Identifier: Apache-2.0
"""The turns of one session as a tree of text and token segments.

A prompt that starts with the full context of an earlier turn extends that turn: sampled tokens are
kept exactly, and only the remaining text is tokenized. The comparison uses escaped text, where
equal text means equal control tokens (see `control_tokens`), or ids if the caller sends ids.
History rewritten by the agent or the template starts a branch; nothing is repaired silently.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import AnyStr

from penstock.bounds import MAX_SESSION_BYTES, MAX_TOKENS, MAX_TURNS
from penstock.types import PolicyName, TokenIds, Turn, view_ids
from penstock.wire.codec import encoded_bytes

ROOT = -1
TOKEN_BYTES = 4


@dataclass(slots=True)
class _Segment:
    """The part one turn added to its parent's context."""

    turn: Turn
    prompt: str
    sampled: str
    children: list[int]


class TurnTree:
    """One turn per model call; memory grows with the number of distinct tokens."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._roots: list[int] = []
        self._num_tokens = 0
        self.num_bytes = 0
        """Of the turns in a row: each has its prompt there, also where siblings share it here."""
        self.num_text_bytes = 0
        """Of their texts in memory. A token may be a hundred spaces long."""

    @property
    def is_full(self) -> bool:
        """A row of more turns, tokens or bytes would not be accepted."""
        return (
            len(self._segments) >= MAX_TURNS
            or self._num_tokens >= MAX_TOKENS
            or self.num_bytes >= MAX_SESSION_BYTES
        )

    def __getitem__(self, index: int) -> Turn:
        return self._segments[index].turn

    def match(self, policy: PolicyName, text: str, agent: str = "") -> tuple[int, int]:
        """The turn whose context is a prefix of `text`, and the length of that context; (-1, 0) if
        none.

        The longest context wins, then a turn of the same sub-agent, then the newest turn. Turns of
        other policies never match, as their tokenizer may differ; nor do answers that never reached
        the agent.
        """
        return self._longest(policy, text, agent, lambda at: (at.prompt, at.sampled))

    def match_ids(self, policy: PolicyName, ids: TokenIds, agent: str = "") -> tuple[int, int]:
        """`match` for a prompt of ids; the length is in bytes."""
        return self._longest(
            policy, ids, agent, lambda at: (at.turn.prompt_ids, at.turn.sampled_ids)
        )

    def _longest(
        self,
        policy: PolicyName,
        context: AnyStr,
        agent: str,
        parts_of: Callable[[_Segment], tuple[AnyStr, AnyStr]],
    ) -> tuple[int, int]:
        best, best_length, is_own = ROOT, 0, False
        open_nodes = [(index, 0) for index in self._roots]
        while open_nodes:
            index, start = open_nodes.pop()
            segment = self._segments[index]
            if segment.turn.policy != policy or not segment.turn.reached_agent:
                continue
            prompt, sampled = parts_of(segment)
            middle = start + len(prompt)
            if not (context.startswith(prompt, start) and context.startswith(sampled, middle)):
                continue
            end = middle + len(sampled)
            rank = end, segment.turn.agent == agent, index
            if rank > (best_length, is_own, best):
                best_length, is_own, best = rank
            open_nodes.extend((child, end) for child in segment.children)
        return best, best_length

    def context_ids(self, index: int) -> list[int]:
        """All ids of a turn's context, from the first prompt through its sampled tokens."""
        parts: list[bytes] = []
        while index != ROOT:
            turn = self._segments[index].turn
            parts += (turn.sampled_ids, turn.prompt_ids)
            index = turn.parent
        return view_ids(TokenIds(b"".join(reversed(parts)))).tolist()

    def add(self, turn: Turn, prompt: str, sampled: str) -> int:
        """Add a turn. Siblings with the same prompt share its memory."""
        index = len(self._segments)
        siblings = self._roots if turn.parent == ROOT else self._segments[turn.parent].children
        for sibling in siblings:
            twin = self._segments[sibling]
            if twin.turn.prompt_ids == turn.prompt_ids and twin.prompt == prompt:
                turn, prompt = replace(turn, prompt_ids=twin.turn.prompt_ids), twin.prompt
                break
        else:
            self.num_text_bytes += sys.getsizeof(prompt)
        self.num_text_bytes += sys.getsizeof(sampled)
        self._segments.append(_Segment(turn, prompt, sampled, []))
        self._num_tokens += (len(turn.prompt_ids) + len(turn.sampled_ids)) // TOKEN_BYTES
        self.num_bytes += encoded_bytes(turn)
        siblings.append(index)
        return index

    def mark_unreached(self, index: int) -> None:
        segment = self._segments[index]
        segment.turn = replace(segment.turn, reached_agent=False)

    def turns(self) -> tuple[Turn, ...]:
        return tuple(segment.turn for segment in self._segments)
