# SPDX-License-Identifier: Apache-2.0
"""Runs on Ray clusters whose hosts die, hang and come, and whose control store dies."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from tests.e2e.ray_clusters import RayCluster, kill_raylet, ray_cluster, workers_of
from tests.e2e.system import SMALL, System, assert_complete, is_gone, penstock, until

pytestmark = [
    pytest.mark.ray,
    pytest.mark.alone,  # the workers of Ray give way to other processes
    pytest.mark.timeout(3600),
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray"),
]
BOTH = {"rollout": "true", "train": "true"}
ENDLESS = ("training.steps=100000", *SMALL[1:], "launcher=ray")
"""A lost host is noticed after up to a minute; a run of few steps could end before."""


@pytest.fixture
def system(tmp_path: Path) -> Generator[System]:
    made = System(tmp_path / "run")
    yield made
    made.close()


@pytest.fixture
def cluster() -> Generator[RayCluster]:
    with ray_cluster() as made:
        yield made


def finish(system: System) -> None:
    """Three steps more, as one command on the stopped run, and the proof of a stranger."""
    steps = system.step() + 3
    words = (str(system.folder.path), f"training.steps={steps}", "--headless")
    resumed = penstock("run", *words)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert_complete(system, steps=steps)


def stop(system: System) -> None:
    stopped = penstock("stop", str(system.folder.path), "--timeout-s", "600")
    assert stopped.returncode == 0, stopped.stderr
    assert system.wait(300.0) == 128 + signal.SIGTERM, system.output()
    system.until_nothing_is_left()


def until_placed(system: System, *services: str) -> dict[str, int]:
    until(lambda: set(services) <= system.pids().keys(), timeout_s=600.0, what="a place for each")
    return system.pids()


def test_a_run_on_a_new_cluster_ends_and_leaves_nothing(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A service that is killed comes back, as on this machine; the cluster ends with the run."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    steps = 10
    system.start(f"training.steps={steps}", *SMALL[1:], "launcher=ray")
    system.until_step(1)
    parents = psutil.Process(system.pids()["node-0"]).parents()
    raylets = [process.pid for process in parents if process.name() == "raylet"]
    system.kill("node-0")
    assert system.wait() == 0, system.output()
    assert "node-0 was killed by SIGKILL" in system.output()
    assert_complete(system, steps=steps)
    assert raylets, "it ran in a worker of Ray"
    until(lambda: all(map(is_gone, raylets)), timeout_s=60.0, what="the cluster is gone")


def test_a_cluster_without_authentication_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    done = penstock("demo", "--dir", str(tmp_path / "run"), "--headless", "launcher=ray")
    assert done.returncode != 0 and "RAY_AUTH_MODE=token" in done.stderr


KEPT = """
import sys
from penstock.fleet.launchers.ray_cluster import connect
from penstock.fleet.launchers.ray_keeper import ServiceKeeper

ray = connect(None)
keeper = ray.remote(ServiceKeeper).options(num_cpus=0, label_selector={"host": "b"}).remote()
command = ["-c", "import time; time.sleep(600)"]
print(ray.get(keeper.start.remote(command, {}, ".", sys.argv[1]))[1], flush=True)
ended = keeper.wait.remote()
sys.stdin.read()
"""


def test_a_service_dies_with_its_raylet(cluster: RayCluster, tmp_path: Path) -> None:
    """Ray's worker would outlive it, and the service with it, without anybody who could end it."""
    host = cluster.add("b")
    words = [sys.executable, "-c", KEPT, str(tmp_path / "log")]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as driver:
        assert driver.stdin is not None and driver.stdout is not None
        pid = int(driver.stdout.readline())
        assert not is_gone(pid)
        kill_raylet(host)
        until(lambda: is_gone(pid), timeout_s=120.0, what="the service is gone")
        driver.stdin.close()
        driver.wait(120.0)


@pytest.mark.slow
def test_a_host_is_lost_and_another_comes(
    system: System, cluster: RayCluster, record_property: Any
) -> None:
    hosts = {name: cluster.add(name, **BOTH) for name in ("b", "c")}
    system.start(*ENDLESS)
    system.until_step(3)
    before = until_placed(system, "trainer-policy", "node-0", "node-1")
    lost = cluster.host_of(before["trainer-policy"], hosts)
    there = [name for name in before if name not in ("dataflow", "weights")]
    there = [name for name in there if cluster.host_of(before[name], hosts) == lost]
    kill_raylet(hosts.pop(lost))
    killed_at = time.monotonic()
    gone = [before[service] for service in there]
    until(lambda: all(map(is_gone, gone)), timeout_s=60.0, what="its services die with the raylet")
    hosts["d"] = cluster.add("d", **BOTH)
    for service in there:
        system.until_back(service, before[service])
        record_property(f"recovery_s {service}", round(time.monotonic() - killed_at, 1))
        print(f"{service} runs again {time.monotonic() - killed_at:.1f} s after its host was lost")
    step = system.step()
    system.until_step(step + 1)
    print(f"step {step + 1} {time.monotonic() - killed_at:.1f} s after the loss")
    stop(system)
    assert "trainer-policy lost its host" in system.output()
    finish(system)


@pytest.mark.slow
def test_two_live_copies_of_a_trainer_and_a_node(system: System, cluster: RayCluster) -> None:
    """The host hangs, as behind a broken network: its services go on, and Ray starts others."""
    hosts = {name: cluster.add(name, **BOTH) for name in ("b", "c")}
    system.start(*ENDLESS)
    system.until_step(3)
    before = until_placed(system, "trainer-policy", "node-0", "node-1")
    hung = hosts[cluster.host_of(before["trainer-policy"], hosts)]
    stopped = workers_of(hung)
    old = psutil.Process(before["trainer-policy"])
    for process in stopped:
        process.send_signal(signal.SIGSTOP)
    try:
        system.until_back("trainer-policy", before["trainer-policy"])
        assert old.is_running(), "both copies live"
        until(lambda: is_gone(old.pid), timeout_s=600.0, what="the old trainer gives up")
        system.until_step(system.step() + 1)
    finally:
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGCONT)
    stop(system)
    logs = "".join(path.read_text() for path in system.folder.logs.rglob("trainer-policy.log"))
    assert "incarnation 1 of policy was replaced by 2" in logs, logs[-3000:]
    finish(system)


@pytest.mark.slow
def test_the_control_store_is_lost_and_one_command_resumes(system: System) -> None:
    with ray_cluster() as cluster:
        cluster.add("b", **BOTH)
        system.start(*ENDLESS)
        system.until_step(3)
        cluster.kill_store()
        killed_at = time.monotonic()
        assert system.wait() != 0
        print(f"the run ended {time.monotonic() - killed_at:.1f} s after the control store")
        assert "Ray's control store" in system.output()
        system.until_nothing_is_left()
    with ray_cluster() as cluster:
        cluster.add("b", **BOTH)
        finish(system)
    assert os.environ.get("RAY_ADDRESS") is None
