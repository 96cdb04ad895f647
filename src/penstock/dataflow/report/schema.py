# SPDX-License-Identifier: Apache-2.0
"""Generates the published JSON schema of the balance report from its records.

Regenerate it with `python -m penstock.dataflow.report.schema > docs/report.schema.json`; a test
checks that the published file is up to date."""

from __future__ import annotations

import ast
import inspect
import json
import textwrap
from typing import Any, cast

import msgspec

from penstock.dataflow.report import shape

DIALECT = "https://json-schema.org/draft/2020-12/schema"


def report_schema() -> dict[str, Any]:
    """Every field is required and has a description; readers must ignore unknown fields."""
    schema = msgspec.json.schema(shape.BalanceReport)
    for name, definition in cast(dict[str, dict[str, Any]], schema["$defs"]).items():
        if "properties" not in definition:  # an enumeration
            continue
        for field, text in _meanings(getattr(shape, name)).items():
            definition["properties"][field]["description"] = text
        definition["required"] = sorted(definition["properties"])
    version = schema["$defs"]["BalanceReport"]["properties"]["schema_version"]
    version["const"] = version.pop("default")
    return {"$schema": DIALECT, "title": "penstock balance report", **schema}


def _meanings(kind: type[Any]) -> dict[str, str]:
    """The docstring of each field of a record."""
    [record] = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(record, ast.ClassDef)
    found: dict[str, str] = {}
    for field, text in zip(record.body, record.body[1:], strict=False):
        if (
            isinstance(field, ast.AnnAssign)
            and isinstance(field.target, ast.Name)
            and isinstance(text, ast.Expr)
            and isinstance(text.value, ast.Constant)
        ):
            found[field.target.id] = " ".join(str(text.value.value).split())
    return found


def main() -> None:
    print(json.dumps(report_schema(), indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
