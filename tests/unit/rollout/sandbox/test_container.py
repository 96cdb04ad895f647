# SPDX-License-Identifier: Apache-2.0
"""How the back end `container` calls its engine: a fake one here, a real one in the contract."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from penstock.errors import SandboxError
from penstock.rollout.sandbox.container import ContainerBackend
from penstock.rollout.sandbox.run import run
from penstock.rollout.sandbox.types import Grants, Limits, SandboxSpec

WALLS = {
    "--network=none",
    "--read-only",
    "--cap-drop=ALL",
    "--security-opt=no-new-privileges",
    "--memory=100m",
    "--pids-limit=12",
    "--ulimit=nofile=1024:1024",
    "--ulimit=nproc=12:12",
}


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    script = tmp_path / "podman.py"
    shutil.copy(Path(__file__).parent / "fake_engine.py", script)
    command = tmp_path / "podman"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    command.chmod(0o755)
    return command


async def test_a_program_runs_behind_the_walls_that_the_engine_offers(engine: Path) -> None:
    socket = engine.parent / "socket"
    grants = Grants(folders=(engine.parent,), sockets={"gateway": socket})
    spec = SandboxSpec(limits=Limits(memory_mb=100, num_processes=10), grants=grants)
    sandbox = ContainerBackend("the-image", str(engine)).create(spec)
    await sandbox.start()
    await sandbox.put("in.txt", b"words")
    done = await run(sandbox, ["sh", "-c", "cat in.txt; exit 3"])
    called = json.loads((engine.parent / "called.json").read_text())
    await sandbox.kill()
    assert (done.stdout, done.exit.code) == (b"words", 3)
    assert set(called["options"]) >= WALLS
    assert f"--volume={engine.parent}:{engine.parent}:ro" in called["options"]
    assert f"--volume={socket}:/run/sockets/gateway:ro" in called["options"]
    assert not sandbox.path.exists()


async def test_kill_removes_the_container(engine: Path) -> None:
    sandbox = ContainerBackend("the-image", str(engine)).create(SandboxSpec())
    await sandbox.start()
    process = await sandbox.exec(["sleep", "600"])
    await sandbox.kill()
    assert (await process.wait()).code == -9
    called = json.loads((engine.parent / "called.json").read_text())
    assert not (engine.parent / called["name"]).exists()


async def test_an_image_that_does_not_start_is_reported(engine: Path) -> None:
    (engine.parent / "podman.py").unlink()
    sandbox = ContainerBackend("the-image", str(engine)).create(SandboxSpec())
    await sandbox.start()
    with pytest.raises(SandboxError, match=r"does not start the-image: .*No such file.*; pull"):
        await sandbox.exec(["true"])
    await sandbox.kill()


def test_without_an_engine_the_message_says_what_to_install() -> None:
    with pytest.raises(SandboxError, match="neither podman nor docker answers"):
        ContainerBackend("the-image", "").create(SandboxSpec())
