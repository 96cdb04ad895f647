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
from penstock.gateway.generation import ChunkCallback, Completion, Generate
from penstock.gateway.session import Session
from penstock.types import PolicyName, RowId, SamplingSpec, Turn, is_usable
from penstock.wire.auth import PREFIX, Credential, Role

MAX_SESSIONS = 4096
"""Open at once."""
MAX_FINISHED = 4096
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
class EndedSession:
    """A recorded session that is over."""

    row_id: RowId
    turns: tuple[Turn, ...]
    reward: float | None
    """None: it expired."""
    reason: str
    started_at: float


class SlotSource(Protocol):
    """Who has places in the run."""

    def take(self) -> RowId | None:
        """A place for a session that begins now, if there is one."""
        ...

    def release_slot(self, row_id: RowId) -> None:
        """Nothing came of it."""
        ...

    def deliver(self, ended: EndedSession) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTerms:
    reward_deadline_s: float
    idle_s: float
    default_reward: float | None


@dataclass(slots=True, eq=False)
class OnlineSession:
    """One session as its owner and the run know it."""

    id: str
    api_key: str
    owner: str
    name: str
    session: Session | None
    """None once it is over."""
    has_slot: bool
    opened_at: float
    started_at: float
    last_active_at: float
    state: State = State.OPEN
    num_running: int = 0
    turns: tuple[Turn, ...] = ()
    """Of one that waits for its reward."""
    reward: float | None = None
    is_delivered: bool = False
    """The run has what was recorded of it."""


