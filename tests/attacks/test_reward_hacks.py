# SPDX-License-Identifier: Apache-2.0
"""A verdict cannot be forged from inside the sandbox: 25 hacks fail, 25 honest solutions pass."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from tests.attacks.reward_hacks import HACKS, HONEST_PRIMES, HONEST_VALUES, IDS, TESTS

from penstock.errors import SandboxError
from penstock.rollout.grading.grader import grade
from penstock.rollout.grading.types import GradingLimits, Solution, TestFile, Verdict
from penstock.rollout.isolation import Isolation, Use
from penstock.rollout.sandbox.bubblewrap import BubblewrapBackend
from penstock.rollout.sandbox.types import Limits, Sandbox
from penstock.rollout.tool_sandbox import grade_solution

FAST = GradingLimits(call_s=4.0)
"""For hacks only: an honest solution may take its time on a slow machine."""
PATIENT = GradingLimits(
    solution=Limits(wall_s=600, cpu_s=600, memory_mb=1024),
    tests=Limits(wall_s=600, cpu_s=600, memory_mb=1024),
    call_s=300,
)


async def verdict_of(
    source: str, tests: str = TESTS, ids: frozenset[str] = IDS, limits: GradingLimits = PATIENT
) -> Verdict:
    return await grade_solution(Isolation(), source, tests, ids=sorted(ids), limits=limits)


def test_there_are_25_of_each() -> None:
    assert len(HACKS) == 25
    assert len(HONEST_PRIMES) + len(HONEST_VALUES) == 25


@pytest.mark.parametrize("hack", HACKS)
async def test_a_hack_passes_no_test(hack: str) -> None:
    """A solution that does not solve the task passes none of its tests, whatever else it does."""
    verdict = await verdict_of(HACKS[hack], limits=FAST)
    assert verdict.passed == frozenset() and verdict.failed.keys() == IDS, verdict
    assert not verdict.is_pass and verdict.share == 0.0


@pytest.mark.parametrize("name", HONEST_PRIMES)
async def test_an_honest_program_passes_every_test(name: str) -> None:
    """What keeps cheats out lets every honest solution of the same task in."""
    verdict = await verdict_of(HONEST_PRIMES[name])
    assert verdict.is_pass and verdict.passed == IDS, verdict.failed


@pytest.mark.parametrize("name", HONEST_VALUES)
async def test_an_honest_value_passes(name: str) -> None:
    """Values of every plain type reach the tests unchanged."""
    source, args, expected = HONEST_VALUES[name]
    tests = f"def test_f(solution): solution.expect(solution.call('f', *{args!r}), {expected!r})"
    verdict = await verdict_of(source, tests, frozenset({"test_f"}))
    assert verdict.is_pass, verdict.failed


@pytest.mark.parametrize(
    ("returned", "expected"), [("True", 1), ("1.0", 1), ("'1'", 1), ("[1.0]", [1]), ("0", False)]
)
async def test_equal_is_not_enough(returned: str, expected: object) -> None:
    """A value of another type that Python calls equal is wrong."""
    tests = f"def test_f(solution): solution.expect(solution.call('f'), {expected!r})"
    verdict = await verdict_of(f"def f(): return {returned}", tests, frozenset({"test_f"}))
    assert not verdict.is_pass


async def test_a_test_that_does_not_report_has_failed() -> None:
    """Exit code 0 is never a pass: tests that end early, or are missing, have failed."""
    early = "import os\ndef test_a(s): pass\ndef test_b(s): os._exit(0)\ndef test_c(s): pass"
    verdict = await verdict_of("", early, frozenset({"test_a", "test_b", "test_c"}))
    assert verdict.passed == frozenset(), "without the end message nothing counts"
    assert set(verdict.failed.values()) == {"did not report"}
    verdict = await verdict_of("", "def test_a(s): pass", frozenset({"test_a", "test_gone"}))
    assert verdict.passed == {"test_a"} and verdict.failed.keys() == {"test_gone"}


@pytest.mark.parametrize("tests", ["raise SystemExit(0)", "import nothing_like_it", "def test_f("])
async def test_tests_that_end_before_the_first_are_no_verdict(tests: str) -> None:
    """Their interpreter did not start, or they cannot be imported: no solution can cause it."""
    with pytest.raises(SandboxError, match="before the first"):
        await verdict_of("def f(): return 1", tests, frozenset({"test_f"}))


async def test_tests_that_are_killed_are_no_verdict() -> None:
    """An infrastructure failure is neither pass nor fail: it raises, and is never a reward of 0."""
    tests = "def test_a(s): bytearray(1 << 30)"
    small = replace(PATIENT, tests=Limits(wall_s=600, cpu_s=600, memory_mb=64))
    with pytest.raises(SandboxError, match="memory_mb"):
        await verdict_of("", tests, frozenset({"test_a"}), small)


async def test_the_solution_sees_nothing_of_the_tests() -> None:
    """The sandboxes share no file, process or descriptor."""
    look = """
