# SPDX-License-Identifier: Apache-2.0
"""The generated reference is current and complete: keys, commands, names, routes, metrics."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from scripts.reference import PAGES
from scripts.reference_pages import cli, config, http, metrics, python
from tests.unit.docs.pages import DOCS, ROOT

import penstock
from penstock.config.run import RunConfig
from penstock.observe.metric_names import PROMETHEUS, STEP_METRICS, family_of

TRAINER = ROOT / "src" / "penstock" / "trainer"
NOT_METRICS = frozenset({"application/json"})


@pytest.mark.parametrize("name", PAGES)
def test_pages_are_current(name: str) -> None:
    text = (DOCS / name).read_text(encoding="utf-8")
    assert text == PAGES[name](), "run scripts/reference.py"


def schema_keys() -> set[str]:
    """Every property of the JSON schema, as `Class.key`: another way to the same list."""
    schema = RunConfig.model_json_schema()
    found = {f"RunConfig.{key}" for key in schema["properties"]}
    for name, definition in schema["$defs"].items():
        found |= {f"{name}.{key}" for key in definition.get("properties", {})}
    return found


def test_every_config_key() -> None:
    text = config.page()
    documented = {
        f"{kind.__name__}.{key.path.rpartition('.')[2]}"
        for kind, keys in config.sections().values()
        for key in keys
    }
    assert schema_keys() - documented == set()
    assert [key for key in config.all_keys() if f"\n`{key}` " not in text] == []


def test_every_command_and_flag() -> None:
    text = cli.page()
    sections = dict(re.findall(r"^## (penstock .+?)$(.*?)(?=^## |\Z)", text, re.M | re.S))
    for full, command in cli.commands():
        for argument in cli.arguments(command):
            for name in cli.names_of(argument):
                assert f"`{name}`" in sections[full], f"{full} {name}"
    assert len(sections) >= 30


def test_every_flag_has_a_meaning() -> None:
    silent = [
        f"{full} {argument.names[0]}"
        for full, command in cli.commands()
        for argument in cli.arguments(command)
        if not argument.parameter.help
    ]
    assert silent == []


def test_every_public_name() -> None:
    text = python.page()
    names = [name for name in penstock.__all__ if not name.startswith("_")]
    assert [name for name in names if f"\n## {name} {{ #{name} }}\n" not in text] == []


def decorated_routes() -> Iterator[tuple[str, str]]:
    """Routes as the source declares them, found without importing it."""
    for path in (ROOT / "src" / "penstock").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "route":
                method, where = node.args[:2]
                if isinstance(method, ast.Constant) and isinstance(where, ast.Constant):
                    yield str(method.value), str(where.value)


def test_every_route() -> None:
    text = http.page()
    found = set(decorated_routes())
    assert len(found) >= 35
    assert [pair for pair in found if f"`{pair[0]} {pair[1]}`\n:   " not in text] == []
    for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/sessions"):
        assert f"`POST {path}`" in text


def metric_literals() -> set[str]:
    """Texts of the trainer that look like the name of a metric."""
    found: set[str] = set()
    for path in TRAINER.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                found |= set(re.findall(r"^[a-z0-9_]+/[a-z0-9_/]+$", node.value))
    return found - NOT_METRICS


def test_every_metric() -> None:
    text = metrics.page()
    assert len(metric_literals()) >= 20
    assert [name for name in metric_literals() if family_of(name) is None] == []
    names = [*STEP_METRICS, *PROMETHEUS]
    assert [name for name in names if f"\n`{name}`" not in text] == []


def test_the_metrics_of_a_recorded_step_are_known() -> None:
    """Keys of a line of metrics.jsonl, written by the demo."""
    keys = Path(__file__).with_name("step_metrics.txt").read_text(encoding="utf-8").split()
    assert [key for key in keys if family_of(key) is None] == []
