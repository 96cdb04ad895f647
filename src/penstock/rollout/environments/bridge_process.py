# SPDX-License-Identifier: Apache-2.0
"""One bridge: its process in a sandbox, its calls with deadlines, and how it ends.

A call that gets no answer in time fails alone; the bridge is then retired: it gets no new episodes,
and ends with its last one. So does a call whose answer has a value out of bounds, as a model can
bring about. A bridge that ends or breaks the protocol fails all calls at once.
Knows nothing of attempts."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from dataclasses import dataclass, field

from penstock.errors import EnvironmentFailed
from penstock.rollout.environments.protocol import (
    MAX_MESSAGE_BYTES,
    PROTOCOL,
    BridgeAnswer,
    WrongAnswer,
    pack_call,
    parse_answer,
)
from penstock.rollout.sandbox.lines import read_lines
from penstock.rollout.sandbox.types import Exit, Sandbox, SandboxProcess
from penstock.rollout.user_errors import KEPT_ERROR_BYTES, last_words, shorten
from penstock.types import JsonObject

RENEWALS_PER_LEASE = 3
LAST_WORDS_S = 1.0
"""How long a bridge without output may take to end, and its errors to arrive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeSettings:
    """Of one source."""

    source: str
    library: str
    """Empty for a program of the user."""
    argv: tuple[str, ...]
    settings: JsonObject
    max_episodes: int
    start_timeout_s: float
    reset_timeout_s: float
    step_timeout_s: float
    lease_s: float

    @property
    def label(self) -> str:
        return f"environment of source {self.source} ({self.library or self.argv[0]})"

    def timeout_of(self, call: str) -> tuple[float, str]:
        """Most seconds of this call, and the config key that says so."""
        if call == "hello":
            return self.start_timeout_s, "start_timeout_s"
        if call == "reset":
            return self.reset_timeout_s, "reset_timeout_s"
        return self.step_timeout_s, "step_timeout_s"


