# SPDX-License-Identifier: Apache-2.0
"""What a delivered trajectory must satisfy, and what home needs to know of it. Pure; trusts
nothing a node says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from penstock.types import FinishReason, PolicyName, Trajectory, Turn

MAX_LOGPROB = 1e-3
"""Log-probabilities are at most 0; engines round."""
MAX_TURNS = 4096

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
    return Digested(
        sampled=sampled, versions={policy: sorted(made) for policy, made in versions.items()}
    )


def _is_trainable(turn: Turn) -> bool:
    return turn.reached_agent and turn.finish is not FinishReason.ABORT


def _check_outcome(trajectory: Trajectory) -> str:
    reward = trajectory.reward
    if trajectory.outcome.has_reward:
        if reward is None or not math.isfinite(reward):
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
    if values.size and not (np.isfinite(values).all() and values.max() <= MAX_LOGPROB):
        return "log-probs are finite and at most 0"
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
