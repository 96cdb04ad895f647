# SPDX-License-Identifier: Apache-2.0
"""Every route of every service, from the declarations that the services serve."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, get_type_hints

from scripts.reference_pages.markdown import head

from penstock.dashboard.server import Dashboard
from penstock.dataflow.service.nodes.routes import NodeRoutes
from penstock.dataflow.service.partitions.routes import PartitionRoutes, RowPayloadRoutes
from penstock.dataflow.service.rows.routes import BlobRoutes, RowRoutes
from penstock.dataflow.service.server import ServiceRoutes
from penstock.dataflow.service.trainers.routes import TrainerRoutes
from penstock.gateway.online_routes import ONLINE_ROUTES
from penstock.gateway.server import DIALECTS, openapi_document
from penstock.tinker.server import TinkerRoutes
from penstock.weights.serving.server import WeightServer


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteEntry:
    """One route as the page shows it."""

    method: str
    path: str
    summary: str
    roles: str
    body: str = ""
    """Fields of the request."""
    answer: str = ""
    """Fields of the response."""


DATAFLOW = {
    "Nodes": (NodeRoutes,),
    "Trainers": (TrainerRoutes,),
    "Rows, spaces and blobs": (RowRoutes, BlobRoutes),
    "Partitions": (PartitionRoutes, RowPayloadRoutes),
    "Operators": (ServiceRoutes,),
}
BOTH = (
    RouteEntry(
        method="GET",
        path="/healthz",
        summary="Health check; the only route without a credential.",
        roles="none needed",
    ),
    RouteEntry(
        method="GET", path="/openapi.json", summary="This service's OpenAPI document.", roles="any"
    ),
)


def declared(kind: type[Any]) -> Iterator[RouteEntry]:
    """Routes that methods of this class declare."""
    for function in vars(kind).values():
        if (found := getattr(function, "route", None)) is None:
            continue
        types = get_type_hints(function)
        query = "".join(f" `?{name}=`" for name in found.get("query", ()))
        yield RouteEntry(
            method=found["method"],
            path=found["path"],
            summary=found["summary"],
            roles=", ".join(sorted(role.value for role in found["roles"])),
            body=_fields(types.get("body")) + query,
            answer=_fields(found.get("response", types["return"])),
        )


def _fields(kind: Any) -> str:
    """The fields of a message, as in the protocol."""
    if not is_dataclass(kind):
        names = getattr(kind, "__struct_fields__", ())
    else:
        names = tuple(field.name for field in fields(kind))
    return f"`{{{', '.join(names)}}}`" if names else ""


def gateway() -> Iterator[RouteEntry]:
    for path, methods in openapi_document(DIALECTS)["paths"].items():
        for method, operation in methods.items():
            roles = "none needed" if operation.get("security") == [] else "a session's key"
            yield RouteEntry(
                method=method.upper(), path=path, summary=operation["summary"], roles=roles
            )


def online() -> Iterator[RouteEntry]:
    for declared_route in ONLINE_ROUTES:
        yield RouteEntry(
            method=declared_route.method,
            path=declared_route.path,
            summary=declared_route.summary,
            roles=declared_route.callers,
        )


def services() -> dict[str, list[RouteEntry]]:
    """Every service with its routes, by the title of its section."""
    found: dict[str, list[RouteEntry]] = {}
    for title, kinds in DATAFLOW.items():
        found[f"Dataflow: {title.lower()}"] = [one for kind in kinds for one in declared(kind)]
    found["Dataflow, weight server and relay: all"] = list(BOTH)
    found["Weight server and relay"] = list(declared(WeightServer))
    found["Dashboard"] = list(declared(Dashboard))
    found["Tinker API"] = list(declared(TinkerRoutes))
    found["Gateway"] = list(gateway())
    found["Gateway of external agents"] = list(online())
    return found


def _text(route: RouteEntry) -> str:
    facts = [f"Roles: {route.roles}."]
    facts += [f"Request: {route.body.strip()}."] if route.body.strip() else []
    facts += [f"Response: {route.answer}."] if route.answer else []
    body = "\n\n    ".join([route.summary, *facts])
    return f"`{route.method} {route.path}`\n:   {body}\n"


def page() -> str:
    parts = [
        head(
            "HTTP routes",
            "Every service serves its own OpenAPI document, with all schemas, at `/openapi.json`. "
            "This page is the overview. [The protocol](protocol.md) says what the calls promise "
            "and in which order to make them; [access tokens](tokens.md) explains the roles.",
        )
    ]
    for title, routes in services().items():
        parts += [f"## {title}\n", *(_text(route) for route in routes)]
    return "\n".join(parts)
