# SPDX-License-Identifier: Apache-2.0
"""Checks between the coordinator and partitions with separate ledgers: no message is lost or
invented, and no partition has a fact that the coordinator did not send.

Also finds the messages still in flight, for other checks: a sender keeps a message until the
receiver has it.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.audit.evidence import Evidence, RemotePartition, partition_of
from penstock.audit.ledger import ReplicatedTables
from penstock.audit.records import MessageBody, decode_body
from penstock.audit.report import Check, Violations


def undelivered_issues(evidence: Evidence) -> set[str]:
    """Groups issued by the coordinator whose message has not reached their partition."""
    return {
        body.record.group_id
        for remote in evidence.remote.values()
        for body in _undelivered(
            evidence.coordinator, f"coordinator>p{remote.index}", remote.replicated
        )
        if body.type == "IssueGroup"
    }


def undelivered_reports(evidence: Evidence) -> dict[str, set[str]]:
    """Ended groups whose report is still in flight, with the policies that must judge them."""
    found: dict[str, set[str]] = {}
    for remote in evidence.remote.values():
        link = f"p{remote.index}>coordinator"
        for body in _undelivered(remote.replicated, link, evidence.coordinator_after):
            if body.type == "GroupEnded":
                policies = body.policies or evidence.config.trained
                found.setdefault(body.group_id, set()).update(policies)
    return found


def _undelivered(
    sender: ReplicatedTables, link: str, receiver: ReplicatedTables
) -> Iterator[MessageBody]:
    received = receiver.progress.get(link, 0)
    for message in sender.messages:
        if message.link == link and message.number > received and (body := decode_body(message)):
            yield body


def check_messages(evidence: Evidence) -> Check:
    """On each link, unacknowledged messages are kept without a gap, and no more was received than
    sent, and no less than acknowledged."""
    violations = Violations("messages")
    num_examined = 0
    for remote in evidence.remote.values():
        down, up = f"coordinator>p{remote.index}", f"p{remote.index}>coordinator"
        coordinator, coordinator_after = evidence.coordinator, evidence.coordinator_after
        num_examined += coordinator_after.sent(down) + remote.replicated.sent(up)
        for link, sender in ((down, coordinator), (up, remote.replicated)):
            violations.extend(link, _kept_faults(sender, link))
        # Each side is compared with a later read of the other, so a running run passes too.
        received = remote.replicated.progress.get(down, 0)
        for why in _progress_faults(
            coordinator.progress.get(down, 0), received, received, coordinator_after.sent(down)
        ):
            violations.add(down, why)
        early, late = coordinator.progress.get(up, 0), coordinator_after.progress.get(up, 0)
        acknowledged = remote.replicated.progress.get(up, 0)
        violations.extend(
            up, _progress_faults(acknowledged, late, early, remote.replicated.sent(up))
        )
    return violations.result(num_examined)


def _kept_faults(sender: ReplicatedTables, link: str) -> Iterator[str]:
    kept = [message for message in sender.messages if message.link == link]
    for expected, message in enumerate(kept, start=sender.progress.get(link, 0) + 1):
        if message.number != expected:
            yield f"message {message.number} found where {expected} is expected"
            return
        if decode_body(message) is None:
            yield f"message {message.number} cannot be read"


def _progress_faults(acknowledged: int, late: int, early: int, sent: int) -> Iterator[str]:
    """`late` and `early` count received messages, read after `acknowledged` and before `sent`."""
    if late < acknowledged:
        yield f"{acknowledged} messages acknowledged, but the receiver has {late}"
    if early > sent:
        yield f"{early} messages received, but the sender sent {sent}"


def check_partitions(evidence: Evidence) -> Check:
    """A remote partition has only its own groups and no facts that the coordinator lacks; with all
    messages received, it has the full lineage."""
    violations = Violations("partitions")
    for remote in evidence.remote.values():
        name = f"p{remote.index}"
        for group_id in sorted(_groups_in(remote)):
            if partition_of(group_id) != remote.index:
                violations.add(group_id, f"is in the ledger of partition {remote.index}")
        for fact in sorted(_lineage(remote.replicated) - _lineage(evidence.coordinator_after)):
            violations.add(name, f"has {fact}, but the coordinator does not")
        for group_id in sorted(remote.replicated.freed - evidence.coordinator_after.freed):
            violations.add(group_id, "freed by its partition but not by the coordinator")
        link = f"coordinator>{name}"
        received = remote.replicated.progress.get(link, 0)
        if remote.state != "gone" and received >= evidence.coordinator.sent(link):
            for fact in sorted(_lineage(evidence.coordinator) - _lineage(remote.replicated)):
                violations.add(name, f"lacks {fact} although it has every message")
    return violations.result(len(evidence.remote))


def _groups_in(remote: RemotePartition) -> set[str]:
    tables = remote.tables
    return {one.group_id for found in (tables.groups, tables.leases, tables.rows) for one in found}


def _lineage(replicated: ReplicatedTables) -> set[str]:
    """Incarnations, commits and versions as comparable strings."""
    forks = {
        f"incarnation {f.policy}@{f.incarnation} from {f.seq}, {f.number}" for f in replicated.forks
    }
    commits = {
        f"commit {c.consumer}.{c.seq} as {c.incarnation}.{c.number} {c.skipped}".strip()
        for c in replicated.commits
    }
    return forks | commits | {f"version {v.name} {v.weights_digest}" for v in replicated.versions}
