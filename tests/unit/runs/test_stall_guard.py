# SPDX-License-Identifier: Apache-2.0
"""What happens when a run stands still: the record, the stacks, the restart, the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from tests.unit.cli.sample_statuses import policy_status, status, view

from penstock.config.limits import BudgetConfig, StallConfig
from penstock.dataflow.core.stalls import Link
from penstock.dataflow.service.operators.messages import Status
from penstock.errors import Stalled
from penstock.fleet.process_state import ask_for_stacks, is_suspended
from penstock.fleet.run_folder import RunFolder
from penstock.observe.stacks import STACKS_SIGNAL
from penstock.runs.spending import BudgetGuard
from penstock.runs.stall_guard import StallGuard

LIMIT_S = 10.0
LAST = Link(who="node-0", on="reward task:score", item="row 7", since_s=11.0, service="node-0")
SERVICE = """
import asyncio, sys
from penstock.observe.stacks import write_stacks_on_signal
write_stacks_on_signal()

async def wait_for_the_reward():
    print("ready", flush=True)
    await asyncio.sleep(600)

asyncio.run(wait_for_the_reward())
"""


@dataclass
class FakeServices:
    """Remembers what was restarted."""

    folder: Path
    known: dict[str, int] = field(default_factory=lambda: {"node-0": 0, "dataflow": 0})
    restarted: list[str] = field(default_factory=list[str])

    def pids(self) -> dict[str, int]:
        return self.known

    def logs(self) -> dict[str, Path]:
        return {name: self.folder / f"{name}.log" for name in self.known}

    def restart(self, service: str) -> bool:
        self.restarted.append(service)
        return True


class World:
    """A run that a guard looks at once a second."""

    def __init__(self, folder: Path, action: str, chain: tuple[Link, ...] = (LAST,)) -> None:
        self.services = FakeServices(folder)
        self.told: list[str] = []
        config = StallConfig.model_validate({"limit_s": LIMIT_S, "action": action})
        self.guard = StallGuard(self.services, config, folder, self.told.append, stacks_s=0.0)
        self.status: Status = replace(status(policy_status(number=1, reward=None)), chain=chain)
        self.unreachable_s = 0.0
        self._now = 0.0
        self.look(1)
        self.get_result()
        self.look(1)

    def get_result(self) -> None:
        self.status = replace(self.status, trajectories=self.status.trajectories + 1)

    def look(self, seconds: int) -> None:
        for _ in range(seconds):
            self._now += 1.0
            shown = replace(view(self.status), unreachable_s=self.unreachable_s)
            self.guard.check(self._now, shown)


@pytest.fixture
def service() -> Iterator[subprocess.Popen[str]]:
    """A process of its own group that writes its stacks when asked."""
    found = subprocess.Popen(
        [sys.executable, "-c", SERVICE],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert found.stdout is not None and found.stdout.readline() == "ready\n"
    yield found
    found.kill()
    found.wait(timeout=60.0)
    found.stdout.close()
    assert found.stderr is not None
    found.stderr.close()


def _record(folder: Path, number: int = 1) -> dict[str, object]:
    return json.loads((folder / f"stall-{number}.json").read_text())


def test_the_culprit_is_restarted_once_and_a_second_stall_without_a_result_ends_the_run(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, "restart")
    world.look(int(LIMIT_S))
    assert world.services.restarted == ["node-0"]
    found = _record(tmp_path)
    assert (found["action"], found["culprit"], found["idle_s"]) == ("restart", "node-0", LIMIT_S)
    assert "node-0 waits for reward task:score (row 7)" in world.told[0]
    with pytest.raises(Stalled, match=r"also after a restart[\s\S]*reward task:score \(row 7\)"):
        world.look(int(LIMIT_S))
    assert _record(tmp_path, 2)["action"] == "stop" and world.services.restarted == ["node-0"]
    assert len((tmp_path / "launcher.log").read_text().splitlines()) == 2


def test_a_result_between_two_stalls_earns_another_restart(tmp_path: Path) -> None:
    world = World(tmp_path, "restart")
    world.look(int(LIMIT_S))
    world.get_result()
    world.look(int(LIMIT_S) + 1)
    assert world.services.restarted == ["node-0", "node-0"]


def test_stop_ends_the_run_at_the_first_stall(tmp_path: Path) -> None:
    world = World(tmp_path, "stop")
    with pytest.raises(Stalled, match=r"raise stall\.limit_s"):
        world.look(int(LIMIT_S))
    assert world.services.restarted == []


def test_a_run_that_waits_for_others_is_told_of_once_and_goes_on(tmp_path: Path) -> None:
    node = Link(who="batch 1", on="a rollout node", item="none has joined", since_s=9.0)
    world = World(tmp_path, "restart", (node,))
    world.look(5 * int(LIMIT_S))
    assert len(world.told) == 1 and "a rollout node" in world.told[0]
    assert world.services.restarted == []


def test_a_service_that_does_not_answer_is_the_culprit_whatever_it_said_last(
    tmp_path: Path,
) -> None:
    world = World(tmp_path, "restart")
    world.unreachable_s = 60.0
    world.look(int(LIMIT_S))
    assert world.services.restarted == ["dataflow"]


def test_a_trainer_that_exited_early_is_started_again(tmp_path: Path) -> None:
    world = World(tmp_path, "restart")
    world.services.known["trainer-policy"] = 0
    policy = world.status.policies[0]
    world.services.known[f"trainer-{policy.policy}"] = 0
    world.guard.trainers_exited(view(world.status), 60.0)
    assert world.services.restarted == [f"trainer-{policy.policy}"]
    assert f"exited with code 0 at step {policy.number} of {policy.steps}" in world.told[0]


def test_a_suspended_process_is_the_culprit(tmp_path: Path, service: subprocess.Popen[str]) -> None:
    world = World(tmp_path, "restart")
    world.services.known["node-0"] = service.pid
    os.kill(service.pid, signal.SIGSTOP)
    os.waitid(os.P_PID, service.pid, os.WSTOPPED | os.WNOWAIT)
    assert is_suspended(service.pid)
    world.look(1)
    world.get_result()
    world.look(int(LIMIT_S) + 1)
    assert world.services.restarted == ["node-0"]
    assert f"its process {service.pid} is suspended" in world.told[0]


def test_stacks_of_threads_and_tasks_are_written_on_request(
    service: subprocess.Popen[str],
) -> None:
    assert ask_for_stacks(service.pid, STACKS_SIGNAL) == 1
    assert service.stderr is not None
    wanted = {"in wait_for_the_reward", "asyncio task", "most recent call first"}
    while wanted:  # threads and tasks write at the same time, in any order
        line = service.stderr.readline()
        assert line, f"the service ended without {wanted}"
        wanted = {part for part in wanted if part not in line}
    assert service.poll() is None


def test_a_process_that_does_not_handle_the_signal_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "600"], start_new_session=True) as sleeper:
        assert ask_for_stacks(sleeper.pid, STACKS_SIGNAL) == 0
        assert sleeper.poll() is None
        sleeper.kill()


def test_usage_outlives_the_launcher_and_a_spent_budget_ends_the_run(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    budget = BudgetConfig(tokens=100)
    shown = status(policy_status(number=1, reward=None))
    first = BudgetGuard(folder, budget)
    assert first.check(1000.0, view(replace(shown, sampled_tokens=60))) == ""
    assert folder.usage().tokens == 60 and first.spent() == ""
    again = BudgetGuard(folder, budget)
    assert again.check(1000.0, view(replace(shown, sampled_tokens=60))) == ""
    assert "raise budget.tokens" in again.check(1001.0, view(replace(shown, sampled_tokens=110)))
    assert folder.usage().tokens == 110
    assert "raise budget.tokens" in BudgetGuard(folder, budget).spent()
