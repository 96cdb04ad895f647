# SPDX-License-Identifier: Apache-2.0
"""Recognizes which messages of a request are answers this session gave earlier.

An agent sends an answer back in parts (text, reasoning, tool calls), and a template renders the
parts with its own spacing. This module remembers every answer whose parts differ from its sampled
text, so that the sampled text can be restored. An answer is recognized only if it comes back
complete: dropped reasoning or a changed argument counts as a rewritten history.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from json import loads
from typing import Any, cast

from penstock.gateway.model_calls import Answer
from penstock.gateway.turn_tree import ROOT
from penstock.types import JsonObject, PolicyName

_Key = tuple[PolicyName, str, str, tuple[tuple[str, str], ...]]
_Known = tuple[object, object, object]
"""Ids, sub-agent and preceding answer; None stands for any."""
MAX_READ_CHARS = 256 << 10
"""Of arguments in one call that are read to compare them: on the event loop, some milliseconds."""


@dataclass(frozen=True, slots=True)
class _PastAnswer:
    turn: int
    parent: int
    agent: str
    call_ids: tuple[str, ...]
    sampled_text: str | None


class _SameAnswers:
    """Answers with equal parts: the newest by each combination of what may tell them apart, so that
    a session of thousands of them is not searched for each message of a call."""

    def __init__(self) -> None:
        self._newest: dict[_Known, _PastAnswer] = {}

    def add(self, past: _PastAnswer) -> None:
        for known in _combinations(past.call_ids, past.agent, past.parent):
            self._newest[known] = past

    def find(self, ids: tuple[Any, ...], agent: str, before: int) -> _PastAnswer:
        """The ids count most, then the sub-agent, then the preceding answer."""
        found = (self._newest.get(wanted) for wanted in _combinations(ids, agent, before))
        return next(past for past in found if past is not None)


def _combinations(ids: object, agent: object, parent: object) -> Iterator[_Known]:
    """Of what is known, the most telling first."""
    return product((ids, None), (agent, None), (parent, None))


class AnswerHistory:
    def __init__(self) -> None:
        self._past_answers: dict[_Key, _SameAnswers] = {}
        self._has_sampled_texts = False
        self._new: list[Callable[[], None]] = []
        """Answers not looked at yet: most sessions make one call."""
        self._canonical: dict[str, str] = {}
        """Of arguments as the model wrote them, which most agents send back as they are."""

    def remember(
        self,
        policy: PolicyName,
        parent: int,
        answer: Answer,
        sampled_text: Callable[[], str | None],
        agent: str = "",
    ) -> None:
        """`agent`: the sub-agent that got it. `sampled_text`: the escaped answer as sampled,
        without its end token; None if the agent received exactly that text."""
        self._new.append(partial(self._add, policy, parent, answer, sampled_text, agent))

    def _add(
        self,
        policy: PolicyName,
        parent: int,
        answer: Answer,
        get_text: Callable[[], str | None],
        agent: str,
    ) -> None:
        sampled_text = get_text()
        written = {call.arguments: _canonical(call.arguments) for call in answer.tool_calls}
        self._canonical |= written
        calls = tuple((call.name, written[call.arguments]) for call in answer.tool_calls)
        key = (policy, answer.text, answer.reasoning, calls)
        ids = tuple(call.id for call in answer.tool_calls)
        same = self._past_answers.setdefault(key, _SameAnswers())
        same.add(_PastAnswer(answer.turn, parent, agent, ids, sampled_text))
        self._has_sampled_texts |= sampled_text is not None

    def find(
        self, policy: PolicyName, messages: Sequence[JsonObject], agent: str = ""
    ) -> dict[int, str]:
        """Sampled text of each repeated answer, by message index.

        Identical answers are distinguished by the ids of their tool calls, then by the sub-agent
        that sends them, then by the preceding answer; otherwise the newest wins. A wrong guess
        costs a branch, never a wrong token."""
        for add in self._new:
            add()
        self._new.clear()
        found: dict[int, str] = {}
        before, reader = ROOT, _ArgumentReader(self._canonical)
        for at, message in enumerate(messages if self._has_sampled_texts else ()):
            if message.get("role") != "assistant":
                continue
            key, ids = _read(policy, message, reader)
            same = self._past_answers.get(key) if key is not None else None
            if same is not None:
                best = same.find(ids, agent, before)
                before = best.turn
                if best.sampled_text is not None:
                    found[at] = best.sampled_text
        return found


class _ArgumentReader:
    """Reads the arguments of one call's messages, up to a length; beyond it equal texts are equal
    and others are not."""

    def __init__(self, known: Mapping[str, str]) -> None:
        self._known = known
        self._room = MAX_READ_CHARS

    def canonical(self, arguments: str | JsonObject) -> str:
        if not isinstance(arguments, str):
            return _canonical(arguments)
        known = self._known.get(arguments)
        if known is not None or len(arguments) > self._room:
            return arguments if known is None else known
        self._room -= len(arguments)
        return _canonical(arguments)


def _read(
    policy: PolicyName, message: JsonObject, reader: _ArgumentReader
) -> tuple[_Key | None, tuple[Any, ...]]:
    content = message.get("content") or ""
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    calls = cast(list[JsonObject], message.get("tool_calls") or [])
    if not isinstance(content, str) or not isinstance(reasoning, str):
        return None, ()
    try:
        named = tuple(
            (call["function"]["name"], reader.canonical(call["function"]["arguments"]))
            for call in calls
        )
        key = (policy, content, reasoning, named)
        ids = tuple(call.get("id") for call in calls)
        hash((key, ids))
        return key, ids
    except (KeyError, TypeError, AttributeError):
        return None, ()


def _canonical(arguments: str | JsonObject) -> str:
    """The same text for equal JSON values, whatever their formatting."""
    try:
        value = loads(arguments) if isinstance(arguments, str) else arguments
        return json.dumps(value, sort_keys=True)
    except (ValueError, RecursionError):
        return str(arguments)
