# SPDX-License-Identifier: Apache-2.0
"""A running run grows and shrinks: nodes of the launcher and nodes of commands join and leave, and
no row is lost."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from tests.e2e.system import System, penstock, until

from penstock.fleet.scaling_records import ScalingRecord

START = """
import os, subprocess, sys
name, url, token_file, tags, pids = sys.argv[1:]
child = subprocess.Popen(
    [sys.executable, "-m", "penstock.cli.main", "join", url, "--token-file", token_file,
     "--name", name, "--capacity", "16", "--tags", tags],
    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    start_new_session=True,
)
open(os.path.join(pids, name), "w").write(str(child.pid))
"""
STOP = """
import os, signal, sys
try:
    os.kill(int(open(os.path.join(sys.argv[2], sys.argv[1])).read()), signal.SIGTERM)
except ProcessLookupError:
    pass
"""


def serving(system: System) -> set[str]:
    status = system.status()
    return {str(n.node_id) for n in status.nodes if n.state == "live"} if status else set()


def record(system: System) -> ScalingRecord:
    return system.folder.scaling() or ScalingRecord(mode="")


def scale_to(system: System, gpus: int) -> None:
    run = str(system.folder.path)
    done = penstock("scale", run, "--to", str(gpus), "--why", "test", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["to"] == gpus


@pytest.mark.slow
def test_the_pool_follows_an_operator_and_replaces_what_dies(
    system: System, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    pids.mkdir()
    start, stop = tmp_path / "start.py", tmp_path / "stop.py"
    start.write_text(START)
    stop.write_text(STOP)
    words = ["{name}", "{url}", "{token_file}", "{tags}", str(pids)]
    spot = {
        "spot": True,
        "max_nodes": 1,
        "cost_per_hour": 0.5,
        "start": [sys.executable, str(start), *words],
        "stop": [sys.executable, str(stop), "{name}", str(pids)],
    }
    system.start(
        "training.steps=100000",
        "training.groups_per_batch=8",
        "training.checkpoint_every=50",
        "training.lr_scheduler_type=constant",
        "algorithm.num_generations=4",
        "models.policy.replicas=1",
        f"autoscale.node_types={json.dumps({'local': {}, 'spot': spot})}",
    )
    system.until_step(1)
    assert serving(system) == {"node-0"}

    scale_to(system, 3)
    until(lambda: len(serving(system)) == 3, timeout_s=600.0, what="three nodes serve")
    assert serving(system) == {"node-0", "spot-0", "node-1"}, "spot first, and only one of it"

    killed = int((pids / "spot-0").read_text())
    os.kill(killed, signal.SIGKILL)
    until(lambda: "spot-2" in serving(system), timeout_s=600.0, what="the spot node is replaced")

    step = system.step()
    scale_to(system, 1)
    until(lambda: len(serving(system)) == 1, timeout_s=600.0, what="two nodes left")
    system.until_step(step + 2)
    assert len(system.pids().keys() & {"node-0", "node-1"}) <= 1

    assert penstock("stop", str(system.folder.path), "--timeout-s", "600").returncode == 0
    system.wait(300.0)
    system.until_nothing_is_left()
    assert not record(system).nodes
    audited = penstock("audit", str(system.folder.path))
    assert audited.returncode == 0, audited.stdout + audited.stderr
    log = (system.folder.path / "admin.jsonl").read_text()
    assert log.count('"scaled"') == 2 and log.count('"node_started"') >= 3
    assert log.count('"node_retired"') >= 3
