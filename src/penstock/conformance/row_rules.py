# SPDX-License-Identifier: Apache-2.0
"""Checks a delivered row against its lease and the protocol. Pure functions.

The checks of spans and log-probs deliberately repeat `penstock.audit.payloads`: the audit shares no
code with the rest."""

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
"""Tolerance for rounding in engines."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """A grant, and the versions that the node reported as live in its request."""

    grant: Grant
    live: tuple[LiveVersion, ...]


def read_row(delivery: Delivery) -> Trajectory | str:
    """The record, or why it cannot be read."""
    try:
        return decode(delivery.payload, Trajectory)
    except BadRequest as error:
        return str(error)


def check_row(
    delivery: Delivery, trajectory: Trajectory | str, lease: Lease | None, node_id: NodeId
) -> Iterator[tuple[str, str]]:
    """Each rule that was checked, and what is wrong; empty if the rule is kept."""
    if isinstance(trajectory, str):
        yield "row-names-lease", trajectory
        return
    yield "row-names-lease", _wrong_name(delivery, trajectory, lease, node_id)
    yield "reward-by-outcome", _wrong_reward(trajectory)
    for turn in trajectory.turns:
        yield "spans-cover", _wrong_spans(turn)
        yield "logprobs-at-most-0", _wrong_logprobs(turn)
        if lease is not None:
            yield "spans-name-live", _older_than_live(turn, lease.live)


def _wrong_name(delivery: Delivery, row: Trajectory, lease: Lease | None, node_id: NodeId) -> str:
    if lease is None:
        return "this lease was never granted"
    grant = lease.grant
    expected = (delivery.row_id, grant.group_id, grant.slot, grant.epoch, grant.attempt, node_id)
    named = (row.row_id, row.group_id, row.slot, row.epoch, row.attempt, row.node_id)
    return "" if named == expected else f"the record has {named}, its lease {expected}"


def _wrong_reward(trajectory: Trajectory) -> str:
    outcome, reward = trajectory.outcome, trajectory.reward
    if not outcome.has_reward:
        is_right = reward is None
    else:
        is_right = reward is not None and math.isfinite(reward)
    return "" if is_right else f"{outcome.kind} with reward {reward}"


def _wrong_spans(turn: Turn) -> str:
    if len(turn.sampled_ids) % 4:
        return f"sampled_ids has {len(turn.sampled_ids)} bytes, not a multiple of 4 (int32)"
    num_tokens = len(view_ids(turn.sampled_ids))
    position = 0
    for span in turn.spans:
        if span.start != position or span.end <= span.start:
            return f"span {span.start} to {span.end}, but the next token is {position}"
        position = span.end
    return "" if position == num_tokens else f"spans cover {position} of {num_tokens} tokens"


def _wrong_logprobs(turn: Turn) -> str:
    if len(turn.logprobs) != len(turn.sampled_ids) or len(turn.logprobs) % 4:
        return f"{len(turn.logprobs)} bytes of logprobs for {len(turn.sampled_ids)} of sampled_ids"
    values = memoryview(turn.logprobs).cast("f")
    wrong = [value for value in values if not (math.isfinite(value) and value <= MAX_LOGPROB)]
    return f"log-prob {wrong[0]}" if wrong else ""


def _older_than_live(turn: Turn, live: tuple[LiveVersion, ...]) -> str:
    """Rows must be sampled by the version that was live at the lease request, or a newer one."""
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
