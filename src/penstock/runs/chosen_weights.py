# SPDX-License-Identifier: Apache-2.0
"""Finds the weights of one version of a policy: in the run's weight store, its checkpoints, or its
initial model.

Owns which of these counts. Changes nothing in the run folder."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from penstock.durable import is_regular
from penstock.errors import ConfigError
from penstock.runs.target import RunTarget
from penstock.trainer.model_folders import initial_folder
from penstock.weights.catalog import (
    CatalogVersion,
    deletion_paused,
    full_file,
    read_catalog,
)
from penstock.weights.store import DirectoryStore


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenWeights:
    """One version of one policy."""

    number: int
    """Steps that it was trained for."""
    place: str
    """Where it is, for people."""
    open: Callable[[], AbstractContextManager[Path]]
    """A model folder that is there while the context is open."""


def newest_checkpoint_or_init(target: RunTarget, policy: str) -> ChosenWeights:
    """The newest checkpoint, else the initial model."""
    checkpoint = newest_checkpoint(target, policy)
    return _initial(target, policy) if checkpoint is None else _of_checkpoint(checkpoint)


def chosen_weights(target: RunTarget, policy: str, version: int | None) -> ChosenWeights:
    """This version, or the newest that can be loaded."""
    found = {0: _initial(target, policy)}
    if _is_run_folder(target):
        found |= {_step(path): _of_checkpoint(path) for path in _checkpoints(target, policy)}
        found |= _stored(target, policy)
    number = max(found) if version is None else version
    if number not in found:
        known = ", ".join(map(str, sorted(found)[-20:]))
        raise ConfigError(
            f"{target.folder.path} has no weights of {policy}@{number}: they were never published, "
            f"or deleted because nothing needed them. Choose --version from: {known}"
        )
    return found[number]


def newest_checkpoint(target: RunTarget, policy: str) -> Path | None:
    """Of a run folder that was given as the target; None for a config file, or before the first
    checkpoint."""
    return max(_checkpoints(target, policy), key=_step, default=None)


def _is_run_folder(target: RunTarget) -> bool:
    return target.config_file == target.folder.config_file


def _checkpoints(target: RunTarget, policy: str) -> list[Path]:
    if not _is_run_folder(target):
        return []
    root = target.folder.path / "checkpoints"
    root = root / policy if len(target.config.models) > 1 else root
    return [path for path in root.glob("step_*") if path.name.removeprefix("step_").isdecimal()]


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_"))


def _initial(target: RunTarget, policy: str) -> ChosenWeights:
    init = target.config.models[policy].init
    opened = partial(initial_folder, init, target.config.seed)
    return ChosenWeights(number=0, place=init, open=opened)


def _of_checkpoint(path: Path) -> ChosenWeights:
    return ChosenWeights(number=_step(path), place=str(path), open=partial(_checkpoint, path))


@contextmanager
def _checkpoint(path: Path) -> Generator[Path]:
    """The checkpoint without the trainer's own files."""
    with tempfile.TemporaryDirectory(prefix="penstock-try-") as temporary:
        for file in path.iterdir():
            if is_regular(file) and not file.name.startswith(("optimizer", "trainer")):
                (Path(temporary) / file.name).symlink_to(file.absolute())
        yield Path(temporary)


def _stored(target: RunTarget, policy: str) -> dict[int, ChosenWeights]:
    """The versions of the weight store; of a number that was published twice, any."""
    if not target.folder.weights.is_dir():
        return {}
    store = DirectoryStore(target.folder.weights)
    return {
        version.manifest.number: ChosenWeights(
            number=version.manifest.number,
            place=f"{target.folder.weights}: {version.name}",
            open=partial(_snapshot, store, version),
        )
        for version in read_catalog(store).versions
        if version.manifest.policy == policy and version.is_available
    }


@contextmanager
def _snapshot(store: DirectoryStore, version: CatalogVersion) -> Generator[Path]:
    """The files of a version under their names; those stored as deltas are rebuilt."""
    with ExitStack() as files:
        folder = Path(files.enter_context(tempfile.TemporaryDirectory(prefix="penstock-version-")))
        scratch = folder / "rebuilt"
        scratch.mkdir()
        files.enter_context(deletion_paused(store))
        for file in version.files:
            path = files.enter_context(full_file(store, file.entry.blob, scratch))
            (folder / file.entry.name).symlink_to(path.absolute())
        yield folder
