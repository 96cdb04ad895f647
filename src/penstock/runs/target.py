# SPDX-License-Identifier: Apache-2.0
"""Resolves what a user points to: a config file or a run folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.config import RunConfig, load, run_dir
from penstock.fleet.run_folder import RunFolder


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


def read_target(path: Path, overrides: Sequence[str] = ()) -> RunTarget:
    """Load a config file, or the config of a run folder, with overrides."""
    if path.is_dir():
        folder = RunFolder.open_existing(path)
        config = load(folder.config_file, overrides)
        return RunTarget(
            config=config,
            folder=folder,
            python_path=folder.python_path(),
            config_file=folder.config_file,
            overrides=tuple(overrides),
        )
    config = load(path, overrides)
    folder = RunFolder(run_dir(config))
    return RunTarget(
        config=config,
        folder=folder,
        python_path=(str(path.absolute().parent),),
        config_file=path,
        overrides=tuple(overrides),
    )


def find_run_folder(path: Path) -> RunFolder:
    """The run folder itself, or the one that a config file describes."""
    return RunFolder.open_existing(
        path if path.is_dir() or not path.is_file() else run_dir(load(path))
    )
