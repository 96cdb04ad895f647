# SPDX-License-Identifier: Apache-2.0
"""What a delivered trajectory must satisfy, and what home needs to know of it. Pure; trusts
nothing a node says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from penstock.types import FinishReason, PolicyName, Trajectory, Turn

MAX_LOGPROB = 1e-3
"""Log-probabilities are at most 0; engines round."""
MIN_LOGPROB = -1e4
"""No engine samples a token this unlikely; a ratio against it would only poison a batch."""
MAX_REWARD = 1e9
MAX_TURNS = 4096
MAX_TOKENS = 4_000_000
"""Of all branches together: what the trainer unfolds must stay in proportion to what was sent."""

IsPublished = Callable[[PolicyName, int, int], bool]
"""Did the ledger ever publish this (policy, incarnation, number)?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Digested:
    sampled: dict[PolicyName, int]
    versions: dict[PolicyName, list[tuple[int, int]]]


def digest(trajectory: Trajectory, is_published: IsPublished) -> Digested | str:
    """The summary of a sound record, or what is wrong with it."""
    if wrong := _check_outcome(trajectory):
        return wrong
    if len(trajectory.turns) > MAX_TURNS:
        return f"{len(trajectory.turns)} turns; at most {MAX_TURNS}"
    sampled: dict[PolicyName, int] = {}
    versions: dict[PolicyName, set[tuple[int, int]]] = {}
    for index, turn in enumerate(trajectory.turns):
        if wrong := _check_turn(turn, index):
            return f"turn {index}: {wrong}"
        made_by = {(span.incarnation, span.number) for span in turn.spans}
        for incarnation, number in made_by:
            if not is_published(turn.policy, incarnation, number):
                version = f"{turn.policy}@{incarnation}.{number}"
                return f"turn {index}: {version} was never published"
        if _is_trainable(turn) and turn.sampled_ids:
            sampled[turn.policy] = sampled.get(turn.policy, 0) + len(turn.sampled_ids) // 4
            versions.setdefault(turn.policy, set()).update(made_by)
    if (tokens := _unfolded(trajectory.turns)) > MAX_TOKENS:
        return f"its branches unfold to {tokens} tokens; at most {MAX_TOKENS}"
    return Digested(
        sampled=sampled, versions={policy: sorted(made) for policy, made in versions.items()}
    )


def _unfolded(turns: Sequence[Turn]) -> int:
    """Tokens of all paths from a root to a leaf."""
    lengths: list[int] = []
    leaves = set(range(len(turns)))
    for turn in turns:
        before = lengths[turn.parent] if turn.parent >= 0 else 0
        lengths.append(before + (len(turn.prompt_ids) + len(turn.sampled_ids)) // 4)
        leaves.discard(turn.parent)
    return sum(lengths[leaf] for leaf in leaves)


def _is_trainable(turn: Turn) -> bool:
    return turn.reached_agent and turn.finish is not FinishReason.ABORT


def _check_outcome(trajectory: Trajectory) -> str:
    reward = trajectory.reward
    if trajectory.outcome.has_reward:
        if reward is None or not abs(reward) <= MAX_REWARD:
            return f"a {trajectory.outcome.kind} trajectory needs a finite reward, not {reward}"
    elif reward is not None:
        return f"a {trajectory.outcome.kind} trajectory carries no reward: failure is not a reward"
    return ""


def _check_turn(turn: Turn, index: int) -> str:
    if not -1 <= turn.parent < index:
        return f"parent {turn.parent} does not come before it"
    if len(turn.sampled_ids) % 4 or len(turn.prompt_ids) % 4:
        return "token ids are int32, 4 bytes each"
    if len(turn.sampled_ids) != len(turn.logprobs):
        return "one float32 log-prob per sampled token"
    values = np.frombuffer(turn.logprobs, "<f4")
    if values.size and not (values.min() >= MIN_LOGPROB and values.max() <= MAX_LOGPROB):
        return f"log-probs are finite, at most 0 and at least {MIN_LOGPROB:g}"
    for ids in (turn.sampled_ids, turn.prompt_ids):
        if ids and np.frombuffer(ids, "<i4").min() < 0:
            return "a token id is negative"
    position = 0
    for span in turn.spans:
        if span.start != position or span.end <= span.start:
            return "spans cover the sampled tokens in order, without gap or overlap"
        position = span.end
    if position != len(turn.sampled_ids) // 4:
        return f"spans cover {position} of {len(turn.sampled_ids) // 4} sampled tokens"
    return ""
