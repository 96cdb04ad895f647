# SPDX-License-Identifier: Apache-2.0
"""Trainers of a simulated run: draw, train or skip, commit, publish, checkpoint; crash, rewind, and
meet their successors.

"Weights" are a digest of what was trained, so that doing the same again makes the same version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any

from tests.sim.events import Actor, Call, Command, EventLoop, Network, Sleep, Task
from tests.sim.invariants import Invariants
from tests.sim.plans import Plan
from tests.sim.processes import CoordinatorProcess

from penstock.errors import Conflict, Fenced
from penstock.types import PolicyName


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    number: int
    seq: int
    weights: str


Ask = Callable[[CoordinatorProcess, float], Any]
FIRST = Checkpoint(number=0, seq=0, weights="initial")


class Trainer:
    def __init__(
        self,
        engine: EventLoop,
        network: Network,
        plan: Plan,
        laws: Invariants,
        coordinator: CoordinatorProcess,
        policy: PolicyName,
    ) -> None:
        self.policy = policy
        self.saved: list[Checkpoint] = [FIRST]
        """On its own disk: what a next life can restore."""
        self.has_ended = False
        self.saves = True
        self.task: Task | None = None
        self._engine = engine
        self._network = network
        self._plan = plan
        self._laws = laws
        self._coordinator = coordinator
        self._requests = 0
        self._lives = 0
        self._told = -1

    def start(self) -> None:
        """A life that takes over; one before it may still run, and will be fenced."""
        self._lives += 1
        self.task = Task(self._engine, self._network, self._live(self._lives))

    def crash(self) -> None:
        if self.task is not None:
            self.task.cancel()

    @property
    def is_idle(self) -> bool:
        return self.task is None or self.task.is_over

    def _call(self, name: str, run: Ask, *, waits: bool = True) -> Call:
        return Call(
            target=self._coordinator,
            name=f"trainer {self.policy} {name}",
            command=Command(run=run, waits=waits),
            retry_s=2.0,
        )

    def _live(self, boot: int) -> Actor:
        policy = self.policy
        while True:
            state = yield self._call(
                "state", lambda coordinator, now: coordinator.state(policy), waits=False
            )
            start = self._choose(state)
            self._requests += 1
            request_id = f"{policy}/{self._requests}"
            incarnation = yield self._call(
                f"incarnate at {start.seq}", _incarnate(policy, request_id, state[0], start)
            )
            if not isinstance(incarnation, Conflict):
                break
            if start in self.saved[:-1] and state[0] == self._told:
                self.saved.remove(start)  # let go by the service meanwhile
            self._told = state[0]
        self._engine.note(f"trainer {policy} is incarnation {incarnation}")
        answer = "kept"
        if self._plan.names_checkpoints and boot == self._lives:
            answer = yield self._name(int(incarnation))
        if not isinstance(answer, Fenced):
            yield from self._train(boot, int(incarnation), start)

    def _choose(self, state: tuple[int, int, int]) -> Checkpoint:
        """Mostly the newest that the ledger knows, at times an older one."""
        known = [saved for saved in self.saved if saved.seq <= state[2]] or [FIRST]
        return known[-1] if self._engine.chance(0.7) else self._engine.rng.choice(known)

    def _train(self, boot: int, incarnation: int, start: Checkpoint) -> Actor:
        policy, at = self.policy, start
        answer = yield self._publish(incarnation, at)
        while not isinstance(answer, Fenced):
            assert not isinstance(answer, Exception), f"publish of {policy}: {answer}"
            seq = at.seq + 1
            answer = "sealed"
            if self._plan.stream:
                answer = yield from self._stream(incarnation, seq)
            if answer == "sealed":
                answer = yield self._call(f"batch {seq}", _batch(policy, incarnation, seq))
            if isinstance(answer, Fenced):
                return
            if isinstance(answer, str):
                if answer == "end":
                    self.has_ended = True
                    return
                yield Sleep(seconds=0.5)
                continue
            assert not isinstance(answer, Exception), f"batch {seq} of {policy}: {answer}"
            self._laws.served(policy, answer, self._plan)
            yield Sleep(seconds=self._engine.between(0.3, 2.0))
            at = self._after(at, answer.digest, incarnation)
            skipped = "" if at.number > start.number else "nothing to learn"
            start = at
            answer = yield self._call(f"commit {seq}", _commit(policy, incarnation, at, skipped))
            if isinstance(answer, Fenced):
                return
            assert answer == "committed", f"commit {seq} of {policy}: {answer}"
            self._laws.committed(policy, seq, incarnation, at.number)
            answer = yield self._publish(incarnation, at)
            if not isinstance(answer, Exception) and boot == self._lives:
                answer = yield from self._save(incarnation, at)

    def _stream(self, incarnation: int, seq: int) -> Generator[Call | Sleep, Any, Any]:
        """Take the instalments of this batch, the same ones as any life before; "sealed" after the
        last."""
        number = 1
        while True:
            ask = _instalment(self.policy, incarnation, seq, number)
            answer = yield self._call(f"instalment {seq}/{number}", ask)
            if isinstance(answer, Fenced):
                return answer
            if isinstance(answer, str):
                if answer == "end":
                    return answer
                yield Sleep(seconds=0.5)
                continue
            assert not isinstance(answer, Exception), f"instalment {seq}/{number}: {answer}"
            self._laws.served_instalment(answer)
            if answer.is_last:
                return "sealed"
            yield Sleep(seconds=self._engine.between(0.1, 0.5))
            number += 1

    def _after(self, at: Checkpoint, digest: str, incarnation: int) -> Checkpoint:
        if self._engine.fault_chance(self._plan.faults.skipped):
            return Checkpoint(number=at.number, seq=at.seq + 1, weights=at.weights)
        text = f"{at.weights} {digest}"
        if not self._plan.is_deterministic:
            text += f" {incarnation} {at.seq}"
        weights = hashlib.sha256(text.encode()).hexdigest()
        return Checkpoint(number=at.number + 1, seq=at.seq + 1, weights=weights)

    def _publish(self, incarnation: int, at: Checkpoint) -> Call:
        policy = self.policy
        return self._call(
            f"publish {incarnation}.{at.number}",
            lambda coordinator, now: coordinator.publish(
                policy, incarnation, at.number, at.weights, now
            ),
        )

    def _save(self, incarnation: int, at: Checkpoint) -> Generator[Call, Any, Any]:
        """A trainer that names none must be able to restore any of the last few."""
        if not self.saves or (self._plan.names_checkpoints and self._engine.chance(0.5)):
            return "not now"
        self.saved = [saved for saved in self.saved if saved.seq < at.seq] + [at]
        if not self._plan.names_checkpoints:
            return "not named"
        self.saved = self.saved[-2:]
        answer = yield self._name(incarnation)
        return answer

    def _name(self, incarnation: int) -> Call:
        policy, named = self.policy, [(saved.number, saved.seq) for saved in self.saved]
        return self._call(
            f"keeps {named}",
            lambda coordinator, now: coordinator.checkpoints(policy, incarnation, named, now),
        )


def _incarnate(policy: PolicyName, request_id: str, expected: int, at: Checkpoint) -> Ask:
    return lambda coordinator, now: coordinator.incarnate(
        policy, request_id, expected, at.number, at.seq, now
    )


def _batch(policy: PolicyName, incarnation: int, seq: int) -> Ask:
    return lambda coordinator, now: coordinator.batch(policy, incarnation, seq, now)


def _instalment(policy: PolicyName, incarnation: int, seq: int, number: int) -> Ask:
    return lambda coordinator, now: coordinator.instalment(policy, incarnation, seq, number, now)


def _commit(policy: PolicyName, incarnation: int, at: Checkpoint, skipped: str) -> Ask:
    return lambda coordinator, now: coordinator.commit(
        policy, at.seq, incarnation, at.number, skipped, now
    )
