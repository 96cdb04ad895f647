# SPDX-License-Identifier: Apache-2.0
"""What every back end of the sandbox promises to those who run programs in it."""

from __future__ import annotations

import asyncio
import functools
import io
import os
import shutil
import socket
import subprocess
import tarfile
import tempfile
from collections.abc import AsyncGenerator, Callable
from pathlib import Path

import pytest

from penstock.errors import SandboxError
from penstock.rollout.sandbox.bubblewrap import BubblewrapBackend
from penstock.rollout.sandbox.container import ContainerBackend, find_engine
from penstock.rollout.sandbox.limits import LimitsBackend, NoneBackend
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

LIMITS = Limits(wall_s=60, cpu_s=20, memory_mb=512, num_processes=64, disk_mb=16)
IMAGE = os.environ.get("PENSTOCK_TEST_IMAGE", "docker.io/library/debian:12")
Create = Callable[[SandboxSpec], Sandbox]


def make_backend(kind: str) -> Backend:
    if kind == "bubblewrap" and shutil.which("bwrap"):
        return BubblewrapBackend()
    if kind == "runsc" and shutil.which("runsc") and os.geteuid() == 0:
        return RunscBackend()
    if kind == "container" and (engine := cached_engine()):
        return ContainerBackend(IMAGE, engine)
    if kind in ("limits", "none"):
        return LimitsBackend() if kind == "limits" else NoneBackend()
    pytest.skip(f"{kind} is not to be had here")


@functools.cache
def cached_engine() -> str:
    """The engine of containers that has the image; a machine may have one without it."""
    engine = find_engine()
    look = [engine, "image", "inspect", IMAGE]
    has_image = engine and subprocess.run(look, capture_output=True, check=False).returncode == 0
    return engine if has_image else ""


KINDS = ("bubblewrap", "limits", "none", pytest.param("runsc", marks=pytest.mark.slow), "container")


@pytest.fixture(params=KINDS)
def backend(request: pytest.FixtureRequest) -> Backend:
    return make_backend(request.param)


@pytest.fixture
async def sandbox(backend: Backend) -> AsyncGenerator[Sandbox]:
    one = backend.create(SandboxSpec(limits=LIMITS, env={"COLOUR": "blue"}))
    await one.start()
    yield one
    await one.kill()


async def test_a_program_reads_its_input_and_gives_its_output_and_code(sandbox: Sandbox) -> None:
    done = await run(sandbox, ["sh", "-c", "cat; echo problem >&2; exit 7"], stdin=b"words")
    assert (done.stdout, done.stderr) == (b"words", b"problem\n")
    assert (done.exit.code, done.exit.limit) == (7, "")


async def test_words_reach_the_program_unchanged(sandbox: Sandbox) -> None:
    words = ["$HOME", "a b", "it's", 'say "x"', "two\nlines", "`id`", "é", "", "\\", "-n", "$(id)"]
    done = await run(sandbox, ["sh", "-c", 'printf "%s|" "$@"', "sh", *words], env={"X": "1\n$2'"})
    assert done.stdout.decode() == "".join(f"{word}|" for word in words)
    done = await run(sandbox, ["sh", "-c", 'printf %s "$X"'], env={"X": "1\n$2'"})
    assert done.stdout.decode() == "1\n$2'"


async def test_the_environment_is_clean(sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "canary")
    done = await run(sandbox, ["env"])
    names = {line.split("=")[0] for line in done.stdout.decode().splitlines()}
    assert "COLOUR" in names
    allowed = {"PATH", "HOME", "LANG", "PENSTOCK_SECRETS", "PENSTOCK_SOCKETS", "COLOUR", "PWD"}
    assert names <= allowed | {"HOSTNAME", "TERM", "container"}  # what engines add


async def test_files_go_in_and_come_out(sandbox: Sandbox) -> None:
    await sandbox.put("in/data.txt", b"abc")
    await sandbox.put("in/run.sh", b"#!/bin/sh\ncat in/data.txt > out.txt\n", mode=0o755)
    done = await run(sandbox, ["./in/run.sh"])
    assert done.exit.code == 0, done.stderr
    assert await sandbox.get("out.txt", max_bytes=3) == b"abc"
    with tarfile.open(fileobj=io.BytesIO(await sandbox.snapshot())) as tar:
        assert set(tar.getnames()) == {"in", "in/data.txt", "in/run.sh", "out.txt"}


