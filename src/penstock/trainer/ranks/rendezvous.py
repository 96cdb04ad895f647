# SPDX-License-Identifier: Apache-2.0
"""Where the ranks of a trainer meet: rank 0's store, before their first collective and after one
that failed.

Owns that all ranks of one start are alive when they begin, and who is named when they stop: a rank
that hangs does not say so itself, so each tells the store where it is. The store is neither
encrypted nor authenticated, as collectives are not: it belongs in a private network.
"""

from __future__ import annotations

import datetime
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import structlog
import torch.distributed as dist

from penstock.errors import PenstockError
from penstock.trainer.ranks.supervisor import RankEnv

CONNECT_S = 5.0
"""One attempt to reach rank 0's store; repeated without end."""
POLL_S = 0.05
REMIND_S = 30.0
BEAT_S = 2.0
"""Between two reports of a rank to the store."""
CLOSE_S = 10.0
"""A thread that waits for a store that is gone ends with the process."""
_BEGUN = "begun"
_log = structlog.get_logger(__name__)

Store = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]


class RanksNotMet(PenstockError):
    """Not all ranks of a trainer came together; it is tried again."""


@dataclass(slots=True)
class Progress:
    """How far this process is in the sequence of collectives, which is the same on all ranks."""

    number: int = 0
    name: str = "start"

    def enter(self, name: str) -> None:
        """The next collective begins."""
        self.number += 1
        self.name = name


progress = Progress()
"""One per process, like torch's process group."""


def open_store(
    rank_env: RankEnv, *, timeout_s: float, is_stopping: Callable[[], bool] = lambda: False
) -> Store:
    """Rank 0's store, served by this process if it is rank 0; waits until it can be reached."""
    reminded_at = time.monotonic()
    while True:
        try:
            store = Store(
                rank_env.host,
                rank_env.port,
                rank_env.num_ranks,
                is_master=rank_env.rank == 0,
                timeout=datetime.timedelta(seconds=CONNECT_S),
                wait_for_workers=False,
                master_listen_fd=rank_env.listener,
            )
        except RuntimeError as error:  # of torch's kinds, by version
            if rank_env.rank == 0 or is_stopping():
                raise RanksNotMet(f"rank {rank_env.rank} has no store: {error}") from error
            if time.monotonic() - reminded_at > REMIND_S:
                reminded_at = time.monotonic()
                where = f"{rank_env.host}:{rank_env.port}"
                _log.info("waiting for rank 0", at=where, rank=rank_env.rank)
        else:
            store.set_timeout(datetime.timedelta(seconds=timeout_s))
            return store


def meet(
    store: Store,
    rank_env: RankEnv,
    *,
    hosts: Sequence[str] = (),
    is_stopping: Callable[[], bool] = lambda: False,
) -> None:
    """Return when every rank is here. hosts: of each rank, for messages; empty: all on this one.

    Raises RanksNotMet if the others began with an earlier process of this rank, which is dead: they
    notice, and all meet again."""
    is_here_again = store.add(_joined(rank_env.rank), 1) > 1
    if is_here_again and store.check([_BEGUN]):
        raise RanksNotMet(f"rank {rank_env.rank} came too late: the others began without it")
    reminded_at = time.monotonic()
    while missing := _missing(store, rank_env):
        if is_stopping():
            raise RanksNotMet(f"rank {rank_env.rank} was stopped before all ranks had met")
        if time.monotonic() - reminded_at > REMIND_S:
            reminded_at = time.monotonic()
            _log.info("waiting for ranks", missing=_named(missing, hosts), rank=rank_env.rank)
        time.sleep(POLL_S)
    if rank_env.rank == 0:
        store.set(_BEGUN, "1")


def _missing(store: Store, rank_env: RankEnv) -> list[int]:
    """Ranks that have not come; for all but rank 0, rank 0 until it has seen all of them."""
    try:
        if rank_env.rank != 0:
            return [] if store.check([_BEGUN]) else [0]
        return [r for r in range(rank_env.num_ranks) if not store.check([_joined(r)])]
    except RuntimeError as error:
        raise RanksNotMet(f"rank {rank_env.rank} lost rank 0's store: {error}") from error


def _joined(rank: int) -> str:
    return f"joined/{rank}"


def _named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """`2, 3 (gpu1)`."""
    if not hosts:
        return ", ".join(map(str, ranks))
    by_host: dict[str, list[str]] = {}
    for rank in ranks:
        by_host.setdefault(hosts[rank], []).append(str(rank))
    return "; ".join(f"{', '.join(found)} ({host})" for host, found in by_host.items())


def is_of_collective(error: RuntimeError) -> bool:
    """Whether a collective failed, not the work between two of them. Gloo raises plain
    RuntimeErrors that name its source files."""
    return isinstance(error, dist.DistError) or "gloo" in str(error)


class RankWatch:
    """Tells rank 0's store every BEAT_S where this rank is, from a separate thread."""

    def __init__(self, store: Store, rank_env: RankEnv, hosts: Sequence[str] = ()) -> None:
        self._store, self._hosts = store, hosts
        self._rank, self._num_ranks = rank_env.rank, rank_env.num_ranks
        self._beats: Store = cast(Any, store).clone()  # one connection for each thread
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="rank-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=CLOSE_S)

    def explain(self, error: BaseException) -> None:
        """Log which ranks the others wait for, after a collective failed here."""
        found = self._look_twice()
        if found is None:
            _log.error(
                "collective failed, and rank 0's store cannot be reached: its process or its host "
                "is gone; all ranks start again from the last checkpoint",
                rank=self._rank,
                why=str(error)[:300],
            )
            return
        silent, behind = blamed(*found, num_ranks=self._num_ranks)
        _log.error(
            "collective failed; all ranks start again from the last checkpoint",
            rank=self._rank,
            inside=progress.name,
            silent=_named(silent, self._hosts),
            behind=_named(behind, self._hosts),
            why=str(error)[:300],
        )

    def _tell(self) -> None:
        beat = 0
        with suppress(RuntimeError):  # the store is gone, and its rank with it
            while True:
                beat += 1
                at = f"{beat}:{progress.number}:{progress.name}"
                self._beats.set(f"at/{self._rank}", at)
                if self._closing.wait(BEAT_S):
                    return

    def _look_twice(self) -> tuple[Mapping[int, str], Mapping[int, str]] | None:
        """What each rank reported, now and some beats later; None without the store."""
        try:
            before = self._look()
            time.sleep(3 * BEAT_S)
            return before, self._look()
        except RuntimeError:
            return None

    def _look(self) -> dict[int, str]:
        keys = {rank: f"at/{rank}" for rank in range(self._num_ranks)}
        known = {rank: key for rank, key in keys.items() if self._store.check([key])}
        return {rank: self._store.get(key).decode() for rank, key in known.items()}


def blamed(
    before: Mapping[int, str], after: Mapping[int, str], *, num_ranks: int
) -> tuple[list[int], list[int]]:
    """(ranks that tell nothing any more, ranks that live and are behind the furthest one)."""
    silent = [r for r in range(num_ranks) if r not in after or before.get(r) == after[r]]
    numbers = {rank: int(text.split(":")[1]) for rank, text in after.items()}
    furthest = max(numbers.values(), default=0)
    behind = [r for r, number in numbers.items() if number < furthest and r not in silent]
    return silent, behind
