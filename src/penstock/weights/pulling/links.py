# SPDX-License-Identifier: Apache-2.0
"""Links to weight servers: measured speed and wait times.

Owns timeouts and measurement. Only the last server of a pull is waited for during a long outage;
any other that does not respond is skipped for a while. Decides nothing about versions and trusts no
data.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeVar

import httpx2

from penstock.errors import BadRequest, NotFound, TooLarge, Unreachable, WeightsError
from penstock.wire.client import (
    NO_COMPRESSION,
    REQUEST_TIMEOUT_S,
    RETRY_DEADLINE_S,
    AsyncServiceClient,
)
from penstock.wire.codec import MSGPACK, decode

T = TypeVar("T")
Transfer = Literal["auto", "delta", "full"]

MAX_RECORD_BYTES = 64 << 10
"""Most bytes of an answer about deltas: 32 steps of 300 bytes."""
QUERY_TIMEOUT_S = 5.0
"""Timeout for a delta request to an unresponsive server."""
TRY_TIMEOUT_S = 3.0
"""How long to retry a server that is not the last."""
IDLE_TIMEOUT_S = 10.0
"""Longest pause allowed inside a response; lossy links stall this long."""
PENDING_TIMEOUT_S = 300.0
"""How long to keep waiting for a server that answers "not ready yet"."""
BACKOFF_S = 60.0
"""How long a failed server is skipped after that."""
MIN_BYTES_PER_S = 16 << 10
"""A server that is slower than this on one connection is left, unless it is the last."""
SLOW_BACKOFF_S = 1800.0
"""How long it is then skipped."""
MIN_SAMPLE_BYTES = 4 << 20
"""Shorter transfers are dominated by round trips and are not measured."""
HISTORY_WEIGHT = 0.5
"""Weight of all earlier samples against the newest."""
DECAY = 0.9
"""Factor on the measured seconds each time a speed ruled out its own path."""


class Throughput:
    """Bytes per second, as an exponential moving average."""

    def __init__(self, *, num_warmup: int = 0) -> None:
        """Ignores the first `num_warmup` samples."""
        self._num_unlike = num_warmup
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
        self._bytes = HISTORY_WEIGHT * self._bytes + num_bytes
        self._s = HISTORY_WEIGHT * self._s + took_s

    def decay(self) -> None:
        """Assume slightly more speed: a path too slow to be used would never be measured again."""
        self._s *= DECAY


def prefers_delta(
    transfer: Transfer,
    *,
    delta_bytes: int,
    file_bytes: int,
    link_bytes_per_s: float | None,
    rebuild_bytes_per_s: float | None,
) -> bool:
    """True if deltas are expected to be faster than the full file, or if there are no measurements
    yet."""
    if transfer != "auto":
        return transfer == "delta"
    if link_bytes_per_s is None or rebuild_bytes_per_s is None:
        return True
    delta_s = delta_bytes / link_bytes_per_s + file_bytes / rebuild_bytes_per_s
    return delta_s < file_bytes / link_bytes_per_s


@dataclass(slots=True)
class LinkStats:
    """Measurements of one weight server, across pulls."""

    speed: Throughput = field(default_factory=Throughput)
    backoff_until_s: float = 0.0
    """Monotonic time."""
    num_in_flight: int = 0
    busy_since_s: float = 0.0
    busy_bytes: int = 0
    """Bytes received since then."""

    def start(self) -> None:
        if not self.num_in_flight:
            self.busy_since_s, self.busy_bytes = time.monotonic(), 0
        self.num_in_flight += 1

    def end(self, num_bytes: int) -> None:
        self.num_in_flight -= 1
        self.busy_bytes += num_bytes
        if not self.num_in_flight:
            self.speed.add(self.busy_bytes, time.monotonic() - self.busy_since_s)


@dataclass(frozen=True, slots=True)
class WeightServerClient:
    """One weight server, as used by one pull."""

    caller: AsyncServiceClient
    link: LinkStats
    is_last: bool

    @property
    def url(self) -> str:
        return self.caller.base_url

    @property
    def is_usable(self) -> bool:
        return self.is_last or time.monotonic() >= self.link.backoff_until_s

    @asynccontextmanager
    async def no_slower(self, num_bytes: int) -> AsyncGenerator[None]:
        """Raise Unreachable, and skip this server for a while, if receiving this many bytes takes
        too long: one that sends a byte now and then is never silent. The last one may be slow."""
        limit_s = PENDING_TIMEOUT_S + num_bytes / MIN_BYTES_PER_S
        try:
            async with asyncio.timeout(None if self.is_last else limit_s):
                yield
        except TimeoutError:
            self.link.backoff_until_s = time.monotonic() + SLOW_BACKOFF_S
            raise Unreachable(
                f"{self.url} did not finish an answer within {limit_s:.0f} s; it is skipped for "
                f"{SLOW_BACKOFF_S:.0f} s"
            ) from None

    async def request(self, path: str, kind: type[T]) -> T:
        """A record."""
        answer = await self.ask(path, MAX_RECORD_BYTES)
        media_type = answer.headers.get("content-type", MSGPACK)
        return decode(answer.content, kind, media_type=media_type)

    async def ask(self, path: str, max_bytes: int) -> httpx2.Response:
        """An answer without waiting for a busy server; a compressed one, or one that is too long,
        is not read."""
        async with self.no_slower(0):
            return await self.caller.request(
                "GET",
                path,
                headers=NO_COMPRESSION,
                max_response_bytes=max_bytes,
                deadline_s=QUERY_TIMEOUT_S,
                timeout_s=QUERY_TIMEOUT_S,
            )

    async def get(
        self, path: str, max_bytes: int, what: str, headers: dict[str, str] | None = None
    ) -> bytes:
        """The response body; raises WeightsError if this server cannot provide it."""
        num_bytes = 0
        self.link.start()
        try:
            body = await self._wait_for(path, {**NO_COMPRESSION, **(headers or {})}, max_bytes)
            num_bytes = len(body)
            return body
        except (BadRequest, NotFound, TooLarge) as error:
            raise WeightsError(f"{what}: {error}") from error
        except Unreachable:
            self.link.backoff_until_s = time.monotonic() + BACKOFF_S
            raise
        finally:
            self.link.end(num_bytes)

    async def _wait_for(self, path: str, headers: dict[str, str], max_bytes: int) -> bytes:
        started_at = time.monotonic()
        deadline_s, idle_timeout_s = TRY_TIMEOUT_S, IDLE_TIMEOUT_S
        if self.is_last:
            deadline_s, idle_timeout_s = RETRY_DEADLINE_S, REQUEST_TIMEOUT_S
        while True:
            try:
                answer = await self.caller.request(
                    "GET",
                    path,
                    headers=headers,
                    max_response_bytes=max_bytes,
                    deadline_s=deadline_s,
                    timeout_s=idle_timeout_s,
                )
                return answer.content
            except Unreachable as error:
                is_late = self.is_last or time.monotonic() > started_at + PENDING_TIMEOUT_S
                if is_late or not _is_pending(error):
                    raise


def _is_pending(error: Unreachable) -> bool:
    """True if the server answered that it will be ready soon."""
    cause = error.__cause__
    return isinstance(cause, Unreachable) and cause.retry_after_s is not None


def weight_server_clients(
    callers: Sequence[AsyncServiceClient], links: dict[str, LinkStats]
) -> list[WeightServerClient]:
    """Clients in order of preference; their measurements are kept in `links`."""
    return [
        WeightServerClient(
            caller, links.setdefault(caller.base_url, LinkStats()), caller is callers[-1]
        )
        for caller in callers
    ]