async def test_a_later_program_can_replace_a_file_that_was_put(sandbox: Sandbox) -> None:
    await sandbox.put("a.txt", b"old")
    assert (await run(sandbox, ["sh", "-c", "echo new > a.txt"])).exit.code == 0
    assert await sandbox.get("a.txt", max_bytes=10) == b"new\n"
    await sandbox.put("a.txt", b"ours")
    assert await sandbox.get("a.txt", max_bytes=10) == b"ours"


async def test_a_folder_is_listed_and_no_link_is_followed(sandbox: Sandbox) -> None:
    await sandbox.put("b/c.txt", b"x")
    await run(sandbox, ["sh", "-c", "touch a; ln -s /etc d; ln -s b e"])
    assert [*await sandbox.list_files(".")] == ["a", "b/", "d", "e"]
    assert [*await sandbox.list_files("b")] == ["c.txt"]
    for path in ("d", "e", "a", "nothing", "..", "/etc"):
        with pytest.raises(FileRefused):
            await sandbox.list_files(path)


@pytest.mark.parametrize(
    "path", ["../x", "/etc/passwd", "a/../b", "", "a//b", "a\0b", "/work", "."]
)
async def test_a_path_that_leaves_the_folder_is_refused(sandbox: Sandbox, path: str) -> None:
    with pytest.raises(FileRefused):
        await sandbox.get(path, max_bytes=10)
    with pytest.raises(FileRefused):
        await sandbox.put(path, b"")


async def test_a_file_that_is_too_large_or_missing_is_refused(sandbox: Sandbox) -> None:
    await sandbox.put("four", b"1234")
    with pytest.raises(FileRefused, match="more than 3 bytes"):
        await sandbox.get("four", max_bytes=3)
    with pytest.raises(FileRefused, match="No such file"):
        await sandbox.get("five", max_bytes=3)


async def test_a_missing_program_is_an_exit_code(sandbox: Sandbox) -> None:
    assert (await run(sandbox, ["/no/such/program"])).exit.code == 127


async def test_a_signal_is_a_negative_code(sandbox: Sandbox) -> None:
    assert (await run(sandbox, ["sh", "-c", "kill -TERM $$"])).exit.code == -15


async def test_output_beyond_the_limit_ends_the_program(sandbox: Sandbox) -> None:
    done = await run(sandbox, ["sh", "-c", "while :; do echo 0123456789; done"])
    assert done.exit.limit == "output_bytes"
    assert len(done.stdout) + len(done.stderr) <= LIMITS.output_bytes


async def test_a_frame_larger_than_the_limit_of_output_ends_the_program(sandbox: Sandbox) -> None:
    process = await sandbox.exec(["cat", "/dev/zero"])
    with pytest.raises(asyncio.IncompleteReadError) as raised:
        await process.stdout.readexactly(1 << 30)
    assert len(raised.value.partial) <= LIMITS.output_bytes
    assert (await process.wait()).limit == "output_bytes"


async def test_the_wall_clock_ends_a_program_that_ignores_signals(backend: Backend) -> None:
    sandbox = backend.create(SandboxSpec(limits=Limits(wall_s=0.3)))
    await sandbox.start()
    try:
        done = await run(sandbox, ["sh", "-c", "trap '' TERM INT HUP; while :; do sleep 9; done"])
        assert (done.exit.code, done.exit.limit) == (-9, "wall_s")
    finally:
        await sandbox.kill()


async def test_a_program_ends_though_nobody_reads_its_output(sandbox: Sandbox) -> None:
    process = await sandbox.exec(["sh", "-c", "head -c 60000 /dev/zero"])
    process.stdin.close()
    assert (await process.wait()).code == 0
    assert len(await process.stdout.read()) == 60000


async def test_kill_ends_running_programs_and_may_be_repeated(backend: Backend) -> None:
    sandbox = backend.create(SandboxSpec(limits=LIMITS))
    await sandbox.start()
    processes = [await sandbox.exec(["sleep", "600"]) for _ in range(2)]
    await sandbox.kill()
    assert [(await process.wait()).code for process in processes] == [-9, -9]
    await sandbox.kill()
    with pytest.raises(SandboxError, match="not running"):
        await sandbox.get("x", max_bytes=1)


