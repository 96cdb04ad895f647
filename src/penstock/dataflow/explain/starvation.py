# SPDX-License-Identifier: Apache-2.0
"""A run whose groups come to nothing says so, with the main reason and the next step.

The one place that makes this text, for the status and the log. A trainer tells of batches that
teach nothing; it has no word while there is none.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from penstock.dataflow.core.consumers import Consumer, Starvation
from penstock.dataflow.core.coordinator import Coordinator
from penstock.dataflow.explain.sentences import describe_drop
from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import DeadSlotRecord
from penstock.types import DropReason

NUM_BATCHES = 4
MIN_GROUPS = 32
"""So many batches' worth of groups, and at least so many, come to nothing before anybody is told;
where rules let only a share of them through, accordingly more."""
MAX_CAUSE = 120
"""Characters of an error that are shown."""

_REMEDIES: Mapping[DropReason, str] = {
    DropReason.STALE: "raise training.max_staleness, or give nodes fewer slots at a time",
    DropReason.FAILED_SLOTS: "mend that first",
    DropReason.ABSENT: "let the workflow ask this policy, or look at the route rules",
    DropReason.UNIFORM_REWARD: (
        "check the reward on a few answers by hand; take easier tasks if all fail, harder ones if "
        "all pass"
    ),
    DropReason.COLUMN_FAILED: "look at the log of the stage that writes it",
    DropReason.OVERLONG: "raise sampling.max_tokens, or the rule's max_share",
    DropReason.OUTCOME: "look at the outcomes, or leave the rule out",
    DropReason.REWARD_RANGE: "look at the rewards, or widen the range",
    DropReason.DUPLICATE: "give more tasks, or leave the rule out",
    DropReason.RULE: "look at what it judges by",
    DropReason.OVERDUE: "raise dataflow.lease.schedule_to_close_s, or add nodes",
}
_TRUNCATED_REMEDY = "no answer is finished: raise sampling.max_tokens"


def is_starving(consumer: Consumer, coordinator: Coordinator) -> bool:
    """Many groups came to nothing since the last batch, and the next one is still not full."""
    return (
        consumer.starvation.num_groups >= _alarm_threshold(consumer)
        and consumer.num_admitted < consumer.num_fresh_needed
        and not coordinator.has_ended(consumer)
        and not coordinator.is_exhausted  # what is left is the last batch, full or not
    )


def _alarm_threshold(consumer: Consumer) -> float:
    """Groups before anybody is told: few where every one failed since the run began, else as many
    times what a batch usually takes."""
    found = consumer.starvation
    num_groups = max(NUM_BATCHES * consumer.terms.groups_per_batch, MIN_GROUPS)
    if found.has_participated and not consumer.last_sealed and not consumer.num_admitted:
        return num_groups
    return num_groups / (found.baseline_yield or consumer.expected_yield)


def starvation(consumer: Consumer, tables: Tables) -> str:
    """For a policy that is so."""
    found = consumer.starvation
    main = max(found.counts, key=lambda reason: found.counts[reason])
    counts = ", ".join(f"{num} {reason}" for reason, num in found.counts.items())
    num_ready = consumer.num_admitted
    state = "waits long for its next batch" if num_ready else "gets no batch"
    return (
        f"policy {consumer.terms.policy} {state}: {found.num_groups} groups ended since the "
        f"last one ({counts}), {num_ready} of {consumer.num_fresh_needed} are ready; "
        f"{_describe_cause(found, main, tables)} (`penstock explain RUN {found.newest[main]}`)"
    )


def _describe_cause(found: Starvation, main: DropReason, tables: Tables) -> str:
    cause, step = describe_drop(main), _REMEDIES.get(main, "")
    if main is DropReason.UNIFORM_REWARD:
        earned = f"{found.low:g}" if found.low == found.high else f"{found.low:g} to {found.high:g}"
        cause = f"in each group all answers earned the same ({earned})"
        if 2 * found.num_truncated > found.counts[main]:
            cause, step = f"{cause}, most of them cut at their limit", _TRUNCATED_REMEDY
    if main is DropReason.FAILED_SLOTS and (error := _last_error(found, tables)):
        cause = f"{cause}, the last: {error}"
    return f"{cause}: {step}" if step else cause


def _last_error(found: Starvation, tables: Tables) -> str:
    """Of the newest group that failed, if its partition shares this ledger."""
    group_id = found.newest[DropReason.FAILED_SLOTS]
    letters = tables.read(DeadSlotRecord, "group_id = :group_id", group_id=group_id)
    reasons = msgspec.json.decode(letters[-1].reasons, type=list[str]) if letters else []
    if not reasons:
        return ""
    first, *rest = reasons[-1].strip().splitlines()
    kind = ": ".join(first.split(": ", 2)[:2])
    return (f"{kind}: {rest[-1].strip()}" if rest else first)[:MAX_CAUSE]
