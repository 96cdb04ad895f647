# SPDX-License-Identifier: Apache-2.0
"""Versions as initial models: `run:FOLDER@VERSION` of another run, `POLICY@NUMBER` of this one.

Owns the copy that a run keeps in `initial/DIGEST`, verified against the version's manifest, and the
record of which name it stands for: the other run may go on, or be deleted. A run that is resumed
uses the same copies. Refuses adapters, which are not whole models, and changed frozen policies.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from penstock.config import RunConfig
from penstock.config.models import KEPT_COPY, RUN_PREFIX, own_version
from penstock.durable import copy_regular, read_regular, sync, write_durably
from penstock.errors import ConfigError, WeightsError
from penstock.fleet.run_folder import RunFolder
from penstock.runs.target import RunTarget
from penstock.weights.catalog import (
    SHORT_DIGEST_CHARS,
    Catalog,
    CatalogVersion,
    deletion_paused,
    find_version,
    full_file,
    read_catalog,
)
from penstock.weights.manifest import file_digest
from penstock.weights.store import DirectoryStore

MAX_ORIGIN_BYTES = 1 << 16

INITIAL = "initial"
"""Folder of the copies in a run folder; `KEPT_COPY` finds it in a path."""


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What a copy is, in `initial/DIGEST.json`."""

    name: str
    """As the config has it."""
    version: str
    """`policy@number` in its own run."""
    run: str
    """Folder of that run, when it was copied."""
    digest: str
    """Of the version's manifest; also the name of the copy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    run: Path
    version: CatalogVersion

    @property
    def store(self) -> DirectoryStore:
        return DirectoryStore(RunFolder(self.run).weights)


def is_version(name: str) -> bool:
    return name.startswith(RUN_PREFIX) or own_version(name) is not None


def keep_version(name: str, folder: RunFolder, notify: Callable[[str], None]) -> str:
    """The folder with a copy of the version of this name; other names are returned unchanged."""
    if (moved := KEPT_COPY.fullmatch(name)) and (kept := _kept(folder, moved["digest"])):
        return str(kept)
    if not is_version(name):
        return name
    if kept := _known(name, folder):
        return str(kept)
    found = find(name, folder)
    target = folder.path / INITIAL / found.version.digest
    if not target.is_dir():
        _copy(found, target)
    origin = Origin(
        name=name, version=found.version.name, run=str(found.run), digest=found.version.digest
    )
    write_durably(target.with_suffix(".json"), msgspec.json.encode(origin))
    short = found.version.digest[:SHORT_DIGEST_CHARS]
    notify(f"{name}: version {found.version.name}, manifest {short}, kept in {target}")
    return str(target)


def find(name: str, folder: RunFolder) -> _Found:
    """The version that this name means now. ConfigError if there is none, or it is damaged."""
    run, reference = folder.path, name
    if name.startswith(RUN_PREFIX):
        place, _, reference = name.removeprefix(RUN_PREFIX).partition("@")
        run = RunFolder.open_existing(Path(place).expanduser()).path
    elif not folder.config_file.exists():
        policy = name.partition("@")[0]
        raise ConfigError(
            f"{name}: this run has not begun, so {policy} has version 0 alone; write {policy}@0, "
            f"or run:FOLDER@{name} for a version of another run"
        )
    catalog = read_catalog(DirectoryStore(RunFolder(run).weights))
    try:
        version = find_version(catalog, _with_number(catalog, reference, run))
    except WeightsError as error:
        raise ConfigError(f"{name}: {str(error).replace('RUN', str(run))}") from None
    _require_whole_model(name, version, run)
    return _Found(run=run, version=version)


def _with_number(catalog: Catalog, reference: str, run: Path) -> str:
    """The reference, with the newest number if it has none."""
    if reference and reference not in catalog.policies:
        return reference
    policies = [reference] if reference else catalog.policies
    if len(policies) > 1:
        raise WeightsError(
            f"the run in {run} has the policies {', '.join(policies)}; add one, like "
            f"run:{run}@{policies[0]}"
        )
    numbers = [v.manifest.number for v in catalog.versions if v.manifest.policy in policies]
    if not numbers:
        raise WeightsError(
            f"no version in {RunFolder(run).weights} yet; the trainer publishes version 0 when it "
            "starts"
        )
    return f"{policies[0]}@{max(numbers)}"


def _require_whole_model(name: str, version: CatalogVersion, run: Path) -> None:
    if version.manifest.is_adapter:
        raise ConfigError(
            f"{name}: {version.name} of {run} is an adapter, and a policy starts from a whole "
            "model; go on from it with `penstock fork`, or name a version of a policy without lora"
        )
    if not version.is_available:
        raise ConfigError(
            f"{name}: files of {version.name} are gone from {RunFolder(run).weights}; `penstock "
            f"weights ls {run}` lists the versions that are complete"
        )


def _kept(folder: RunFolder, digest: str) -> Path | None:
    path = folder.path / INITIAL / digest
    return path if path.is_dir() else None


def _known(name: str, folder: RunFolder) -> Path | None:
    """The copy that this run made for this name before."""
    for record in sorted((folder.path / INITIAL).glob("*.json")):
        if msgspec.json.decode(read_regular(record, MAX_ORIGIN_BYTES), type=Origin).name == name:
            return _kept(folder, record.stem)
    return None


def _copy(found: _Found, target: Path) -> None:
    """A durable copy under its final name; ConfigError if a file differs from its digest."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".incoming-", dir=target.parent) as temporary:
        staging = Path(temporary) / "model"
        staging.mkdir()
        _write(found, staging, copy_regular)
        for file in found.version.files:
            if file_digest(staging / file.entry.name) != file.entry.blob:
                raise ConfigError(
                    f"{file.entry.name} of {found.version.name} in {found.run} is damaged; "
                    f"`penstock weights verify {found.run}` shows what is, and how to repair it"
                )
            sync(staging / file.entry.name)
        sync(staging)
        staging.rename(target)


