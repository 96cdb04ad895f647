# SPDX-License-Identifier: Apache-2.0
"""A third node joins a run with a URL and a token; then the run's key is rotated, the run is
stopped, and resumes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.system import PENSTOCK, System, assert_complete, penstock, until

from penstock.dataflow.service.operators.messages import NodeStatus

ENDLESS = (
    "training.steps=100000",
    "training.groups_per_batch=8",
    "training.checkpoint_every=5",
    "training.lr_scheduler_type=constant",  # or the number of steps could not change on resume
    "algorithm.num_generations=4",
    "models.policy.capacity=8",  # fewer slots than the run has room for: the guest gets some too
)


def guest_status(system: System) -> NodeStatus | None:
    status = system.status()
    nodes = status.nodes if status is not None else ()
    return next((node for node in nodes if node.node_id == "guest"), None)


def is_live(system: System) -> bool:
    guest = guest_status(system)
    return guest is not None and guest.state == "live"


def has_delivered(system: System) -> bool:
    guest = guest_status(system)
    return guest is not None and guest.delivered > 0


@pytest.fixture
def guest(system: System, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A third node, started with what `penstock token` wrote and nothing else."""
    system.start(*ENDLESS)
    system.until_step(1)
    token_file = tmp_path / "token"
    run, options = str(system.folder.path), ("--name", "guest", "--out", str(token_file))
    assert penstock("token", run, "--role", "rollout", *options).returncode == 0
    url = system.folder.endpoints().dataflow
    env = {
        **os.environ,
        "PENSTOCK_TOKEN_FILE": str(token_file),
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
        "OMP_NUM_THREADS": "1",
    }
    with (tmp_path / "guest.log").open("wb") as log:
        joined = subprocess.Popen(
            [*PENSTOCK, "join", url, "--name", "guest", "--capacity", "16"], env=env, stderr=log
        )
    yield joined
    joined.kill()
    joined.wait()


def test_a_guest_works_survives_a_restart_and_leaves(
    system: System, guest: subprocess.Popen[bytes]
) -> None:
    until(lambda: is_live(system), timeout_s=300.0, what="guest live")
    until(lambda: has_delivered(system), timeout_s=300.0, what="guest works")

    dataflow = system.kill("dataflow")
    system.until_back("dataflow", other_than=dataflow)
    until(lambda: has_delivered(system), timeout_s=300.0, what="guest goes on")
    assert guest.poll() is None

    guest.send_signal(signal.SIGTERM)
    assert guest.wait(timeout=300.0) == 0
    left = guest_status(system)
    assert left is None or left.num_leases == 0
    assert "guest" not in system.pids()

    refused = penstock("run", str(system.folder.path))
    assert refused.returncode == 1
    assert system.launcher is not None
    assert f"pid {system.launcher.pid}" in refused.stderr

    json_of(penstock("token", "rotate", str(system.folder.path), "--now", "--json"))
    system.pids()
    stopped = penstock("stop", str(system.folder.path), "--timeout-s", "600")
    assert stopped.returncode == 0, stopped.stderr
    assert system.wait(300.0) == 128 + signal.SIGTERM
    assert "Resume with: penstock run" in system.output()
    system.until_nothing_is_left()
    ended = json_of(penstock("status", str(system.folder.path), "--json"))
    assert (ended["state"], ended["why"]) == ("stopped", "SIGTERM")
    assert ended["policies"][0]["step"] == system.step() > 0
    report = json_of(penstock("report", str(system.folder.path), "--json"))
    assert report["policies"][0]["trainer_time"]["total_s"] > 0

    step = system.step() + 3
    short = ["run", str(system.folder.path), f"training.steps={step}", "--headless", "--json"]
    changed = penstock(*short, "training.epochs=2")
    assert changed.returncode == 1
    assert "training.epochs: 1 -> 2" in changed.stderr
    resumed = penstock(*short)
    assert resumed.returncode == 0, resumed.stderr
    assert_complete(system, steps=step)
    again = penstock("run", str(system.folder.path))
    assert again.returncode == 0
    assert "already finished" in again.stderr
    assert_store_is_tidied(system)


def assert_store_is_tidied(system: System) -> None:
    """Of a run that is over: by what its ledger says is in use."""
    run = str(system.folder.path)
    # Young versions stay, and which are young would change between two calls on a slow machine.
    for manifest in (system.folder.weights / "manifests").glob("*.json"):
        os.utime(manifest, (0, 0))
    planned = json_of(penstock("weights", "gc", run, "--dry-run", "--json"))
    done = json_of(penstock("weights", "gc", run, "--json"))
    assert planned["versions_deleted"]
    assert {*planned["versions_deleted"]} == {*done["versions_deleted"]}
    assert {*planned["blobs_deleted"]} <= {*done["blobs_deleted"]}  # files being read stay a while
    assert 2 <= done["versions_kept"] == planned["versions_kept"]
    again = json_of(penstock("weights", "gc", run, "--json"))
    assert not {*done["blobs_deleted"]} & {*again["blobs_deleted"]}
    verified = json_of(penstock("weights", "verify", run, "--json"))
    assert verified["ok"] and verified["num_versions"] == again["versions_kept"]


def json_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])
