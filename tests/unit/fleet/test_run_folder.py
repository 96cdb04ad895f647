# SPDX-License-Identifier: Apache-2.0
"""The run folder: lock, addresses, attempts, tokens."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.config import demo_config
from penstock.config.network import NetworkConfig
from penstock.errors import ConfigError, Forbidden, LaunchError
from penstock.fleet.ports import LOOPBACK, free_port, is_port_free, wait_for_port
from penstock.fleet.run_folder import (
    Endpoints,
    FinishRecord,
    RunFolder,
)
from penstock.wire.auth import Audience, Role, Signer

LOCK_HOLDER = """
import sys, time
from pathlib import Path
from penstock.fleet.run_folder import RunFolder
with RunFolder(Path(sys.argv[1])).locked():
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_launcher_is_rejected_with_the_pid_of_the_first(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r")
    assert folder.launcher_pid() is None
    with folder.locked():
        assert folder.launcher_pid() == os.getpid()
        with (
            pytest.raises(LaunchError, match=rf"pid {os.getpid()}\).*penstock stop"),
            RunFolder(tmp_path / "r").locked(),
        ):
            pass
    assert folder.launcher_pid() is None


def test_the_lock_ends_with_its_process_however_that_dies(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LOCK_HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "held\n"
        assert RunFolder(tmp_path).launcher_pid() == first.pid
        first.kill()
    with RunFolder(tmp_path).locked():
        pass


def test_checking_for_a_launcher_does_not_block_one(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.locked():
        pass
    with (tmp_path / "run" / "lock").open() as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        answered = threading.Timer(0.1, fcntl.flock, (asking, fcntl.LOCK_UN))
        answered.start()
        with folder.locked():
            assert folder.launcher_pid() == os.getpid()
        answered.join()


def test_two_checks_do_not_mistake_each_other_for_a_launcher(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    with folder.locked():
        pass
    with (tmp_path / "run" / "lock").open() as asking:
        fcntl.flock(asking, fcntl.LOCK_SH)
        assert folder.launcher_pid() is None


def test_a_pid_that_cannot_be_written_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with RunFolder(tmp_path).locked(), pytest.raises(LaunchError), RunFolder(tmp_path).locked():
        pass


def test_endpoints_are_chosen_once(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r")
    with pytest.raises(ConfigError, match="never started"):
        folder.endpoints()
    first = folder.allocate_endpoints(tmp_path, ("a",))
    assert first.dataflow != first.weights
    assert RunFolder(tmp_path / "r").allocate_endpoints(tmp_path / "other", ()) == first
    again = RunFolder(tmp_path / "r").allocate_endpoints(tmp_path / "other", ("b",))
    assert again == replace(first, python_path=("b",)), "the folder of the config file wins"
    assert folder.endpoints() == again


def test_a_run_behind_a_firewall_has_the_ports_of_its_config(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r")
    chosen = folder.allocate_endpoints(tmp_path, (), num_partitions=3)
    network = NetworkConfig(port=18_500)
    fixed = folder.allocate_endpoints(tmp_path, (), num_partitions=3, network=network)
    urls = (fixed.dataflow, fixed.weights, *fixed.partitions)
    assert urls == tuple(f"http://127.0.0.1:{port}" for port in range(18_500, 18_504))
    again = folder.allocate_endpoints(tmp_path, (), num_partitions=3)
    assert again == fixed != chosen, "without the key the last ones stay"


def test_a_port_in_use_is_named_with_the_fix(tmp_path: Path) -> None:
    port = free_port()
    with socket.socket() as stranger:
        stranger.bind((LOOPBACK, port))
        stranger.listen()
        assert not is_port_free(port)
        with pytest.raises(LaunchError, match=rf"(?s)port {port}.*delete run/endpoints.json"):
            wait_for_port(f"http://{LOOPBACK}:{port}", timeout_s=0.1, what="dataflow")
    wait_for_port(f"http://{LOOPBACK}:{port}", timeout_s=0.1, what="dataflow")


def test_each_start_has_separate_logs(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.new_attempt() == (1, tmp_path / "logs" / "attempt_1")
    assert folder.new_attempt() == (2, tmp_path / "logs" / "attempt_2")
    assert (tmp_path / "logs" / "latest").resolve() == tmp_path / "logs" / "attempt_2"


def test_config_and_finish_are_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "r")
    with pytest.raises(ConfigError, match="not a run folder"):
        RunFolder.open_existing(tmp_path / "r")
    config = demo_config(3)
    folder.write_config(config)
    assert RunFolder.open_existing(tmp_path / "r").read_config() == config
    assert folder.finish() is None
    finish = FinishRecord(finished_at=1.0, steps=2, trajectories=3)
    folder.write_finish(finish)
    assert folder.finish() == finish
    folder.clear_finish()
    assert folder.finish() is None


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "endpoints.json").write_text('{"dataflow": 3}')
    with pytest.raises(ConfigError, match=r"endpoints.json is damaged.*delete it"):
        RunFolder(tmp_path).endpoints()


def test_a_rollout_token_opens_dataflow_and_weights_and_a_reader_only_the_dataflow(
    tmp_path: Path,
) -> None:
    folder = RunFolder(tmp_path)
    signer = Signer.create(folder.keys, "reverse")
    node = folder.token("reverse", Role.ROLLOUT, ttl_s=60)
    for audience in (Audience.DATAFLOW, Audience.WEIGHTS):
        assert signer.verifier(audience).verify(node).role is Role.ROLLOUT
    session = folder.token("reverse", Role.SESSION, ttl_s=60)
    with pytest.raises(Forbidden):
        signer.verifier(Audience.WEIGHTS).verify(session)


def test_the_tokens_that_the_docs_list_are_accepted(tmp_path: Path) -> None:
    """An admin's at the gateway, a reader's at `/metrics` of the weight server."""
    folder = RunFolder(tmp_path)
    signer = Signer.create(folder.keys, "reverse")
    admin = folder.token("reverse", Role.ADMIN, ttl_s=60)
    for audience in (Audience.DATAFLOW, Audience.WEIGHTS, Audience.GATEWAY):
        assert signer.verifier(audience).verify(admin).role is Role.ADMIN
    reader = folder.token("reverse", Role.READER, ttl_s=60)
    for audience in (Audience.DATAFLOW, Audience.WEIGHTS):
        assert signer.verifier(audience).verify(reader).role is Role.READER


def test_endpoints_record_where_the_user_was(tmp_path: Path) -> None:
    chosen = RunFolder(tmp_path).allocate_endpoints(tmp_path / "work", ("x",))
    assert isinstance(chosen, Endpoints)
    assert (chosen.work_dir, chosen.python_path) == (str(tmp_path / "work"), ("x",))


def test_a_moved_folder_finds_what_moved_with_it_and_what_stayed(tmp_path: Path) -> None:
    project, lib = tmp_path / "old" / "project", tmp_path / "lib"
    lib.mkdir()
    folder = RunFolder(project / "outputs" / "r")
    first = folder.allocate_endpoints(project, (str(project), str(lib)))
    (tmp_path / "old").rename(tmp_path / "new")
    moved = RunFolder(tmp_path / "new" / "project" / "outputs" / "r")
    there = str(tmp_path / "new" / "project")
    assert moved.python_path() == (there, str(lib))
    assert moved.endpoints().work_dir == there
    again = moved.allocate_endpoints(tmp_path, ())
    assert (again.work_dir, again.python_path) == (there, (there, str(lib)))
    assert again.dataflow == first.dataflow


def test_a_folder_moved_alone_starts_where_the_user_is(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    RunFolder(work / "deep" / "r").allocate_endpoints(work, ())
    (work / "deep" / "r").rename(tmp_path / "r")
    (work / "deep").rmdir()
    work.rmdir()
    (tmp_path / "here").mkdir()
    moved = RunFolder(tmp_path / "r")
    chosen = moved.allocate_endpoints(tmp_path / "here", ())
    assert Path(chosen.work_dir).is_dir() and chosen.folder == str(tmp_path / "r")
