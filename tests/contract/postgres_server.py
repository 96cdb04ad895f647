# SPDX-License-Identifier: Apache-2.0
"""A real PostgreSQL server for tests: the binaries of the system's packages, a cluster of its own
in a temporary folder, loopback only, stopped with the tests."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PASSWORD = "of-the-tests"


def binaries() -> Path | None:
    """Folder of the newest installed server."""
    found = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda p: int(p.parts[-3])
    )
    return found[-1].parent if found else None


@contextmanager
def running_postgres() -> Generator[str]:
    """The URL of an empty database; the server refuses root, so root runs it as somebody else."""
    folder = binaries()
    assert folder is not None, "install postgresql, or run `make setup`"
    user = _unprivileged()
    coordinator = Path(tempfile.mkdtemp(prefix="penstock-postgres-"))
    try:
        if user is not None:
            os.chown(coordinator, user.pw_uid, user.pw_gid)
        with _server(folder, coordinator, user) as port:
            yield f"postgresql://penstock:{PASSWORD}@127.0.0.1:{port}/postgres"
    finally:
        shutil.rmtree(coordinator, ignore_errors=True)


def _unprivileged() -> pwd.struct_passwd | None:
    if os.getuid() != 0:
        return None
    names = {entry.pw_name for entry in pwd.getpwall()}
    return pwd.getpwnam("postgres" if "postgres" in names else "nobody")


@contextmanager
def _server(folder: Path, coordinator: Path, user: pwd.struct_passwd | None) -> Generator[int]:
    run_as: dict[str, Any] = {}
    if user is not None:
        run_as = {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": ()}
    secret = coordinator / "password"
    secret.write_text(PASSWORD)
    secret.chmod(0o644)
    data = coordinator / "data"
    make = f"-D {data} -U penstock --auth=scram-sha-256 --pwfile={secret} -E UTF8 --locale=C"
    subprocess.run(
        [folder / "initdb", "--no-sync", *make.split()],
        check=True,
        stdout=subprocess.DEVNULL,
        cwd=coordinator,
        **run_as,
    )
    port = _free_port()
    serve = f"-D {data} -p {port} -h 127.0.0.1 -c unix_socket_directories= -c shared_buffers=32MB"
    with (coordinator / "log").open("wb") as log:
        server: subprocess.Popen[Any] = subprocess.Popen(
            [folder / "postgres", *serve.split()],
            stdout=log,
            stderr=log,
            cwd=coordinator,
            **run_as,
        )
        try:
            _wait_for(folder, port, server, coordinator / "log")
            yield port
        finally:
            server.send_signal(signal.SIGQUIT)  # nobody needs its data: end without a checkpoint
            server.wait(timeout=60)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _wait_for(folder: Path, port: int, server: subprocess.Popen[Any], log: Path) -> None:
    ask = [folder / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
    give_up_at = time.monotonic() + 60
    while subprocess.run(ask, check=False).returncode != 0:
        assert server.poll() is None, f"PostgreSQL ended: {log.read_text()}"
        assert time.monotonic() < give_up_at, f"PostgreSQL does not answer: {log.read_text()}"
        time.sleep(0.05)
