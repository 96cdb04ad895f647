# SPDX-License-Identifier: Apache-2.0
"""Which program is taken from an answer, and the tests of the usual suites."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import ConfigError, RewardError
from penstock.scorers.code import (
    assert_tests,
    check_tests,
    output_tests,
    program_of,
    reward,
)
from penstock.scorers.code import (
    test_ids as ids_of,
)
from penstock.scorers.values_in_json import pack, unpack

STARTER = "def double(x):\n    '''Twice x.'''\n"


class Solved:
    """A solution as tests see it, in this process."""

    def __init__(self, program: str) -> None:
        self._program = program

    def call(self, name: str, *args: Any) -> Any:
        names: dict[str, Any] = {}
        exec(self._program, names)
        return names[name](*args)


def run(tests: str, program: str) -> list[str]:
    """Names of the tests that pass."""
    from penstock.scorers.code import solution_source

    names: dict[str, Any] = {}
    exec(tests, names)
    passed: list[str] = []
    for id in ids_of(tests):
        try:
            names[id](Solved(solution_source(program)))
        except Exception:
            continue
        passed.append(id)
    return passed


def test_the_last_block_of_python_is_the_program() -> None:
    text = "```python\na\n```\n```bash\nls\n```\n```py\nb\n```\nDone."
    assert program_of(text) == "b"
    assert program_of("x = 1") == "x = 1"
    assert program_of("<think>```python\na\n```</think>b") == "b"
    assert program_of("```python\ncut off") == "cut off"


def test_an_answer_may_continue_the_starter_or_repeat_it() -> None:
    whole = program_of("    return 2 * x\n", entry_point="double", starter=STARTER)
    assert whole == STARTER + "    return 2 * x"
    again = program_of("def double(x):\n    return 2 * x", entry_point="double", starter=STARTER)
    assert again.count("def double") == 1


@pytest.mark.parametrize(
    "value",
    [
        (1, [2, {3}], None),
        {1: ("a",), "b": frozenset({2.5})},
        b"x",
        1 + 2j,
        float("inf"),
        10**30,
        {"tuple": [1]},
    ],
)
def test_values_cross_unchanged(value: Any) -> None:
    assert unpack(pack(value)) == value
    assert type(unpack(pack(value))) is type(value)


def test_tests_of_humaneval_may_use_functions_of_the_starter() -> None:
    check = "def check(candidate):\n    assert candidate(2) == helper(4)\n"
    tests = check_tests(check, "double", "def helper(x):\n    return x\n" + STARTER)
    assert run(tests, STARTER + "    return 2 * x") == ["test_check"]
    assert run(tests, STARTER + "    return x") == []


def test_tests_of_mbpp_call_functions_by_name() -> None:
    asserts = ["assert set(f((1, 2))) == {1, 2}", "assert math.isclose(f(3), 3.0)"]
    tests = assert_tests(asserts, "import math")
    assert run(tests, "def f(x):\n    return x") == ["test_0", "test_1"]
    assert run(tests, "def f(x):\n    return 3") == ["test_1"]


def test_tests_of_livecodebench_call_methods() -> None:
    case = {"input": "[1, 2]\n3", "output": "6", "testtype": "functional"}
    tests = output_tests([case], "Solution.total")
    program = "class Solution:\n    def total(self, a, b):\n        return sum(a) + b"
    assert run(tests, program) == ["test_0"]
    assert run(tests, program.replace("+ b", "")) == []


def test_tests_without_a_function_are_refused() -> None:
    with pytest.raises(ConfigError, match="no function test_NAME"):
        ids_of("x = 1")
    with pytest.raises(ConfigError, match="no Python"):
        ids_of("def test_a(:")


def test_the_reward_never_runs_outside_of_a_node() -> None:
    with pytest.raises(RewardError, match="only a node does, in sandboxes"):
        reward(["print(1)"], tests=["def test_a(solution): pass"])
