# SPDX-License-Identifier: Apache-2.0
"""Where a relay asks for what it does not hold: fronts in order of preference.

Owns the order, and whose turn it is after a failure. Trusts none of them: whoever asks checks the
answer, and a front whose answer he refuses is asked last for a while.
"""

from __future__ import annotations

import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import structlog

from penstock.errors import BadRequest, NotFound, Unreachable, WeightsError, WireError
from penstock.weights.manifest import MAX_FILE_BYTES
from penstock.wire.client import AsyncServiceClient

log = structlog.get_logger(__name__)
T = TypeVar("T")
DEMOTE_S = 60.0
"""How long a front that failed is asked last."""
IDLE_TIMEOUT_S = 8.0
"""Without a byte from a front; less than readers grant a relay."""
CONTENT_RANGE = re.compile(r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18})")
NO_COMPRESSION = {"accept-encoding": "identity"}


@dataclass(slots=True, eq=False)
class Upstream:
    caller: AsyncServiceClient
    demoted_until: float = 0.0

    @property
    def url(self) -> str:
        return self.caller.base_url

    def demote(self, why: object) -> None:
        if self.demoted_until < time.monotonic():
            log.warning("upstream is of no use now", url=self.url, why=str(why), for_s=DEMOTE_S)
        self.demoted_until = time.monotonic() + DEMOTE_S

    async def get(self, path: str, max_bytes: int) -> bytes:
        answer = await self.caller.request(
            "GET",
            path,
            headers=NO_COMPRESSION,
            max_response_bytes=max_bytes,
            deadline_s=0.0,
            timeout_s=IDLE_TIMEOUT_S,
        )
        return answer.content

    async def head(self, blob: str, num_bytes: int) -> tuple[bytes, int]:
        """The first so many bytes of a blob, and how many there are."""
        answer = await self.caller.request(
            "GET",
            f"/v1/blobs/{blob}",
            headers={"range": f"bytes=0-{num_bytes - 1}", **NO_COMPRESSION},
            max_response_bytes=num_bytes,
            deadline_s=0.0,
            timeout_s=IDLE_TIMEOUT_S,
        )
        size = _size(answer.headers.get("content-range", ""), 0, num_bytes)
        if len(answer.content) != min(num_bytes, size):
            raise WeightsError(f"{self.url} sent {len(answer.content)} bytes of a blob of {size}")
        return answer.content, size

    async def part(self, blob: str, start: int, end: int, num_bytes: int) -> AsyncGenerator[bytes]:
        """These bytes of a blob of so many, as they come: all of them, or an error at the end."""
        headers = {"range": f"bytes={start}-{end - 1}", **NO_COMPRESSION}
        path = f"/v1/blobs/{blob}"
        async with self.caller.stream(path, headers=headers, timeout_s=IDLE_TIMEOUT_S) as answer:
            size = _size(answer.headers.get("content-range", ""), start, end)
            if size != num_bytes:
                raise SizeMismatch(f"{self.url}: {size} bytes where another said {num_bytes}")
            async for chunk in answer.aiter_raw():
                start += len(chunk)
                if start > end:
                    raise WeightsError(f"{self.url} sent more than it was asked for")
                yield chunk
        if start < end:
            raise WeightsError(f"{self.url} sent {end - start} bytes less than it was asked for")


class SizeMismatch(WeightsError):
    """Two fronts disagree about the size of a blob."""


class Upstreams:
    def __init__(self, callers: Sequence[AsyncServiceClient]) -> None:
        assert callers, "a relay has at least one upstream"
        self._all = [Upstream(caller) for caller in callers]

    def __len__(self) -> int:
        return len(self._all)

    async def ask(self, get: Callable[[Upstream], Awaitable[T]]) -> T:
        """From the first that can. Where none can, Unreachable has a hint when to ask again only if
        one of them gave it: who gets none turns elsewhere."""
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
    """A front that failed is shunned; one that lacks the thing, or will have it soon, is not."""
    if isinstance(error, (NotFound, BadRequest)):
        return error
    # A caller that did not try again says only that; the reason is the front's own answer.
    for told in (error, error.__cause__):
        if isinstance(told, WireError) and told.retry_after_s is not None:
            return told
    upstream.demote(error)
    return Unreachable(f"{upstream.url} is of no use now: {error}")


def _combine_errors(errors: Sequence[WireError]) -> WireError:
    hinted = [error for error in errors if error.retry_after_s is not None]
    if hinted:
        return min(hinted, key=lambda error: error.retry_after_s or 0.0)
    if all(isinstance(error, (NotFound, BadRequest)) for error in errors):
        return errors[-1]
    told = "; ".join(str(error) for error in errors)
    return Unreachable(f"this relay does not hold it and cannot get it: {told}")


def _size(content_range: str, start: int, end: int) -> int:
    """Of the whole blob, when the range is the one asked for or what the blob has of it."""
    match = CONTENT_RANGE.fullmatch(content_range)
    first, last, size = map(int, match.groups()) if match else (-1, -1, 0)
    if first != start or last != min(end, size) - 1 or size > MAX_FILE_BYTES:
        raise WeightsError(f"asked for bytes {start}-{end - 1} it sent {content_range[:80]!r}")
    return size
