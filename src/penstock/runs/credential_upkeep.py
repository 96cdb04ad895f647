# SPDX-License-Identifier: Apache-2.0
"""Keeps the credentials of a joined process in order while it works: renews its token, warns before
the end of one that cannot be renewed, and fetches the run's deny list where it verifies tokens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Sequence

import msgspec
import structlog

from penstock.errors import Forbidden, Unauthorized, WireError
from penstock.wire.auth import RENEWED_TTL_S, read_unverified
from penstock.wire.client import connect
from penstock.wire.credential_routes import RENEW_ROUTE, RenewedToken
from penstock.wire.denied import ROUTE, DenyList
from penstock.wire.held_token import HeldToken

WARN_BEFORE_S = (3600.0, 600.0, 60.0)
"""How long before its token expires a joined process warns."""
DENIED_POLL_S = 3.0
CALL_DEADLINE_S = 5.0
MAX_SLEEP_S = 60.0
"""Then look at the clock again: a suspended machine sleeps longer."""
MAX_LIST_BYTES = 4 << 20
log = structlog.get_logger(__name__)


async def with_upkeep(
    work: Coroutine[None, None, object],
    token: HeldToken,
    *,
    urls: Sequence[str],
    denied: DenyList | None = None,
) -> None:
    """Do the work of a joined process.

    urls: services that it calls; the last is the run's own, and renews its token.
    denied: its deny list, if it verifies the tokens of others."""
    if denied is not None:
        await _fetch_denied(urls, token, denied)  # before it serves anyone
    tasks = [asyncio.create_task(_keep_token(token, urls[-1] if urls else ""))]
    if denied is not None and urls:
        tasks.append(asyncio.create_task(_keep_denied(urls, token, denied)))
    try:
        await work
    finally:
        for task in tasks:
            task.cancel()


async def _keep_token(token: HeldToken, url: str) -> None:
    """consumes: time · produces: renewed tokens, else warnings before the end
    waits for: the second half of an hour · ends: when the token cannot be renewed"""
    while (known := read_unverified(token.value())) is not None:
        if not url or known.renew_until <= known.expires_at:
            await _warn_before(known.expires_at)
            return
        left_s = known.expires_at - time.time()
        wait_s = left_s - RENEWED_TTL_S / 2
        if wait_s <= 0:
            try:
                async with connect(url, token) as client:
                    renewed = await client.call(
                        "POST", RENEW_ROUTE, None, RenewedToken, deadline_s=CALL_DEADLINE_S
                    )
                token.replace(renewed.token)
            except (Unauthorized, Forbidden):
                return  # revoked, or expired: the work gets the same answer
            except (WireError, OSError) as error:
                log.warning("token not renewed; trying again", error=str(error))
            wait_s = max(1.0, left_s / 4)
        await asyncio.sleep(min(wait_s, MAX_SLEEP_S))


async def _warn_before(end: float) -> None:
    """consumes: time · produces: a warning WARN_BEFORE_S before the end, and more as it comes
    nearer · waits for: the next of these moments"""
    for before_s in WARN_BEFORE_S:
        left_s = end - time.time()
        if left_s > before_s:
            await asyncio.sleep(left_s - before_s)
            left_s = before_s
        elif before_s != WARN_BEFORE_S[-1]:
            continue  # it was nearer than that from the start: the next warning is due
        log.warning(
            "token expires soon; then this process ends",
            minutes_left=round(left_s / 60, 1),
            fix="get a new one with `penstock token RUN`, then start this again with it",
        )


async def _keep_denied(urls: Sequence[str], token: HeldToken, denied: DenyList) -> None:
    """consumes: the run's deny list · produces: the list in use here · waits for: DENIED_POLL_S"""
    while True:
        await asyncio.sleep(DENIED_POLL_S)
        await _fetch_denied(urls, token, denied)


async def _fetch_denied(urls: Sequence[str], token: HeldToken, denied: DenyList) -> None:
    """From the first service that answers with a list of the run, nearest to the run first."""
    for url in reversed(urls):
        try:
            async with connect(url, token) as client:
                answer = await client.request(
                    "GET", ROUTE, deadline_s=CALL_DEADLINE_S, max_response_bytes=MAX_LIST_BYTES
                )
            denied.install(answer.content.decode("ascii"))
            return
        except (WireError, OSError) as error:
            log.info("deny list not fetched", url=url, error=str(error))
        except (ValueError, msgspec.MsgspecError) as error:
            log.warning("refused a deny list that this run did not sign", url=url, why=str(error))
