# SPDX-License-Identifier: Apache-2.0
"""HTTP calls with a deadline, retries and typed errors; an asynchronous and a synchronous client.

Every mutating call of penstock is idempotent by a client-chosen id, so a call without a response is
retried with jittered back-off until its deadline. A call that is refused with 401 is made once more
with the newest token of this process. Variables of the environment name no proxy: it would see the
token.
"""

from __future__ import annotations

import asyncio
import math
import random
import ssl
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import asynccontextmanager, contextmanager
from typing import TypeVar

import httpx2
import structlog

from penstock.errors import (
    WIRE_ERRORS,
    BadRequest,
    Busy,
    StorageFull,
    TlsError,
    TooLarge,
    Unreachable,
    WireError,
)
from penstock.redaction import excerpt
from penstock.wire.codec import JSON, MSGPACK, decode, encode
from penstock.wire.held_token import HeldToken, Token, held
from penstock.wire.routes import ErrorResponse
from penstock.wire.trust import client_context

log = structlog.get_logger(__name__)

T = TypeVar("T")
RETRY_DEADLINE_S = 600.0
"""How long to retry during an outage of a service before giving up."""
REQUEST_TIMEOUT_S = 30.0
NO_COMPRESSION = {"accept-encoding": "identity"}
"""Header for a response that must have a declared length."""
MAX_ERROR_BYTES = 512 << 10
MAX_SHOWN_BYTES = 8 << 10
"""Most bytes of an error that a bounded call reads: the longest message fits."""
MAX_CONNECTIONS = 64
IDLE_S = 60.0
"""Services close a connection that was idle for 75 s; a new one costs two round trips with TLS."""
WARN_AFTER_S = 3.0
"""Log a warning after this many seconds of retrying, then every ten times that."""


MAX_RETRY_AFTER_S = 30.0
"""A service cannot make a client wait longer than this before the next attempt."""
MAX_RESPONSE_BYTES = 4 << 30
"""Of a call without another limit: more than the rows of a batch."""
_HEADERS = {"accept": MSGPACK, "content-type": MSGPACK, **NO_COMPRESSION}


class _Bearer(httpx2.Auth):
    """Sends the newest token of this process."""

    def __init__(self, token: Token) -> None:
        self._held: HeldToken = held(token)

    def auth_flow(
        self, request: httpx2.Request
    ) -> Generator[httpx2.Request, httpx2.Response, None]:
        sent = self._held.value()
        request.headers["authorization"] = f"Bearer {sent}"
        response = yield request
        if response.status_code == 401 and (newest := self._held.reload()) != sent:
            request.headers["authorization"] = f"Bearer {newest}"
            yield request


def _parse_retry_after(value: str) -> float | None:
    """Seconds, bounded; None for anything else, such as a date."""
    try:
        wait_s = float(value) if value.isascii() else math.nan
    except ValueError:
        return None
    return min(wait_s, MAX_RETRY_AFTER_S) if wait_s >= 0 else None


def _text_of(response: httpx2.Response) -> str:
    """The start of it, as UTF-8. `response.text` takes the codec that the server names, among them
    some that raise what no caller expects, and some that take the square of the text."""
    return response.content[:MAX_SHOWN_BYTES].decode("utf-8", "replace")


def _raise_for_status(response: httpx2.Response, url: str) -> None:
    if response.status_code < 400:
        return
    try:
        error = decode(response.content, ErrorResponse, media_type=JSON).error
        code, message = error.code, error.message
    except BadRequest:
        code, message = "", excerpt(_text_of(response), 200, 0)
    kind = WIRE_ERRORS.get(code, WireError)
    raise kind(
        excerpt(f"{url}: {response.status_code} {message}"),  # it may echo our token
        retry_after_s=_parse_retry_after(response.headers.get("retry-after", "")),
    )


def _decode(response: httpx2.Response, kind: type[T]) -> T:
    media_type = response.headers.get("content-type", MSGPACK)
    return decode(response.content, kind, media_type=media_type)


def _check_length(response: httpx2.Response, url: str, max_bytes: int | None) -> None:
    """Raise TooLarge, or for an error WireError, unless the response has a length within the limit.
    Errors have a separate limit."""
    if max_bytes is None:
        return
    refusal: type[WireError] = TooLarge
    if response.status_code >= 400:
        refusal, max_bytes = WireError, MAX_ERROR_BYTES
    declared = response.headers.get("content-length", "")
    is_coded = not {"content-encoding", "transfer-encoding"}.isdisjoint(response.headers)
    if is_coded or not declared.isdigit():  # chunks are read whatever length stands beside them
        raise refusal(f"{url}: response of unknown length; the limit is {max_bytes} bytes")
    if int(declared) > max_bytes:
        raise refusal(f"{url}: response of {declared} bytes; the limit is {max_bytes}")


