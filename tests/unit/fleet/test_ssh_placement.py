# SPDX-License-Identifier: Apache-2.0
"""What the ssh launcher does with a trainer whose host is lost. The hosts are this machine, behind
a program `ssh` that runs what it is told."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.unit.fleet.test_local import wait_until

from penstock.config import HostConfig
from penstock.fleet.launchers.ssh import SshStarter
from penstock.fleet.launchers.starter import EXIT_HOST_LOST, Child
from penstock.fleet.services import ServiceKind, ServiceSpec, with_train_tag

SSH = '#!/bin/sh\nfor last; do :; done\neval "exec $last"\n'
KEEPER = "penstock.fleet.launchers.ssh_keeper"
FOREVER = (sys.executable, "-c", "import time; time.sleep(600)")


def host(*tags: str, tflops: float) -> HostConfig:
    return HostConfig(memory_gb=4, tags=tags, tflops=tflops, memory_gb_per_s=1000)


HOSTS = {
    "here": host("train", "rollout", tflops=10),
    "best": host("train", tflops=1000),
    "next": host("train", "rollout", tflops=100),
}


def service(name: str, kind: ServiceKind, *tags: str) -> ServiceSpec:
    return ServiceSpec(name=name, kind=kind, command=FOREVER, build_env=dict, tags=tags)


TRAINER = service("trainer", ServiceKind.TRAINER, "train")
NODES = [service(f"node-{number}", ServiceKind.NODE, "rollout") for number in range(2)]


@contextmanager
def running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]
) -> Generator[tuple[SshStarter, dict[str, Child]]]:
    program = tmp_path / "bin" / "ssh"
    program.parent.mkdir()
    program.write_text(SSH)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    children: dict[str, Child] = {}
    starter = SshStarter(HOSTS, "here", work_dir=tmp_path, config_file=None, notify=notes.append)
    try:
        yield starter, children
    finally:
        for child in children.values():
            child.kill()
        for child in children.values():
            wait_until(lambda child=child: child.exit_code() is not None)
        starter.close()


def test_a_lost_trainer_is_replaced_by_the_best_that_is_idle_or_rolls_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    with running(tmp_path, monkeypatch, notes) as (starter, children):
        for one in (TRAINER, *NODES):
            children[one.name] = starter.start(one, tmp_path / "log")
        assert notes == ["trainer goes to best: needed"]
        _lose(children["trainer"])
        children["trainer"] = starter.start(TRAINER, tmp_path / "log")
        assert notes[1:] == ["trainer goes to next: replaces_dead"]
        preempted = children["node-1"]  # the other one is here, on the host that trains worst
        wait_until(lambda: preempted.exit_code() is not None)
        assert children["node-0"].exit_code() is None


def _lose(child: Child) -> None:
    """Its connection is gone: the oldest one that is still there."""
    every = [one for one in psutil.Process().children() if KEEPER in " ".join(one.cmdline())]
    min(every, key=lambda process: process.create_time()).kill()
    wait_until(lambda: child.exit_code() is not None)
    assert child.exit_code() == EXIT_HOST_LOST


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), ("--tags", "train")),
        (("--tags", "eu,spot", "-v"), ("--tags", "eu,spot,train", "-v")),
        (("--tags", "train"), ("--tags", "train")),
        (("--evaluates-only",), ("--evaluates-only",)),
    ],
)
def test_a_node_on_the_host_of_a_trainer_takes_turns_with_it(
    words: tuple[str, ...], expected: tuple[str, ...]
) -> None:
    node = ServiceSpec(
        name="node", kind=ServiceKind.NODE, command=("rollout", *words), build_env=dict
    )
    assert with_train_tag(node).command == ("rollout", *expected)
    assert with_train_tag(TRAINER) == TRAINER
