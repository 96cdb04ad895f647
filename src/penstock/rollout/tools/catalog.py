# SPDX-License-Identifier: Apache-2.0
"""From what servers list to what models see: valid and unique names, bounded texts and schemas.

A server is not trusted: what it lists beyond a bound is cut or left out, and a note says so.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from penstock.dataflow.service.nodes.messages import ToolServerInfo
from penstock.rollout.tools.arguments import ArgumentCheck
from penstock.rollout.tools.attempt_tools import OfferedTool, clean
from penstock.rollout.tools.types import ToolSpec
from penstock.types import JsonObject

MAX_TOOLS = 128
"""Of one server; most model APIs take no more."""
MAX_DESCRIPTION_CHARS = 4000
MAX_SCHEMA_CHARS = 32 << 10
MAX_NAME_CHARS = 64
_WRONG = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True, slots=True)
class Catalog:
    tools: tuple[OfferedTool, ...] = ()
    notes: tuple[str, ...] = ()
    """What was left out, and why."""


def make_catalog(
    servers: Sequence[ToolServerInfo], listed: Mapping[str, Sequence[ToolSpec]]
) -> Catalog:
    """What models see. A name that two servers have is prefixed with the names of the servers."""
    notes = list[str]()
    kept = {server.name: _bounded(server.name, listed[server.name], notes) for server in servers}
    names = Counter(name for specs in kept.values() for name in {_plain(s.name) for s in specs})
    tools = dict[str, OfferedTool]()
    for server in servers:
        for spec in kept[server.name]:
            name = _plain(spec.name)
            if names[name] > 1:
                name = _plain(f"{server.name}_{spec.name}")
            tool = _offered(name, server, spec)
            if isinstance(tool, str) or name in tools:
                why = tool if isinstance(tool, str) else f"its name is {name}, like another's"
                notes.append(f"tools.{server.name} offers {spec.name!r}, which is left out: {why}")
            else:
                tools[name] = tool
    return Catalog(tuple(tools.values()), tuple(note[:500] for note in notes[:MAX_TOOLS]))


def _bounded(server: str, specs: Sequence[ToolSpec], notes: list[str]) -> list[ToolSpec]:
    if len(specs) > MAX_TOOLS:
        notes.append(f"tools.{server} offers more than {MAX_TOOLS} tools; the first are used")
    return list(_cut(specs[:MAX_TOOLS]))


def _cut(specs: Sequence[ToolSpec]) -> Iterator[ToolSpec]:
    for spec in specs:
        description = clean(spec.description)
        if len(description) > MAX_DESCRIPTION_CHARS:
            description = f"{description[: MAX_DESCRIPTION_CHARS - 1]}…"
        yield replace(spec, description=description)


def _plain(name: str) -> str:
    return _WRONG.sub("_", name)[:MAX_NAME_CHARS] or "tool"


def _offered(name: str, server: ToolServerInfo, spec: ToolSpec) -> OfferedTool | str:
    """The tool, or why it is left out."""
    try:
        schema = _readable(spec.parameters)
        check = ArgumentCheck(schema)
    except (ValueError, RecursionError) as error:
        return f"its schema is not usable: {error}"
    return OfferedTool(
        name=name,
        server=server.name,
        spec=replace(spec, parameters=schema),
        check=check,
        timeout_s=server.timeout_s,
        max_result_chars=server.max_result_chars,
    )


def _readable(schema: JsonObject) -> JsonObject:
    text = clean(json.dumps(schema))
    if len(text) > MAX_SCHEMA_CHARS:
        raise ValueError(f"it has {len(text):,} characters, more than {MAX_SCHEMA_CHARS:,}")
    if schema.get("type", "object") != "object":
        raise ValueError("it does not describe an object")
    return json.loads(text)
