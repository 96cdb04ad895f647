# SPDX-License-Identifier: Apache-2.0
"""In a running run the signing key is replaced and a node's token revoked: nobody else notices."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from tests.e2e.system import PENSTOCK, System, penstock, until

from penstock.wire.auth import PREFIX

ENDLESS = (
    "training.steps=100000",
    "training.groups_per_batch=8",
    "training.checkpoint_every=5",
    "training.lr_scheduler_type=constant",  # or the number of steps could not change on resume
    "algorithm.num_generations=4",
    "models.policy.capacity=8",  # fewer slots than the run has room for: the guest gets some too
)


@contextmanager
def joined(system: System, name: str, tmp_path: Path) -> Generator[subprocess.Popen[bytes]]:
    """A node with a token of this name, as another user's would be."""
    file = tmp_path / f"{name}.token"
    made = penstock("token", str(system.folder.path), "--name", name, "--out", str(file))
    assert made.returncode == 0, made.stderr
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / name), "OMP_NUM_THREADS": "1"}
    words = ["join", system.folder.endpoints().dataflow, "--token-file", str(file)]
    with (tmp_path / f"{name}.log").open("wb") as log:
        node = subprocess.Popen(
            [*PENSTOCK, *words, "--name", name, "--capacity", "16"], env=env, stderr=log
        )
    try:
        yield node
    finally:
        node.kill()
        node.wait()


def delivered(system: System, name: str) -> int:
    status = system.status()
    nodes = status.nodes if status is not None else ()
    return next((node.delivered for node in nodes if node.node_id == name), -1)


def command(*words: str) -> dict[str, object]:
    made = penstock(*words, "--json")
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout.splitlines()[-1])


def assert_no_token_is_in_sight(system: System) -> None:
    """Of any process of the run: in its command line, and in its environment as it started."""
    assert system.launcher is not None
    launcher = psutil.Process(system.launcher.pid)
    processes = [launcher, *launcher.children(recursive=True)]
    assert len(processes) >= 6
    for process in processes:
        for file in ("cmdline", "environ"):
            shown = Path(f"/proc/{process.pid}/{file}").read_bytes()
            assert PREFIX.encode() not in shown, f"{process.cmdline()}: token in {file}"


@pytest.mark.slow  # `test_fleet` rotates the key of a run in CI
def test_key_rotation_and_revocation_in_a_running_run(system: System, tmp_path: Path) -> None:
    run = str(system.folder.path)
    system.start(*ENDLESS)
    system.until_step(1)
    with joined(system, "guest", tmp_path) as guest, joined(system, "thief", tmp_path) as thief:
        for name in ("guest", "thief"):
            until(lambda: delivered(system, name) > 0, timeout_s=300.0, what=f"{name} works")  # noqa: B023  # called at once
        assert_no_token_is_in_sight(system)
        pids = system.pids()

        assert command("token", "rotate", run)["now"] is False
        before = delivered(system, "guest")
        until(lambda: delivered(system, "guest") > before, timeout_s=300.0, what="guest goes on")
        assert thief.poll() is None

        command("token", "revoke", run, "--name", "thief")
        until(lambda: delivered(system, "thief") < 0, timeout_s=300.0, what="thief out")
        until(lambda: thief.poll() is not None, timeout_s=300.0, what="thief ends")
        assert thief.returncode == 1
        assert "were revoked" in (tmp_path / "thief.log").read_text()

        before, step = delivered(system, "guest"), system.step()
        until(lambda: delivered(system, "guest") > before, timeout_s=300.0, what="guest goes on")
        system.until_step(step + 1)
        assert guest.poll() is None
        assert system.pids() == pids  # no service of the run restarted
        assert '"error"' not in (tmp_path / "guest.log").read_text()

        command("token", "rotate", run, "--now")
        until(lambda: guest.poll() is not None, timeout_s=300.0, what="the old key's guest ends")
        step = system.step()
        system.until_step(step + 1)
        assert system.pids() == pids
    assert command("token", "ls", run)["tokens"] == []

    stopped = penstock("stop", run, "--timeout-s", "600")
    assert stopped.returncode == 0, stopped.stderr
    summary = system.audit()["summary"]
    assert (summary["lost"], summary["trained_twice"]) == (0, 0)
