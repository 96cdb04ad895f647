# SPDX-License-Identifier: Apache-2.0
"""A dictionary that knows what the dataflow must answer, and a machine that compares.

The same machine drives the bare core and a service over HTTP: a subject gives the calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from msgspec import structs

from penstock.dataflow.core.leasing import Grant, LiveVersion
from penstock.types import GroupId, NodeId, PolicyName

POLICY = PolicyName("policy")
NODES = tuple(NodeId(name) for name in ("n0", "n1", "n2"))
NUM_SLOTS = 2
MAX_ATTEMPTS = 3
CAPACITY = 3
WORDS = ("good", "better", "failed")
MAX_STALENESS = 50
"""More than a test commits, so that no row grows too old."""


class SystemUnderTest(Protocol):
    """The dataflow as nodes and one trainer see it; errors come as their code."""

    def join(self, node: NodeId, boot_id: str) -> None: ...
    def lease(
        self, node: NodeId, boot_id: str, request: str, count: int, live: LiveVersion
    ) -> list[Grant]: ...
    def deliver(
        self, node: NodeId, boot_id: str, grant: Grant, live: LiveVersion, word: str
    ) -> str: ...
    def release(self, node: NodeId, boot_id: str, grant: Grant) -> str: ...
    def incarnate(self, request: str, expected: int, number: int, seq: int) -> int | str: ...
    def publish(self, incarnation: int, number: int) -> str: ...
    def batch(self, incarnation: int, seq: int) -> tuple[GroupId, ...] | str: ...
    def commit(self, incarnation: int, seq: int, number: int) -> str: ...
    def restart(self) -> None: ...
    def close(self) -> None: ...


def reward_of(word: str, slot: int) -> float:
    """Differs between the slots of a group, so that no rule finds it uniform."""
    return slot + len(word) / 100


@dataclass(slots=True)
class Group:
    """What the dictionary knows of a group it has seen."""

    epochs: dict[int, int] = field(default_factory=dict[int, int])
    attempts: dict[int, int] = field(default_factory=dict[int, int])
    holders: dict[int, NodeId] = field(default_factory=dict[int, NodeId])
    results: dict[int, str] = field(default_factory=dict[int, str])
    """Row id and word of each slot that has a result."""
    versions: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    state: str = "open"

    @property
    def waiting(self) -> int:
        return NUM_SLOTS - len(self.holders) - len(self.results) if self.state == "open" else 0


class DataflowStateMachine(RuleBasedStateMachine):
    """Nodes that lease, deliver, repeat and are replaced; trainers that draw, commit and rewind."""

    def make_subject(self) -> SystemUnderTest:
        raise NotImplementedError

    def __init__(self) -> None:
        super().__init__()
        self.subject = self.make_subject()
        self.groups: dict[GroupId, Group] = {}
        self.sessions: dict[NodeId, str] = {}
        self.grants: list[tuple[NodeId, str, Grant, LiveVersion]] = []
        """Every grant ever made, with the session that got it."""
        self.words: dict[str, str] = {}
        """What is stored under each row id."""
        self.ready: list[GroupId] = []
        """Admitted and not sealed, in order of admission."""
        self.batches: dict[int, tuple[GroupId, ...]] = {}
        self.path: dict[int, int] = {0: 0}
        self.forks: list[int] = [0]
        self.published: dict[int, int] = {}
        self.count = 0
        self.take_over(0)

    def teardown(self) -> None:
        self.subject.close()

    def _new(self, what: str) -> str:
        self.count += 1
        return f"{what}{self.count}"

    @property
    def incarnation(self) -> int:
        return len(self.forks) - 1

    @property
    def seq(self) -> int:
        return max(self.path)

    @property
    def number(self) -> int:
        return self.path[self.seq]

    def _live(self) -> LiveVersion:
        newest = max(self.published)
        return LiveVersion(policy=POLICY, incarnation=newest, number=self.published[newest])

    def _effective_number(self, incarnation: int, number: int) -> int:
        return min([number, *self.forks[incarnation + 1 :]])

    # --- nodes ------------------------------------------------------------------------------------

    @rule(node=st.sampled_from(NODES))
    def join(self, node: NodeId) -> None:
        """A new life: what the old one held is free again and cost an attempt."""
        boot_id = self._new("s")
        self.subject.join(node, boot_id)
        self.sessions[node] = boot_id
        self._lose_all(node)

    def _lose_all(self, node: NodeId) -> None:
        for group in self.groups.values():
            for slot in [slot for slot, holder in group.holders.items() if holder == node]:
                if group.state == "open":
                    self._lose(group, slot)

    def _lose(self, group: Group, slot: int) -> None:
        del group.holders[slot]
        group.attempts[slot] = group.attempts.get(slot, 0) + 1
        if group.attempts[slot] == MAX_ATTEMPTS:
            group.state = "dropped"
            group.holders.clear()

    @precondition(lambda self: bool(self.sessions))
    @rule(data=st.data(), count=st.integers(1, 4), again=st.booleans())
    def lease(self, data: st.DataObject, count: int, again: bool) -> None:
        node = data.draw(st.sampled_from(sorted(self.sessions)))
        self._lease(node, count, again)

    @precondition(lambda self: bool(self.sessions))
    @rule(data=st.data(), again=st.booleans())
    def work(self, data: st.DataObject, again: bool) -> None:
        """Without this, few histories would get as far as a batch."""
        node = data.draw(st.sampled_from(sorted(self.sessions)))
        self._lease(node, CAPACITY, again)
        for holder, boot_id, grant, live in self.grants[-2 * CAPACITY :]:
            if holder == node:
                self._deliver(node, boot_id, grant, live, "good", again)

    def _lease(self, node: NodeId, count: int, again: bool) -> None:
        request, live = self._new("r"), self._live()
        held = sum(list(group.holders.values()).count(node) for group in self.groups.values())
        waiting = sum(group.waiting for group in self.groups.values())
        grants = self._ask(node, request, count, live)
        assert len(grants) <= min(count, CAPACITY - held)
        assert grants or held or not waiting, "work waits and a free node gets none"
        if again and grants:
            assert self._ask(node, request, count, live) == grants
        for grant in grants:
            group = self.groups.setdefault(grant.group_id, Group())
            assert group.state == "open" and grant.slot not in group.results
            assert grant.slot not in group.holders, "two nodes hold one slot"
            assert grant.epoch == group.epochs.get(grant.slot, 0) + 1
            assert grant.attempt == group.attempts.get(grant.slot, 0) + 1
            group.epochs[grant.slot] = grant.epoch
            group.holders[grant.slot] = node
            self.grants.append((node, self.sessions[node], grant, live))

    def _ask(self, node: NodeId, request: str, count: int, live: LiveVersion) -> list[Grant]:
        """In order of slots; where a task stands in an answer may differ from answer to answer."""
        found = self.subject.lease(node, self.sessions[node], request, count, live)
        named = [structs.replace(grant, task=0) for grant in found]
        return sorted(named, key=lambda grant: (grant.group_id, grant.slot))

    @precondition(lambda self: bool(self.grants))
    @rule(data=st.data(), word=st.sampled_from(WORDS), again=st.booleans())
    def deliver(self, data: st.DataObject, word: str, again: bool) -> None:
        """Of a lease that runs, that ended, or that was answered before."""
        index = data.draw(st.integers(0, min(11, len(self.grants) - 1)))
        node, boot_id, grant, live = self.grants[-1 - index]
        self._deliver(node, boot_id, grant, live, word, again)

    def _deliver(
        self, node: NodeId, boot_id: str, grant: Grant, live: LiveVersion, word: str, again: bool
    ) -> None:
        group = self.groups[grant.group_id]
        name = f"{grant.group_id}.{grant.slot}.{grant.epoch}"
        runs = group.holders.get(grant.slot) == node and group.epochs[grant.slot] == grant.epoch
        runs = runs and group.state == "open"
        if runs:
            expected = "stored"
        elif name in self.words:
            expected = "duplicate" if self.words[name] == word else "conflict"
        else:
            expected = "fenced"
        assert self.subject.deliver(node, boot_id, grant, live, word) == expected
        if runs:
            self.words[name] = word
            self._delivered(group, grant, live, word)
        if runs and again:
            other = WORDS[WORDS.index(word) - 1]
            assert self.subject.deliver(node, boot_id, grant, live, word) == "duplicate"
            assert self.subject.deliver(node, boot_id, grant, live, other) == "conflict"

    def _delivered(self, group: Group, grant: Grant, live: LiveVersion, word: str) -> None:
        if word == "failed":
            self._lose(group, grant.slot)
            return
        del group.holders[grant.slot]
        group.results[grant.slot] = word
        group.versions.add((live.incarnation, live.number))
        if len(group.results) == NUM_SLOTS:
            group.state = "closed"
            self.ready.append(grant.group_id)

    @precondition(lambda self: bool(self.grants))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, min(11, len(self.grants) - 1)))
        node, boot_id, grant, _ = self.grants[-1 - index]
        group = self.groups[grant.group_id]
        runs = group.holders.get(grant.slot) == node and group.epochs[grant.slot] == grant.epoch
        runs = runs and group.state == "open"
        expected = "stored" if runs else "fenced"
        assert self.subject.release(node, boot_id, grant) == expected
        if runs:
            del group.holders[grant.slot]

    # --- the trainer ------------------------------------------------------------------------------

    @rule(back=st.integers(0, 3))
    def take_over(self, back: int) -> None:
        """A trainer restores a checkpoint and forks there."""
        seq = max(0, self.seq - back)
        expected = self.incarnation
        request = self._new("i")
        number = self.path[seq]
        assert self.subject.incarnate(request, expected, number, seq) == expected + 1
        assert self.subject.incarnate(request, expected, number, seq) == expected + 1
        assert self.subject.incarnate(self._new("i"), expected, number, seq) == "conflict"
        self.forks.append(number)
        self.path = {s: n for s, n in self.path.items() if s <= seq}
        assert self.subject.publish(self.incarnation, number) == "ok"
        self.published[self.incarnation] = number

    @rule()
    def draw_batch(self) -> None:
        seq = self.seq + 1
        answer = self.subject.batch(self.incarnation, seq)
        if seq in self.batches:
            assert answer == self.batches[seq], "a sealed batch is served unchanged"
        elif self.ready:
            oldest = min(self.ready, key=self._age_key)
            assert answer == (oldest,), "the group with the earliest deadline goes first"
            self.batches[seq] = (oldest,)
            self.ready.remove(oldest)
        else:
            assert answer == "wait"

    def _age_key(self, group_id: GroupId) -> tuple[int, int]:
        versions = self.groups[group_id].versions
        return min(self._effective_number(*v) for v in versions), self.ready.index(group_id)

    @rule()
    def fenced_trainer(self) -> None:
        if self.incarnation > 1:
            assert self.subject.batch(self.incarnation - 1, self.seq + 1) == "fenced"
            old = self.incarnation - 1
            assert self.subject.commit(old, self.seq + 1, self.number + 1) in ("fenced", "conflict")
            assert self.subject.publish(old, self.number) == "fenced"

    @precondition(lambda self: self.seq + 1 in self.batches)
    @rule(skips=st.booleans(), again=st.booleans())
    def commit(self, skips: bool, again: bool) -> None:
        seq, number = self.seq + 1, self.number + (not skips)
        assert self.subject.commit(self.incarnation, seq, number) == "ok"
        self.path[seq] = number
        if again:
            assert self.subject.commit(self.incarnation, seq, number) == "ok"
            assert self.subject.commit(self.incarnation, seq, number + 1) == "conflict"
        assert self.subject.publish(self.incarnation, number) == "ok"
        self.published[self.incarnation] = number

    @rule()
    def commit_too_much(self) -> None:
        answer = self.subject.commit(self.incarnation, self.seq + 2, self.number + 1)
        assert answer == "conflict"

    @invariant()
    def trained_once(self) -> None:
        sealed = [group for groups in self.batches.values() for group in groups]
        assert len(set(sealed)) == len(sealed)
