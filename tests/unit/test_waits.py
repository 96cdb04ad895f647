# SPDX-License-Identifier: Apache-2.0
"""scripts/check_waits.py: which calls can block for ever, what is a deadline, and that an exception
names who ends the wait and stays true."""

from __future__ import annotations

import pytest
from scripts import check_waits


def _calls(source: str) -> list[str]:
    return [wait.call for wait in check_waits.find_waits(source, "a.py")]


@pytest.mark.parametrize(
    "call",
    [
        "jobs.get()",
        "ended.wait()",
        "ended.wait(timeout=None)",
        "thread.join()",
        "lock.acquire()",
        "future.result()",
        "child.communicate()",
        "selector.select()",
        "peer.recv(4096)",
        "listener.accept()",
        "pipe.readexactly(4)",
        "pipe.readline()",
        "asyncio.wait(tasks)",
        "subprocess.run(command)",
        "urllib.request.urlopen(url)",
        "httpx2.Client()",
        "httpx2.AsyncClient(timeout=None)",
    ],
)
def test_a_call_that_can_block_for_ever_is_found(call: str) -> None:
    imports = "import asyncio, subprocess, urllib.request, httpx2\n"
    assert _calls(f"{imports}{call}\n") == [call]


@pytest.mark.parametrize(
    "call",
    [
        "settings.get('key')",
        "', '.join(names)",
        "ended.wait(5.0)",
        "ended.wait(timeout=limit_s)",
        "lock.acquire(blocking=False)",
        "points.select(group='console_scripts')",
        "subprocess.run(command, timeout=5)",
    ],
)
def test_a_call_that_ends_by_itself_is_not(call: str) -> None:
    assert _calls(f"import subprocess\n{call}\n") == []


def test_an_alias_hides_nothing() -> None:
    assert _calls("from subprocess import run as start\nstart(command)\n") == ["start(command)"]


def test_a_block_with_a_deadline_covers_what_it_runs_and_nothing_that_runs_later() -> None:
    source = """
import asyncio
async def f():
    async with asyncio.timeout({time}):
        await ended.wait()
        async def later():
            await begun.wait()
"""
    assert _calls(source.format(time="5.0")) == ["begun.wait()"]
    assert _calls(source.format(time="None")) == ["ended.wait()", "begun.wait()"]


def test_an_exception_covers_as_many_calls_as_it_says_and_goes_with_them() -> None:
    waits = check_waits.find_waits("a.wait()\na.wait()\nb.get()\n", "a.py")
    kept = check_waits.read_kept(
        '[["a.py"]]\ncall = "a.wait()"\nended_by = "the caller, after a minute"\n'
        '[["a.py"]]\ncall = "c.join()"\nended_by = "the thread, which ends"\n'
    )
    found, stale = check_waits.unkept(waits, kept)
    assert [(wait.line, wait.call) for wait in found] == [(2, "a.wait()"), (3, "b.get()")]
    assert stale == ["a.py: c.join() is no longer there"]


def test_an_exception_without_an_owner_is_refused() -> None:
    with pytest.raises(SystemExit, match="say who ends"):
        check_waits.read_kept('[["a.py"]]\ncall = "a.wait()"\nended_by = "ok"\n')
