# SPDX-License-Identifier: Apache-2.0
"""The gateway's OpenAPI document: its paths and request schemas."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from penstock.gateway.dialects.dialect import Dialect
from penstock.types import JsonObject
from penstock.wire.codec import JSON

SESSION = "/sessions/{session_id}"


def openapi_document(dialects: Sequence[Dialect]) -> JsonObject:
    template = "#/components/schemas/{name}"
    requests, components = msgspec.json.schema_components(
        [dialect.request for dialect in dialects], ref_template=template
    )
    paths: JsonObject = {
        "/healthz": {"get": {**_operation("Liveness check; needs no key."), "security": []}},
        "/openapi.json": {"get": _operation("This document.")},
    }
    for prefix in ("", SESSION):
        models = _operation("List the policies of this session.")
        paths[f"{prefix}/v1/models"] = {"get": _in_session(models, prefix)}
        for dialect, request in zip(dialects, requests, strict=True):
            operation = _operation(dialect.summary)
            content = {JSON: {"schema": request}}
            operation["requestBody"] = {"required": True, "content": content}
            paths[prefix + dialect.path] = {"post": _in_session(operation, prefix)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "penstock gateway", "version": "1"},
        "paths": paths,
        "security": [{"bearer": []}, {"key": []}],
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(summary: str) -> JsonObject:
    responses = {
        "200": {"description": "done"},
        "4XX": {"description": "client error, in the format of the API that was called"},
        "503": {"description": "no engine available"},
    }
    return {"summary": summary, "responses": responses}


def _in_session(operation: JsonObject, prefix: str) -> JsonObject:
    if not prefix:
        return operation
    parameter = {"name": "session_id", "in": "path", "required": True}
    return {**operation, "parameters": [{**parameter, "schema": {"type": "string"}}]}
