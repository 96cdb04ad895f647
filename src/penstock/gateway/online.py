# SPDX-License-Identifier: Apache-2.0
"""Sessions of agents outside the run: opened with a token, ended or left idle, rewarded later.

Owns their lives and what is counted of them. A session that begins while the run has a place for
it is recorded; without one it is served all the same, and counted. Where places come from and
recorded turns go to is its keeper's business, so nothing here knows of leases.

    open ──► waiting ──► rewarded | defaulted | expired
      └───────┴──► forgotten | dropped; without a place or an answer: unrecorded | empty
"""

from __future__ import annotations

import re
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import structlog
from blake3 import blake3

from penstock.errors import BadRequest, Busy, Conflict, Forbidden, NotFound, Unauthorized
from penstock.gateway.gateway import NO_KEY, Gateway
from penstock.gateway.generation import Completion, Generate, Listen
from penstock.gateway.session import Session
from penstock.types import PolicyName, RowId, SamplingSpec, Turn, is_data
from penstock.wire.auth import PREFIX, Credential, Role

MAX_SESSIONS = 4096
"""Open at once."""
MAX_PAST = 4096
"""Sessions that are over and still known, so that a repeated reward finds its answer."""
MAX_REASON = 500
MAX_REWARD = 1e9
NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
OPERATORS = (Role.GATEWAY, Role.ADMIN)
AGENTS = (Role.SESSION, *OPERATORS)
log = structlog.get_logger(__name__)


class State(StrEnum):
    OPEN = "open"
    WAITING = "waiting"
    """Ended; its reward may still come."""
    REWARDED = "rewarded"
    """On its way to the run, with its reward."""
    DEFAULTED = "defaulted"
    """The same with the declared default, because none came in time."""
    EXPIRED = "expired"
    """No reward came in time, and there is no default: never trained."""
    UNRECORDED = "unrecorded"
    """Ended; the run had no place for it."""
    EMPTY = "empty"
    """Ended without an answer that could be trained."""
    FORGOTTEN = "forgotten"
    DROPPED = "dropped"
    """Ended after the run had given up its place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A recorded session that is over."""

    row_id: RowId
    turns: tuple[Turn, ...]
    reward: float | None
    """None: it expired."""
    reason: str
    started_at: float


class Keeper(Protocol):
    """Who has places in the run."""

    def take(self) -> RowId | None:
        """A place for a session that begins now, if there is one."""
        ...

    def give_back(self, row_id: RowId) -> None:
        """Nothing came of it."""
        ...

    def deliver(self, ended: Ended) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    reward_deadline_s: float
    idle_s: float
    default_reward: float | None


@dataclass(slots=True, eq=False)
class Held:
    """One session as its owner and the run know it."""

    id: str
    api_key: str
    owner: str
    name: str
    session: Session | None
    """None once it is over."""
    has_place: bool
    opened_at: float
    started_at: float
    touched_at: float
    state: State = State.OPEN
    num_running: int = 0
    turns: tuple[Turn, ...] = ()
    """Of one that waits for its reward."""
    reward: float | None = None
    is_told: bool = False
    """The run has what was recorded of it."""


