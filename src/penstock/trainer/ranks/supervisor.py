# SPDX-License-Identifier: Apache-2.0
"""The ranks of a trainer as processes: started, stopped and restarted together.

A supervisor starts one command N times, with the environment that torchrun uses, so the same
command also runs under torchrun or a custom launcher on other hosts. If a rank dies the others
cannot continue: they are killed, and all restart from the last checkpoint. SIGTERM reaches every
rank; a supervisor that is killed takes its ranks with it.

On several hosts each has a supervisor of its own ranks. They do not talk: a rank whose peers are
gone fails, its supervisor starts its ranks again, and they wait for the others at rank 0's store.

Owns processes and their exit codes. Imports no torch: it must respond while ranks compute.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import structlog

_log = structlog.get_logger(__name__)

PARENT_PID_ENV = "PENSTOCK_PARENT_PID"
"""The process that a service must not outlive; every command ties itself to it at startup."""
LISTENER = "PENSTOCK_STORE_FD"
"""A socket that is listening already, inherited by rank 0: no other process can take its port."""
LOOPBACK = "127.0.0.1"

POLL_S = 0.05
INITIAL_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
HEALTHY_UPTIME_S = 60.0
"""Ranks that ran this long do not count as a fast failure."""
MAX_FAST_FAILURES = 5
"""Consecutive; after that the process that started the supervisor decides."""


EXIT_NOT_MET = 75
"""A rank's exit code: not all ranks came together. This host did not fail, so it tries again
without end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRanks:
    """The ranks that one host starts, and where all ranks meet."""

    num_ranks: int
    """Of all hosts."""
    num_local: int
    """Of this host."""
    first: int = 0
    """Its first rank."""
    address: str = LOOPBACK
    """Of the host of rank 0."""
    port: int = 0
    """There; 0: any free one, if no other host has to know it."""
    interface: str = "lo"
    """Of this host's own address, which the ranks talk through."""

    @classmethod
    def one_host(cls, num_ranks: int) -> HostRanks:
        return cls(num_ranks=num_ranks, num_local=num_ranks)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnv:
    """Which rank this process is, and the address of the store."""

    rank: int
    num_ranks: int
    local_rank: int
    """Index among the ranks of its host: selects its device."""
    host: str
    port: int
    listener: int | None = None


def read_rank_env(environ: Mapping[str, str]) -> RankEnv | None:
    """The rank's environment; None in a process that is not a rank."""
    if "RANK" not in environ:
        return None
    try:
        listener = environ.get(LISTENER, "")
        return RankEnv(
            rank=int(environ["RANK"]),
            num_ranks=int(environ["WORLD_SIZE"]),
            local_rank=int(environ.get("LOCAL_RANK", environ["RANK"])),
            host=environ["MASTER_ADDR"],
            port=int(environ["MASTER_PORT"]),
            listener=int(listener) if listener else None,
        )
    except (KeyError, ValueError) as error:
        raise ValueError(
            f"RANK is set, but the rest of a rank's environment is invalid: {error}; set RANK, "
            "WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT as torchrun does, or none of them"
        ) from error


def run_ranks(
    command: Sequence[str],
    ranks: HostRanks,
    *,
    env: Mapping[str, str],
    is_stopping: Callable[[], bool],
    final_codes: Collection[int] = (),
) -> int:
    """Keep the ranks of this command running until they end by themselves; return the exit code.

    waits for: the first rank to end · ends: when all end with 0, when one ends with a final code,
    when it is stopped, or after `MAX_FAST_FAILURES` consecutive fast failures"""
    num_fast_failures = 0
    while True:
        began_at = time.monotonic()
        code = _run_once(command, ranks, env=env, is_stopping=is_stopping)
        if code == 0 or code in final_codes or is_stopping():
            return code
        was_healthy = time.monotonic() - began_at > HEALTHY_UPTIME_S or code == EXIT_NOT_MET
        num_fast_failures = 1 if was_healthy else num_fast_failures + 1
        if num_fast_failures >= MAX_FAST_FAILURES:
            _log.error(
                "ranks keep crashing on startup; giving up", failures=num_fast_failures, code=code
            )
            return code
        pause_s = min(INITIAL_BACKOFF_S * 2 ** (num_fast_failures - 1), MAX_BACKOFF_S)
        _log.warning("ranks restart from the last checkpoint", in_s=pause_s)
        _sleep(pause_s, is_stopping)
        if is_stopping():
            return 128 + signal.SIGTERM


def _run_once(
    command: Sequence[str],
    here: HostRanks,
    *,
    env: Mapping[str, str],
    is_stopping: Callable[[], bool],
) -> int:
    """0 if every rank ended with 0, else the code of the first that did not."""
    with _started(command, here, env) as ranks:
        is_terminated = False
        while True:
            if is_stopping() and not is_terminated:
                is_terminated = True
                for rank in ranks:
                    rank.terminate()
            codes = [rank.poll() for rank in ranks]
            failed = [(rank, code) for rank, code in enumerate(codes, here.first) if code]
            if failed and not (is_terminated and _is_shutting_down(codes)):
                return _report(*failed[0])
            if None not in codes:
                return 0
            time.sleep(POLL_S)


def _is_shutting_down(codes: Sequence[int | None]) -> bool:
    """Ranks that were stopped exit one after another; the last of them may still save."""
    return None in codes and all(code in (None, 0, 128 + signal.SIGTERM) for code in codes)


def _report(failed: int, code: int) -> int:
    shell_code = code if code > 0 else 128 - code
    if shell_code != 128 + signal.SIGTERM:
        why = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        _log.error("rank ended; stopping the others", rank=failed, why=why)
    return shell_code


@contextmanager
def _started(
    command: Sequence[str], here: HostRanks, env: Mapping[str, str]
) -> Generator[list[subprocess.Popen[bytes]]]:
    """All ranks of one start on this host; none is left when the block ends."""
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        with ExitStack() as stack:
            listener = stack.enter_context(_listen(here)) if here.first == 0 else None
            for local_rank in range(here.num_local):
                ranks.append(_start(command, local_rank, here, env, listener))
        yield ranks
    finally:
        for process in ranks:
            process.kill()
        for process in ranks:
            process.wait()


def _listen(here: HostRanks) -> socket.socket:
    """The socket of rank 0's store."""
    family = socket.AF_INET6 if ":" in here.address else socket.AF_INET
    return socket.create_server(
        (here.address, here.port), family=family, backlog=4 * here.num_ranks
    )


def _start(
    command: Sequence[str],
    local_rank: int,
    here: HostRanks,
    env: Mapping[str, str],
    listener: socket.socket | None,
) -> subprocess.Popen[bytes]:
    """listener: on the host of rank 0."""
    own = {
        "RANK": str(here.first + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(here.num_ranks),
        "MASTER_ADDR": here.address,
        "MASTER_PORT": str(listener.getsockname()[1] if listener else here.port),
        PARENT_PID_ENV: str(os.getpid()),
    }
    inherited: tuple[int, ...] = ()
    if listener is not None and local_rank == 0:
        own[LISTENER] = str(listener.fileno())
        inherited = (listener.fileno(),)
    interfaces = {"GLOO_SOCKET_IFNAME": here.interface}
    if here.num_local < here.num_ranks:
        interfaces["NCCL_SOCKET_IFNAME"] = here.interface
    return subprocess.Popen(command, env={**interfaces, **env, **own}, pass_fds=inherited)


def _sleep(seconds: float, is_stopping: Callable[[], bool]) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until and not is_stopping():
        time.sleep(POLL_S)
