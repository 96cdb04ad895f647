# SPDX-License-Identifier: Apache-2.0
"""Grades a solution: passes calls between two sandboxes, and collects the reports of the tests.

Refuses what could forge a verdict: reports without the nonce, unknown or repeated ids, values that
are not JSON or too long. A solution that crashes, hangs or floods fails the test that called it. A
sandbox that fails raises SandboxError, which is never a reward."""

from __future__ import annotations

import asyncio
import hmac
import json
import math
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib import resources
from typing import Any, NoReturn

import msgspec

from penstock.errors import SandboxError
from penstock.rollout.grading.types import GradingLimits, Solution, TestFile, Verdict
from penstock.rollout.isolation import Opened
from penstock.rollout.sandbox.types import Limits, ReadStream, Sandbox, SandboxProcess

PREFIX_BYTES = 4
DRIVER, RUNNER = "penstock_driver.py", "penstock_runner.py"
MAX_REPORT_BYTES = 4 << 20
"""Of a report, or of a call with what the solution returned before; as in the runner."""
SPARE_CPU_S = 10.0
"""Of the tests, besides their work on what the solution returned, which they bound themselves."""
_NO_BOUND = 1 << 62
"""Each message has a bound, and the rest of the tests' output is not kept."""


class _Report(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    nonce: str
    id: str
    passed: bool
    why: str


class _Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the tests' sandbox says: one report, one request to the solution, or the end."""

    report: _Report | None = None
    done: str | None = None
    call: str | None = None
    run: str | None = None
    read: str | None = None
    args: list[Any] = []


class _Answer(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the solution's sandbox says to a call."""

    value: msgspec.Raw = msgspec.Raw(b"null")
    error: str | msgspec.UnsetType = msgspec.UNSET


_MESSAGES = msgspec.json.Decoder(_Message)
_ANSWERS = msgspec.json.Decoder(_Answer)


async def grade(
    make: Callable[[Limits], Awaitable[Sandbox]],
    solution: Solution,
    tests: TestFile,
    *,
    python: str = "python3",
    limits: GradingLimits | None = None,
) -> Verdict:
    """Run all tests against the solution.

    make: makes a sandbox with these limits.
    python: the interpreter, as a path inside of the sandboxes."""
    bounds = limits or GradingLimits()
    theirs, ours = await make(bounds.solution), await make(_waiting_for_calls(bounds))
    async with Opened(theirs), Opened(ours):
        await theirs.put(DRIVER, _script("solution_driver.py"))
        try:
            for path, data in solution.files.items():
                await theirs.put(path, data)
        except ValueError as error:  # FileRefused, or a name that no file can have
            return Verdict(passed=frozenset(), failed=dict.fromkeys(tests.ids, str(error)))
        await ours.put("tests.py", tests.source.encode())
        await ours.put(RUNNER, _script("test_runner.py"))
        called = _CalledSolution(theirs, python, bounds)
        judge = await ours.exec([python, "-I", RUNNER])
        draining = asyncio.create_task(_drain(judge.stderr))
        try:
            return await _collect(judge, called, tests.ids, bounds)
        finally:
            draining.cancel()
            await called.close()


def _waiting_for_calls(bounds: GradingLimits) -> Limits:
    """Limits of the tests' sandbox. Its clock also runs while the solution answers, its output
    repeats what the solution returned, and that may be costly to compare: none of these may end the
    tests, which would be no verdict."""
    calls_s = bounds.solution.wall_s + bounds.call_s
    wall_s = bounds.tests.wall_s + calls_s
    cpu_s = bounds.tests.cpu_s + SPARE_CPU_S
    return replace(bounds.tests, wall_s=wall_s, cpu_s=cpu_s, output_bytes=_NO_BOUND)


async def _collect(
    judge: SandboxProcess, called: _CalledSolution, ids: frozenset[str], bounds: GradingLimits
) -> Verdict:
    nonce = secrets.token_hex(16)
    with suppress(ConnectionError):  # how they ended is found out by reading
        await _send(judge, {"nonce": nonce, "ids": sorted(ids), "cpu_s": bounds.tests.cpu_s})
    reports = _Reports(nonce, ids)
    message = await _next_message(judge, bounds.tests.wall_s)
    if message is None:  # no code of the solution has run
        raise SandboxError(
            "the tests ended before the first of them; check that they can be imported, with the "
            "standard library alone"
        )
    while message is not None and message.done is None:
        if message.report is not None:
            reports.add(message.report)
        else:
            answer = await called.answer(message)
            with suppress(ConnectionError):
                await _send(judge, answer)
        message = await _next_message(judge, bounds.tests.wall_s)
    is_whole = message is not None and hmac.compare_digest(message.done or "", nonce)
    return reports.verdict(is_whole=is_whole)


async def _next_message(judge: SandboxProcess, deadline_s: float) -> _Message | None:
    """None if the tests ended by themselves without saying so."""
    try:
        async with asyncio.timeout(deadline_s):
            return _MESSAGES.decode(await _read_frame(judge.stdout, MAX_REPORT_BYTES))
    except TimeoutError:
        raise SandboxError(f"the tests did not report within {deadline_s:g} s") from None
    except (asyncio.IncompleteReadError, ConnectionError):
        ended = await judge.wait()
        if ended.limit or ended.code < 0:
            how = ended.limit or f"signal {-ended.code}"
            raise SandboxError(f"the sandbox of the tests was ended by {how}") from None
        return None
    except (msgspec.MsgspecError, ValueError) as error:
        raise SandboxError(f"the sandbox of the tests sent no valid report: {error}") from None


@dataclass(slots=True)
class _Reports:
    _nonce: str
    _ids: frozenset[str]
    _passed: set[str] = field(default_factory=set[str])
    _failed: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, report: _Report) -> None:
        if not hmac.compare_digest(report.nonce, self._nonce) or report.id not in self._ids:
            return
        if report.id in self._passed or report.id in self._failed:
            self._passed.discard(report.id)
            self._failed[report.id] = "reported twice"
        elif report.passed:
            self._passed.add(report.id)
        else:
            self._failed[report.id] = report.why

    def verdict(self, *, is_whole: bool) -> Verdict:
        """Every test that did not report failed; without the end message all of them did."""
        passed = self._passed if is_whole else set[str]()
        missing = self._ids - passed - self._failed.keys()
        failed = {**dict.fromkeys(sorted(missing), "did not report"), **self._failed}
        return Verdict(passed=frozenset(passed), failed=failed)


@dataclass(slots=True)
class _CalledSolution:
    """The solution's sandbox, as the tests reach it: an answer for every request, never an
    error."""

    _box: Sandbox
    _python: str
    _bounds: GradingLimits
    _driver: SandboxProcess | None = None
    _draining: asyncio.Task[None] | None = None
    _num_calls: int = 0
    _used_s: float = 0.0

    async def answer(self, message: _Message) -> dict[str, Any]:
        self._num_calls += 1
        if self._num_calls > self._bounds.max_calls:
            return {"error": f"more than {self._bounds.max_calls} calls"}
        if self._used_s > self._bounds.solution.wall_s:
            return {"error": f"all calls took longer than {self._bounds.solution.wall_s:g} s"}
        started_at = time.monotonic()
        try:
            async with asyncio.timeout(self._bounds.call_s):
                return {"value": await self._ask(message)}
        except TimeoutError:
            await self.close()
            return {"error": f"took longer than {self._bounds.call_s:g} s"}
        except (asyncio.IncompleteReadError, ConnectionError):
            await self.close()
            return {"error": "ended instead of answering"}
        except (ValueError, msgspec.MsgspecError, RecursionError, OSError) as error:
            return {"error": str(error)[:1000]}
        finally:
            self._used_s += time.monotonic() - started_at

    async def close(self) -> None:
        """Forget the process; its sandbox is killed by the owner."""
        if self._draining is not None:
            self._draining.cancel()
        self._driver = self._draining = None

    async def _ask(self, message: _Message) -> Any:
        if message.read is not None:
            data = await self._box.get(message.read, max_bytes=self._bounds.max_value_bytes)
            return data.decode()
        if message.run is not None:
            return await self._run(message.run, [str(argument) for argument in message.args])
        return await self._call({"name": message.call, "args": message.args})

    async def _call(self, call: dict[str, Any]) -> Any:
        if self._driver is None:
            self._driver = await self._box.exec([self._python, DRIVER])
            self._draining = asyncio.create_task(_drain(self._driver.stderr))
        await _send(self._driver, call)
        body = await _read_frame(self._driver.stdout, self._bounds.max_value_bytes)
        answer = _ANSWERS.decode(body)
        if answer.error is not msgspec.UNSET:
            raise ValueError(answer.error)
        return json.loads(bytes(answer.value), parse_constant=_refuse, parse_float=_finite)

    async def _run(self, stdin: str, args: list[str]) -> str:
        program = await self._box.exec([self._python, "solution.py", *args])
        draining = asyncio.create_task(_drain(program.stderr))
        try:
            program.stdin.write(stdin.encode())
            await program.stdin.drain()
            program.stdin.close()
            printed = await _read_all(program.stdout, self._bounds.max_value_bytes)
            ended = await program.wait()
        finally:
            draining.cancel()
        if ended.code != 0:
            raise ValueError(f"exited with code {ended.code}")
        return printed.decode(errors="strict")


def _refuse(text: str) -> NoReturn:
    raise ValueError(f"{text} is not JSON")


def _finite(text: str) -> float:
    """Such as 1e999 is JSON, and no number that can be passed on."""
    number = float(text)
    if not math.isfinite(number):
        _refuse(text[:40])
    return number


async def _send(process: SandboxProcess, message: Any) -> None:
    body = json.dumps(message, allow_nan=False).encode()
    process.stdin.write(len(body).to_bytes(PREFIX_BYTES, "little") + body)
    await process.stdin.drain()


async def _read_frame(source: ReadStream, max_bytes: int) -> bytes:
    num_bytes = int.from_bytes(await source.readexactly(PREFIX_BYTES), "little")
    if num_bytes > max_bytes:
        raise ConnectionError(f"a message of {num_bytes} bytes; at most {max_bytes} are allowed")
    return await source.readexactly(num_bytes)


async def _read_all(source: ReadStream, max_bytes: int) -> bytes:
    found = bytearray()
    while chunk := await source.read(1 << 16):
        found += chunk
        if len(found) > max_bytes:
            raise ValueError(f"printed more than {max_bytes} bytes")
    return bytes(found)


async def _drain(source: ReadStream) -> None:
    while await source.read(1 << 16):
        pass


def _script(name: str) -> bytes:
    return resources.files("penstock.rollout.grading").joinpath(name).read_bytes()
