# SPDX-License-Identifier: Apache-2.0
"""Builds the OpenAPI document of a table of routes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.wire.codec import JSON, MSGPACK
from penstock.wire.routes import ErrorResponse, Health, Route


def openapi_document(routes: Sequence[Route], title: str) -> dict[str, Any]:
    kinds = [kind for r in routes for kind in (r.request, r.response) if kind is not None]
    schemas, components = msgspec.json.schema_components(
        [*kinds, Health, ErrorResponse], ref_template="#/components/schemas/{name}"
    )
    schema_by_type = dict(zip([*kinds, Health, ErrorResponse], schemas, strict=True))
    paths: dict[str, Any] = {
        "/healthz": {
            "get": {
                "summary": "Health check; the only route without a credential.",
                "security": [],
                "responses": {"200": _content(schema_by_type[Health])},
            }
        }
    }
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schema_by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": title, "version": "1"},
        "paths": paths,
        "security": [{"token": []}],
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, schemas: dict[Any, Any]) -> dict[str, Any]:
    names = [part[1:-1] for part in route.path.split("/") if part.startswith("{")]
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in names
    ] + [{"name": name, "in": "query", "schema": {"type": "string"}} for name in route.query]
    answer = (
        {"description": "done"} if route.response is None else _content(schemas[route.response])
    )
    operation: dict[str, Any] = {
        "summary": route.summary,
        "x-roles": sorted(route.roles),
        "parameters": parameters,
        "responses": {"200": answer, "4XX": _content(schemas[ErrorResponse])},
    }
    if route.request is not None:
        schema = {"schema": schemas[route.request]}
        operation["requestBody"] = {"required": True, "content": {MSGPACK: schema, JSON: schema}}
    return operation


def _content(schema: Any) -> dict[str, Any]:
    return {"description": "done", "content": {JSON: {"schema": schema}}}
