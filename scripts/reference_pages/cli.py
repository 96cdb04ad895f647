# SPDX-License-Identifier: Apache-2.0
"""Every command and flag, from the `penstock` app."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from cyclopts import App
from scripts.reference_pages.markdown import code, entry, flat, head, type_text

from penstock.cli.main import build


def commands(app: App | None = None, prefix: str = "penstock") -> Iterator[tuple[str, App]]:
    """Every command that does something, with its full name."""
    parent = app or build()
    for name in parent:
        if name.startswith("-"):
            continue
        command = parent[name]
        full = f"{prefix} {name}"
        if any(not inner.startswith("-") for inner in command):
            yield from commands(command, full)
        else:
            yield full, command


def arguments(command: App) -> list[Any]:
    """Its parameters, as cyclopts parses them."""
    return list(command.assemble_argument_collection(parse_docstring=True))


def names_of(argument: Any) -> list[str]:
    """Its names, without the negative form of a flag."""
    return [name for name in argument.names if not name.startswith("--no-")]


def _entry(argument: Any) -> str:
    default = argument.field_info.default
    is_set = default is not inspect.Parameter.empty and default not in (None, (), False, True)
    facts = [
        "" if argument.hint is bool else type_text(argument.hint).replace("mapping", "path"),
        "required" if argument.required else "",
        f"default {code(default)}" if is_set else "",
    ]
    names = " ".join(f"`{name}`" for name in names_of(argument))
    return entry(
        f"{names} {' · '.join(filter(None, facts))}".strip(), [flat(argument.parameter.help) or "–"]
    )


def _usage(full: str, command: App) -> str:
    words: list[str] = []
    for argument in arguments(command):
        name = argument.names[0]
        if name.startswith("-"):
            continue
        many = "…" if str(argument.hint).startswith(("tuple", "list")) else ""
        words.append(f"{name}{many}" if argument.required else f"[{name}{many}]")
    return f"```text\n{' '.join([full, *words])} [OPTIONS]\n```\n"


def page() -> str:
    parts = [
        head(
            "Commands",
            "`RUN` is a run folder or its config file. Commands that people and programs both read "
            "take `--json`: the last line on stdout is then one JSON object.",
            "Exit codes: 0 done, 1 failed, 2 wrong usage, 128 + n stopped by signal n.",
        )
    ]
    for full, command in commands():
        function = command.default_command
        text = inspect.cleandoc(getattr(function, "__doc__", "") or "").split("\n\nArgs:")[0]
        parts += [f"## {full}\n", _usage(full, command), f"{text}\n"]
        parts += [_entry(argument) for argument in arguments(command)]
    return "\n".join(parts)
