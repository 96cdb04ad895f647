# SPDX-License-Identifier: Apache-2.0
"""Resolves what a user points to: a config file or a run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.config import RunConfig, load, load_stored, run_dir
from penstock.errors import ConfigError
from penstock.fleet.run_folder import RunFolder
from penstock.runs.device_defaults import with_device_defaults
from penstock.runs.user_code import missing_modules


@dataclass(frozen=True, slots=True, kw_only=True)
class RunTarget:
    config: RunConfig
    folder: RunFolder
    python_path: tuple[str, ...]
    """Folders of the user's modules."""
    config_file: Path | None = None
    """The file that `config` was read from, for messages; None for a built-in config."""
    overrides: tuple[str, ...] = ()
    """Settings that override the file, for messages."""


def read_target(
    path: Path, overrides: Sequence[str] = (), python_path: Sequence[Path] = ()
) -> RunTarget:
    """Load a config file, or the config of a run folder, with overrides. `python_path`: folders of
    the user's modules; by default the folder of the config file, or as in the last start."""
    given = tuple(str(folder.absolute()) for folder in python_path)
    if path.is_dir():
        folder = RunFolder.open_existing(path)
        config = load_stored(folder.config_file, overrides)
        found = given or folder.python_path()
        _require_modules(config, folder, found)
        return RunTarget(
            config=config,
            folder=folder,
            python_path=found,
            config_file=folder.config_file,
            overrides=tuple(overrides),
        )
    config = with_device_defaults(load(path, overrides))
    folder = RunFolder(run_dir(config))
    found = given or (str(path.absolute().parent),)
    return RunTarget(
        config=config,
        folder=folder,
        python_path=found,
        config_file=path,
        overrides=tuple(overrides),
    )


def _require_modules(config: RunConfig, folder: RunFolder, python_path: tuple[str, ...]) -> None:
    """The user's modules of a run that was moved may be gone: say where they were."""
    gone = [entry for entry in python_path if not Path(entry).is_dir()]
    missing = missing_modules(config, python_path) if gone else []
    if missing:
        raise ConfigError(
            f"cannot find the modules {', '.join(missing)} of run {config.name}: they were in "
            f"{', '.join(gone)}, which is gone. Resume with `penstock run {folder.path} "
            "--python-path DIR`, where DIR is the folder they are in now"
        )


def find_run_folder(path: Path) -> RunFolder:
    """The run folder itself, or the one that a config file describes."""
    return RunFolder.open_existing(
        path if path.is_dir() or not path.is_file() else run_dir(load(path))
    )


def find_running_run(path: Path) -> RunFolder:
    """The run of this folder or config file, or the only running one directly under this folder."""
    if path.is_file() or (path / "config.yaml").is_file():
        return find_run_folder(path)
    folders = [RunFolder(one) for one in sorted(path.glob("*/")) if (one / "config.yaml").is_file()]
    running = [folder for folder in folders if folder.launcher_pid() is not None]
    if len(running) != 1:
        found = ", ".join(str(folder.path) for folder in running) or "none"
        raise ConfigError(
            f"{path} must be a run folder, or have exactly one running run in it; running there: "
            f"{found}. Pass the folder of one with --run"
        )
    return running[0]
