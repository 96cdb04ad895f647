# SPDX-License-Identifier: Apache-2.0
"""llms.txt: every page with one line, from the navigation and the pages' first sentences."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def navigation() -> list[tuple[str, str, str]]:
    """(section, title, path) of every page, in the order of the site."""
    settings = tomllib.loads((ROOT / "zensical.toml").read_text(encoding="utf-8"))
    return list(_pages(settings["project"]["nav"], ""))


def _pages(nav: list[dict[str, Any]], section: str) -> Iterator[tuple[str, str, str]]:
    for item in nav:
        for title, target in item.items():
            if isinstance(target, str):
                yield section, title, target
            else:
                yield from _pages(target, section or title)


def summary(path: str) -> str:
    """The first sentence of a page's text."""
    if path in GENERATED:
        return GENERATED[path]
    text = (ROOT / "docs" / path).read_text(encoding="utf-8")
    body = re.sub(r"<!--.*?-->|^```.*?^```|^[#!|][^\n]*$", "", text, flags=re.M | re.S)
    paragraph = next((part for part in re.split(r"\n\s*\n", body) if part.strip()), "")
    flat = " ".join(re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", paragraph).split())
    return re.split(r"(?<=[.!?:]) ", flat)[0].rstrip(":")


GENERATED = {
    "reference/config.md": "Every key of run.yaml with type, default, unit and meaning.",
    "reference/cli.md": "Every command and flag.",
    "reference/python.md": "The public names of the package.",
    "reference/http.md": "Every route of every service.",
    "reference/metrics.md": "Every metric.",
    "reference/names-elsewhere.md": "Settings of TRL, verl and prime-rl and their names here.",
}


def page() -> str:
    lines = [
        "# penstock",
        "",
        "> penstock trains LLM agents with reinforcement learning, as a dataflow between "
        "independent services: rollout nodes, a durable dataflow service, and trainers.",
    ]
    last = ""
    for section, title, path in navigation():
        if section != last:
            lines += ["", f"## {section}", ""]
            last = section
        lines.append(f"- [{title}]({path}): {summary(path)}")
    return "\n".join([*lines, ""])
