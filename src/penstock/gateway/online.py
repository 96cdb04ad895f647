# SPDX-License-Identifier: Apache-2.0
"""Sessions of external agents: opened with a token, ended or idled out, rewarded later.

Owns their lifecycle and counters. A session that starts while the run has a free slot is recorded;
without a slot it is answered but not recorded, and counted. Slots come from, and recorded turns go
to, a `SlotSource`, so nothing here knows about leases. A session has two keys: the agent's calls
the model, and the other one sets the reward, so that no agent judges itself. Neither outlives the
token that opened the session, if that is revoked.

    open ──► waiting ──► rewarded | defaulted | expired
      └───────┴──► forgotten | dropped; without a slot or an answer: unrecorded | empty
"""

from __future__ import annotations

import hmac
import re
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import structlog
from blake3 import blake3

from penstock.errors import BadRequest, Conflict, Forbidden, NotFound, Unauthorized
from penstock.gateway.gateway import NO_KEY, Gateway
from penstock.gateway.generation import Completion, Generate, GenerationRequest
from penstock.gateway.owners import Owners
from penstock.gateway.session import KEY_BYTES, Session
from penstock.types import PolicyName, RowId, SamplingSpec, Turn, is_usable
from penstock.wire.auth import NEW_TOKEN, PREFIX, Credential, Role

REWARD_KEY_PREFIX = "rk-penstock-"
MAX_FINISHED = 4096
"""Number of ended sessions kept, so that a repeated reward gets the same response."""
MAX_REASON = 500
MAX_REWARD = 1e9
NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
OPERATORS = (Role.GATEWAY, Role.ADMIN)
AGENTS = (Role.SESSION, *OPERATORS)
log = structlog.get_logger(__name__)


class State(StrEnum):
    OPEN = "open"
    WAITING = "waiting"
    """Ended; waiting for its reward."""
    REWARDED = "rewarded"
    """Delivered to the run with its reward."""
    DEFAULTED = "defaulted"
    """Delivered with the configured default reward, because none arrived before the deadline."""
    EXPIRED = "expired"
    """No reward arrived before the deadline and no default is configured: never trained."""
    UNRECORDED = "unrecorded"
    """Ended; the run had no free slot for it."""
    EMPTY = "empty"
    """Ended without any answer that can be trained."""
    FORGOTTEN = "forgotten"
    DROPPED = "dropped"
    """Ended after the run dropped its slot."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedSession:
    row_id: RowId
    turns: tuple[Turn, ...]
    reward: float | None
    """None if the session expired."""
    reason: str
    started_at: float


class SlotSource(Protocol):
    """Provides slots of the run and takes recorded sessions."""

    @property
    def num_free(self) -> int: ...

    def acquire_slot(self) -> RowId | None:
        """A slot for a new session, or None if none is free."""
        ...

    def release_slot(self, row_id: RowId) -> None:
        """Return a slot whose session recorded nothing."""
        ...

    def deliver(self, ended: EndedSession) -> None: ...


class Tokens(Protocol):
    """Checks the tokens of agents and operators."""

    def verify(self, token: str) -> Credential: ...

    def watch(self, token: str) -> Callable[[], bool]:
        """Says whether a token, valid now, has been revoked since."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionTerms:
    reward_deadline_s: float
    idle_s: float
    default_reward: float | None


@dataclass(slots=True, eq=False)
class OnlineSession:
    id: str
    api_key: str
    """For model calls: the agent's."""
    reward_key: str
    """For the reward, the end and forgetting: for the judge of the agent, never for the agent."""
    owner: str
    name: str
    session: Session | None
    """None once the session has ended."""
    is_revoked: Callable[[], bool]
    """Whether the token that opened it has been revoked."""
    has_slot: bool
    opened_at: float
    started_at: float
    last_active_at: float
    num_bytes: int = 0
    """Of its turns, as counted for the owner at its last call."""
    state: State = State.OPEN
    num_running: int = 0
    turns: tuple[Turn, ...] = ()
    """Recorded turns, while the session waits for its reward."""
    reward: float | None = None
    is_delivered: bool = False
    """The run has received its recorded turns."""


