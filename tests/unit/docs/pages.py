# SPDX-License-Identifier: Apache-2.0
"""The pages of the documentation, as tests read them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
_FENCE = re.compile(r"^[ ]*```.*?^[ ]*```", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+?)(?: \{ #([^ }]+) \})?$", re.MULTILINE)


def all_pages() -> list[Path]:
    others = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md")]
    return [*others, *sorted((ROOT / "recipes").rglob("README.md")), *sorted(DOCS.rglob("*.md"))]


def prose(path: Path) -> str:
    """The page without its code blocks."""
    return _FENCE.sub("", path.read_text(encoding="utf-8"))


def links(path: Path) -> Iterator[str]:
    """Targets inside the repository."""
    for target in _LINK.findall(re.sub(r"`[^`\n]*`", "", prose(path))):
        if not re.match(r"[a-z][a-z0-9+.-]*:", target):
            yield target


def anchors(path: Path) -> set[str]:
    """Ids of the page's headings, as the site makes them."""
    return {given or slug(title) for title, given in _HEADING.findall(prose(path))}


def slug(title: str) -> str:
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).replace("`", "")
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", text).strip().lower())


def words(path: Path) -> str:
    """The page on one line, for sentences that span lines."""
    return " ".join(path.read_text(encoding="utf-8").split())
