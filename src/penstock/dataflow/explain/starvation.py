# SPDX-License-Identifier: Apache-2.0
"""Warns when groups keep being dropped and no batch fills: the main reason and a remedy.

The only source of this text, for both status and log. Trainers report batches without a learning
signal themselves, but cannot report missing batches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec

from penstock.dataflow.core.consumers import Consumer, Starvation
from penstock.dataflow.core.coordinator import Coordinator
from penstock.dataflow.core.partition import Partition
from penstock.dataflow.explain.sentences import describe_drop
from penstock.dataflow.ledger.tables import Tables
from penstock.dataflow.records import DeadSlotRecord
from penstock.types import DropReason

NUM_BATCHES = 4
MIN_GROUPS = 32
"""Warn after NUM_BATCHES batches' worth of dropped groups, and at least MIN_GROUPS. Where rules
normally admit only a share of the groups, proportionally more."""
MAX_CAUSE = 120
"""Maximum number of characters of an error message."""

_REMEDIES: Mapping[DropReason, str] = {
    DropReason.STALE: "raise training.max_staleness, or give nodes fewer slots",
    DropReason.FAILED_SLOTS: "fix that error first",
    DropReason.ABSENT: "make the workflow call this policy, or check the route rules",
    DropReason.UNIFORM_REWARD: (
        "check the reward of a few answers by hand; use easier tasks if all fail, harder ones if "
        "all pass"
    ),
    DropReason.COLUMN_FAILED: "check the log of the stage that writes it",
    DropReason.OVERLONG: "raise sampling.max_tokens, or the rule's max_share",
    DropReason.OUTCOME: "check the outcomes, or remove the rule",
    DropReason.REWARD_RANGE: "check the rewards, or widen the range",
    DropReason.PARTNER_LAG: "raise dataflow.max_partner_lag, or lower training.max_staleness",
    DropReason.DUPLICATE: "add more tasks, or remove the rule",
    DropReason.RULE: "check the criteria of the rule",
    DropReason.OVERDUE: "raise dataflow.lease.schedule_to_close_s, or add nodes",
}
_TRUNCATED_REMEDY = "answers are never finished, so raise sampling.max_tokens"


def is_starving(consumer: Consumer, coordinator: Coordinator) -> bool:
    """Whether many groups were dropped since the last batch and the next one is still not full."""
    return (
        consumer.starvation.num_groups >= _alarm_threshold(consumer)
        and consumer.num_admitted < consumer.num_fresh_needed
        and not coordinator.has_ended(consumer)
        and not coordinator.is_exhausted(consumer)  # then the last batch may stay partial
    )


def unserved(partition: Partition) -> Iterator[str]:
    """What sources wait for whose policies no node serves together."""
    for source, policies in partition.waiting.unserved_sources(partition.nodes.values()).items():
        yield (
            f"a node that serves {', '.join(sorted(policies))}: source {source} calls them, and no "
            "node here serves them all; start one, or join with --policies"
        )


def _alarm_threshold(consumer: Consumer) -> float:
    """Dropped groups before a warning: few if every group was dropped since the run started,
    otherwise in proportion to the usual share of dropped groups."""
    found = consumer.starvation
    num_groups = max(NUM_BATCHES * consumer.terms.groups_per_batch, MIN_GROUPS)
    if found.has_participated and not consumer.last_sealed and not consumer.num_admitted:
        return num_groups
    return num_groups / (found.baseline_yield or consumer.expected_yield)


def starvation(consumer: Consumer, tables: Tables) -> str:
    """The warning for a starving policy."""
    found = consumer.starvation
    main = max(found.counts, key=lambda reason: found.counts[reason])
    counts = ", ".join(f"{num} {reason}" for reason, num in found.counts.items())
    num_ready = consumer.num_admitted
    state = "is short of groups for its next batch" if num_ready else "gets no batch"
    return (
        f"policy {consumer.terms.policy} {state}: {found.num_groups} groups dropped since the "
        f"last batch ({counts}), {num_ready} of {consumer.num_fresh_needed} are ready; "
        f"{_describe_cause(found, main, tables)} (`penstock explain RUN {found.newest[main]}`)"
    )


def _describe_cause(found: Starvation, main: DropReason, tables: Tables) -> str:
    cause, step = describe_drop(main), _REMEDIES.get(main, "")
    if main is DropReason.UNIFORM_REWARD:
        earned = f"{found.low:g}" if found.low == found.high else f"{found.low:g} to {found.high:g}"
        cause = f"all answers in each group earned the same reward ({earned})"
        if 2 * found.num_truncated > found.counts[main]:
            cause, step = f"{cause}, most were truncated at the limit", _TRUNCATED_REMEDY
    if main is DropReason.FAILED_SLOTS and (error := _last_error(found, tables)):
        cause = f"{cause}; last error: {error}"
    return f"{cause}: {step}" if step else cause


def _last_error(found: Starvation, tables: Tables) -> str:
    """Last error of the newest failed group, if its partition shares this ledger."""
    group_id = found.newest[DropReason.FAILED_SLOTS]
    records = tables.read(DeadSlotRecord, "group_id = :group_id", group_id=group_id)
    reasons = msgspec.json.decode(records[-1].reasons, type=list[str]) if records else []
    if not reasons:
        return ""
    first, *rest = reasons[-1].strip().splitlines()
    kind = ": ".join(first.split(": ", 2)[:2])
    return (f"{kind}: {rest[-1].strip()}" if rest else first)[:MAX_CAUSE]
