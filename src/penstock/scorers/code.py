# SPDX-License-Identifier: Apache-2.0
"""`code`: the program in an answer passes all hidden tests.

Owns what is taken from the answer, and the tests of the usual suites as functions
`test_NAME(solution)`. Runs nothing: a node grades it, solution and tests in a sandbox each (see
`penstock.rollout.rewards.graded`). The solution sees neither the tests nor what they expect, and
cannot report for them."""

from __future__ import annotations

import ast
import builtins
import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, NoReturn

from penstock.errors import ConfigError, RewardError
from penstock.scorers.final_answer import without_thinking

REWARD = "penstock.scorers.code:reward"
_BLOCK = re.compile(r"```[ \t]*+(\w*+)[ \t]*+\n(.*?)(?:\n```|\Z)", re.DOTALL)
"""Nothing is tried twice (`*+`): a run of blanks would take time in its square."""
_CALL = """

def penstock_call(path, arguments):
    return called_by_name(globals(), path, arguments)
"""
_SAME_OUTPUT = '''
def same_output(printed, expected):
    """Line by line, apart from spaces at the ends; numbers may be written in another way."""
    lines = [text.strip().splitlines() for text in (printed, expected)]
    words = [(a.split(), b.split()) for a, b in zip(*lines)]
    is_same = all(len(a) == len(b) and all(map(same_word, a, b)) for a, b in words)
    return len(lines[0]) == len(lines[1]) and is_same


def same_word(word, expected):
    try:
        return word == expected or float(word) == float(expected)
    except ValueError:
        return False
'''


def program_of(answer: str, *, entry_point: str = "", starter: str = "") -> str:
    """The program in an answer: its last block of code, else all of it. `starter` goes in front if
    the program does not define `entry_point` itself: the answer continues it."""
    text = without_thinking(answer).strip("\n")
    blocks = [code for language, code in _BLOCK.findall(text) if language.lower() in _PYTHON]
    program = blocks[-1] if blocks else text
    is_defined = re.search(
        rf"^[ \t]*(?:async[ \t]+)?(?:def|class)[ \t]+{re.escape(entry_point)}\b", program, re.M
    )
    return f"{starter}{program}" if starter and entry_point and not is_defined else program


_PYTHON = ("", "python", "python3", "py")


def solution_source(program: str) -> str:
    """What stands in the sandbox of the solution: the program, and how tests call it."""
    return f"{program}\n\n{_codec()}{_CALL}" if program.strip() else ""


def test_ids(tests: str) -> list[str]:
    """Names of the tests in a source; raises ConfigError if there is none."""
    try:
        tree = ast.parse(tests)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f"the hidden tests are no Python: {error}; mend the column `tests`"
        ) from None
    found = [one.name for one in tree.body if isinstance(one, ast.FunctionDef)]
    found = [name for name in found if name.startswith("test_")]
    if not found:
        raise ConfigError(
            "the hidden tests have no function test_NAME(solution); write at least one into the "
            "column `tests`"
        )
    return found


def check_tests(check: str, entry_point: str, starter: str = "") -> str:
    """Tests from a function `check(candidate)`, as in HumanEval. It may use functions of
    `starter`."""
    body = f"def test_check(solution):\n    check(candidate(solution, {entry_point!r}))\n"
    return f"{starter}\n\n{check}\n\n{_codec()}\n\n{body}"


def assert_tests(asserts: Sequence[str], setup: str = "") -> str:
    """Tests from statements that call functions of the solution by name, as in MBPP."""
    called = sorted({name for one in asserts for name in _unknown_names(one, setup)})
    bodies = list[str]()
    for number, one in enumerate(asserts):
        lines = [f"def test_{number}(solution):"]
        lines += [f"    {name} = candidate(solution, {name!r})" for name in called]
        lines += [f"    {line}" for line in one.strip().splitlines()]
        bodies.append("\n".join(lines))
    return "\n\n".join([setup, _codec(), *bodies]) + "\n"


def _unknown_names(statement: str, setup: str) -> set[str]:
    """Names that only the solution can define."""
    known = set(dir(builtins))
    for node in ast.walk(ast.parse(setup)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            known.add(node.name)
        elif isinstance(node, ast.alias):
            known.add((node.asname or node.name).partition(".")[0])
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known.add(node.id)
    calls = (node for node in ast.walk(ast.parse(statement)) if isinstance(node, ast.Call))
    return {call.func.id for call in calls if isinstance(call.func, ast.Name)} - known


def output_tests(cases: Sequence[Mapping[str, Any]], function: str = "") -> str:
    """Tests from inputs and outputs, as in LiveCodeBench: of a program, or of a function whose
    arguments are one JSON value per line."""
    bodies = [_SAME_OUTPUT, _codec()]
    for number, case in enumerate(cases):
        given, expected = str(case["input"]), str(case["output"])
        if case.get("testtype") == "functional":
            arguments = [json.loads(line) for line in given.splitlines() if line.strip()]
            check = f"found = candidate(solution, {function!r})(*{arguments!r})\n"
            check += "    found = list(found) if isinstance(found, tuple) else found\n"
            check += f"    assert found == {json.loads(expected)!r}"
        else:
            check = f"assert same_output(solution.run({given!r}), {expected!r})"
        bodies.append(f"def test_{number}(solution):\n    {check}")
    return "\n\n".join(bodies) + "\n"


def _codec() -> str:
    return resources.files("penstock.scorers").joinpath("values_in_json.py").read_text("utf-8")


def reward(completions: Sequence[str], **columns: Any) -> NoReturn:
    """For `reward: penstock.scorers.code:reward`; the task has the column `tests`, and optionally
    `entry_point` and `starter`. A node knows it by its name and never calls it."""
    raise RewardError(
        "penstock.scorers.code runs programs that a model wrote, which only a node does, in "
        "sandboxes; name it as `reward:` in a run file, or call `ctx.grade` in a workflow"
    )