class OnlineGateway(Gateway):
    """A gateway whose sessions come from outside; `find` opens them by token and name."""

    def __init__(
        self,
        generate: Generate,
        slot_source: SlotSource,
        terms: SessionTerms,
        verify: Callable[[str], Credential],
        *,
        policies: Sequence[PolicyName],
        sampling: SamplingSpec,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(self._generate_tracked)
        self.counts: Counter[str] = Counter()
        self.terms = terms
        self._generate = generate
        self._slot_source = slot_source
        self._verify = verify
        self._policies = tuple(policies)
        self._sampling = sampling
        self._clock = clock
        self._entries: dict[str, OnlineSession] = {}
        self._by_name: dict[tuple[str, str], OnlineSession] = {}
        """By owner and the name the owner gave it."""
        self._finished: OrderedDict[str, OnlineSession] = OrderedDict()

    # --- agents -------------------------------------------------------------------------------

    def find(self, api_key: str, session_id: str | None = None) -> Session:
        """Also by a token: then the path names the session, and its first call opens it."""
        if not api_key.startswith(f"{PREFIX}."):
            session = super().find(api_key, session_id)
            self._entries[session.id].last_active_at = self._clock()
            return session
        owner, name = self.admit(api_key).owner, session_id or ""
        entry = self._by_name.get((owner, name))
        if entry is None or entry.session is None:
            entry = self._by_name[owner, name] = self.begin(owner, name)
        assert entry.session is not None, "an open session"
        entry.last_active_at = self._clock()
        return entry.session

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

    def begin(self, owner: str, name: str = "") -> OnlineSession:
        """A new session; recorded if the run has a place for it."""
        if name and not NAME.fullmatch(name):
            raise BadRequest("a session's name is [A-Za-z0-9._-]{1,128}")
        if len(self._entries) - len(self._finished) >= MAX_SESSIONS:
            raise Busy(f"{MAX_SESSIONS} sessions are open here; end some", retry_after_s=1.0)
        slot_id = self._slot_source.take()
        session = self.open(policies=self._policies, sampling=self._sampling, seed=_seed())
        session.id = slot_id or f"unrecorded-{session.id}"
        now = self._clock()
        entry = OnlineSession(
            id=session.id,
            api_key=session.api_key,
            owner=owner,
            name=name or session.id,
            session=session,
            has_slot=slot_id is not None,
            opened_at=now,
            started_at=time.time(),
            last_active_at=now,
        )
        self._entries[entry.id] = self._by_name[owner, entry.name] = entry
        self.counts["opened"] += 1
        self.counts["recorded" if entry.has_slot else "unrecorded"] += 1
        return entry

    def lookup(self, name: str, *, token: str) -> OnlineSession:
        """The session of this id or name, for its own key, its owner, or an operator."""
        entry = self._entries.get(name)
        if entry is not None and token == entry.api_key:
            return entry
        caller = self.admit(token)
        mine = self._by_name.get((caller.owner, name))
        if mine is not None:
            return mine
        if entry is None or not (caller.is_operator or entry.owner == caller.owner):
            raise NotFound(f"no session {name!r} of yours here; it may have ended long ago")
        return entry

    # --- its end ------------------------------------------------------------------------------

    def reward(self, entry: OnlineSession, value: float, reason: str = "") -> None:
        """Ends the session and hands it to the run; the first reward stands."""
        if not abs(value) <= MAX_REWARD or len(reason) > MAX_REASON:
            raise BadRequest(
                f"a reward is a finite number up to {MAX_REWARD:g}, its reason has at most "
                f"{MAX_REASON} characters"
            )
        if entry.state is State.OPEN and not entry.is_delivered:
            self.end(entry)
        if entry.state is State.WAITING:
            entry.reward = value
            self._deliver(entry, State.REWARDED, value, reason)
        elif entry.state is State.UNRECORDED and not entry.is_delivered:
            entry.reward = value
        elif entry.reward != value:
            raise Conflict(
                f"session {entry.id} is {entry.state}; this reward comes too late for it"
            )

    def end(self, entry: OnlineSession) -> None:
        """No further call; its reward may still come."""
        if entry.state is not State.OPEN:
            return
        assert entry.session is not None, "an open session"
        entry.turns = self.close(entry.session)
        entry.session = None
        if not entry.has_slot:
            self._finish(entry, State.UNRECORDED)
        elif not any(map(is_usable, entry.turns)):
            self._slot_source.release_slot(RowId(entry.id))
            self._finish(entry, State.EMPTY)
        else:
            entry.state = State.WAITING

    def forget(self, entry: OnlineSession) -> None:
        """Nothing of it is kept. What the run already has, the run must forget."""
        if entry.is_delivered:
            raise Conflict(
                f"session {entry.id} was handed to the run; `penstock forget RUN {entry.id}` "
                "removes it there"
            )
        if entry.state in (State.OPEN, State.WAITING):
            if entry.has_slot:
                self._slot_source.release_slot(RowId(entry.id))
            self._close(entry, State.FORGOTTEN)

    def dropped(self, row_id: RowId) -> None:
        """The run has given up its place: it is forgotten there, or of no use any more. An open
        session is served on."""
        entry = self._entries.get(row_id)
        if entry is None or entry.state not in (State.OPEN, State.WAITING) or not entry.has_slot:
            return
        entry.has_slot = False
        if entry.state is State.WAITING:
            self._finish(entry, State.DROPPED)
        else:
            self.counts["dropped"] += 1

    def sweep(self) -> None:
        """What is over by time alone."""
        now = self._clock()
        for entry in [*self._entries.values()]:
            is_late = now >= entry.opened_at + self.terms.reward_deadline_s
            if entry.state is State.OPEN and self._is_idle(entry, now):
                self.end(entry)
            if entry.state is State.WAITING and is_late:
                self._expire(entry)
            elif entry.state is State.OPEN and entry.has_slot and is_late:
                self._stop_recording(entry)

    def extend_deadlines(self, gap_s: float) -> None:
        """The gateway itself stood still for so long: nobody could be heard meanwhile, so nobody
        was idle or late."""
        now = self._clock()
        for entry in self._entries.values():
            entry.opened_at = min(entry.opened_at + gap_s, now)
            entry.last_active_at = min(entry.last_active_at + gap_s, now)

    def close_all(self) -> None:
        """The gateway ends: what has no reward by now gets none, and its place is another's."""
        for entry in [*self._entries.values()]:
            if entry.state in (State.OPEN, State.WAITING):
                if entry.has_slot:
                    self._slot_source.release_slot(RowId(entry.id))
                self._close(entry, State.DROPPED)

    def _is_idle(self, entry: OnlineSession, now: float) -> bool:
        return not entry.num_running and now >= entry.last_active_at + self.terms.idle_s

    def _stop_recording(self, entry: OnlineSession) -> None:
        """It talks longer than its reward may take: what was recorded ends here."""
        assert entry.session is not None, "an open session"
        turns = entry.session.turns()
        entry.has_slot = False
        if any(map(is_usable, turns)):
            self._hand_to_run(entry, turns, self.terms.default_reward, "")
        else:
            self._slot_source.release_slot(RowId(entry.id))
        self.counts["overran"] += 1

    def _expire(self, entry: OnlineSession) -> None:
        default = self.terms.default_reward
        state = State.EXPIRED if default is None else State.DEFAULTED
        self._deliver(entry, state, default, "")

    def _deliver(
        self, entry: OnlineSession, state: State, reward: float | None, reason: str
    ) -> None:
        self._hand_to_run(entry, entry.turns, reward, reason)
        self._finish(entry, state)

    def _hand_to_run(
        self, entry: OnlineSession, turns: tuple[Turn, ...], reward: float | None, why: str
    ) -> None:
        entry.is_delivered = True
        self._slot_source.deliver(
            EndedSession(
                row_id=RowId(entry.id),
                turns=turns,
                reward=reward,
                reason=why,
                started_at=entry.started_at,
            )
        )

    def _close(self, entry: OnlineSession, state: State) -> None:
        if entry.session is not None:
            self.close(entry.session)
        self._finish(entry, state)

    def _finish(self, entry: OnlineSession, state: State) -> None:
        entry.state, entry.session, entry.turns = state, None, ()
        if state is not State.UNRECORDED:  # counted when it began
            self.counts[state] += 1
        self._finished[entry.id] = entry
        while len(self._finished) > MAX_FINISHED:
            _, oldest = self._finished.popitem(last=False)
            del self._entries[oldest.id]
            for key in [(oldest.owner, ""), (oldest.owner, oldest.name)]:
                if self._by_name.get(key) is oldest:
                    del self._by_name[key]

    async def _generate_tracked(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingSpec,
        *,
        policy: PolicyName,
        session: str,
        on_chunk: ChunkCallback | None = None,
    ) -> Completion:
        """A session with a call on its way is not idle."""
        entry = self._entries[session]
        entry.num_running += 1
        try:
            return await self._generate(
                prompt_ids, sampling, policy=policy, session=session, on_chunk=on_chunk
            )
        finally:
            entry.num_running -= 1
            entry.last_active_at = self._clock()


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    owner: str
    is_operator: bool


def _seed() -> int:
    return int.from_bytes(blake3(str(time.time_ns()).encode()).digest(8), "little") >> 1
