# SPDX-License-Identifier: Apache-2.0
"""The walk names real code: each `file.py:Name` of docs/explanation/walk.md is defined there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "explanation" / "walk.md"
NAMES = sorted(set(re.findall(r"`([\w/]+\.py):([\w.]+)`", PAGE.read_text(encoding="utf-8"))))
MAX_FORMS = {"row": 5, "group": 5}
"""One form for each stage of its life, and no more."""


def defined(path: Path) -> set[str]:
    """Classes, functions and methods as `Class.method`."""
    names: set[str] = set()

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(prefix + node.name)
                if isinstance(node, ast.ClassDef):
                    visit(node.body, f"{prefix}{node.name}.")

    visit(ast.parse(path.read_text(encoding="utf-8")).body, "")
    return names


@pytest.mark.parametrize(("file", "name"), NAMES)
def test_a_name_of_the_walk_exists(file: str, name: str) -> None:
    assert name in defined(ROOT / "src" / "penstock" / file)


def test_the_walk_names_every_hop() -> None:
    assert len(NAMES) >= 20


@pytest.mark.parametrize("thing", MAX_FORMS)
def test_few_forms(thing: str) -> None:
    section = PAGE.read_text(encoding="utf-8").split(f"## Forms of a {thing}\n")[1]
    table = section.split("\n## ")[0]
    forms = re.findall(r"^\| \d+ \|", table, re.MULTILINE)
    assert 0 < len(forms) <= MAX_FORMS[thing]
