# SPDX-License-Identifier: Apache-2.0
"""A run folder of somebody else can be opened: it takes nothing from the environment of who opens
it, writes through no link, and has none of their processes ended."""

from __future__ import annotations

import fcntl
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock import load_config
from penstock.config import demo_config
from penstock.durable import write_durably
from penstock.errors import ConfigError, LaunchError
from penstock.fleet import process_state
from penstock.fleet.run_folder import RunFolder
from penstock.runs.control import stop_run
from penstock.runs.fork import fork_run
from penstock.runs.listing import list_runs
from penstock.runs.target import read_target
from penstock.wire.auth import Signer

SECRET = "hf_of_who_opens_it"
STOLEN = [
    "name: ${oc.env:RED_SECRET}",
    "name: ${${output_dir}:RED_SECRET}\noutput_dir: oc.env",
    "name: a-${oc.decode:${oc.env:RED_SECRET}}",
    "name: \\\\${oc.env:RED_SECRET}",
    "name: ${oc.env:RED_UNSET}",
]


def foreign_folder(path: Path, name: str = "") -> RunFolder:
    folder = RunFolder(path)
    folder.write_config(demo_config(0))
    Signer.create(folder.keys, "theirs")
    if name:
        text = re.sub(r"(?m)^(name|output_dir): .*\n", "", folder.config_file.read_text())
        folder.config_file.write_text(f"{name}\n{text}")
    return folder


def _openings() -> dict[str, Callable[[RunFolder], object]]:
    return {
        "read_config": lambda folder: folder.read_config(),
        "read_target": lambda folder: read_target(folder.path),
        "load_config": lambda folder: load_config(folder.path),
        "fork": lambda folder: fork_run(folder, (), 1, "new"),
    }


@pytest.mark.parametrize("name", STOLEN)
@pytest.mark.parametrize("opening", _openings())
def test_a_stored_config_takes_nothing_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, opening: str
) -> None:
    """The name of a run stands in every token, and so went to the server that the folder names."""
    monkeypatch.setenv("RED_SECRET", SECRET)
    folder = foreign_folder(tmp_path / "evil", name)
    with pytest.raises(ConfigError, match=r"name: \$\{\} is for run files") as refused:
        _openings()[opening](folder)
    assert SECRET not in str(refused.value)


def test_a_list_of_runs_shows_such_a_folder_and_asks_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RED_SECRET", SECRET)
    foreign_folder(tmp_path / "evil", STOLEN[0])
    [found] = list_runs(tmp_path)
    assert found.state == "unreadable"
    assert "is for run files" in found.why and SECRET not in found.why


def test_text_that_looks_like_an_interpolation_stays(tmp_path: Path) -> None:
    """What `dump` wrote is read again: it escapes such text."""
    config = demo_config(0, ["output_dir='\\${oc.env:HOME}'"])
    folder = RunFolder(tmp_path / "run")
    folder.write_config(config)
    assert folder.read_config().output_dir == config.output_dir == "${oc.env:HOME}"


@pytest.mark.parametrize("is_hard", [False, True])
def test_a_file_is_never_written_through_a_link(tmp_path: Path, is_hard: bool) -> None:
    """`penstock stop`, `scale` and `token` write into the folder, perhaps as root."""
    precious = tmp_path / "precious"
    precious.write_text("precious")
    planted = tmp_path / ".new-admin.head"
    if is_hard:
        planted.hardlink_to(precious)
    else:
        planted.symlink_to(precious)
    write_durably(tmp_path / "admin.head", b"1 abc\n")
    assert precious.read_text() == "precious"
    assert (tmp_path / "admin.head").read_text() == "1 abc\n"
    assert not (tmp_path / "admin.head").is_symlink()


def _another_user(folder: RunFolder) -> int:
    return os.getuid() + 1


def test_stop_ends_no_process_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pid in the lock is what the owner of the folder wrote there."""
    folder = foreign_folder(tmp_path / "evil")
    (tmp_path / "evil" / "run").mkdir()
    with subprocess.Popen(["sleep", "600"]) as victim:
        lock = os.open(tmp_path / "evil" / "run" / "lock", os.O_RDWR | os.O_CREAT)
        try:
            os.write(lock, f"{victim.pid}\n".encode())
            fcntl.flock(lock, fcntl.LOCK_EX)
            monkeypatch.setattr(RunFolder, "lock_owner", _another_user)
            with pytest.raises(LaunchError, match="not of the user who owns the lock"):
                stop_run(folder, timeout_s=1.0)
            assert victim.poll() is None
            assert process_state.owner_of(victim.pid) == os.getuid()
        finally:
            os.close(lock)
            victim.kill()
