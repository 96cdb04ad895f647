# SPDX-License-Identifier: Apache-2.0
"""Validates a delivered trajectory and summarises it for the coordinator. Pure; trusts nothing that
a node sends."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import lru_cache

import numpy as np

from penstock.bounds import (
    MAX_BRANCH_TURNS,
    MAX_REWARD,
    MAX_ROLE_CHARS,
    MAX_ROW_ROLES,
    MAX_TOKENS,
    MAX_TURNS,
)
from penstock.dataflow.service.nodes.model_limits import MAX_TOKEN_ID, ModelLimits
from penstock.redaction import hide_secrets
from penstock.types import (
    MIN_TEMPERATURE,
    ROLE_REWARD,
    SANDBOX_MS,
    TURN_REWARD,
    ExpertChoices,
    PolicyName,
    RowSummary,
    Trajectory,
    Turn,
    is_trainable,
    is_usable,
    versions_of,
)

MAX_LOGPROB = 1e-3
"""Log-probabilities are at most 0; engines round."""
MIN_LOGPROB = -1e4
"""No engine samples a token this unlikely; its importance ratio would only spoil a batch."""

NO_LIMITS = ModelLimits()
IsPublished = Callable[[PolicyName, int, int], bool]
"""Did the ledger ever publish this (policy, incarnation, number)?"""


class UnknownVersion(str):
    """The error is a version unknown to this partition; the coordinator may know it."""

    __slots__ = ()


def summarise(
    trajectory: Trajectory,
    digest: str,
    is_published: IsPublished,
    *,
    is_scored: bool = True,
    limits: ModelLimits = NO_LIMITS,
    roles: Collection[str] = (),
    policies: Collection[PolicyName] | None = None,
    has_sound_numbers: bool = False,
) -> RowSummary | str:
    """The summary of a valid trajectory, or the reason it is invalid.

    digest: BLAKE3 of its payload. is_scored: the node gives the rewards, not a stage. roles and
    policies: what the run file names; None: any policy. has_sound_numbers: as
    `have_sound_numbers` says."""
    turns = trajectory.turns
    has_turn_rewards = _has_turn_rewards(turns)
    if (
        wrong := _check_outcome(trajectory, is_scored)
        or _check_own_rewards(trajectory, is_scored, roles, has_turn_rewards)
        or _check_shapes(turns, limits)
        or _check_tool_uses(trajectory)
        or (not has_sound_numbers and _check_values(turns, limits.max_id))
    ):
        return wrong
    sampled: dict[PolicyName, int] = {}
    versions: dict[PolicyName, set[tuple[int, int]]] = {}
    known: tuple[PolicyName, set[tuple[int, int]]] | None = None
    """Policy and versions of the turn before, which most turns share."""
    lengths: list[int] = []
    """Tokens of each turn's full context, its answer included."""
    has_roles = False
    for index, turn in enumerate(turns):
        policy, made_by = turn.policy, versions_of(turn)
        if known != (policy, made_by):
            for incarnation, number in made_by:
                if not is_published(policy, incarnation, number):
                    name = f"{policy}@{incarnation}.{number}"
                    return UnknownVersion(f"turn {index}: {name} was never published")
            if policies is not None and policy not in policies:
                return f"turn {index}: the run has no policy {policy!r}"
            known = (policy, made_by)
        num_sampled = len(turn.sampled_ids) // 4
        before = lengths[turn.parent] if turn.parent >= 0 else 0
        lengths.append(before + len(turn.prompt_ids) // 4 + num_sampled)
        has_roles = has_roles or turn.role != ""
        if num_sampled and is_usable(turn):
            sampled[policy] = sampled.get(policy, 0) + num_sampled
            versions.setdefault(policy, set()).update(made_by)
    leaves = _leaves(turns)
    if lengths and max(lengths) > limits.narrowest and (wrong := _overflow(turns, lengths, limits)):
        return wrong
    if (tokens := sum(lengths[leaf] for leaf in leaves)) > MAX_TOKENS:
        return f"its branches unfold to {tokens} tokens; at most {MAX_TOKENS}"
    if len(leaves) > 1 and (number := _unfolded_turns(turns, leaves)) > MAX_BRANCH_TURNS:
        return f"its branches unfold to {number} turns; at most {MAX_BRANCH_TURNS}"
    return RowSummary(
        row_id=trajectory.row_id,
        digest=digest,
        reward=trajectory.reward,
        outcome=trajectory.outcome.kind,
        sampled=sampled,
        versions={p: tuple(sorted(made)) for p, made in versions.items()},
        roles=_by_role(turns) if has_roles else {},
        compute_cost=_compute_cost(turns, lengths, leaves),
        values=_values(trajectory, has_turn_rewards),
    )


def _values(trajectory: Trajectory, has_turn_rewards: bool) -> dict[str, float]:
    values = _own_rewards(trajectory, has_turn_rewards)
    if trajectory.sandbox_ms:
        values[SANDBOX_MS] = float(trajectory.sandbox_ms)
    return values


def _own_rewards(trajectory: Trajectory, has_turn_rewards: bool) -> dict[str, float]:
    """Rewards of roles, and the mean reward of each role's turns where one has its own."""
    values = {ROLE_REWARD + role: reward for role, reward in trajectory.role_rewards.items()}
    if not has_turn_rewards:
        return values
    found: dict[str, list[float | None]] = {}
    for turn in trajectory.turns:
        if turn.sampled_ids and is_usable(turn):
            found.setdefault(turn.role, []).append(turn.reward)
    for role, own in found.items():
        default = trajectory.role_rewards.get(role, trajectory.reward)
        rewards = [default if reward is None else reward for reward in own]
        known = [reward for reward in rewards if reward is not None]
        if known and any(reward is not None for reward in own):
            values[TURN_REWARD + role] = sum(known) / len(known)
    return values


def _has_turn_rewards(turns: Sequence[Turn]) -> bool:
    return any([turn.reward is not None for turn in turns])  # noqa: C419  cheaper than a generator


def _overflow(turns: Sequence[Turn], lengths: Sequence[int], limits: ModelLimits) -> str:
    """The turn whose context is longer than the window of its model."""
    for index, (turn, length) in enumerate(zip(turns, lengths, strict=True)):
        if length > (window := limits.window(turn.policy)):
            return f"turn {index}: {length} tokens, the window of {turn.policy} has {window}"
    return ""


def _by_role(turns: Sequence[Turn]) -> dict[PolicyName, dict[str, int]]:
    found: dict[PolicyName, dict[str, int]] = {}
    for turn in turns:
        if turn.sampled_ids and is_usable(turn):
            roles = found.setdefault(turn.policy, {})
            roles[turn.role] = roles.get(turn.role, 0) + len(turn.sampled_ids) // 4
    return {policy: roles for policy, roles in found.items() if roles.keys() != {""}}


def _leaves(turns: Sequence[Turn]) -> list[int]:
    if len(turns) == 1:
        return [0]
    parents = {turn.parent for turn in turns}
    return [index for index in range(len(turns)) if index not in parents]


def _unfolded_turns(turns: Sequence[Turn], leaves: Sequence[int]) -> int:
    """Turns from the root to each leaf."""
    depths: list[int] = []
    for turn in turns:
        depths.append(1 + (depths[turn.parent] if turn.parent >= 0 else 0))
    return sum([depths[leaf] for leaf in leaves])


def _compute_cost(
    turns: Sequence[Turn], lengths: Sequence[int], leaves: Sequence[int]
) -> dict[PolicyName, tuple[int, int]]:
    """Count as trainers cut samples: one path from root to leaf after another, each up to the last
    turn not trained by an earlier path. Visits every turn once, however many branches share it."""
    if len(turns) == 1:  # most rows
        turn, length = turns[0], lengths[0]
        return {turn.policy: (length, length**2)} if is_trainable(turn) else {}
    found: dict[PolicyName, tuple[int, int]] = {}
    is_passed = [False] * len(turns)
    for leaf in leaves:
        last: dict[PolicyName, int] = {}
        index = leaf
        while index >= 0 and not is_passed[index]:
            is_passed[index] = True
            turn = turns[index]
            if turn.policy not in last and is_trainable(turn):
                last[turn.policy] = index
            index = turn.parent
        for policy, end in last.items():
            tokens, squares = found.get(policy, (0, 0))
            found[policy] = tokens + lengths[end], squares + lengths[end] ** 2
    return found


def _check_outcome(trajectory: Trajectory, is_scored: bool) -> str:
    reward = trajectory.reward
    if not is_scored:
        return (
            ""
            if reward is None
            else "a stage gives the reward of this row; deliver it without a reward"
        )
    if trajectory.outcome.has_reward:
        if reward is None or not abs(reward) <= MAX_REWARD:
            return f"a {trajectory.outcome.kind} trajectory needs a finite reward, not {reward}"
    elif reward is not None:
        return f"a {trajectory.outcome.kind} trajectory has a reward: failure is not a reward"
    return ""


def _check_own_rewards(
    trajectory: Trajectory, is_scored: bool, run_roles: Collection[str], has_turn_rewards: bool
) -> str:
    """Check the rewards of roles and turns: only who gives the row's reward gives these."""
    turns, own = trajectory.turns, trajectory.role_rewards
    if not own and not has_turn_rewards:
        return ""
    if not is_scored:
        return "a stage gives the rewards of this row; deliver it without rewards of roles or turns"
    if not trajectory.outcome.has_reward:
        return f"a {trajectory.outcome.kind} trajectory has rewards of roles or turns"
    for index, turn in enumerate(turns):
        if turn.reward is not None and not abs(turn.reward) <= MAX_REWARD:
            return f"turn {index}: its reward must be a finite number, not {turn.reward}"
    for role, reward in own.items():
        if not role or (role not in run_roles and all(turn.role != role for turn in turns)):
            return f"role_rewards names {role!r}, a role of neither a turn nor the run"
        if not abs(reward) <= MAX_REWARD:
            return f"the reward of role {role} must be a finite number, not {reward}"
    return ""


def _check_shapes(turns: Sequence[Turn], limits: ModelLimits) -> str:
    if len(turns) > MAX_TURNS:
        return f"{len(turns)} turns; at most {MAX_TURNS}"
    if len(turns) > MAX_ROW_ROLES and (wrong := _check_roles(turns)):
        return wrong
    for index, turn in enumerate(turns):
        if wrong := _check_shape(turn, index):
            return f"turn {index}: {wrong}"
        if turn.experts is not None and (wrong := _expert_fault(turn, turn.experts, limits)):
            return f"turn {index}: {wrong}"
    return ""


def _check_roles(turns: Sequence[Turn]) -> str:
    """Each role is stored with the row's summary, and has its own figures in status and metrics."""
    num = len({turn.role for turn in turns} - {""})
    return f"its turns have {num} roles; at most {MAX_ROW_ROLES}" if num > MAX_ROW_ROLES else ""


def _check_tool_uses(trajectory: Trajectory) -> str:
    """Exports and traces look up the turn of each call."""
    for use in trajectory.tool_uses:
        if not -1 <= use.turn < len(trajectory.turns):
            return f"a tool was called after turn {use.turn}, of {len(trajectory.turns)} turns"
    return ""


def check_turn(turn: Turn, index: int) -> str:
    """The error in a single turn, or an empty string."""
    return _check_shape(turn, index) or _check_numbers([turn], MAX_TOKEN_ID)


def _check_shape(turn: Turn, index: int) -> str:
    if not -1 <= turn.parent < index:
        return f"parent {turn.parent} does not come before it"
    if len(turn.role) > MAX_ROLE_CHARS:
        return f"its role has {len(turn.role)} characters; at most {MAX_ROLE_CHARS}"
    if turn.role and not _is_plain(turn.role):
        return "its role has control characters, or the form of a secret"
    if 0 < turn.sampling.temperature < MIN_TEMPERATURE:
        return f"temperature {turn.sampling.temperature:g}: use 0, or at least {MIN_TEMPERATURE:g}"
    num_bytes = len(turn.sampled_ids)
    if num_bytes % 4 or len(turn.prompt_ids) % 4:
        return "token ids must be int32, 4 bytes each"
    if num_bytes != len(turn.logprobs):
        return "there must be one float32 log-prob per sampled token"
    position = 0
    for span in turn.spans:
        if span.start != position or span.end <= position:
            return "spans must cover the sampled tokens in order, without gap or overlap"
        position = span.end
    if position != num_bytes // 4:
        return f"spans cover {position} of {num_bytes // 4} sampled tokens"
    return ""


@lru_cache(maxsize=1024)
def _is_plain(role: str) -> bool:
    """Whether it can stand in status and metrics as it is."""
    return role.isprintable() and role == hide_secrets(role)


def _expert_fault(turn: Turn, experts: ExpertChoices, limits: ModelLimits) -> str:
    num_tokens = (len(turn.prompt_ids) + len(turn.sampled_ids)) // 4
    if len(experts.choices) != num_tokens * experts.token_bytes:
        return (
            f"experts has {len(experts.choices)} bytes; {num_tokens} tokens with "
            f"{experts.token_bytes} bytes each need {num_tokens * experts.token_bytes}"
        )
    if turn.policy in limits.experts:
        known = limits.experts[turn.policy]
        if known is None:
            return f"experts are given, and {turn.policy} is not a mixture of experts"
        if (experts.num_experts, experts.num_chosen) != (known.num_experts, known.num_chosen) or (
            experts.num_layers > known.max_layers
        ):
            return (
                f"experts are of {experts.num_chosen} of {experts.num_experts} in "
                f"{experts.num_layers} layers; {turn.policy} chooses {known.num_chosen} of "
                f"{known.num_experts} in at most {known.max_layers}"
            )
    values = np.frombuffer(experts.choices, "<u1" if experts.item_bytes == 1 else "<u2")
    none = np.iinfo(values.dtype).max
    if values.size and np.max(values, where=values != none, initial=0) >= experts.num_experts:
        return f"an expert's number is not below {experts.num_experts}"
    return ""


def have_sound_numbers(trajectories: Iterable[Trajectory], max_id: int) -> bool:
    """Whether all ids and log-probs of these are valid, checked together; False if a shape is
    wrong."""
    turns = [turn for trajectory in trajectories for turn in trajectory.turns]
    for turn in turns:
        if (len(turn.sampled_ids) | len(turn.prompt_ids) | len(turn.logprobs)) % 4:
            return False
    return not _check_numbers(turns, max_id)


def _check_values(turns: Sequence[Turn], max_id: int) -> str:
    """Check all turns together, because the cost is per array, not per number; one by one only to
    name the bad turn."""
    wrong = _check_numbers(turns, max_id)
    if not wrong:
        return ""
    index = next(index for index, turn in enumerate(turns) if _check_numbers([turn], max_id))
    return f"turn {index}: {_check_numbers([turns[index]], max_id)}"


def _check_numbers(turns: Sequence[Turn], max_id: int) -> str:
    values = np.frombuffer(b"".join([turn.logprobs for turn in turns]), "<f4")
    # Comparisons with NaN are false, and both reductions propagate it.
    if values.size and not (
        np.minimum.reduce(values) >= MIN_LOGPROB and np.maximum.reduce(values) <= MAX_LOGPROB
    ):
        return f"log-probs must be finite, at most 0 and at least {MIN_LOGPROB:g}"
    parts = [part for turn in turns for part in (turn.prompt_ids, turn.sampled_ids)]
    ids = np.frombuffer(b"".join(parts), "<i4")
    if ids.size and np.minimum.reduce(ids) < 0:
        return "a token id is negative"
    if max_id < MAX_TOKEN_ID and ids.size and np.maximum.reduce(ids) > max_id:
        return f"token id {np.maximum.reduce(ids)} is not in the vocabulary of {max_id + 1}"
    return ""
