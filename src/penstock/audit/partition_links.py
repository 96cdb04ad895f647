# SPDX-License-Identifier: Apache-2.0
"""Laws between home and the partitions with ledgers of their own: no message is lost or invented,
and no partition knows what home never said.

Also tells which facts are still on their way, so that other laws need not guess: a message is kept
by its sender until the other side has it.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.audit.evidence import Evidence, Far, partition_of
from penstock.audit.ledger import Facts
from penstock.audit.records import Letter, Message, decode_letter
from penstock.audit.report import Check, Findings


def issues_under_way(evidence: Evidence) -> set[str]:
    """Groups that home issued and that their partition had not heard of."""
    found: set[str] = set()
    for far in evidence.far.values():
        link = f"home>p{far.index}"
        for letter in _letters(evidence.home, link, far.facts.progress.get(link, 0)):
            if letter.type == "Issue":
                found.add(letter.record.group_id)
    return found


def reports_under_way(evidence: Evidence) -> dict[str, set[str]]:
    """Ended groups that home had not heard of, with the policies that shall judge them."""
    found: dict[str, set[str]] = {}
    for far in evidence.far.values():
        link = f"p{far.index}>home"
        for letter in _letters(far.facts, link, evidence.later.progress.get(link, 0)):
            if letter.type == "Report":
                policies = letter.policies or evidence.run_file.models
                found.setdefault(letter.group_id, set()).update(policies)
    return found


def _letters(sender: Facts, link: str, received: int) -> Iterator[Letter]:
    for message in sender.messages:
        if message.link == link and message.number > received:
            letter = decode_letter(message)
            if letter is not None:
                yield letter


def check_messages(evidence: Evidence) -> Check:
    """On each link: what was sent after the last acknowledged message is kept without a gap, and
    nobody has received more than was sent or less than was acknowledged."""
    findings = Findings("messages")
    num_examined = 0
    for far in evidence.far.values():
        down, up = f"home>p{far.index}", f"p{far.index}>home"
        home, later = evidence.home, evidence.later
        num_examined += later.sent(down) + far.facts.sent(up)
        for link, sender in ((down, home), (up, far.facts)):
            for why in _kept_faults(sender, link):
                findings.add(link, why)
        # Each side is held against the other as it was read after it, so a running run passes too.
        received = far.facts.progress.get(down, 0)
        for why in _progress_faults(
            home.progress.get(down, 0), received, received, later.sent(down)
        ):
            findings.add(down, why)
        early, late = home.progress.get(up, 0), later.progress.get(up, 0)
        acknowledged = far.facts.progress.get(up, 0)
        for why in _progress_faults(acknowledged, late, early, far.facts.sent(up)):
            findings.add(up, why)
    return findings.result(num_examined)


def _kept_faults(sender: Facts, link: str) -> Iterator[str]:
    kept: list[Message] = [message for message in sender.messages if message.link == link]
    for due, message in enumerate(kept, start=sender.progress.get(link, 0) + 1):
        if message.number != due:
            yield f"message {message.number} is kept where {due} is due"
            return
        if decode_letter(message) is None:
            yield f"message {message.number} cannot be read"


def _progress_faults(acknowledged: int, late: int, early: int, sent: int) -> Iterator[str]:
    """`late` and `early` are what was received, read after the one and before the other."""
    if late < acknowledged:
        yield f"{acknowledged} messages acknowledged; the other side has {late}"
    if early > sent:
        yield f"{early} messages received; the other side sent {sent}"


def check_partitions(evidence: Evidence) -> Check:
    """A further partition holds its own groups only, and of home's facts nothing that home lacks;
    with every message it has every fact of the lineage."""
    findings = Findings("partitions")
    for far in evidence.far.values():
        name = f"p{far.index}"
        for group_id in sorted(_groups_in(far)):
            if partition_of(group_id) != far.index:
                findings.add(group_id, f"lies in the ledger of partition {far.index}")
        for fact in sorted(_lineage(far.facts) - _lineage(evidence.later)):
            findings.add(name, f"knows {fact}, and home does not")
        for group_id in sorted(far.facts.freed - evidence.later.freed):
            findings.add(group_id, "freed by its partition, and home never said so")
        link = f"home>{name}"
        if far.state != "gone" and far.facts.progress.get(link, 0) >= evidence.home.sent(link):
            for fact in sorted(_lineage(evidence.home) - _lineage(far.facts)):
                findings.add(name, f"lacks {fact}, although it has every message")
    return findings.result(len(evidence.far))


def _groups_in(far: Far) -> set[str]:
    work = far.work
    return {one.group_id for found in (work.groups, work.leases, work.rows) for one in found}


def _lineage(facts: Facts) -> set[str]:
    """Who trained what and published it, as sentences that are equal when the facts are."""
    forks = {
        f"incarnation {f.policy}@{f.incarnation} from {f.seq}, {f.number}" for f in facts.forks
    }
    commits = {
        f"commit {c.consumer}.{c.seq} as {c.incarnation}.{c.number} {c.skipped}".strip()
        for c in facts.commits
    }
    return forks | commits | {f"version {v.name} {v.weights_digest}" for v in facts.versions}