async def test_programs_of_one_sandbox_run_at_the_same_time(sandbox: Sandbox) -> None:
    wait = "until [ -e done ]; do sleep 0.01; done; cat file"
    reader = await sandbox.exec(["sh", "-c", wait])
    await run(sandbox, ["sh", "-c", "echo through > file; touch done"])
    assert await reader.stdout.read() == b"through\n"


async def test_a_secret_and_a_folder_are_granted_and_read_only(
    backend: Backend, tmp_path: Path
) -> None:
    (tmp_path / "key").write_text("s3cret")
    (tmp_path / "key").chmod(0o600)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)  # in a private parent, as the environment of a user is
        os.chmod(folder, 0o700)
        (folder / "lib").mkdir()
        (folder / "lib" / "table").write_text("rows")
        grants = Grants(folders=(folder / "lib",), secrets={"api": tmp_path / "key"})
        sandbox = backend.create(SandboxSpec(limits=LIMITS, grants=grants))
        await sandbox.start()
        try:
            secret = await run(sandbox, ["sh", "-c", 'cat "$PENSTOCK_SECRETS/api"'])
            table = await run(
                sandbox, ["sh", "-c", f"cat {folder}/lib/table; cd {folder} && echo *"]
            )
            written = await run(sandbox, ["sh", "-c", f"echo x > {folder}/lib/table"])
        finally:
            await sandbox.kill()
        assert secret.stdout == b"s3cret"
        if backend.level >= Level.NAMESPACES:
            assert table.stdout == b"rowslib\n"
            assert written.exit.code != 0
            assert (folder / "lib" / "table").read_text() == "rows"


async def test_a_granted_socket_answers(backend: Backend, tmp_path: Path) -> None:
    if not shutil.which("/usr/bin/python3"):
        pytest.skip("needs the system's Python")
    with tempfile.TemporaryDirectory() as name:
        path = Path(name) / "gateway.sock"
        server = await asyncio.start_unix_server(_answer, path)
        path.chmod(0o666)
        if backend.level < Level.NAMESPACES:
            os.chmod(name, 0o711)  # without walls, the program itself walks the path
        sandbox = backend.create(
            SandboxSpec(limits=LIMITS, grants=Grants(sockets={"gateway": path}))
        )
        await sandbox.start()
        code = (
            "import socket,os;s=socket.socket(socket.AF_UNIX);"
            "s.connect(os.environ['PENSTOCK_SOCKETS']+'/gateway');print(s.recv(9).decode())"
        )
        done = await run(sandbox, ["/usr/bin/python3", "-c", code])
        await sandbox.kill()
        server.close()
        await server.wait_closed()
    assert done.stdout == b"hello\n", done.stderr


async def _answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"hello")
    writer.close()


async def test_a_grant_that_cannot_be_given_is_refused(tmp_path: Path) -> None:
    backend = make_backend("bubblewrap")
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(str(tmp_path / "private.sock"))
    (tmp_path / "private.sock").chmod(0o600)
    wrong = [
        (Grants(folders=(tmp_path / "none",)), "does not exist"),
        (Grants(secrets={"x": tmp_path / "none"}), "cannot read"),
        (Grants(secrets={"../x": tmp_path}), "cannot name"),
        (Grants(sockets={"x": tmp_path}), "is not a socket"),
        (Grants(sockets={"x": tmp_path / "private.sock"}), "0666"),
    ]
    for grants, why in wrong:
        with pytest.raises(SandboxError, match=why):
            await backend.create(SandboxSpec(limits=LIMITS, grants=grants)).start()
    bound.close()


async def test_the_umask_of_the_node_changes_nothing(tmp_path: Path) -> None:
    """Services write for their owner alone; a sandbox has another user."""
    granted = tmp_path / "granted"
    granted.mkdir(mode=0o755)
    (granted / "file").write_text("granted")
    old = os.umask(0o077)
    try:
        spec = SandboxSpec(limits=LIMITS, grants=Grants(folders=(granted,)))
        sandbox = make_backend("bubblewrap").create(spec)
        await sandbox.start()
        await sandbox.put("inner/hello", b"hello")
        done = await run(sandbox, ["cat", "/etc/passwd", "inner/hello", str(granted / "file")])
        await sandbox.kill()
    finally:
        os.umask(old)
    assert done.exit.code == 0, done.stderr