class Online(Gateway):
    """A gateway whose sessions come from outside; `find` opens them by token and name."""

    def __init__(
        self,
        generate: Generate,
        keeper: Keeper,
        terms: Terms,
        verify: Callable[[str], Credential],
        *,
        policies: Sequence[PolicyName],
        sampling: SamplingSpec,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(self._busy)
        self.counts: Counter[str] = Counter()
        self.terms = terms
        self._generate = generate
        self._keeper = keeper
        self._verify = verify
        self._policies = tuple(policies)
        self._sampling = sampling
        self._clock = clock
        self._held: dict[str, Held] = {}
        self._named: dict[tuple[str, str], Held] = {}
        """By owner and the name the owner gave it."""
        self._past: OrderedDict[str, Held] = OrderedDict()

    # --- agents -------------------------------------------------------------------------------

    def find(self, api_key: str, session_id: str | None = None) -> Session:
        """Also by a token: then the path names the session, and its first call opens it."""
        if not api_key.startswith(f"{PREFIX}."):
            session = super().find(api_key, session_id)
            self._held[session.id].touched_at = self._clock()
            return session
        owner, name = self.admit(api_key).owner, session_id or ""
        held = self._named.get((owner, name))
        if held is None or held.session is None:
            held = self._named[owner, name] = self.begin(owner, name)
        assert held.session is not None, "an open session"
        held.touched_at = self._clock()
        return held.session

    def admit(self, token: str) -> Caller:
        """Who shows this token; Unauthorized or Forbidden."""
        if not token.startswith(f"{PREFIX}."):
            raise Unauthorized(NO_KEY)
        credential = self._verify(token)
        if credential.role not in AGENTS:
            raise Forbidden(
                f"a {credential.role} token opens no session; "
                "`penstock token RUN --role session` mints one that does"
            )
        owner = blake3(token.encode()).hexdigest()[:16]
        return Caller(owner=owner, is_operator=credential.role in OPERATORS)

    def begin(self, owner: str, name: str = "") -> Held:
        """A new session; recorded if the run has a place for it."""
        if name and not NAME.fullmatch(name):
            raise BadRequest("a session's name is [A-Za-z0-9._-]{1,128}")
        if len(self._held) - len(self._past) >= MAX_SESSIONS:
            raise Busy(f"{MAX_SESSIONS} sessions are open here; end some", retry_after_s=1.0)
        place = self._keeper.take()
        session = self.open(policies=self._policies, sampling=self._sampling, seed=_seed())
        session.id = place or f"unrecorded-{session.id}"
        now = self._clock()
        held = Held(
            id=session.id,
            api_key=session.api_key,
            owner=owner,
            name=name or session.id,
            session=session,
            has_place=place is not None,
            opened_at=now,
            started_at=time.time(),
            touched_at=now,
        )
        self._held[held.id] = self._named[owner, held.name] = held
        self.counts["opened"] += 1
        self.counts["recorded" if held.has_place else "unrecorded"] += 1
        return held

    def lookup(self, name: str, *, token: str) -> Held:
        """The session of this id or name, for its own key, its owner, or an operator."""
        held = self._held.get(name)
        if held is not None and token == held.api_key:
            return held
        caller = self.admit(token)
        mine = self._named.get((caller.owner, name))
        if mine is not None:
            return mine
        if held is None or not (caller.is_operator or held.owner == caller.owner):
            raise NotFound(f"no session {name!r} of yours here; it may have ended long ago")
        return held

    # --- its end ------------------------------------------------------------------------------

    def reward(self, held: Held, value: float, reason: str = "") -> None:
        """Ends the session and hands it to the run; the first reward stands."""
        if not abs(value) <= MAX_REWARD or len(reason) > MAX_REASON:
            raise BadRequest(
                f"a reward is a finite number up to {MAX_REWARD:g}, its reason has at most "
                f"{MAX_REASON} characters"
            )
        if held.state is State.OPEN and not held.is_told:
            self.end(held)
        if held.state is State.WAITING:
            held.reward = value
            self._deliver(held, State.REWARDED, value, reason)
        elif held.state is State.UNRECORDED and not held.is_told:
            held.reward = value
        elif held.reward != value:
            raise Conflict(f"session {held.id} is {held.state}; this reward comes too late for it")

    def end(self, held: Held) -> None:
        """No further call; its reward may still come."""
        if held.state is not State.OPEN:
            return
        assert held.session is not None, "an open session"
        held.turns = self.close(held.session)
        held.session = None
        if not held.has_place:
            self._over(held, State.UNRECORDED)
        elif not any(map(is_data, held.turns)):
            self._keeper.give_back(RowId(held.id))
            self._over(held, State.EMPTY)
        else:
            held.state = State.WAITING

    def forget(self, held: Held) -> None:
        """Nothing of it is kept. What the run already has, the run must forget."""
        if held.is_told:
            raise Conflict(
                f"session {held.id} was handed to the run; `penstock forget RUN {held.id}` "
                "removes it there"
            )
        if held.state in (State.OPEN, State.WAITING):
            if held.has_place:
                self._keeper.give_back(RowId(held.id))
            self._close(held, State.FORGOTTEN)

    def dropped(self, row_id: RowId) -> None:
        """The run has given up its place: it is forgotten there, or of no use any more. An open
        session is served on."""
        held = self._held.get(row_id)
        if held is None or held.state not in (State.OPEN, State.WAITING) or not held.has_place:
            return
        held.has_place = False
        if held.state is State.WAITING:
            self._over(held, State.DROPPED)
        else:
            self.counts["dropped"] += 1

    def sweep(self) -> None:
        """What is over by time alone."""
        now = self._clock()
        for held in [*self._held.values()]:
            is_late = now >= held.opened_at + self.terms.reward_deadline_s
            if held.state is State.OPEN and self._is_idle(held, now):
                self.end(held)
            if held.state is State.WAITING and is_late:
                self._give_up(held)
            elif held.state is State.OPEN and held.has_place and is_late:
                self._go_on_unrecorded(held)

    def forgive(self, gap_s: float) -> None:
        """The gateway itself stood still for so long: nobody could be heard meanwhile, so nobody
        was idle or late."""
        now = self._clock()
        for held in self._held.values():
            held.opened_at = min(held.opened_at + gap_s, now)
            held.touched_at = min(held.touched_at + gap_s, now)

    def close_all(self) -> None:
        """The gateway ends: what has no reward by now gets none, and its place is another's."""
        for held in [*self._held.values()]:
            if held.state in (State.OPEN, State.WAITING):
                if held.has_place:
                    self._keeper.give_back(RowId(held.id))
                self._close(held, State.DROPPED)

    def _is_idle(self, held: Held, now: float) -> bool:
        return not held.num_running and now >= held.touched_at + self.terms.idle_s

    def _go_on_unrecorded(self, held: Held) -> None:
        """It talks longer than its reward may take: what was recorded ends here."""
        assert held.session is not None, "an open session"
        turns = held.session.turns()
        held.has_place = False
        if any(map(is_data, turns)):
            self._tell(held, turns, self.terms.default_reward, "")
        else:
            self._keeper.give_back(RowId(held.id))
        self.counts["outlasted"] += 1

    def _give_up(self, held: Held) -> None:
        default = self.terms.default_reward
        state = State.EXPIRED if default is None else State.DEFAULTED
        self._deliver(held, state, default, "")

    def _deliver(self, held: Held, state: State, reward: float | None, reason: str) -> None:
        self._tell(held, held.turns, reward, reason)
        self._over(held, state)

    def _tell(self, held: Held, turns: tuple[Turn, ...], reward: float | None, why: str) -> None:
        held.is_told = True
        self._keeper.deliver(
            Ended(
                row_id=RowId(held.id),
                turns=turns,
                reward=reward,
                reason=why,
                started_at=held.started_at,
            )
        )

    def _close(self, held: Held, state: State) -> None:
        if held.session is not None:
            self.close(held.session)
        self._over(held, state)

    def _over(self, held: Held, state: State) -> None:
        held.state, held.session, held.turns = state, None, ()
        if state is not State.UNRECORDED:  # counted when it began
            self.counts[state] += 1
        self._past[held.id] = held
        while len(self._past) > MAX_PAST:
            _, oldest = self._past.popitem(last=False)
            del self._held[oldest.id]
            for key in [(oldest.owner, ""), (oldest.owner, oldest.name)]:
                if self._named.get(key) is oldest:
                    del self._named[key]

    async def _busy(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingSpec,
        *,
        policy: PolicyName,
        session: str,
        listen: Listen | None = None,
    ) -> Completion:
        """A session with a call on its way is not idle."""
        held = self._held[session]
        held.num_running += 1
        try:
            return await self._generate(
                prompt_ids, sampling, policy=policy, session=session, listen=listen
            )
        finally:
            held.num_running -= 1
            held.touched_at = self._clock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    owner: str
    is_operator: bool


def _seed() -> int:
    return int.from_bytes(blake3(str(time.time_ns()).encode()).digest(8), "little") >> 1