import os
def f():
    pids = [p for p in os.listdir("/proc") if p.isdigit()]
    commands = [open(f"/proc/{p}/cmdline").read() for p in pids]
    return {"files": sorted(os.listdir("/work")), "runner": any("runner" in c for c in commands)}
"""
    tests = (
        "def test_f(solution):\n"
        "    found = solution.call('f')\n"
        "    solution.expect(found['runner'], False)\n"
        "    assert 'tests.py' not in found['files'], found\n"
    )
    verdict = await verdict_of(look, tests, frozenset({"test_f"}))
    assert verdict.is_pass, verdict.failed


async def test_a_solution_that_does_not_fit_has_failed() -> None:
    """What a solution can cause is its own failure, and no excuse to be tried again."""
    small = replace(PATIENT, solution=Limits(disk_mb=1))
    verdict = await verdict_of("#" * (4 << 20), limits=small)
    assert verdict.passed == frozenset() and verdict.failed.keys() == IDS


@pytest.mark.parametrize("name", ["penstock_driver.py/x", "solution.py/x", "../x", "\ud800", ""])
async def test_a_file_name_that_cannot_be_is_a_failed_solution(name: str) -> None:
    """Names of files that a model chose, too, fail the solution and not the grader."""
    solution = Solution(files={"solution.py": b"def f(): return 1", name: b""})
    tests = TestFile(source="def test_f(s): s.expect(s.call('f'), 1)", ids=frozenset({"test_f"}))

    async def make(limits: Limits) -> Sandbox:
        return await Isolation().open(Use.TOOLS, limits=limits)

    verdict = await grade(make, solution, tests)
    assert verdict.failed.keys() == {"test_f"} and not verdict.passed


async def test_a_sandbox_that_cannot_start_is_no_verdict() -> None:
    """A grader whose sandbox fails raises, so that the attempt is retried."""
    isolation = Isolation(_found=BubblewrapBackend(program="/bin/false"))
    with pytest.raises(SandboxError, match="bubblewrap"):
        await grade_solution(isolation, "", TESTS, ids=sorted(IDS))


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of the project that the node works and imports in."""
    with tempfile.TemporaryDirectory(prefix="penstock-attack-") as project:
        Path(project).chmod(0o755)
        path = Path(project, "answers.txt")
        path.write_text("42")
        monkeypatch.chdir(project)
        monkeypatch.setattr(sys, "path", ["", project, *sys.path])
        yield path


async def test_a_solution_reads_no_answer_in_the_project(answers: Path) -> None:
    """The folder from which the owner's modules come often holds the tasks with their answers."""
    source = f"def f(): return int(open({str(answers)!r}).read())"
    tests = "def test_f(solution): solution.expect(solution.call('f'), 42)"
    verdict = await verdict_of(source, tests, frozenset({"test_f"}))
    assert "FileNotFoundError" in verdict.failed["test_f"]


FORGED_FRAME = """
import os
def f():
    body = b'{"value": 1e999}'
    for fd in range(3, 20):
        try: os.write(fd, len(body).to_bytes(4, "little") + body)
        except OSError: pass
    os._exit(0)
"""
TWICE = "def test_{0}(s): s.expect(s.call('f', s.call('f')), 1)"
ESCAPES = {
    "an infinite number": (FORGED_FRAME, "def test_{0}(s): s.expect(s.call('f'), 1)"),
    "text that no file can hold": ("f = '\ud800'", "def test_{0}(s): s.expect(s.call('f'), 1)"),
    "slow answers": ("import time\ndef f(*_): time.sleep(0.8)", TWICE),
    "a long value that a test passes on": ("def f(*_): return 'x' * 200_000", TWICE),
    "long values that add up": ("def f(*_): return 'x' * 60_000", TWICE),
    "long values that tests print": (
        "def f(): return 'x' * 250_000",
        "def test_{0}(s): print(s.call('f')); print(s.call('f')); assert False",
    ),
    "numbers of one hash": (
        "def f(*_): return [((1 << 61) - 1) * k for k in range(1, 9_000)]",
        "def test_{0}(s): assert set(s.call('f')) == {{1}}",
    ),
    "a number that a test counts to": (
        "def f(*_): return 10**12",
        "def test_{0}(s): assert sum(1 for _ in range(s.call('f'))) == 1",
    ),
}


@pytest.mark.parametrize("way", ESCAPES)
async def test_a_wrong_solution_cannot_make_its_verdict_a_failure_of_ours(way: str) -> None:
    """A failure of the sandbox is tried again without a reward: a model that can cause one escapes
    its bad reward."""
    source, test = ESCAPES[way]
    ids = [f"test_{number}" for number in range(20)]
    tests = "\n".join(test.format(number) for number in range(20))
    limits = GradingLimits(
        call_s=1.5,
        solution=replace(Limits(), wall_s=3.0),
        tests=replace(Limits(), wall_s=6.0, cpu_s=1.0),
    )
    verdict = await verdict_of(source, tests, frozenset(ids), limits)
    assert not verdict.passed and verdict.failed.keys() == set(ids)