class OnlineGateway(Gateway):
    """A gateway for external sessions; `find` opens them by token and name."""

    def __init__(
        self,
        generate: Generate,
        slot_source: SlotSource,
        terms: SessionTerms,
        tokens: Tokens,
        *,
        policies: Sequence[PolicyName],
        sampling: SamplingSpec,
        roles: Mapping[str, PolicyName] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(generate)
        self.counts: Counter[str] = Counter()
        self.terms = terms
        self._slot_source = slot_source
        self._tokens = tokens
        self._policies = tuple(policies)
        self._roles = dict(roles or {})
        self._sampling = sampling
        self._clock = clock
        self._entries: dict[str, OnlineSession] = {}
        self._by_name: dict[tuple[str, str], OnlineSession] = {}
        """By owner and the name the owner gave it."""
        self._finished: OrderedDict[str, OnlineSession] = OrderedDict()
        self._owners = Owners(clock)

    @property
    def num_open(self) -> int:
        """Open and waiting sessions."""
        return self._owners.num_sessions

    # --- agents -------------------------------------------------------------------------------

    def find(self, api_key: str, session_id: str | None = None) -> Session:
        """Accepts a token too: the path then names the session, and its first call opens it."""
        if not api_key.startswith(f"{PREFIX}."):
            session = super().find(api_key, session_id)
            entry = self._entries[session.id]
            self._require_not_revoked(entry)
            self._require_room(entry)
            entry.last_active_at = self._clock()
            return session
        caller, name = self.admit(api_key), session_id or ""
        entry = self._by_name.get((caller.owner, name))
        if entry is None or entry.session is None:
            entry = self.open_session(caller.owner, name, caller.is_revoked)
            self._by_name[caller.owner, name] = entry
        self._require_room(entry)
        assert entry.session is not None, "entry must be open"
        entry.last_active_at = self._clock()
        return entry.session

    def _require_room(self, entry: OnlineSession) -> None:
        """Raise Busy if the turns of its owner's sessions fill the memory that it may have."""
        assert entry.session is not None, "entry must be open"
        growth = entry.session.num_bytes - entry.num_bytes
        entry.num_bytes += growth
        self._owners.add(entry.owner, num_bytes=growth)
        self._owners.check_memory(entry.owner)

    def admit(self, token: str) -> Caller:
        """The caller identified by a token; raises Unauthorized or Forbidden."""
        if not token.startswith(f"{PREFIX}."):
            raise Unauthorized(NO_KEY)
        credential = self._tokens.verify(token)
        if credential.role not in AGENTS:
            raise Forbidden(
                f"role {credential.role} cannot open sessions; "
                "create a session token with `penstock token RUN --role session`"
            )
        owner = credential.subject or f"token {blake3(token.encode()).hexdigest()[:16]}"
        return Caller(
            owner=owner,
            is_operator=credential.role in OPERATORS,
            is_revoked=self._tokens.watch(token),
        )

    def open_session(
        self, owner: str, name: str = "", is_revoked: Callable[[], bool] = lambda: False
    ) -> OnlineSession:
        """Open a session; it is recorded if the run has a free slot. `is_revoked`: whether the
        owner's token has been."""
        if name and not NAME.fullmatch(name):
            raise BadRequest(f"session name {name[:64]!r} must match [A-Za-z0-9._-]{{1,128}}")
        self._owners.check_place(owner)
        may_record = self._owners.may_record(owner, self._slot_source.num_free)
        slot_id = self._slot_source.acquire_slot() if may_record else None
        seed = secrets.randbits(63)
        session = self.open(
            policies=self._policies, sampling=self._sampling, seed=seed, roles=self._roles
        )
        session.id = slot_id or f"unrecorded-{session.id}"
        now = self._clock()
        entry = OnlineSession(
            id=session.id,
            api_key=session.api_key,
            reward_key=REWARD_KEY_PREFIX + secrets.token_hex(KEY_BYTES),
            owner=owner,
            name=name or session.id,
            session=session,
            is_revoked=is_revoked,
            has_slot=slot_id is not None,
            opened_at=now,
            started_at=time.time(),
            last_active_at=now,
        )
        self._entries[entry.id] = self._by_name[owner, entry.name] = entry
        self._owners.add(owner, sessions=1, slots=int(entry.has_slot))
        self.counts["opened"] += 1
        self.counts["recorded" if entry.has_slot else "unrecorded"] += 1
        return entry

    def lookup(self, name: str, *, token: str, needs_judge: bool = False) -> OnlineSession:
        """Find a session by id or name. Needs one of its keys, its owner's token or an operator's
        token; with `needs_judge`, the agent's key is not enough."""
        entry = self._entries.get(name)
        if entry is not None and _is_same(token, entry.reward_key):
            self._require_not_revoked(entry)
            return entry
        if entry is not None and _is_same(token, entry.api_key):
            self._require_not_revoked(entry)
            if needs_judge:
                raise Forbidden(
                    f"the key of session {entry.id} calls the model only; use its reward_key, "
                    "which POST /sessions returned, or the token that opened it"
                )
            return entry
        caller = self.admit(token)
        mine = self._by_name.get((caller.owner, name))
        if mine is not None:
            return mine
        if entry is None or not (caller.is_operator or entry.owner == caller.owner):
            raise NotFound(f"session {name!r} not found, or not yours")
        return entry

    def _require_not_revoked(self, entry: OnlineSession) -> None:
        """Raise Unauthorized, and end the session, if the token that opened it was revoked."""
        if entry.is_revoked():
            self._discard(entry, State.DROPPED)
            raise Unauthorized(f"the token that opened session {entry.id} was revoked; {NEW_TOKEN}")

    # --- end of a session --------------------------------------------------------------------

    def reward(self, entry: OnlineSession, value: float, reason: str = "") -> None:
        """End the session and deliver it to the run. Only the first reward counts."""
        if not abs(value) <= MAX_REWARD or len(reason) > MAX_REASON:
            raise BadRequest(
                f"reward must be a finite number of magnitude up to {MAX_REWARD:g}, "
                f"and reason at most {MAX_REASON} characters"
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
                f"session {entry.id} is already {entry.state}; the reward cannot be changed"
            )

    def end(self, entry: OnlineSession) -> None:
        """Accept no further calls; the reward may still arrive."""
        if entry.state is not State.OPEN:
            return
        assert entry.session is not None, "entry must be open"
        entry.turns = self.close(entry.session)
        entry.session = None
        if not entry.has_slot:
            self._finish(entry, State.UNRECORDED)
        elif not any(map(is_usable, entry.turns)):
            self._give_back(entry)
            self._finish(entry, State.EMPTY)
        else:
            entry.state = State.WAITING

    def forget(self, entry: OnlineSession) -> None:
        """Delete everything recorded. A session already delivered must be forgotten in the run."""
        if entry.is_delivered:
            raise Conflict(
                f"session {entry.id} was already delivered to the run; "
                f"remove it there with `penstock forget RUN {entry.id}`"
            )
        self._discard(entry, State.FORGOTTEN)

    def on_slot_dropped(self, row_id: RowId) -> None:
        """The run dropped the slot: its row was forgotten or can no longer be used. An open session
        continues unrecorded."""
        entry = self._entries.get(row_id)
        if entry is None or entry.state not in (State.OPEN, State.WAITING) or not entry.has_slot:
            return
        self._lose_slot(entry)
        if entry.state is State.WAITING:
            self._finish(entry, State.DROPPED)
        else:
            self.counts["dropped"] += 1

    def sweep(self) -> None:
        """End idle sessions and those with a revoked token, and expire late ones."""
        now = self._clock()
        for entry in [*self._entries.values()]:
            if entry.state in (State.OPEN, State.WAITING) and entry.is_revoked():
                self._discard(entry, State.DROPPED)
            is_late = now >= entry.opened_at + self.terms.reward_deadline_s
            is_idle = not entry.num_running and now >= entry.last_active_at + self.terms.idle_s
            if entry.state is State.OPEN and is_idle:
                self.end(entry)
            if entry.state is State.WAITING and is_late:
                default = self.terms.default_reward
                state = State.EXPIRED if default is None else State.DEFAULTED
                self._deliver(entry, state, default)
            elif entry.state is State.OPEN and entry.has_slot and is_late:
                self._stop_recording(entry)

    def extend_deadlines(self, gap_s: float) -> None:
        """The gateway stalled for `gap_s`: extend idle and reward deadlines by that time."""
        now = self._clock()
        for entry in self._entries.values():
            entry.opened_at = min(entry.opened_at + gap_s, now)
            entry.last_active_at = min(entry.last_active_at + gap_s, now)

    def close_all(self) -> None:
        """Shut down: drop sessions that have no reward yet and return their slots."""
        for entry in [*self._entries.values()]:
            self._discard(entry, State.DROPPED)

    def _stop_recording(self, entry: OnlineSession) -> None:
        """The session outlived its reward deadline: deliver the turns so far and stop recording."""
        assert entry.session is not None, "entry must be open"
        turns = entry.session.turns()
        self._lose_slot(entry)
        if any(map(is_usable, turns)):
            self._hand_to_run(entry, turns, self.terms.default_reward, "")
        else:
            self._give_back(entry)
        self.counts["overran"] += 1

    def _give_back(self, entry: OnlineSession) -> None:
        self._slot_source.release_slot(RowId(entry.id))
        self._owners.give_back(entry.owner)

    def _lose_slot(self, entry: OnlineSession) -> None:
        entry.has_slot = False
        self._owners.add(entry.owner, slots=-1)

    def _deliver(
        self, entry: OnlineSession, state: State, reward: float | None, reason: str = ""
    ) -> None:
        self._hand_to_run(entry, entry.turns, reward, reason)
        self._finish(entry, state)

    def _hand_to_run(
        self, entry: OnlineSession, turns: tuple[Turn, ...], reward: float | None, reason: str
    ) -> None:
        entry.is_delivered = True
        self._slot_source.deliver(
            EndedSession(
                row_id=RowId(entry.id),
                turns=turns,
                reward=reward,
                reason=reason,
                started_at=entry.started_at,
            )
        )

    def _discard(self, entry: OnlineSession, state: State) -> None:
        """End a session without a result and return its slot."""
        if entry.state in (State.OPEN, State.WAITING):
            if entry.has_slot:
                self._give_back(entry)
            if entry.session is not None:
                self.close(entry.session)
            self._finish(entry, state)

    def _finish(self, entry: OnlineSession, state: State) -> None:
        slots = -1 if entry.has_slot else 0
        self._owners.add(entry.owner, sessions=-1, slots=slots, num_bytes=-entry.num_bytes)
        entry.state, entry.session, entry.turns = state, None, ()
        if state is not State.UNRECORDED:  # counted when it was opened
            self.counts[state] += 1
        self._finished[entry.id] = entry
        while len(self._finished) > MAX_FINISHED:
            _, oldest = self._finished.popitem(last=False)
            del self._entries[oldest.id]
            for key in [(oldest.owner, ""), (oldest.owner, oldest.name)]:
                if self._by_name.get(key) is oldest:
                    del self._by_name[key]

    def queue_key(self, session_id: str) -> str:
        """All sessions of an owner take turns as one."""
        return self._entries[session_id].owner

    async def _generate_in_turn(self, request: GenerationRequest) -> Completion:
        """Generate, and count the session as active while the call waits or runs."""
        entry = self._entries[request.session]
        entry.num_running += 1
        try:
            return await super()._generate_in_turn(request)
        finally:
            entry.num_running -= 1
            entry.last_active_at = self._clock()


def _is_same(key: str, expected: str) -> bool:
    return hmac.compare_digest(key.encode(), expected.encode())


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    owner: str
    is_operator: bool
    is_revoked: Callable[[], bool]
