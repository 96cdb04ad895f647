# SPDX-License-Identifier: Apache-2.0
"""The routes about credentials that every service has: the run's deny list, and where the service
may renew tokens, a later expiry date for the caller's own."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.wire import denied
from penstock.wire.auth import Verifier, expires_at
from penstock.wire.routes import ALL_ROLES, Call, RawResponse, Route, bearer_token

RENEW_ROUTE = "/v1/token"


@dataclass(frozen=True, slots=True, kw_only=True)
class RenewedToken:
    token: str
    expires_at: float


def credential_routes(verifier: Verifier) -> list[Route]:
    renewer = verifier.renewer

    async def deny_list(call: Call) -> RawResponse:
        verifier.denied.current()
        return RawResponse(verifier.denied.text.encode(), "text/plain")

    async def renew(call: Call) -> RenewedToken:
        assert renewer is not None
        token = renewer.renew(bearer_token(call.headers), call.credential)
        return RenewedToken(token=token, expires_at=expires_at(token) or 0.0)

    found = [
        Route(
            method="GET",
            path=denied.ROUTE,
            handler=deny_list,
            roles=ALL_ROLES,
            summary="Revoked tokens, names and keys, signed by the run's root key.",
        )
    ]
    if renewer is not None:
        renewal = Route(
            method="POST",
            path=RENEW_ROUTE,
            handler=renew,
            roles=ALL_ROLES,
            summary="The caller's own token with a later expiry date; nothing else changes.",
            response=RenewedToken,
        )
        found.append(renewal)
    return found
