# SPDX-License-Identifier: Apache-2.0
"""What a sandbox costs: a start from the pool against a bare bubblewrap, a cold start, the CPU time
of a call, and what many of them leave behind.

`python -m benchmarks.sandbox [--quick]`. Bare and pooled starts take turns, so that others on this
machine slow both.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import subprocess
import time
from collections.abc import Awaitable, Callable

from tests.attacks.hostile.host import count_leftovers

from benchmarks.harness import log_line, result
from penstock.rollout.sandbox.bubblewrap import BubblewrapBackend
from penstock.rollout.sandbox.pool import SandboxPool
from penstock.rollout.sandbox.run import run
from penstock.rollout.sandbox.types import Limits, SandboxSpec

SPEC = SandboxSpec(limits=Limits(disk_mb=64))
BARE = [
    *("bwrap", "--unshare-all", "--die-with-parent", "--ro-bind", "/usr", "/usr"),
    *("--symlink", "usr/lib", "/lib", "--symlink", "usr/lib64", "/lib64"),
    *("--symlink", "usr/bin", "/bin", "--proc", "/proc", "--dev", "/dev", "true"),
]
AT_ONCE = 64


async def time_ms(action: Callable[[], Awaitable[object]]) -> float:
    began_at = time.perf_counter()
    await action()
    return 1e3 * (time.perf_counter() - began_at)


async def bare() -> None:
    process = await asyncio.create_subprocess_exec(*BARE, stderr=subprocess.DEVNULL)
    assert await process.wait() == 0, "bubblewrap does not start here"


async def pooled(pool: SandboxPool) -> float:
    """From the wish for a sandbox to the end of `true` in it; giving it back is not counted."""
    await pool.open()
    began_at = time.perf_counter()
    async with pool.take() as sandbox:
        process = await sandbox.exec(["true"])
        process.stdin.close()
        assert (await process.wait()).code == 0
        return 1e3 * (time.perf_counter() - began_at)


async def cold(backend: BubblewrapBackend) -> None:
    sandbox = backend.create(SPEC)
    await sandbox.start()
    assert (await run(sandbox, ["true"])).exit.code == 0
    await sandbox.kill()


def cpu_ms() -> float:
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return 1e3 * sum(usage.ru_utime + usage.ru_stime for usage in usages)


async def call_cpu_ms(backend: BubblewrapBackend, count: int) -> float:
    """Of one further program in a running sandbox, walls included."""
    sandbox = backend.create(SPEC)
    await sandbox.start()
    before_ms = cpu_ms()
    for _ in range(count):
        await run(sandbox, ["true"])
    used_ms = cpu_ms() - before_ms
    await sandbox.kill()
    return used_ms / count


async def measure(is_quick: bool) -> None:
    backend, rounds, in_a_row = (
        BubblewrapBackend(),
        15 if is_quick else 60,
        30 if is_quick else 1000,
    )
    before = count_leftovers()
    pool = SandboxPool(backend=backend, spec=SPEC, size=2, lease_s=60)
    pairs = [(await time_ms(bare), await pooled(pool)) for _ in range(rounds)]
    await pool.close()
    bare_ms, warm_ms = (statistics.median(one) for one in zip(*pairs, strict=True))
    log_line(f"bare {bare_ms:.1f} ms, from the pool {warm_ms:.1f} ms")
    cold_ms = statistics.median([await time_ms(lambda: cold(backend)) for _ in range(rounds)])
    exec_cpu_ms = await call_cpu_ms(backend, rounds)
    log_line(f"cold {cold_ms:.1f} ms, {exec_cpu_ms:.1f} ms of CPU per call")
    for _ in range(in_a_row):
        await cold(backend)
    at_once_ms = await time_ms(lambda: asyncio.gather(*(cold(backend) for _ in range(AT_ONCE))))
    after = count_leftovers()
    result(
        bare_p50_ms=bare_ms,
        warm_p50_ms=warm_ms,
        ratio=warm_ms / bare_ms,
        cold_p50_ms=cold_ms,
        call_cpu_ms=exec_cpu_ms,
        in_a_row=in_a_row,
        at_once=AT_ONCE,
        at_once_ms=at_once_ms,
        left_processes=len(after.processes) - len(before.processes),
        left_mounts=after.mounts - before.mounts,
        left_groups=len(after.groups) - len(before.groups),
        left_folders=len(after.folders) - len(before.folders),
        left_descriptors=after.descriptors - before.descriptors,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    asyncio.run(measure(parser.parse_args().quick))


if __name__ == "__main__":
    main()
