# SPDX-License-Identifier: Apache-2.0
"""How much one session may ask for: calls at a time, and tokens per minute. Whoever asks for more
is told when to come back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

from penstock.errors import Busy
from penstock.gateway.gateway import Session
from penstock.gateway.model_calls import Answer

MAX_CONCURRENT_CALLS = 256
TOKENS_PER_MINUTE = 100_000_000
"""Prompt and answer; far above what an agent uses, and below what a loop gone wild would."""
MINUTE_S = 60.0


@dataclass(slots=True)
class _SessionUsage:
    num_calls: int
    tokens_left: float
    counted_at: float


class Quotas:
    """Tokens are counted when an answer is there, so a session may overdraw once and then waits."""

    def __init__(
        self,
        *,
        max_concurrent_calls: int,
        tokens_per_minute: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_concurrent_calls = max_concurrent_calls
        self._tokens_per_minute = tokens_per_minute
        self._clock = clock
        self._uses: WeakKeyDictionary[Session, _SessionUsage] = WeakKeyDictionary()

    @contextmanager
    def hold(self, session: Session, num_calls: int) -> Generator[None]:
        """A place for each call until all have ended; Busy without enough of them."""
        use = self._refill(session)
        if use.num_calls + num_calls > self._max_concurrent_calls:
            raise Busy(
                f"{use.num_calls} calls of this session are running, and at most "
                f"{self._max_concurrent_calls} may; wait for some to end",
                retry_after_s=1.0,
            )
        if use.tokens_left < 0:
            wait_s = -use.tokens_left * MINUTE_S / self._tokens_per_minute
            raise Busy(
                f"this session used more than {self._tokens_per_minute} tokens in a minute; "
                f"come back in {wait_s:.1f} s",
                retry_after_s=wait_s,
            )
        use.num_calls += num_calls
        try:
            yield
        finally:
            use.num_calls -= num_calls

    def charge(self, session: Session, answers: Iterable[Answer]) -> None:
        used = sum(
            answer.usage.prompt_tokens + answer.usage.completion_tokens for answer in answers
        )
        self._refill(session).tokens_left -= used

    def _refill(self, session: Session) -> _SessionUsage:
        now = self._clock()
        use = self._uses.get(session)
        if use is None:
            use = self._uses[session] = _SessionUsage(0, float(self._tokens_per_minute), now)
        earned = (now - use.counted_at) * self._tokens_per_minute / MINUTE_S
        use.tokens_left = min(float(self._tokens_per_minute), use.tokens_left + earned)
        use.counted_at = now
        return use
