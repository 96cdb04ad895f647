# SPDX-License-Identifier: Apache-2.0
"""What all sides of one service process share: its ledger, its clock, and the shape of a command.

One event loop owns all state. A command's synchronous part decides; its answer leaves only after
the ledger's group commit. If storage fails the process ends, and its next life starts from what
is on disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from penstock.dataflow.ledger.bounds import StorageLimits
from penstock.dataflow.ledger.store import Ledger
from penstock.dataflow.records import CommandJournal, Deletion, Record
from penstock.errors import BadRequest

MAX_WAIT_S = 30.0

IsDisconnected = Callable[[], Awaitable[bool]]
"""Has the caller of this request hung up?"""


async def never_disconnected() -> bool:
    """Callers in this process do not hang up."""
    return False


OnCommand = Callable[[float], None]
"""Acts on what the commands of a turn changed, before it is written."""
OnWrite = Callable[[Sequence[Record | Deletion]], Sequence[Record]]
"""Sees all that is written, and may add to the same commit: running totals."""


def _ignore_command(now: float) -> None:
    pass


def _add_no_records(records: Sequence[Record | Deletion]) -> Sequence[Record]:
    return ()


class Process:
    def __init__(
        self,
        ledger: Ledger,
        outbox: CommandJournal,
        clock: Callable[[], float],
        bounds: StorageLimits | None = None,
        on_command: OnCommand = _ignore_command,
        on_write: OnWrite = _add_no_records,
    ) -> None:
        self.ledger = ledger
        self._bounds = bounds or StorageLimits()
        self.journal = outbox
        self.clock = clock
        self.started_at = clock()
        self._on_command = on_command
        self._on_write = on_write
        self.waiting_since: dict[tuple[str, str], float] = {}
        """(who, on what) to since when: polls that are held open."""
        self._changed = asyncio.Event()
        self.on_wake: list[Callable[[], None]] = []
        """For owners of many polls, who wake only those that it concerns."""
        self._pending: list[asyncio.Future[bool]] = []
        """Commands of this turn of the event loop."""
        self._deferred: list[Callable[[], None]] = []

    async def settle(self) -> None:
        """Act on what changed; return when all of it is durable."""
        await self._commit_future()

    async def repeat(self) -> None:
        """For an answer that may repeat an earlier decision: that one must be durable too."""
        has_written = await self._commit_future()
        if not has_written:  # a write of this turn comes after all earlier ones
            await self.ledger.flush()

    def _commit_future(self) -> asyncio.Future[bool]:
        """Done when what this command did is durable, if it did anything. Commands of one turn of
        the event loop are driven and written together: the fewer groups, the less each costs."""
        loop = asyncio.get_running_loop()
        if not self._pending:
            loop.call_soon(self._end_turn)
        done = loop.create_future()
        self._pending.append(done)
        return done

    def _end_turn(self) -> None:
        settling, self._pending = self._pending, []
        try:
            self._on_command(self.clock())
            records = self.journal.take()
            if not records:
                return self._answer(settling, None)
            durable = self.ledger.write([*records, *self._on_write(records)])
        except Exception as error:
            if not settling:
                raise  # nobody to tell but the log
            return _fail(settling, error)
        durable.add_done_callback(partial(self._answer, settling))
        self.wake()

    def _answer(
        self, settling: Sequence[asyncio.Future[bool]], durable: asyncio.Future[None] | None
    ) -> None:
        """Let the commands of a turn go on; durable: what they wrote, if anything."""
        error = None if durable is None else durable.exception()
        if error is not None:
            return _fail(settling, error)
        for done in settling:
            if not done.done():  # its caller may be gone
                done.set_result(durable is not None)
        if self._deferred:
            asyncio.get_running_loop().call_soon(self.run_deferred)

    # --- what answers do not wait for ---------------------------------------------------------

    def defer(self, act: Callable[[], None]) -> None:
        """Act after the answers of this turn, or at the next `run_deferred()` if that comes
        first."""
        self._deferred.append(act)

    def run_deferred(self) -> None:
        """Before a command that must find everything as if nothing had been put off. What is done
        now is written in a turn that waits for no command: this one may be refused."""
        acts, self._deferred = self._deferred, []
        for act in acts:
            act()
        if acts:
            asyncio.get_running_loop().call_soon(self._end_turn)

    # --- memory and disk ----------------------------------------------------------------------

    @property
    def has_room(self) -> bool:
        """May new work start?"""
        return self._bounds.may_lease(self.ledger.usage())

    def require_room(self, num_bytes: int) -> None:
        """429 or 507 when so much more has no room; asked before anything changes."""
        self._bounds.check_delivery(self.ledger.usage(), num_bytes)

    # --- polls that are held open -------------------------------------------------------------

    def poll_deadline(self, wait_s: float) -> float:
        if not 0 <= wait_s <= 3600:  # also when it is no number
            raise BadRequest(f"wait_s is {wait_s}; give 0 to 3600 seconds")
        return self.clock() + min(wait_s, MAX_WAIT_S)

    @property
    def changed(self) -> asyncio.Event:
        """Set by the next command; take it before you look."""
        return self._changed

    def wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        for act in self.on_wake:
            act()

    async def wait_for(self, change: asyncio.Event, give_up_at: float) -> None:
        """consumes: nothing · produces: nothing · waits for: a command after the caller looked
        woken by: `wake()`"""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, give_up_at - self.clock())):
                await change.wait()


def _fail(settling: Sequence[asyncio.Future[bool]], error: BaseException) -> None:
    for done in settling:
        if not done.done():
            done.set_exception(error)


def monotonic_clock() -> Callable[[], float]:
    """Wall time at the start, then only forwards: a jump of the system clock moves no deadline."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()
