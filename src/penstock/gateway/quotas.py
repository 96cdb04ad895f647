# SPDX-License-Identifier: Apache-2.0
"""Per-session quotas, sub-agents included: concurrent calls and tokens per minute.

Excess requests get 429 with Retry-After. A refused request costs what its body would, so that
refusals are not free.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from penstock.errors import Busy
from penstock.gateway.gateway import Session
from penstock.gateway.model_calls import Answer

MINUTE_S = 60.0
BYTES_PER_TOKEN = 4
"""Of a refused body, which is not tokenized."""


@dataclass(slots=True)
class _SessionUsage:
    num_calls: int
    tokens_left: float
    counted_at: float


@dataclass(slots=True, kw_only=True)
class Quotas:
    """Tokens are charged after an answer, so a session may overdraw once and must then wait."""

    max_concurrent_calls: int = 256
    tokens_per_minute: int = 100_000_000
    """Prompt and answer tokens. Far above normal use; stops only a runaway loop."""
    clock: Callable[[], float] = time.monotonic
    _usage_by_session: WeakKeyDictionary[Session, _SessionUsage] = field(
        default_factory=WeakKeyDictionary[Session, _SessionUsage]
    )

    def check(self, session: Session) -> None:
        """Raise Busy if the session has overdrawn its tokens."""
        self._check_tokens(self._refill(session))

    def _check_tokens(self, usage: _SessionUsage) -> None:
        if usage.tokens_left < 0:
            wait_s = -usage.tokens_left * MINUTE_S / self.tokens_per_minute
            raise Busy(
                f"this session used more than {self.tokens_per_minute} tokens per minute; "
                f"retry in {wait_s:.1f} s",
                retry_after_s=wait_s,
            )

    @contextmanager
    def reserve(self, session: Session, num_calls: int) -> Generator[None]:
        """Reserve capacity for the calls until all have ended; raises Busy if there is too
        little."""
        usage = self._refill(session)
        if usage.num_calls + num_calls > self.max_concurrent_calls:
            raise Busy(
                f"{usage.num_calls} calls of this session are running (limit "
                f"{self.max_concurrent_calls}); wait until some end",
                retry_after_s=1.0,
            )
        self._check_tokens(usage)
        usage.num_calls += num_calls
        try:
            yield
        finally:
            usage.num_calls -= num_calls

    def charge(self, session: Session, answers: Iterable[Answer]) -> None:
        used = sum(
            answer.usage.prompt_tokens + answer.usage.completion_tokens for answer in answers
        )
        self._refill(session).tokens_left -= used

    def charge_refusal(self, session: Session, num_bytes: int) -> None:
        self._refill(session).tokens_left -= num_bytes / BYTES_PER_TOKEN

    def _refill(self, session: Session) -> _SessionUsage:
        now = self.clock()
        usage = self._usage_by_session.get(session.root)
        if usage is None:
            usage = _SessionUsage(0, float(self.tokens_per_minute), now)
            self._usage_by_session[session.root] = usage
        earned = (now - usage.counted_at) * self.tokens_per_minute / MINUTE_S
        usage.tokens_left = min(float(self.tokens_per_minute), usage.tokens_left + earned)
        usage.counted_at = now
        return usage
