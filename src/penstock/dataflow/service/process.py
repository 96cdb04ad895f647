# SPDX-License-Identifier: Apache-2.0
"""Shared by all handlers of one service process: its ledger, its clock, and how a command commits.

One event loop owns all state. A command's synchronous part decides; its answer is sent only after
the ledger's group commit. If storage fails, the process exits and the next one starts from the
state on disk.
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
"""Whether the caller of this request has hung up."""


async def never_disconnected() -> bool:
    """Callers in this process do not hang up."""
    return False


OnCommand = Callable[[float], None]
"""Acts on the changes of one event-loop turn, before they are written."""
OnWrite = Callable[[Sequence[Record | Deletion]], Sequence[Record]]
"""Sees all written records and may add to the same commit, such as running totals."""


class Process:
    def __init__(
        self,
        ledger: Ledger,
        journal: CommandJournal,
        clock: Callable[[], float],
        bounds: StorageLimits | None = None,
        *,
        on_command: OnCommand,
        on_wake: Callable[[], None] = lambda: None,
        on_write: OnWrite = lambda records: (),
    ) -> None:
        """`on_wake`: for owners of many polls, which wake only the affected ones."""
        self.ledger = ledger
        self._bounds = bounds or StorageLimits()
        self.journal = journal
        self.clock = clock
        self.started_at = clock()
        self._on_command = on_command
        self._on_wake = on_wake
        self._on_write = on_write
        self.waiting_since: dict[tuple[str, str], float] = {}
        """Start time of each open poll, by (who, waiting for what)."""
        self.changed = asyncio.Event()
        """Set by the next command; get it before checking the state."""
        self._pending: list[asyncio.Future[bool]] = []
        """Commands of the current event-loop turn."""
        self._deferred: list[Callable[[], None]] = []

    async def make_durable(self) -> None:
        """Act on the changes of this command; return when all of them are durable."""
        await self._commit_future()

    async def make_all_durable(self) -> None:
        """As `make_durable`, for an answer that may repeat an earlier decision: the changes of
        earlier commands are durable too."""
        has_written = await self._commit_future()
        if not has_written:  # writes are ordered, so this turn's write covers all earlier ones
            await self.ledger.flush()

    def _commit_future(self) -> asyncio.Future[bool]:
        """Done when the changes of this command are durable, if any. Commands of one event-loop
        turn are processed and written together, because a commit group has a fixed cost."""
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
                raise  # no caller waits, so log it
            return _fail(settling, error)
        durable.add_done_callback(partial(self._answer, settling))
        self.wake()

    def _answer(
        self, settling: Sequence[asyncio.Future[bool]], durable: asyncio.Future[None] | None
    ) -> None:
        """Resume the commands of a turn; durable: the future of their write, if any."""
        error = None if durable is None else durable.exception()
        if error is not None:
            return _fail(settling, error)
        for done in settling:
            if not done.done():  # its caller may have been cancelled
                done.set_result(durable is not None)
        if self._deferred:
            asyncio.get_running_loop().call_soon(self.run_deferred)

    # --- deferred work ---------------------------------------------------------

    def defer(self, act: Callable[[], None]) -> None:
        """Run `act` after the answers of this turn, or at the next `run_deferred()` if that comes
        first."""
        self._deferred.append(act)

    def run_deferred(self) -> None:
        """Run deferred work now, before a command that needs its effects. It is written separately
        from the command, which may still be refused."""
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
        """Raise 429 or 507 when there is no room for `num_bytes`; call it before changing
        anything."""
        self._bounds.check_delivery(self.ledger.usage(), num_bytes)

    # --- polls that are held open -------------------------------------------------------------

    def poll_deadline(self, wait_s: float) -> float:
        if not 0 <= wait_s <= 3600:  # also catches NaN
            raise BadRequest(f"wait_s is {wait_s}; expected 0 to 3600 seconds")
        return self.clock() + min(wait_s, MAX_WAIT_S)

    def wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()
        self._on_wake()

    async def wait_for(self, change: asyncio.Event, give_up_at: float) -> None:
        """consumes: nothing · produces: nothing · waits for: a command after the caller's check
        woken by: `wake()`"""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, give_up_at - self.clock())):
                await change.wait()


def _fail(settling: Sequence[asyncio.Future[bool]], error: BaseException) -> None:
    for done in settling:
        if not done.done():
            done.set_exception(error)


def monotonic_clock() -> Callable[[], float]:
    """Wall time at the start, then monotonic: a jump of the system clock does not move
    deadlines."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()
