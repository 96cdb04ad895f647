# SPDX-License-Identifier: Apache-2.0
"""Prompt templates: named placeholders and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.unit.rollout.test_sub_agents import given, played

from penstock.errors import ConfigError, WorkflowError
from penstock.rollout.prompt_templates import parse_prompt
from penstock.types import FailureKind, view_ids


def test_placeholders_get_their_values_and_braces_stay() -> None:
    template = parse_prompt("solver", "Q: {question}\n{{json}} {question} {n}\n")
    assert template.placeholders == {"question", "n"}
    assert template.fill({"question": "{n} {{}}", "n": 3}) == "Q: {n} {{}}\n{json} {n} {{}} 3\n"


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "{0}",
        "{a.b}",
        "{a[0]}",
        "{a!r}",
        "{a:>10}",
        "{a:{b}}",
        "{ a}",
        "{a b}",
        "{__class__.__mro__}",
        "{",
        "}",
        "{a",
        "{{a}",
        "a}}}",
    ],
)
def test_anything_but_a_name_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^prompt solver .*write \{name\} for a placeholder"):
        parse_prompt("solver", text)


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({}, "placeholder {question}, which got no value; pass question="),
        ({"question": 1, "hint": 2}, "no placeholder {hint} (it has: question); add it"),
    ],
)
def test_values_and_placeholders_must_match(values: dict[str, Any], says: str) -> None:
    with pytest.raises(WorkflowError) as refused:
        parse_prompt("solver", "{question}").fill(values)
    assert says in str(refused.value)


async def test_a_workflow_fills_the_templates_of_its_run(snapshot: Path) -> None:
    row = await played(snapshot, "fills_a_template", prompts={"solver": "a{question}>"})
    assert view_ids(row.turns[0].prompt_ids).tolist() == [0, 1, 2, 10]


@pytest.mark.parametrize(
    ("name", "values", "says"),
    [
        ("fills_it_wrong", {}, "which got no value"),
        ("fills_it_wrong", {"question": 1, "x": 2}, "has no placeholder {x}"),
        ("wants_another", {}, 'unknown prompt "solvr"; did you mean "solver"?; name its file'),
    ],
)
async def test_a_mistake_with_a_template_is_the_workflows_failure(
    snapshot: Path, name: str, values: dict[str, Any], says: str
) -> None:
    row = await played(snapshot, name, prompts={"solver": "{question}"}, given=given(values=values))
    assert row.outcome.reason == FailureKind.WORKFLOW and says in row.outcome.detail


async def test_a_template_that_cannot_be_parsed_ends_the_node_aloud(snapshot: Path) -> None:
    with pytest.raises(ConfigError, match="prompt solver"):
        await played(snapshot, "fills_a_template", prompts={"solver": "{a.b}"})