def _is_declared(response: httpx2.Response, url: str, max_bytes: int) -> bool:
    """Whether it says how long it is, and is no longer than the limit; else TooLarge. One that was
    packed unasked could be of any length."""
    if response.headers.get("content-encoding", "identity") != "identity":
        raise TooLarge(f"{url}: packed response of unknown length; the limit is {max_bytes} bytes")
    declared = response.headers.get("content-length", "")
    if "transfer-encoding" in response.headers or not declared.isdigit():
        return False
    if int(declared) > max_bytes:
        raise TooLarge(f"{url}: response of {declared} bytes; the limit is {max_bytes}")
    return True


class _Body:
    """Of a response that does not say how long it is; TooLarge beyond the limit."""

    def __init__(self, url: str, max_bytes: int) -> None:
        self._url = url
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._pieces: list[bytes] = []

    def add(self, piece: bytes) -> None:
        self._num_bytes += len(piece)
        if self._num_bytes > self._max_bytes:
            raise TooLarge(f"{self._url}: response without end; the limit is {self._max_bytes}")
        self._pieces.append(piece)

    def of(self, response: httpx2.Response) -> httpx2.Response:
        content = b"".join(self._pieces)
        return httpx2.Response(response.status_code, headers=response.headers, content=content)


def _is_transient(error: Exception) -> bool:
    """Whether to retry: no response, or the service is temporarily unable to respond."""
    transient = (httpx2.TransportError, Busy, StorageFull, Unreachable)
    return isinstance(error, transient) or type(error) is WireError


_TLS_INTERRUPTED = (ssl.SSLEOFError, ssl.SSLZeroReturnError, ssl.SSLWantReadError)
"""The service ended the connection, as in a restart."""


def _tls_failure(error: BaseException | None) -> ssl.SSLError | None:
    """The TLS failure behind this error, if there is one that a retry cannot mend."""
    while error is not None:
        if isinstance(error, ssl.SSLError):
            return None if isinstance(error, _TLS_INTERRUPTED) else error
        error = error.__cause__ or error.__context__
    return None


def _describe_tls_failure(url: str, failed: ssl.SSLError) -> str:
    if isinstance(failed, ssl.SSLCertVerificationError):
        return (
            f"{url}: the certificate of the service is not trusted ({failed.verify_message}). Pass "
            "--ca with the ca.pem of the run (or set PENSTOCK_CA), and use a host name that the "
            "certificate is for; `penstock tls init` renews an expired one"
        )
    return (
        f"{url}: no TLS connection ({failed.reason or failed}); check that the service has TLS "
        "(network.tls in the run file, or --tls-cert and --tls-key), or use http:// on its own host"
    )


class _RetryState:
    """Retries of one call: the delay after an error, when to warn, when to give up."""

    def __init__(self, url: str, deadline_s: float, is_stopping: Callable[[], bool]) -> None:
        self._url = url
        self._deadline_s = deadline_s
        self._is_stopping = is_stopping
        self._started_at = time.monotonic()
        self._warn_at = self._started_at + WARN_AFTER_S
        self._attempt = 0

    def next_delay_s(self, error: Exception) -> float:
        """Seconds until the next attempt; raises if there is none."""
        if not _is_transient(error):
            raise error
        if (failed := _tls_failure(error)) is not None:
            raise TlsError(_describe_tls_failure(self._url, failed)) from error
        suggested_s = error.retry_after_s if isinstance(error, WireError) else None
        delay_s = suggested_s or random.uniform(0.5, 1.0) * min(2.0, 0.05 * 2**self._attempt)
        self._attempt += 1
        now = time.monotonic()
        why = f"{type(error).__name__}: {error}"
        if self._is_stopping():
            raise Unreachable(f"stopped while waiting for {self._url} ({why})") from error
        if now + delay_s > self._started_at + self._deadline_s:
            raise Unreachable(
                f"no response from {self._url} for {self._deadline_s:g} s ({why}); "
                "check that the service is running: `penstock status RUN`"
            ) from error
        if now >= self._warn_at:
            left_s = round(self._started_at + self._deadline_s - now)
            log.warning("no response yet, retrying", url=self._url, why=why, for_s=left_s)
            self._warn_at = now + 10 * WARN_AFTER_S
        return delay_s


