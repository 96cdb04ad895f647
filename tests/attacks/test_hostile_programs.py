# SPDX-License-Identifier: Apache-2.0
"""Programs that try to leave the sandbox, exhaust the host or outlive their run: none succeeds."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import os
import platform
import select
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest
from tests.attacks.hostile.host import (
    SECRET,
    Host,
    count_leftovers,
    processes_of,
    watched_host,
)
from tests.attacks.hostile.programs import PROGRAMS, Hostile

import penstock
from penstock.errors import SandboxError
from penstock.rollout.sandbox.bubblewrap import BubblewrapBackend, BubblewrapSandbox
from penstock.rollout.sandbox.cgroups import Parents
from penstock.rollout.sandbox.choose import choose
from penstock.rollout.sandbox.container import ContainerBackend, find_engine
from penstock.rollout.sandbox.limits import LimitsBackend
from penstock.rollout.sandbox.pool import SandboxPool
from penstock.rollout.sandbox.run import run
from penstock.rollout.sandbox.runsc import RunscBackend
from penstock.rollout.sandbox.types import (
    Backend,
    FileRefused,
    Grants,
    Level,
    Limits,
    Sandbox,
    SandboxSpec,
)

PYTHON = "/usr/bin/python3"
IMAGE = os.environ.get("PENSTOCK_TEST_IMAGE", "docker.io/library/python:3.11")
GVISOR_DIED = 2
"""gVisor's own kernel gives up when it gets no more threads: the program dies with it."""
cached_engine = functools.cache(find_engine)


@functools.cache
def _has_image(engine: str) -> bool:
    """Whether it starts here: an engine may be installed without any image."""
    command = [engine, "run", "--rm", "--network=none", "--ulimit=nofile=1024:1024"]
    done = subprocess.run(
        [*command, "--ulimit=nproc=64:64", "--pull=never", IMAGE, PYTHON, "--version"],
        check=False,
        capture_output=True,
        timeout=120,
    )
    return done.returncode == 0


KINDS = ("bubblewrap", pytest.param("runsc", marks=pytest.mark.slow), "container")
pytestmark = pytest.mark.skipif(
    platform.machine() != "x86_64" or not Path(PYTHON).exists(),
    reason="the programs use numbers of system calls of x86_64, and the system's Python",
)


