# SPDX-License-Identifier: Apache-2.0
"""Virtual time: one queue of events, one random generator, one log. The same seed gives the same
log, byte for byte.

Owns order and chance, and a network that loses, repeats, delays and reorders. Knows nothing of what
the events mean.
"""

from __future__ import annotations

import hashlib
import heapq
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Protocol

Event = Callable[[], None]
Answer = Any
Reply = Callable[[Answer], None]


class EventLoop:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now = 0.0
        self.is_kind = False
        self.log: list[str] = []
        self._queue: list[tuple[float, int, str, Event]] = []
        self._count = 0
        self._digest = hashlib.sha256()

    @property
    def digest(self) -> str:
        return self._digest.hexdigest()

    def note(self, text: str) -> None:
        line = f"{self.now:9.3f} {text}"
        self.log.append(line)
        self._digest.update(line.encode())

    def at(self, delay_s: float, name: str, event: Event) -> None:
        self._count += 1
        heapq.heappush(self._queue, (self.now + delay_s, self._count, name, event))

    def step(self) -> bool:
        if not self._queue:
            return False
        self.now, _, name, event = heapq.heappop(self._queue)
        if name:
            self.note(name)
        event()
        return True

    def chance(self, share: float) -> bool:
        return share > 0 and self.rng.random() < share

    def fault_chance(self, share: float) -> bool:
        """As `chance`, of something that goes wrong; nothing does in a kind world."""
        return not self.is_kind and self.chance(share)

    def between(self, low: float, high: float) -> float:
        return low + (high - low) * self.rng.random()


class Target(Protocol):
    """A process that takes calls; one that is down never answers."""

    name: str

    def handle(self, name: str, command: Command, reply: Reply) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    run: Callable[[Any, float], Answer]
    """(process, its clock) to the answer, or to a function that gives it once all is durable."""
    waits: bool = True
    """Its answer leaves only when all that was decided before is durable."""


@dataclass(slots=True)
class Network:
    """Each call and each answer on its own way."""

    engine: EventLoop
    loss: float = 0.0
    repeats: float = 0.0
    slow: float = 0.0
    """Share of messages that take seconds, and so overtake each other."""
    cut: set[str] | None = None
    """Processes nobody reaches now."""

    def send(self, who: str, name: str, event: Event) -> None:
        """To or from process `who`."""
        engine = self.engine
        copies = 1 + engine.chance(self.repeats)
        for _ in range(copies):
            if engine.chance(self.loss) or (self.cut and who in self.cut):
                continue
            delay_s = engine.between(0.001, 0.05)
            if engine.chance(self.slow):
                delay_s = engine.between(0.5, 15.0)
            engine.at(delay_s, name, event)

    def call(self, target: Target, name: str, command: Command, reply: Reply) -> None:
        def answered(answer: Answer) -> None:
            self.send(target.name, "", lambda: reply(answer))

        self.send(target.name, "", lambda: target.handle(name, command, answered))


# --- actors: generators that sleep and call ------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """Repeated until somebody answers."""

    target: Target
    name: str
    command: Command
    retry_s: float = 3.0
    tries: int = 1_000_000


Actor = Generator[Sleep | Call, Answer, None]


class Task:
    """One running actor; ends with it or when cancelled."""

    def __init__(self, engine: EventLoop, network: Network, actor: Actor) -> None:
        self._engine = engine
        self._network = network
        self._actor = actor
        self._turn = 0
        self.is_over = False
        self.paused_until = 0.0
        engine.at(0.0, "", lambda: self._resume(0, None))

    def cancel(self) -> None:
        self.is_over = True
        self._actor.close()

    def _resume(self, turn: int, answer: Answer) -> None:
        if self.is_over or turn != self._turn:
            return  # an answer that came twice, or too late
        if self.paused_until > self._engine.now:
            wait_s = self.paused_until - self._engine.now
            self._engine.at(wait_s, "", lambda: self._resume(turn, answer))
            return
        self._turn += 1
        try:
            wish = self._actor.send(answer)
        except StopIteration:
            self.is_over = True
            return
        turn = self._turn
        if isinstance(wish, Sleep):
            self._engine.at(wish.seconds, "", lambda: self._resume(turn, None))
        else:
            self._try(turn, wish, wish.tries)

    def _try(self, turn: int, call: Call, tries: int) -> None:
        if self.is_over or turn != self._turn:
            return
        if self.paused_until > self._engine.now:
            wait_s = self.paused_until - self._engine.now
            self._engine.at(wait_s, "", lambda: self._try(turn, call, tries))
            return
        if tries == 0:
            self._resume(turn, None)
            return
        self._network.call(
            call.target, call.name, call.command, lambda answer: self._resume(turn, answer)
        )
        wait_s = call.retry_s * self._engine.between(0.8, 1.2)
        self._engine.at(wait_s, "", lambda: self._try(turn, call, tries - 1))
