# SPDX-License-Identifier: Apache-2.0
"""The tokens of a trajectory one by one: text, log-prob, version, whether it is trained, and what
stages said of it.

Decodes what is stored; computes nothing. A token that is only a part of a character has no text:
the last of its parts shows the character.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.errors import PenstockError
from penstock.runs.recorded_trajectory import RecordedTrajectory
from penstock.types import Turn, view_ids, view_log_probs

MAX_TOKENS = 20_000
"""Of one trajectory; the rest is left out, and `num_left_out` says how many."""
PARTIAL = "\ufffd"
MAX_PARTS = 8
"""Tokens that together may make one character."""
FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTokens:
    """The tokens of one turn: those that were added to the prompt, then the sampled ones."""

    policy: str
    role: str
    agent: str
    parent: int
    prompt: tuple[str, ...]
    """Text of each token."""
    sampled: tuple[str, ...]
    log_probs: tuple[float, ...]
    """One for each sampled token, under the sampling parameters."""
    versions: tuple[str, ...]
    """The version that sampled each token."""
    is_trained: bool
    """False: the answer never reached its agent, or the token ids are only context."""
    finish: str
    columns: dict[str, tuple[float, ...]] = field(default_factory=dict[str, tuple[float, ...]])
    """Values of stages by column, one for each sampled token."""
    num_left_out: int = 0


def view_tokens(one: RecordedTrajectory) -> tuple[TurnTokens, ...]:
    """The tokens of every turn. Without a tokenizer, the text of a token is its id."""
    room = MAX_TOKENS
    found: list[TurnTokens] = []
    columns, start = _token_columns(one), 0
    for turn in one.turns:
        ids, prompt = view_ids(turn.sampled_ids).tolist(), view_ids(turn.prompt_ids).tolist()
        shown_prompt, shown = prompt[:room], ids[: max(0, room - len(prompt))]
        room -= len(shown_prompt) + len(shown)
        decode = _decoder(one, turn)
        found.append(
            TurnTokens(
                policy=turn.policy,
                role=turn.role,
                agent=turn.agent,
                parent=turn.parent,
                prompt=pieces(shown_prompt, decode),
                sampled=pieces(shown, decode),
                log_probs=tuple(view_log_probs(turn.logprobs).tolist()[: len(shown)]),
                versions=_versions(turn, len(shown)),
                is_trained=turn.reached_agent,
                finish=turn.finish.value,
                columns={
                    name: tuple(values[start : start + len(shown)])
                    for name, values in columns.items()
                },
                num_left_out=len(prompt) + len(ids) - len(shown_prompt) - len(shown),
            )
        )
        start += len(ids)
    return tuple(found)


def _decoder(one: RecordedTrajectory, turn: Turn) -> Callable[[Sequence[int]], str]:
    try:
        return one.decoder.renderer(turn.policy).decode
    except PenstockError:
        return lambda ids: " ".join(map(str, ids)) + " "


def pieces(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> tuple[str, ...]:
    """The text of each token; of several that make one character, the last one has it."""
    found: list[str] = []
    pending: list[int] = []
    for one in ids:
        pending.append(one)
        text = decode(pending)
        if text.endswith(PARTIAL) and len(pending) < MAX_PARTS:
            found.append("")
            continue
        found.append(text)
        pending.clear()
    if pending:
        found[-1] = decode(pending)
    return tuple(found)


def _versions(turn: Turn, num_tokens: int) -> tuple[str, ...]:
    names = [""] * num_tokens
    for span in turn.spans:
        for index in range(span.start, min(span.end, num_tokens)):
            names[index] = f"{turn.policy}@{span.incarnation}.{span.number}"
    return tuple(names)


def _token_columns(one: RecordedTrajectory) -> dict[str, Sequence[float]]:
    """Columns with one 32-bit float for each sampled token."""
    num_tokens = sum(len(view_ids(turn.sampled_ids)) for turn in one.turns)
    return {
        name: array("f", value)
        for name, value in one.columns.items()
        if isinstance(value, bytes) and num_tokens and len(value) == FLOAT_BYTES * num_tokens
    }