@pytest.fixture(params=KINDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "bubblewrap" and shutil.which("bwrap"):
        return BubblewrapBackend()
    if request.param == "runsc" and shutil.which("runsc") and os.geteuid() == 0:
        return RunscBackend()
    if request.param == "container" and (engine := cached_engine()) and _has_image(engine):
        return ContainerBackend(IMAGE, engine)
    pytest.skip(f"{request.param} is not to be had here")


@pytest.fixture
async def host() -> AsyncGenerator[Host]:
    os.environ["PENSTOCK_TEST_CANARY"] = SECRET
    try:
        async with watched_host() as one:
            yield one
    finally:
        del os.environ["PENSTOCK_TEST_CANARY"]


@pytest.fixture
async def sandbox() -> AsyncGenerator[BubblewrapSandbox]:
    one = BubblewrapBackend().create(SandboxSpec(limits=Limits(disk_mb=16)))
    await one.start()
    yield one
    await one.kill()


def limits_for(program: Hostile) -> Limits:
    return Limits(wall_s=program.wall_s, cpu_s=1, memory_mb=160, num_processes=48, disk_mb=16)


@pytest.fixture
def is_relevant(backend: Backend, program: Hostile) -> None:
    if backend.level is Level.GVISOR and not program.is_about_host:
        pytest.skip("gVisor answers this from its own kernel")


@pytest.mark.usefixtures("is_relevant")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
async def test_a_hostile_program_is_contained(
    backend: Backend, program: Hostile, host: Host
) -> None:
    """It gets nothing, the limit that it meets is named, and nothing of it is left."""
    before = count_leftovers()
    sandbox = backend.create(SandboxSpec(limits=limits_for(program), env=host.env))
    await sandbox.start()
    try:
        done = await run(sandbox, [PYTHON, "-I", "-S", "-c", program.source])
        await _files_can_be_read(sandbox)
        after = await run(sandbox, ["sh", "-c", "echo usable"])
    finally:
        await sandbox.kill()
    assert b"ESCAPED" not in done.stdout + done.stderr, done.stdout
    if backend.name == "container" and program.limit == "memory_mb":
        assert done.exit.code == -signal.SIGKILL, "its engine does not say why"
    else:
        assert program.limit in ("", done.exit.limit), done
    has_gvisor_died = backend.level is Level.GVISOR and done.exit.code == GVISOR_DIED
    if not (program.limit or program.is_own_death_fine or has_gvisor_died):
        assert b"tried" in done.stdout, done
    assert after.stdout == b"usable\n", after
    host.check()
    assert count_leftovers() == before
    if isinstance(sandbox, BubblewrapSandbox) and sandbox.uid >= 0:
        assert processes_of(sandbox.uid) == []


async def _files_can_be_read(sandbox: Sandbox) -> None:
    """Whatever a program left, the node reads files without hanging or leaving the folder."""
    try:
        with tarfile.open(fileobj=io.BytesIO(await sandbox.snapshot())) as tar:
            names = tar.getnames()
    except FileRefused:
        return
    assert not [name for name in names if name.startswith("/") or ".." in name.split("/")]


@pytest.mark.parametrize(
    "make",
    [
        'ln -s "$CANARY" out',
        "ln -s . out",
        "mkfifo out",
        "mkdir out",
        f"{PYTHON} -c \"import socket; socket.socket(1).bind('out')\"",
        "truncate -s 15M out",
        "ln -s /proc/self/environ out",
        "ln -s /dev/zero out",
    ],
    ids=["link", "link to a folder", "pipe", "folder", "socket", "large", "link to proc", "device"],
)
async def test_an_output_file_that_is_no_file_is_refused(
    sandbox: BubblewrapSandbox, host: Host, make: str
) -> None:
    """A grader that fetches the output of a program neither hangs nor reads a file of the host."""
    assert (await run(sandbox, ["sh", "-c", make], env=host.env)).exit.code == 0
    with pytest.raises(FileRefused):
        await sandbox.get("out", max_bytes=14 << 20)


async def test_a_file_is_never_put_through_a_link(sandbox: BubblewrapSandbox, host: Host) -> None:
    """A program leaves links to a file of the host where the node will write."""
    script = f"ln -s {host.canary} in; ln -s {host.canary.parent} folder"
    await run(sandbox, ["sh", "-c", script])
    await sandbox.put("in", b"ours")
    with pytest.raises(FileRefused):
        await sandbox.put("folder/canary", b"ours")
    assert await sandbox.get("in", max_bytes=10) == b"ours"
    host.check()


async def test_a_race_of_links_reads_nothing_of_the_host(
    sandbox: BubblewrapSandbox, host: Host
) -> None:
    """A program swaps a folder and a link to the host's while the node reads and writes."""
    script = (
        "mkdir -p real; echo harmless > real/canary; cp -r real d; "
        f"while :; do rm -rf d; ln -sfn {host.canary.parent} d; rm -f d; cp -r real d; done"
    )
    racing = await sandbox.exec(["sh", "-c", script])
    seen, num_refused = set[bytes](), 0
    while SECRET.encode() not in seen and (num_refused < 200 or not seen):
        try:
            seen.add(await sandbox.get("d/canary", max_bytes=100))
            await sandbox.put("d/canary", b"written")
        except FileRefused as error:
            num_refused += "Not a directory" in str(error)
    await racing.kill()
    assert SECRET.encode() not in seen
    host.check()


async def test_a_snapshot_holds_only_files_and_folders(sandbox: BubblewrapSandbox) -> None:
    """Links, pipes and strange names in a snapshot cannot make its reader write elsewhere."""
    script = "ln -s / root; mkfifo p; mkdir d; echo x > d/f; ln d/f hard; touch -- 'a\nb' '..x' -rf"
    await run(sandbox, ["sh", "-c", script])
    with tarfile.open(fileobj=io.BytesIO(await sandbox.snapshot())) as tar:
        members = tar.getmembers()
    assert all(member.isreg() or member.isdir() for member in members)
    assert {member.name for member in members} == {"d", "d/f", "hard", "a\nb", "..x", "-rf"}


async def test_many_sparse_files_do_not_fill_the_node_by_a_snapshot(
    sandbox: BubblewrapSandbox,
) -> None:
    """A hundred sparse files of the size of the disk: the snapshot stops at the disk limit."""
    await run(sandbox, ["sh", "-c", "for i in $(seq 100); do truncate -s 15M f$i; done"])
    with pytest.raises(FileRefused, match="exceed"):
        await sandbox.snapshot()


async def test_a_program_cannot_redirect_a_grant(tmp_path: Path, host: Host) -> None:
    """A granted folder below /tmp hangs on folders of ours: a program cannot put a link there."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "table").write_text("rows")
    spec = SandboxSpec(grants=Grants(folders=(tmp_path / "lib",)), limits=Limits(disk_mb=16))
    sandbox = BubblewrapBackend().create(spec)
    await sandbox.start()
    try:
        top = f"/tmp/{tmp_path.relative_to('/tmp').parts[0]}"
        script = f"mv {top} /tmp/gone; rm -rf {top}; ln -s /usr {top}; mv {tmp_path} /tmp/gone"
        assert (await run(sandbox, ["sh", "-c", script])).exit.code != 0
        done = await run(sandbox, ["cat", f"{tmp_path}/lib/table"])
        assert done.stdout == b"rows"
    finally:
        await sandbox.kill()


async def test_sandboxes_cannot_reach_each_other() -> None:
    """Two sandboxes at once: no file, no process and no socket of one is in reach of the other."""
    backend = BubblewrapBackend()
    first, second = (backend.create(SandboxSpec(limits=Limits(disk_mb=16))) for _ in range(2))
    await asyncio.gather(first.start(), second.start())
    try:
        serve = (
            "import socket,sys,time;s=socket.socket(socket.AF_UNIX);s.bind('\\0between');"
            "s.listen();t=socket.socket();t.bind(('127.0.0.1',7777));t.listen();"
            "open('/tmp/x','w').close();print('up',flush=True);time.sleep(600)"
        )
        serving = await first.exec([PYTHON, "-c", serve])
        assert await serving.stdout.readexactly(3) == b"up\n"
        reach = (
            "import os,socket\n"
            "for family, where in ((1, '\\0between'), (2, ('127.0.0.1', 7777))):\n"
            "    try: socket.socket(family).connect(where); print('ESCAPED')\n"
            "    except OSError: pass\n"
            "print(os.listdir('/tmp'), sum(name.isdigit() for name in os.listdir('/proc')) < 5)"
        )
        assert (await run(second, [PYTHON, "-c", reach])).stdout == b"[] True\n"
        if os.geteuid() == 0:
            assert first.uid != second.uid
    finally:
        await asyncio.gather(first.kill(), second.kill())


def test_a_killed_node_leaves_nothing() -> None:
    """After SIGKILL of a node its programs are dead, and the next start removes its groups."""
    code = (
        "import asyncio\n"
        "from penstock.rollout.sandbox.bubblewrap import BubblewrapBackend\n"
        "from penstock.rollout.sandbox.types import SandboxSpec\n"
        "async def main():\n"
        "    backend = BubblewrapBackend()\n"
        "    running, waiting = (backend.create(SandboxSpec()) for _ in range(2))\n"
        "    await running.start(); await waiting.start()\n"
        "    process = await running.exec(['sh', '-c', 'setsid sleep 600 & echo up; sleep 600'])\n"
        "    await process.stdout.readexactly(3)\n"
        "    print(running.uid, waiting.uid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    node = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert node.stdout is not None
    uids = [int(uid) for uid in node.stdout.readline().split()]
    running = [os.pidfd_open(pid) for pid in count_leftovers(node.pid).processes]
    assert len(running) > 4
    node.send_signal(signal.SIGKILL)
    node.wait()
    node.stdout.close()
    for process in running:
        assert select.select([process], [], [], 60)[0], "a process outlives its node"
        os.close(process)
    assert [processes_of(uid) for uid in uids if uid >= 0] == [[] for uid in uids if uid >= 0]
    BubblewrapBackend()
    left = count_leftovers(node.pid)
    assert (left.groups, left.folders, left.processes) == (frozenset(), frozenset(), frozenset())


def test_a_folder_of_a_killed_node_is_removed_at_the_next_start() -> None:
    """The weak back end keeps files in a folder: the next start removes that of a dead node."""
    code = (
        "import asyncio, os, signal\n"
        "from penstock.rollout.sandbox.limits import LimitsBackend\n"
        "from penstock.rollout.sandbox.types import SandboxSpec\n"
        "async def main():\n"
        "    sandbox = LimitsBackend().create(SandboxSpec())\n"
        "    await sandbox.start()\n"
        "    print(sandbox.path, flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "asyncio.run(main())\n"
    )
    node = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    folder = Path(node.stdout.strip())
    assert folder.exists()
    LimitsBackend()
    assert not folder.exists()


async def test_a_lease_that_ends_kills_the_sandbox_under_its_holder() -> None:
    """A holder that never gives its sandbox back does not keep it."""
    pool = SandboxPool(
        backend=BubblewrapBackend(),
        spec=SandboxSpec(limits=Limits(disk_mb=16)),
        size=1,
        lease_s=0.2,
    )
    await pool.open()
    try:
        async with pool.take() as sandbox:
            process = await sandbox.exec(["sleep", "600"])
            assert (await process.wait()).code == -9
    finally:
        await pool.close()


async def test_a_pool_gives_fresh_sandboxes_and_leaves_nothing() -> None:
    """No program finds a file of the one before; a closed pool has no process, group or mount."""
    before = count_leftovers()
    pool = SandboxPool(
        backend=BubblewrapBackend(), spec=SandboxSpec(limits=Limits(disk_mb=16)), size=2, lease_s=60
    )
    await pool.open()
    for _ in range(4):
        async with pool.take() as sandbox:
            done = await run(sandbox, ["sh", "-c", "ls -A /work /tmp /dev/shm; touch x /tmp/x"])
            assert done.stdout == b"/dev/shm:\n\n/tmp:\n\n/work:\n"
    await pool.close()
    assert count_leftovers() == before


async def test_many_sandboxes_at_once_leave_nothing() -> None:
    """Sixteen sandboxes at once, each with a daemon: all run, and nothing of them stays."""
    before = count_leftovers()
    backend = BubblewrapBackend()

    async def one(number: int) -> bytes:
        sandbox = backend.create(SandboxSpec(limits=Limits(disk_mb=8)))
        await sandbox.start()
        try:
            command = f"setsid sleep 600 & echo {number} > n; cat n"
            return (await run(sandbox, ["sh", "-c", command])).stdout
        finally:
            await sandbox.kill()

    outputs = await asyncio.gather(*(one(number) for number in range(16)))
    assert outputs == [f"{number}\n".encode() for number in range(16)]
    assert count_leftovers() == before


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("fork bomb", "wall_s"),
        ("thread bomb", ""),
        ("ten gigabytes", ""),
        ("shared memory without end", ""),
        ("burns the processor", "cpu_s"),
        ("fills the disk", ""),
        ("daemons in sessions of their own", ""),
    ],
)
async def test_limits_hold_without_control_groups(name: str, limit: str, host: Host) -> None:
    """In a plain container there are no control groups: resource limits take their place."""
    program = next(one for one in PROGRAMS if one.name == name)
    before = count_leftovers()
    backend = BubblewrapBackend(parents=Parents())
    sandbox = backend.create(SandboxSpec(limits=limits_for(program), env=host.env))
    await sandbox.start()
    try:
        done = await run(sandbox, [PYTHON, "-I", "-S", "-c", program.source])
    finally:
        await sandbox.kill()
    assert b"ESCAPED" not in done.stdout
    assert done.exit.limit == limit, done
    if name == "ten gigabytes":
        assert b"MemoryError" in done.stderr
    assert count_leftovers() == before


FAKES = {
    "fails": ("echo 'No permissions to create a new namespace' >&2; exit 1", "No permissions to"),
    "ends at once": ("exit 0", "ended without a message"),
    "builds no walls": (
        'while [ "$1" != -- ]; do shift; done; shift; "$@"; exit $?',
        "connected to a port|read a private file",
    ),
}


@pytest.fixture
def open_folder() -> Generator[Path]:
    """One that the user of a sandbox can enter."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.parametrize("fake", FAKES)
async def test_a_host_without_namespaces_is_refused(
    fake: str, open_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that demands isolation does not start on a host that cannot give it."""
    script, reason = FAKES[fake]
    program = open_folder / "bwrap"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setattr("penstock.rollout.sandbox.walls.HOST_PATH", f"{open_folder}:/usr/bin:/bin")
    before = count_leftovers()
    expected = rf"no sandbox of level namespaces.*({reason}).*install bubblewrap"
    with pytest.raises(SandboxError, match=expected):
        await choose("auto", demand=Level.NAMESPACES)
    assert count_leftovers() == before


@pytest.mark.parametrize("name", ["limits", "none"])
async def test_a_weaker_back_end_does_not_pass_for_walls(name: str) -> None:
    """A run that demands walls and names a back end without them does not start."""
    with pytest.raises(SandboxError, match="declares only the level"):
        await choose(name, demand=Level.NAMESPACES)


async def test_a_program_missing_from_the_host_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without bubblewrap, the refusal says what to install."""
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r"bwrap, nsenter.* not found on PATH.*apt install"):
        await choose("auto", demand=Level.NAMESPACES)


async def test_the_default_is_chosen_and_tested() -> None:
    """`auto` gives bubblewrap where its self-test passes."""
    backend = await choose("auto", demand=Level.NAMESPACES)
    assert (backend.name, backend.level) == ("bubblewrap", Level.NAMESPACES)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_without_root_the_walls_hold_too() -> None:
    """A node of an ordinary user: the limits of disk and processes, and the walls, are the same."""
    script = Path(__file__).parent / "hostile" / "unprivileged.py"
    source = Path(penstock.__file__).parent.parent
    user = ["setpriv", "--reuid=54321", "--regid=54321", "--clear-groups", "--"]
    env = ["env", "-i", f"PYTHONPATH={source}", "PATH=/usr/sbin:/usr/bin:/bin"]
    done = subprocess.run(
        [*user, *env, PYTHON, str(script)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["back"] == "1"
    size, *others = found["lines"]
    assert 15 << 20 < int(size.removeprefix("size=")) <= 16 << 20
    assert others == ["secret of the user", "refused", "hidden"]
