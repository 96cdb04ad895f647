# SPDX-License-Identifier: Apache-2.0
"""Names of other frameworks and what they are called here, from the table that gives the hints."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from scripts.reference_pages.markdown import entry, head

import penstock.config

TABLE = Path(penstock.config.__file__).with_name("names_elsewhere.toml")
FIELDS = frozenset({"key", "note", "values"})


def names() -> dict[str, dict[str, Mapping[str, Any]]]:
    """By framework, then by dotted name: key, note and values, where there are any."""
    if not TABLE.exists():
        return {}
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {framework: dict(_flat(entries)) for framework, entries in table.items()}


def _flat(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name, value in table.items():
        full = f"{path}.{name}" if path else name
        if isinstance(value, str):
            yield full, {"key": value}
        elif isinstance(value, dict):
            inner = cast(dict[str, Any], value)
            if inner.keys() <= FIELDS:
                yield full, inner
            else:
                yield from _flat(inner, full)


def _entry(name: str, fact: Mapping[str, Any]) -> str:
    values = "; ".join(f"`{value}` → `{ours}`" for value, ours in fact.get("values", {}).items())
    key = f"`{fact['key']}`" if "key" in fact else ""
    return entry(f"`{name}`", [" ".join(filter(None, [key, fact.get("note", "")])), values])


def page() -> str:
    parts = [
        head(
            "Names from elsewhere",
            "Settings of TRL, verl and prime-rl, and what they are called here. `policy` stands "
            "for the name of your policy. Write one of these names in `run.yaml`, and the error "
            "message gives the same hint. [Migrate](../how-to/migrate.md) has the short tables.",
        )
    ]
    for framework, entries in names().items():
        title = "Other names" if framework == "others" else framework
        parts += [f"## {title}\n", *(_entry(name, fact) for name, fact in entries.items())]
    return "\n".join(parts)
