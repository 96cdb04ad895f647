# SPDX-License-Identifier: Apache-2.0
"""How the back end `container` calls its engine: a fake one here, a real one in the contract."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.errors import SandboxError
from penstock.rollout.sandbox.container import ContainerBackend
from penstock.rollout.sandbox.folders import _remove  # pyright: ignore[reportPrivateUsage]
from penstock.rollout.sandbox.run import run
from penstock.rollout.sandbox.seccomp import build_profile
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
    "--stop-timeout=0",
    "--read-only-tmpfs=false",
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
    folder = sandbox.path
    files = {f"--volume={folder}/work:/work", f"--volume={folder}/tmp:/tmp"}
    assert set(called["options"]) >= {*files, f"--volume={folder}/shm:/dev/shm"}
    assert not [one for one in called["options"] if one.startswith("--tmpfs=")]
    assert f"--volume={engine.parent}:{engine.parent}:ro" in called["options"]
    assert f"--volume={socket}:/run/sockets/gateway:ro" in called["options"]
    assert not sandbox.path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a file system")
async def test_without_its_own_file_system_no_sandbox_starts(
    engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its disk would have no limit."""
    mount = engine.parent / "mount"
    mount.write_text("#!/bin/sh\necho no tmpfs here >&2\nexit 32\n")
    mount.chmod(0o755)
    monkeypatch.setenv("PATH", f"{engine.parent}:{os.environ['PATH']}")
    sandbox = ContainerBackend("the-image", str(engine)).create(SandboxSpec())
    with pytest.raises(SandboxError, match="no tmpfs here"):
        await sandbox.start()
    assert not sandbox.path.exists()


async def test_the_engine_gets_our_filter_of_system_calls(engine: Path) -> None:
    sandbox = ContainerBackend("the-image", str(engine)).create(SandboxSpec())
    await sandbox.start()
    await run(sandbox, ["true"])
    called = json.loads((engine.parent / "called.json").read_text())
    start = "--security-opt=seccomp="
    [word] = [one for one in called["options"] if one.startswith(start)]
    path = sandbox.path / "seccomp.json"  # not below /work
    assert word == f"{start}{path}"
    profile = json.loads(path.read_text())
    await sandbox.kill()
    assert profile == json.loads(json.dumps(build_profile()))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts a file system")
async def test_all_files_together_keep_the_limit_of_the_disk(engine: Path) -> None:
    sandbox = ContainerBackend("the-image", str(engine)).create(
        SandboxSpec(limits=Limits(disk_mb=2))
    )
    await sandbox.start()
    if not sandbox.path.is_mount():
        await sandbox.kill()
        pytest.skip("this root may not mount")
    for name in ("a", "b"):
        (sandbox.path / "work" / name).write_bytes(bytes(900 << 10))
    with pytest.raises(OSError, match="No space left"):
        (sandbox.path / "tmp" / "c").write_bytes(bytes(900 << 10))
    await sandbox.kill()
    assert not sandbox.path.exists()
    assert not sandbox.path.is_mount()


def test_the_mount_of_a_dead_node_is_removed(tmp_path: Path) -> None:
    """`remove_stale_folders` finds the folder; what is mounted there goes first."""
    folder = tmp_path / "stale"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "penstock", str(folder)]
    if os.geteuid() or subprocess.run(command, check=False, capture_output=True).returncode:
        pytest.skip("only root mounts a file system")
    (folder / "left").touch()
    _remove(folder)
    assert not folder.exists()


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


async def test_a_container_whose_time_cannot_be_watched_does_not_go_on(engine: Path) -> None:
    """It fails closed, and nothing of it is left."""
    script = engine.parent / "podman.py"
    script.write_text(script.read_text().replace("print(NO_PROCESS)", "return 125"))
    sandbox = ContainerBackend("the-image", str(engine)).create(SandboxSpec())
    await sandbox.start()
    with pytest.raises(SandboxError, match="does not say which process its container is"):
        await sandbox.exec(["true"])
    called = json.loads((engine.parent / "called.json").read_text())
    await sandbox.kill()
    assert not (engine.parent / called["name"]).exists()


def test_without_an_engine_the_message_says_what_to_install() -> None:
    with pytest.raises(SandboxError, match="neither podman nor docker answers"):
        ContainerBackend("the-image", "").create(SandboxSpec())
