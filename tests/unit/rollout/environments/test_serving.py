# SPDX-License-Identifier: Apache-2.0
"""What all bridges of ours share: leases, calls at the same time, prints, and the end."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest
from tests.unit.rollout.environments.test_environments import info, session, sessions
from tests.unit.rollout.polling import (
    eventually,
    eventually_dead,
    is_alive,
    kill,
    running,
    start_python,
)

from penstock.dataflow.service.nodes.messages import EnvironmentInfo
from penstock.errors import EnvironmentFailed
from penstock.rollout import environments as package
from penstock.rollout.isolation import IsolationSettings

BRIDGES = str(Path(package.__file__).parent / "bridges")
SCRIPT = str(Path(__file__).parent / "countdown_bridge.py")


def countdown(*arguments: str, **changes: object) -> EnvironmentInfo:
    return info(command=(sys.executable, SCRIPT, BRIDGES, *arguments), **changes)


async def test_episodes_at_the_same_time_do_not_meet() -> None:
    environments = sessions(countdown())
    found = [session(environments, str(n)) for n in range(8)]
    await asyncio.gather(*(one.reset() for one in found))
    await found[0].step("down")
    assert [(await one.step("what?")).text for one in found] == ["1 left"] + 7 * ["2 left"]
    assert len(running(SCRIPT)) == 1
    await environments.close()
    assert not running(SCRIPT)


async def test_an_exception_in_the_environment_is_its_failure_and_others_go_on() -> None:
    environments = sessions(countdown())
    broken, other = session(environments, "a"), session(environments, "b")
    await asyncio.gather(broken.reset(), other.reset())
    with pytest.raises(EnvironmentFailed, match="ValueError: the world is broken"):
        await broken.step("raise")
    with pytest.raises(EnvironmentFailed, match="the world gave up"):
        await broken.step("exit")
    assert broken.failure is not None and (await other.step("down")).text == "1 left"
    await environments.close()


async def test_a_retired_bridge_serves_its_episodes_and_then_ends() -> None:
    environments = sessions(countdown(step_timeout_s=2.0))
    stuck, other = session(environments, "a"), session(environments, "b")
    await asyncio.gather(stuck.reset(), other.reset())
    (old,) = running(SCRIPT)
    with pytest.raises(EnvironmentFailed, match="no answer within 2 s"):
        await stuck.step("hang")
    assert (await other.step("down")).text == "1 left"  # on the old one
    newer = session(environments, "c")
    assert (await newer.reset()).text == "2 left" and len(running(SCRIPT)) == 2
    stuck.close()
    other.close()
    await eventually(lambda: not is_alive(old.pid))
    assert (await newer.step("down")).text == "1 left"
    await environments.close()


async def test_an_episode_that_nobody_renews_is_closed(tmp_path: Path) -> None:
    """The node stops renewing, as one that is stopped does."""
    closed = tmp_path / "closed"
    environments = sessions(countdown(str(closed), lease_s=0.2))
    lost = session(environments, "a")
    await lost.reset()
    bridge = lost._bridge  # pyright: ignore[reportPrivateUsage]
    assert bridge is not None
    bridge.episodes.clear()
    await eventually(closed.exists)
    with pytest.raises(EnvironmentFailed, match="KeyError"):
        await lost.step("down")
    await environments.close()


async def test_an_episode_is_renewed_while_it_is_open() -> None:
    environments = sessions(info("record", lease_s=0.1))
    kept = session(environments, "a")
    await kept.reset()
    bridge = kept._bridge  # pyright: ignore[reportPrivateUsage]
    assert bridge is not None
    await eventually(lambda: bridge._error.count(b"['a.1']") >= 3)  # pyright: ignore[reportPrivateUsage]
    await environments.close()


async def test_the_end_of_a_session_closes_its_episode(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    environments = sessions(countdown(str(closed)))
    kept = session(environments, "a")
    await kept.reset()
    assert (await kept.step("down")).text == "1 left" and not closed.exists()
    kept.close()
    await eventually(closed.exists)
    await environments.close()


async def test_a_bridge_dies_with_its_node() -> None:
    program = (
        "import asyncio\n"
        "from tests.unit.rollout.environments.test_serving import hold\n"
        "asyncio.run(hold())\n"
    )
    node = start_python(program)
    await eventually(lambda: running(SCRIPT, node.pid))
    pids = [process.pid for process in running(SCRIPT, node.pid)]
    kill(node)
    for pid in pids:
        await eventually_dead(pid)


async def hold() -> None:
    """A node in the middle of an episode that hangs, in the sandbox."""
    environments = sessions(countdown(), IsolationSettings())
    found = session(environments, "a")
    await found.reset()
    await found.step("hang")


async def test_a_bridge_ends_with_its_standard_input() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, SCRIPT, BRIDGES, stdin=asyncio.subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.close()
    assert await process.wait() == 0
