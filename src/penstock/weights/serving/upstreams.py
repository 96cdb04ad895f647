# SPDX-License-Identifier: Apache-2.0
"""A relay's upstream weight servers, in order of preference.

Owns the order and failover. Trusts none of them: the caller verifies each response, and an upstream
whose response is rejected is demoted for a while.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import httpx2
import structlog

from penstock.errors import BadRequest, NotFound, Unreachable, WeightsError, WireError
from penstock.weights.manifest import MAX_FILE_BYTES
from penstock.wire.client import NO_COMPRESSION, AsyncServiceClient

log = structlog.get_logger(__name__)
T = TypeVar("T")
DEMOTE_S = 60.0
"""How long a failed upstream is tried last."""
IDLE_TIMEOUT_S = 8.0
"""Timeout without data from an upstream; shorter than readers allow a relay."""
START_S = 60.0
MIN_BYTES_PER_S = 4 << 10
"""An answer that takes longer than START_S and this rate allow is given up, what came of a blob is
kept: one that sends a byte now and then is never silent."""
MAX_COUNTED_BYTES = 1 << 20
"""Of an answer whose size is not known: no manifest may take hours."""
SLOW_DEMOTE_S = 1800.0
"""How long such an upstream is tried last."""
CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")


@dataclass(slots=True, eq=False)
class Upstream:
    caller: AsyncServiceClient
    demoted_until: float = 0.0

    @property
    def url(self) -> str:
        return self.caller.base_url

    def demote(self, reason: object, for_s: float = DEMOTE_S) -> None:
        if self.demoted_until < time.monotonic():
            log.warning(
                "upstream failed, trying others first",
                url=self.url,
                error=str(reason),
                for_s=for_s,
            )
        self.demoted_until = max(self.demoted_until, time.monotonic() + for_s)

    @asynccontextmanager
    async def no_slower(self, num_bytes: int) -> AsyncGenerator[None]:
        """Raise Unreachable if receiving this many bytes takes too long."""
        limit_s = START_S + num_bytes / MIN_BYTES_PER_S
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            slow = f"did not send {num_bytes} bytes within {limit_s:.0f} s"
            self.demote(slow, SLOW_DEMOTE_S)
            raise Unreachable(f"{self.url} {slow}") from None

    async def get(self, path: str, max_bytes: int, **headers: str) -> httpx2.Response:
        async with self.no_slower(min(max_bytes, MAX_COUNTED_BYTES)):
            return await self.caller.request(
                "GET",
                path,
                headers=headers | NO_COMPRESSION,
                max_response_bytes=max_bytes,
                deadline_s=0.0,
                timeout_s=IDLE_TIMEOUT_S,
            )

    async def head(self, blob: str, num_bytes: int) -> tuple[bytes, int]:
        """The first `num_bytes` of a blob, and its total size."""
        answer = await self.get(f"/v1/blobs/{blob}", num_bytes, range=f"bytes=0-{num_bytes - 1}")
        size = _size(answer.headers.get("content-range", ""), 0, num_bytes)
        if len(answer.content) != min(num_bytes, size):
            raise WeightsError(f"{self.url} sent {len(answer.content)} bytes of a blob of {size}")
        return answer.content, size

    async def part(self, blob: str, start: int, end: int, num_bytes: int) -> AsyncGenerator[bytes]:
        """Stream a range of a blob with `num_bytes` in total; raises at the end if bytes are
        missing."""
        headers = {"range": f"bytes={start}-{end - 1}", **NO_COMPRESSION}
        path = f"/v1/blobs/{blob}"
        async with self.caller.stream(path, headers=headers, timeout_s=IDLE_TIMEOUT_S) as answer:
            size = _size(answer.headers.get("content-range", ""), start, end)
            if size != num_bytes:
                raise SizeMismatch(
                    f"{self.url}: blob has {size} bytes, another upstream said {num_bytes}"
                )
            async for chunk in answer.aiter_raw():
                start += len(chunk)
                if start > end:
                    raise WeightsError(f"{self.url} sent more bytes than requested")
                yield chunk
        if start < end:
            raise WeightsError(f"{self.url} sent {end - start} bytes less than requested")


class SizeMismatch(WeightsError):
    """Two upstreams disagree about the size of a blob."""


class Upstreams:
    def __init__(self, callers: Sequence[AsyncServiceClient]) -> None:
        assert callers, "a relay needs at least one upstream"
        self._all = [Upstream(caller) for caller in callers]

    def __len__(self) -> int:
        return len(self._all)

    async def try_each(self, get: Callable[[Upstream], Awaitable[T]]) -> T:
        """Result of the first upstream that succeeds. If all fail, Unreachable has `retry_after_s`
        only if an upstream gave one; without it the caller should try another server."""
        errors: list[WireError] = []
        for upstream in self._in_order():
            try:
                return await get(upstream)
            except (WireError, WeightsError) as error:
                errors.append(_classify(upstream, error))
        raise _combine_errors(errors)

    def _in_order(self) -> list[Upstream]:
        now = time.monotonic()
        return sorted(self._all, key=lambda upstream: max(upstream.demoted_until, now))


def _classify(upstream: Upstream, error: WireError | WeightsError) -> WireError:
    """Demote an upstream that failed, but not one that lacks the item or will have it soon."""
    if isinstance(error, (NotFound, BadRequest)):
        return error
    # A client that did not retry reports only that; the upstream's answer is the cause.
    for cause in (error, error.__cause__):
        if isinstance(cause, WireError) and cause.retry_after_s is not None:
            return cause
    upstream.demote(error)
    return Unreachable(f"upstream {upstream.url} failed: {error}")


def _combine_errors(errors: Sequence[WireError]) -> WireError:
    hinted = [error for error in errors if error.retry_after_s is not None]
    if hinted:
        return min(hinted, key=lambda error: error.retry_after_s or 0.0)
    if all(isinstance(error, (NotFound, BadRequest)) for error in errors):
        return errors[-1]
    details = "; ".join(str(error) for error in errors)
    return Unreachable(f"not in this relay's cache, and all upstreams failed: {details}")


def _size(content_range: str, start: int, end: int) -> int:
    """Total size of the blob from a Content-Range header; raises if the range is not the requested
    one."""
    parsed = CONTENT_RANGE.fullmatch(content_range)
    first, last, size = map(int, parsed.groups()) if parsed else (-1, -1, 0)
    if first != start or last != min(end, size) - 1 or size > MAX_FILE_BYTES:
        raise WeightsError(
            f"requested bytes {start}-{end - 1}, got Content-Range {content_range[:80]!r}"
        )
    return size
