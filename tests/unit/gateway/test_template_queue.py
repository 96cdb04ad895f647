# SPDX-License-Identifier: Apache-2.0
"""An event loop goes on while its prompts are rendered; each prompt gets its own text, or its own
error, whatever the others do to the process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from jinja2 import TemplateError

from penstock.errors import EngineError
from penstock.gateway.template_process import TemplateProcess

MAX_S = 0.3
SLOW = 99_999


@pytest.fixture
def template() -> Iterator[TemplateProcess]:
    """Writes its name, after as much work as it is asked for."""
    made = TemplateProcess(
        "{% for i in range(work or 0) %}{% for j in range(work) %}{% endfor %}{% endfor %}"
        "{{ name * (times or 1) }}",
        max_s=MAX_S,
    )
    yield made
    made.close()


async def test_each_gets_its_own_text(template: TemplateProcess) -> None:
    """Also large ones, which are sent and received in parts."""
    names = [str(number) for number in range(100)]
    times = [1 + number % 3 * 100_000 for number in range(100)]
    texts = await asyncio.gather(
        *(
            template.render_soon(name=name, times=num, padding="x" * num)
            for name, num in zip(names, times, strict=True)
        )
    )
    assert texts == [name * num for name, num in zip(names, times, strict=True)]


async def test_the_event_loop_goes_on(template: TemplateProcess) -> None:
    await template.render_soon(name="a")
    slow = asyncio.create_task(template.render_soon(name="b", work=SLOW))
    num_turns = 0
    while not slow.done():
        await asyncio.sleep(0.001)
        num_turns += 1
    assert num_turns > 10
    with pytest.raises(TemplateError, match="processor time"):
        await slow


async def test_only_the_prompt_that_ends_the_process_fails(template: TemplateProcess) -> None:
    """Those behind it are rendered by the next process."""
    work = [0, SLOW, 0, 0, SLOW, 0]
    answers = await asyncio.gather(
        *(template.render_soon(name=str(at), work=num) for at, num in enumerate(work)),
        return_exceptions=True,
    )
    assert [answer if isinstance(answer, str) else type(answer) for answer in answers] == [
        "0",
        TemplateError,
        "2",
        "3",
        TemplateError,
        "5",
    ]


async def test_a_caller_that_is_gone_leaves_its_text_to_no_other(template: TemplateProcess) -> None:
    await template.render_soon(name="a")
    gone = asyncio.create_task(template.render_soon(name="b", times=1_000))
    await asyncio.sleep(0)
    gone.cancel()
    assert await template.render_soon(name="c") == "c"


async def test_a_process_that_somebody_kills_is_replaced(template: TemplateProcess) -> None:
    others = frozenset(children())
    for name in "abc":
        assert await template.render_soon(name=name) == name
        [pid] = children(others)
        os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(wait_until_gone, pid)
    assert await template.render_soon(name="d") == "d"


def children(before: frozenset[int] = frozenset()) -> list[int]:
    """Processes that render templates, started here."""
    tasks = Path("/proc/self/task").glob("*/children")
    pids = {int(pid) for task in tasks for pid in task.read_text().split()}
    return [
        pid
        for pid in pids - before
        if b"template_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    ]


def wait_until_gone(pid: int) -> None:
    stat = Path(f"/proc/{pid}/stat")
    with suppress(FileNotFoundError, ProcessLookupError):
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            time.sleep(0.01)


def test_each_event_loop_has_its_own(template: TemplateProcess) -> None:
    assert [asyncio.run(template.render_soon(name=name)) for name in "ab"] == ["a", "b"]
    assert template.render(name="c") == "c"


async def test_a_process_that_does_not_start(
    template: TemplateProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(EngineError, match=r"did not start: /bin/false ended with code 1"):
        await template.render_soon(name="a")
    monkeypatch.undo()
    assert await template.render_soon(name="b") == "b"
