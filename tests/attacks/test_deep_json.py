# SPDX-License-Identifier: Apache-2.0
"""JSON that is nested deeper than a parser goes is garbage like any other: a model that writes it
has written a wrong answer, and a file of it is a damaged file. Neither is a failure of ours."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import penstock
from penstock.errors import ConfigError
from penstock.gateway.dialects.messages_stream import content_blocks
from penstock.gateway.model_calls import Answer, ToolCall, Usage
from penstock.rollout.workflows.plans import read_plan
from penstock.runs.decoded import DecodedToolCall, DecodedTurn
from penstock.runs.prm.steps import NOT_JSON, why_malformed
from penstock.runs.result_files import read_results
from penstock.types import FinishReason

DEEP = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"
PARSERS = ("json.loads", "json.load", "msgspec.json.decode", "msgspec.msgpack.decode")
PARSE_ERRORS = {"ValueError", "JSONDecodeError", "DecodeError", "MsgspecError", "ValidationError"}
ALL_ERRORS = {"RecursionError", "Exception", "BaseException"}


def test_a_deep_plan_is_no_plan() -> None:
    assert read_plan(DEEP) is None


def test_a_step_with_deep_arguments_is_malformed() -> None:
    """It gets the worst score; a failure would leave the row without one."""
    turn = DecodedTurn(
        policy="p",
        role="",
        parent=-1,
        prompt="",
        answer="",
        reasoning="",
        tool_calls=(DecodedToolCall(name="search", arguments=DEEP),),
        versions=(),
        finish=FinishReason.STOP,
        num_tokens=1,
    )
    assert why_malformed(turn, ()) == NOT_JSON


def test_deep_arguments_reach_an_agent_as_text() -> None:
    answer = Answer(
        text="",
        finish=FinishReason.STOP,
        turn=0,
        usage=Usage(prompt_tokens=1, completion_tokens=1),
        tool_calls=(ToolCall(id="c", name="search", arguments=DEEP),),
    )
    [block] = content_blocks(answer)
    assert block["input"] == {"arguments": DEEP}


def test_a_deep_file_of_results_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    path.write_text(DEEP)
    with pytest.raises(ConfigError, match="holds no results of an evaluation"):
        read_results(path)


def caught(handler: ast.ExceptHandler) -> set[str]:
    if handler.type is None:
        return {"BaseException"}
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {ast.unparse(kind).rpartition(".")[2] for kind in kinds}


def test_who_expects_wrong_json_expects_deep_json() -> None:
    """Parsers raise RecursionError for it, which is not among their own errors."""
    found: list[str] = []
    for path in Path(str(penstock.__file__)).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Try):
                continue
            calls = (c for part in node.body for c in ast.walk(part) if isinstance(c, ast.Call))
            errors = {error for handler in node.handlers for error in caught(handler)}
            is_parsing = any(ast.unparse(call.func) in PARSERS for call in calls)
            if is_parsing and errors & PARSE_ERRORS and not errors & ALL_ERRORS:
                found.append(f"{path.name}:{node.lineno} catches {sorted(errors)}")
    assert not found, "\n".join(found)
