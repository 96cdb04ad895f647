# SPDX-License-Identifier: Apache-2.0
"""Is a delivered row what its lease and the contract ask for? Pure: one row in, the rules it keeps
or breaks out."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.dataflow.core.leasing import Grant, LiveVersion
from penstock.dataflow.service.nodes.messages import Delivery
from penstock.errors import BadRequest
from penstock.types import NodeId, Trajectory, Turn, VersionSpan, view_ids
from penstock.wire.codec import decode

MAX_LOGPROB = 1e-3
"""Engines round."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A grant as the party got it, and what it said was live when it asked."""

    grant: Grant
    live: tuple[LiveVersion, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleCheck:
    rule: str
    wrong: str
    """Empty: kept."""


def read_row(delivery: Delivery) -> Trajectory | str:
    try:
        return decode(delivery.payload, Trajectory)
    except BadRequest as error:
        return str(error)


def check_row(delivery: Delivery, lease: Lease | None, node_id: NodeId) -> Iterator[RuleCheck]:
    trajectory = read_row(delivery)
    if isinstance(trajectory, str):
        yield _rule_check("row-names-lease", delivery, trajectory)
        return
    yield _rule_check(
        "row-names-lease", delivery, _wrong_name(delivery, trajectory, lease, node_id)
    )
    yield _rule_check("reward-by-outcome", delivery, _wrong_reward(trajectory))
    for turn in trajectory.turns:
        yield _rule_check("spans-cover", delivery, _wrong_spans(turn))
        yield _rule_check("logprobs-at-most-0", delivery, _wrong_logprobs(turn))
        if lease is not None:
            yield _rule_check("spans-name-live", delivery, _older_than_live(turn, lease.live))


def _rule_check(rule: str, delivery: Delivery, wrong: str) -> RuleCheck:
    return RuleCheck(rule=rule, wrong=f"row {delivery.row_id[:80]}: {wrong}" if wrong else "")


def _wrong_name(
    delivery: Delivery, trajectory: Trajectory, lease: Lease | None, node_id: NodeId
) -> str:
    if lease is None:
        return "no such lease was granted"
    grant = lease.grant
    expected = (delivery.row_id, grant.group_id, grant.slot, grant.epoch, grant.attempt, node_id)
    named = (
        trajectory.row_id,
        trajectory.group_id,
        trajectory.slot,
        trajectory.epoch,
        trajectory.attempt,
        trajectory.node_id,
    )
    return "" if named == expected else f"the record says {named}, its lease {expected}"


def _wrong_reward(trajectory: Trajectory) -> str:
    kind, reward = trajectory.outcome.kind, trajectory.reward
    if not trajectory.outcome.has_reward:
        return "" if reward is None else f"{kind} with reward {reward}"
    is_finite = reward is not None and math.isfinite(reward)
    return "" if is_finite else f"{kind} with reward {reward}"


def _wrong_spans(turn: Turn) -> str:
    if len(turn.sampled_ids) % 4:
        return f"sampled_ids of {len(turn.sampled_ids)} bytes are no int32"
    num_tokens = len(view_ids(turn.sampled_ids))
    position = 0
    for span in turn.spans:
        if span.start != position or span.end <= span.start:
            return f"a span from {span.start} to {span.end} where {position} is next"
        position = span.end
    return "" if position == num_tokens else f"spans cover {position} of {num_tokens} tokens"


def _wrong_logprobs(turn: Turn) -> str:
    if len(turn.logprobs) != len(turn.sampled_ids) or len(turn.logprobs) % 4:
        return f"{len(turn.logprobs)} bytes of log-probs for {len(turn.sampled_ids)} of ids"
    values = memoryview(turn.logprobs).cast("f")
    wrong = [value for value in values if not (math.isfinite(value) and value <= MAX_LOGPROB)]
    return f"a log-prob of {wrong[0]}" if wrong else ""


def _older_than_live(turn: Turn, live: tuple[LiveVersion, ...]) -> str:
    """A lease asked for with a version live is answered with that one or a newer one."""
    for version in live:
        for span in turn.spans if version.policy == turn.policy else ():
            if _order(span) < _order(version):
                return (
                    f"sampled by {span.incarnation}.{span.number} though "
                    f"{version.incarnation}.{version.number} was live when it was leased"
                )
    return ""


def _order(version: VersionSpan | LiveVersion) -> tuple[int, int]:
    return version.incarnation, version.number
