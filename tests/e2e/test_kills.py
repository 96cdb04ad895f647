# SPDX-License-Identifier: Apache-2.0
"""SIGKILL of each process of a run, and of the launcher: the run completes, and nothing is lost."""

from __future__ import annotations

from tests.e2e.system import SMALL, System, assert_complete


def test_a_killed_dataflow_and_a_killed_node_come_back(system: System) -> None:
    system.start(*SMALL)
    system.until_step(1)
    dataflow = system.kill("dataflow")
    system.until_back("dataflow", other_than=dataflow)
    system.until_step(4)
    node = system.kill("node-0")
    system.until_back("node-0", other_than=node)
    assert system.wait() == 0, system.output()
    assert "dataflow was killed by SIGKILL" in system.output()
    assert "node-0 was killed by SIGKILL" in system.output()
    assert_complete(system, steps=10)


def test_a_killed_trainer_comes_back_and_a_killed_launcher_is_started_again(
    system: System,
) -> None:
    system.start(*SMALL)
    system.until_step(5)
    trainer = system.kill("trainer-policy")
    system.until_back("trainer-policy", other_than=trainer)
    system.until_step(6)
    system.pids()
    assert system.launcher is not None
    system.launcher.kill()
    system.launcher.wait()
    system.until_nothing_is_left()
    system.start()
    assert system.wait() == 0, system.output()
    assert (system.folder.logs / "latest").resolve().name == "attempt_2"
    assert system.last_line()["finished"] is True
    assert_complete(system, steps=10)