def _write(found: _Found, target: Path, copy: Callable[[Path, Path, int], Any]) -> None:
    with deletion_paused(found.store):
        for file in found.version.files:
            with full_file(found.store, file.entry.blob, target) as path:
                copy(path, target / file.entry.name, file.entry.bytes)


@contextmanager
def linked_versions(target: RunTarget, *, skip_missing: bool = False) -> Generator[RunTarget]:
    """The target with a temporary folder in the place of each version, for commands that write
    nothing into the run folder.

    skip_missing: leave names as they are that mean no version; otherwise ConfigError."""
    with tempfile.TemporaryDirectory(prefix="penstock-versions-") as temporary:
        models = {
            policy: model.model_copy(
                update={"init": _linked(model.init, target.folder, Path(temporary), skip_missing)}
            )
            for policy, model in with_first_versions(target.config).models.items()
        }
        yield replace(target, config=target.config.model_copy(update={"models": models}))


def _linked(name: str, run: RunFolder, parent: Path, skip_missing: bool) -> str:
    if not is_version(name):
        return name
    if kept := _known(name, run):
        return str(kept)
    try:
        found = find(name, run)
    except ConfigError:
        if skip_missing:
            return name
        raise
    folder = parent / found.version.digest
    if not folder.is_dir():
        folder.mkdir()
        _write(found, folder, _link_or_copy)
    return str(folder)


def _link_or_copy(source: Path, target: Path, num_bytes: int) -> None:
    """A link to a file of the store; a copy of one that was rebuilt and goes away."""
    if source.parent == target.parent:
        copy_regular(source, target, num_bytes)
    else:
        target.symlink_to(source.absolute())


def with_first_versions(config: RunConfig) -> RunConfig:
    """The config with `POLICY@0` replaced by that policy's own initial model: the same weights."""
    models = {
        policy: model.model_copy(update={"init": _first(model.init, config)})
        for policy, model in config.models.items()
    }
    return config if models == config.models else config.model_copy(update={"models": models})


def _first(init: str, config: RunConfig) -> str:
    own = own_version(init)
    return config.models[own[0]].init if own and own[1] == 0 else init


def refuse_changed_frozen(config: RunConfig, known: RunConfig) -> None:
    """A frozen policy is published once, so that another `init` would have no effect."""
    for policy, model in config.models.items():
        before = known.models.get(policy)
        if model.frozen and before is not None and before.init != model.init:
            raise ConfigError(
                f"models.{policy}.init: the run started with {before.init}, and a frozen policy "
                f"keeps its weights; add the new one under another name, beside {policy}"
            )
