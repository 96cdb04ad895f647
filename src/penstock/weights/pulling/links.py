# SPDX-License-Identifier: Apache-2.0
"""The fronts a puller may ask, one link to each: how fast it is, how long to wait for it.

Owns patience and measurement. Only the last front of a pull may sit out a long outage; another that
does not answer is left alone for a while. Decides nothing about versions and trusts no bytes.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from penstock.errors import BadRequest, NotFound, TooLarge, Unreachable, WeightsError
from penstock.wire.client import OUTAGE_S, REQUEST_S, AsyncCaller

T = TypeVar("T")
Transfer = Literal["auto", "delta", "full"]

ASK_S = 5.0
"""How long a front that does not answer is asked for deltas."""
MOMENT_S = 3.0
"""How long a front is tried that is not the last."""
SILENCE_S = 10.0
"""As long may it say nothing in mid-answer: a lossy link has such pauses."""
COMING_S = 300.0
"""How long it is believed that something is on its way to it."""
REST_S = 60.0
"""How long nobody asks it after that."""
MIN_SAMPLE_BYTES = 4 << 20
"""What takes less is mostly round trips, and says little about speed."""
KEEP = 0.5
"""Weight of all samples before the newest."""
FADE = 0.9
"""Of the seconds, each time a speed decided against its own use."""
PLAIN = {"accept-encoding": "identity"}


class Speed:
    """Bytes per second: a mean that forgets."""

    def __init__(self, *, num_unlike: int = 0) -> None:
        """The first `num_unlike` samples are not like the rest."""
        self._num_unlike = num_unlike
        self._bytes = 0.0
        self._s = 0.0

    @property
    def bytes_per_s(self) -> float | None:
        """None before the first sample."""
        return self._bytes / self._s if self._s else None

    def add(self, num_bytes: int, took_s: float) -> None:
        if num_bytes < MIN_SAMPLE_BYTES or took_s <= 0:
            return
        if self._num_unlike:
            self._num_unlike -= 1
            return
        self._bytes = KEEP * self._bytes + num_bytes
        self._s = KEEP * self._s + took_s

    def doubt(self) -> None:
        """Take it for a little faster: what is too slow to be used is never measured again."""
        self._s *= FADE


def takes_delta(
    transfer: Transfer,
    *,
    delta_bytes: int,
    file_bytes: int,
    link_bytes_per_s: float | None,
    making_bytes_per_s: float | None,
) -> bool:
    """Is the way along deltas to be taken: the file is expected sooner so than whole, or nobody
    knows."""
    if transfer != "auto":
        return transfer == "delta"
    if link_bytes_per_s is None or making_bytes_per_s is None:
        return True
    delta_s = delta_bytes / link_bytes_per_s + file_bytes / making_bytes_per_s
    return delta_s < file_bytes / link_bytes_per_s


@dataclass(slots=True)
class Link:
    """What is known of one front, over all pulls."""

    speed: Speed = field(default_factory=Speed)
    rests_until_s: float = 0.0
    """By the monotonic clock."""
    num_under_way: int = 0
    busy_since_s: float = 0.0
    busy_bytes: int = 0
    """Came since then."""

    def begin(self) -> None:
        if not self.num_under_way:
            self.busy_since_s, self.busy_bytes = time.monotonic(), 0
        self.num_under_way += 1

    def end(self, num_bytes: int) -> None:
        self.num_under_way -= 1
        self.busy_bytes += num_bytes
        if not self.num_under_way:
            self.speed.add(self.busy_bytes, time.monotonic() - self.busy_since_s)


class Front:
    """One front in one pull."""

    def __init__(self, caller: AsyncCaller, link: Link, *, is_last: bool) -> None:
        self._caller = caller
        self._link = link
        self._is_last = is_last

    @property
    def url(self) -> str:
        return self._caller.base_url

    @property
    def bytes_per_s(self) -> float | None:
        return self._link.speed.bytes_per_s

    @property
    def is_worth_asking(self) -> bool:
        return self._is_last or time.monotonic() >= self._link.rests_until_s

    async def ask(self, path: str, kind: type[T]) -> T:
        return await self._caller.call("GET", path, None, kind, deadline_s=ASK_S, timeout_s=ASK_S)

    async def get(
        self, path: str, max_bytes: int, what: str, headers: dict[str, str] | None = None
    ) -> bytes:
        """The body of an answer; WeightsError when this front has none."""
        num_bytes = 0
        self._link.begin()
        try:
            body = await self._wait_for(path, {**PLAIN, **(headers or {})}, max_bytes)
            num_bytes = len(body)
            return body
        except (BadRequest, NotFound, TooLarge) as error:
            raise WeightsError(f"{what}: {error}") from error
        except Unreachable:
            self._link.rests_until_s = time.monotonic() + REST_S
            raise
        finally:
            self._link.end(num_bytes)

    async def _wait_for(self, path: str, headers: dict[str, str], max_bytes: int) -> bytes:
        began_at = time.monotonic()
        deadline_s, silence_s = (OUTAGE_S, REQUEST_S) if self._is_last else (MOMENT_S, SILENCE_S)
        while True:
            try:
                answer = await self._caller.request(
                    "GET",
                    path,
                    headers=headers,
                    max_answer_bytes=max_bytes,
                    deadline_s=deadline_s,
                    timeout_s=silence_s,
                )
                return answer.content
            except Unreachable as error:
                is_late = self._is_last or time.monotonic() > began_at + COMING_S
                if is_late or not _is_coming(error):
                    raise


def _is_coming(error: Unreachable) -> bool:
    """Did it answer that it will have this soon?"""
    said = error.__cause__
    return isinstance(said, Unreachable) and said.retry_after_s is not None


def fronts_of(callers: Sequence[AsyncCaller], links: dict[str, Link]) -> list[Front]:
    """In order of preference; what is learned about them goes to `links`."""
    return [
        Front(
            caller,
            links.setdefault(caller.base_url, Link()),
            is_last=number == len(callers),
        )
        for number, caller in enumerate(callers, 1)
    ]