class AsyncServiceClient:
    """Calls one service from an event loop."""

    def __init__(self, base_url: str, token: Token, *, idle_s: float = IDLE_S) -> None:
        """`idle_s`: how long connections are kept for the next call; the service keeps them
        longer."""
        self.base_url = base_url.rstrip("/")
        self._http = httpx2.AsyncClient(
            headers=_HEADERS,
            auth=_Bearer(token),
            limits=httpx2.Limits(
                max_connections=MAX_CONNECTIONS,
                max_keepalive_connections=MAX_CONNECTIONS,
                keepalive_expiry=idle_s,
            ),
            timeout=REQUEST_TIMEOUT_S,
            trust_env=False,
            verify=client_context(base_url),
        )

    async def close(self) -> None:
        await self._http.aclose()

    async def call(
        self,
        method: str,
        path: str,
        body: object,
        kind: type[T],
        *,
        deadline_s: float = RETRY_DEADLINE_S,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> T:
        content = None if body is None else encode(body)
        raw = await self.request(method, path, content, deadline_s=deadline_s, timeout_s=timeout_s)
        return _decode(raw, kind)

    async def request(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        *,
        deadline_s: float = RETRY_DEADLINE_S,
        timeout_s: float = REQUEST_TIMEOUT_S,
        headers: dict[str, str] | None = None,
        max_response_bytes: int | None = None,
    ) -> httpx2.Response:
        """With `max_response_bytes`, a response that is longer or of undeclared length is not read
        and raises TooLarge."""
        url = self.base_url + path
        retry = _RetryState(url, deadline_s, lambda: False)
        while True:
            try:
                async with self._http.stream(
                    method, url, content=content, timeout=timeout_s, headers=headers
                ) as response:
                    _check_length(response, url, max_response_bytes)
                    if _is_declared(response, url, MAX_RESPONSE_BYTES):
                        await response.aread()
                    else:
                        body = _Body(url, MAX_RESPONSE_BYTES)
                        async for piece in response.aiter_raw():
                            body.add(piece)
                        response = body.of(response)
                _raise_for_status(response, url)
                return response
            except (httpx2.TransportError, WireError) as error:
                delay_s = retry.next_delay_s(error)
            await asyncio.sleep(delay_s)

    @asynccontextmanager
    async def stream(
        self, path: str, *, headers: dict[str, str], timeout_s: float = REQUEST_TIMEOUT_S
    ) -> AsyncGenerator[httpx2.Response]:
        """One GET whose body is streamed; no retries."""
        url = self.base_url + path
        try:
            async with self._http.stream(
                "GET", url, headers=headers, timeout=timeout_s
            ) as response:
                if response.status_code >= 400:
                    _check_length(response, url, MAX_ERROR_BYTES)
                    await response.aread()
                _raise_for_status(response, url)
                yield response
        except httpx2.TransportError as error:
            raise Unreachable(f"{url}: {type(error).__name__}: {error}") from error


@asynccontextmanager
async def connect(base_url: str, token: Token) -> AsyncGenerator[AsyncServiceClient]:
    caller = AsyncServiceClient(base_url, token)
    try:
        yield caller
    finally:
        await caller.close()


class ServiceClient:
    """Calls one service from synchronous code: the trainer, the command line."""

    def __init__(
        self,
        base_url: str,
        token: Token,
        *,
        is_stopping: Callable[[], bool] = lambda: False,
        max_response_bytes: int = MAX_RESPONSE_BYTES,
        answer_s: float | None = None,
    ) -> None:
        """`answer_s`: cut off a service that has not answered in full by then, however much it
        sends: one that the folder of another user names."""
        self.base_url = base_url.rstrip("/")
        self._token = token
        self._max_response_bytes = max_response_bytes
        self._answer_s = answer_s
        self._is_stopping = is_stopping
        self._http = self._open()

    def _open(self) -> httpx2.Client:
        return httpx2.Client(
            headers=_HEADERS,
            auth=_Bearer(self._token),
            timeout=REQUEST_TIMEOUT_S,
            trust_env=False,
            verify=client_context(self.base_url),
        )

    def close(self) -> None:
        self._http.close()

    def call(
        self,
        method: str,
        path: str,
        body: object,
        kind: type[T],
        *,
        deadline_s: float = RETRY_DEADLINE_S,
        timeout_s: float = REQUEST_TIMEOUT_S,
    ) -> T:
        url = self.base_url + path
        content = None if body is None else encode(body)
        retry = _RetryState(url, deadline_s, self._is_stopping)
        while True:
            try:
                with self._cut_off():
                    response = self._request(method, url, content, timeout_s)
                _raise_for_status(response, url)
                return _decode(response, kind)
            except (httpx2.TransportError, WireError) as error:
                delay_s = retry.next_delay_s(error)
            time.sleep(delay_s)

    def _request(
        self, method: str, url: str, content: bytes | None, timeout_s: float
    ) -> httpx2.Response:
        with self._http.stream(method, url, content=content, timeout=timeout_s) as response:
            if _is_declared(response, url, self._max_response_bytes):
                response.read()
                return response
            body = _Body(url, self._max_response_bytes)
            for piece in response.iter_raw():
                body.add(piece)
        return body.of(response)

    @contextmanager
    def _cut_off(self) -> Generator[None]:
        if self._answer_s is None:
            yield
            return
        timer = threading.Timer(self._answer_s, self._http.close)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            if self._http.is_closed:
                self._http = self._open()
