# SPDX-License-Identifier: Apache-2.0
"""What is graded, by what, and the verdict. Types only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.rollout.sandbox.types import Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class Solution:
    """Files that a model wrote."""

    files: Mapping[str, bytes]
    """By path. Tests call functions of `solution.py`, or run it as a program."""

    @classmethod
    def of(cls, source: str) -> Solution:
        """A solution of one Python file. Lone surrogates, as in JSON that a model wrote, become
        question marks: no file can hold them."""
        return cls(files={"solution.py": source.encode(errors="replace")})


@dataclass(frozen=True, slots=True, kw_only=True)
class TestFile:
    """Tests that the model does not see: Python source of functions `test_NAME(solution)`.

    A test raises if the solution is wrong. `solution.call(name, *args)` calls a function of
    `solution.py`; `solution.run(stdin, *args)` runs it as a program and returns its standard
    output; `solution.read(path)` returns the text of a file that it wrote. Arguments and results
    are JSON values. `solution.expect(actual, expected)` compares values and their types."""

    __test__ = False  # not a test of ours, in spite of its name
    source: str
    ids: frozenset[str]
    """Names of all tests that must report."""


SOLUTION_LIMITS = Limits(wall_s=30.0, cpu_s=20.0, memory_mb=1024, num_processes=64)
TEST_LIMITS = Limits(wall_s=60.0, cpu_s=30.0, memory_mb=1024, num_processes=64)


@dataclass(frozen=True, slots=True, kw_only=True)
class GradingLimits:
    """The same for every solution."""

    solution: Limits = SOLUTION_LIMITS
    tests: Limits = TEST_LIMITS
    call_s: float = 10.0
    """Longest call of the solution."""
    max_value_bytes: int = 256 << 10
    """Longest result of one call, as JSON."""
    max_calls: int = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What the tests found. A failure of the sandbox gives none: it raises SandboxError."""

    passed: frozenset[str]
    failed: Mapping[str, str] = field(default_factory=dict[str, str])
    """Why, by the id of the test."""

    @property
    def is_pass(self) -> bool:
        return bool(self.passed) and not self.failed

    @property
    def share(self) -> float:
        """The share of tests that passed."""
        total = len(self.passed) + len(self.failed)
        return len(self.passed) / total if total else 0.0