@dataclass(slots=True, eq=False)
class Bridge:
    """A process, started by `start_bridge`."""

    settings: BridgeSettings
    _box: Sandbox
    _process: SandboxProcess
    model_url: str = ""
    """Where the environment reaches the model; empty if it does not play by itself."""
    episodes: set[str] = field(default_factory=set[str])
    """Those that are open."""
    is_retired: bool = False
    _failure: str = ""
    """Why it takes no more calls; empty while it does."""
    _error: bytearray = field(default_factory=bytearray)
    """The end of its standard error."""
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))
    _last: int = 0
    _waiting: dict[int, asyncio.Future[BridgeAnswer]] = field(
        default_factory=dict[int, "asyncio.Future[BridgeAnswer]"]
    )
    _loops: list[asyncio.Task[None]] = field(default_factory=list["asyncio.Task[None]"])

    @property
    def is_open(self) -> bool:
        """Whether it takes new episodes."""
        return not self._failure and not self.is_retired

    def begin(self) -> None:
        loops = (self._read_answers(), self._read_errors(), self._renew_leases())
        self._loops = [asyncio.create_task(loop) for loop in loops]

    async def call(self, call: str, **values: object) -> BridgeAnswer:
        """Ask, and wait for the answer. Raises EnvironmentFailed if none comes in time, or if it
        says that the environment failed."""
        if self._failure:
            raise self._failed(call, self._failure)
        seconds, key = self.settings.timeout_of(call)
        self._last = number = next(self._numbers)
        answer: asyncio.Future[BridgeAnswer] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                with suppress(ConnectionError):  # the reader finds out how it ended
                    self._process.stdin.write(pack_call(number, call, **values))
                    await self._process.stdin.drain()
                found = await answer
        except TimeoutError:
            if not limit.expired():
                raise
            self.is_retired = True
            why = f"gave no answer within {seconds:g} s{self._said()}; mend what hangs there, or "
            raise self._failed(call, f"{why}raise env.{key}") from None
        finally:
            self._waiting.pop(number, None)
        if found.error:
            raise self._failed(call, f"raised: {found.error}")
        return found

    async def end_episode(self, episode: str) -> None:
        """Close it there; a retired bridge ends with its last one."""
        try:
            with suppress(EnvironmentFailed):  # the result of the episode is already known
                if self.is_open:
                    await self.call("close", episode=episode)
        finally:
            self.episodes.discard(episode)
            if self.is_retired and not self.episodes:
                await self.kill()

    async def kill(self) -> None:
        """End the process; calls that still wait fail. May be repeated."""
        self._fail("was ended")
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        await self._box.kill()

    def _fail(self, why: str) -> None:
        self._failure = self._failure or why
        for answer in self._waiting.values():
            if not answer.done():
                answer.set_exception(self._failed("call", self._failure))

    def _failed(self, call: str, why: str) -> EnvironmentFailed:
        return EnvironmentFailed(shorten(f"{self.settings.label}, {call}: {why}"))

    def _said(self) -> str:
        text = last_words(self._error)
        return f" (last output: {text})" if text else ""

    async def _read_answers(self) -> None:
        """consumes: lines of the bridge · produces: the result of each call
        waits for: its output, until its end or an invalid line"""
        try:
            async for line in read_lines(self._process.stdout, MAX_MESSAGE_BYTES):
                try:
                    answer = parse_answer(line)
                except WrongAnswer as error:
                    answer = BridgeAnswer(id=error.id, error=str(error))
                self._take(answer)
            why = f"{await self._how_it_ended()}{self._said()}; mend it, or see `penstock check`"
        except ValueError as error:
            why = f"broke the protocol: {error}{self._said()}; only answers may be on its standard "
            why += "output"
        self._fail(why)
        await self._box.kill()

    async def _how_it_ended(self) -> str:
        try:
            async with asyncio.timeout(LAST_WORDS_S):
                ended = await self._process.wait()
                await asyncio.wait([self._loops[1]])
        except TimeoutError:
            return "closed its standard output"
        return f"its process ended ({_how(ended)})"

    def _take(self, answer: BridgeAnswer) -> None:
        """A late answer is dropped; one to a call that was never made is garbage."""
        if not 0 < answer.id <= self._last:
            raise ValueError(f"it answered call {answer.id}, which was never made")
        waiting = self._waiting.get(answer.id)
        if waiting is not None and not waiting.done():
            waiting.set_result(answer)

    async def _read_errors(self) -> None:
        """consumes: what the environment prints · produces: the end of it, for messages
        waits for: its output, until its end"""
        while chunk := await self._process.stderr.read(1 << 14):
            self._error += chunk
            del self._error[:-KEPT_ERROR_BYTES]

    async def _renew_leases(self) -> None:
        """consumes: open episodes · produces: their renewed leases, or a bridge that is ended
        waits for: a third of a lease"""
        while True:
            await asyncio.sleep(self.settings.lease_s / RENEWALS_PER_LEASE)
            if not self.episodes:
                continue
            try:
                await self.call("renew", episodes=sorted(self.episodes))
            except EnvironmentFailed as error:  # it does not even read
                self._fail(str(error))
                await self._box.kill()
                return


async def start_bridge(
    settings: BridgeSettings, box: Sandbox, argv: list[str], *, model_url: str = ""
) -> Bridge:
    """Start the process in this sandbox and shake hands. Raises EnvironmentFailed, and SandboxError
    if there is no sandbox; the sandbox is then gone."""
    try:
        await box.start()
        bridge = Bridge(settings, box, await box.exec(argv), model_url)
    except BaseException:
        await box.kill()
        raise
    bridge.begin()
    try:
        answer = await bridge.call(
            "hello",
            protocol=PROTOCOL,
            settings=settings.settings,
            max_episodes=settings.max_episodes,
        )
        if answer.protocol != PROTOCOL:
            raise EnvironmentFailed(
                f"{settings.label}, hello: it speaks protocol {answer.protocol} and this node "
                f"{PROTOCOL}; use a bridge of this release of penstock"
            )
    except BaseException:
        await bridge.kill()
        raise
    return bridge


def _how(ended: Exit) -> str:
    if ended.limit:
        return f"its limit {ended.limit}; see sandbox.environment.limits in the run file"
    return f"signal {-ended.code}" if ended.code < 0 else f"exit code {ended.code}"
