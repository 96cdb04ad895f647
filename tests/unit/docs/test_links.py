# SPDX-License-Identifier: Apache-2.0
"""No dead link: files and anchors, in every page; every page is in the navigation."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripts.reference_pages.llms import navigation
from tests.unit.docs.pages import DOCS, ROOT, all_pages, anchors, links

PAGES = all_pages()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    dead: list[str] = []
    for target in links(page):
        file, _, anchor = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        if not path.exists() or (anchor and path.suffix == ".md" and anchor not in anchors(path)):
            dead.append(target)
    assert dead == []


def test_every_page_is_in_the_navigation_once() -> None:
    listed = [path for _, _, path in navigation()]
    assert sorted(listed) == sorted(str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md"))


def test_llms_txt_lists_every_page() -> None:
    text = (DOCS / "llms.txt").read_text(encoding="utf-8")
    assert text.startswith("# penstock\n\n> ")
    assert [path for _, _, path in navigation() if f"]({path}): " not in text] == []
    assert not [line for line in text.splitlines() if line.endswith(": ")], "pages without a line"
