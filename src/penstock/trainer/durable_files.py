# SPDX-License-Identifier: Apache-2.0
"""Folders that exist completely or not at all, even after a power failure.

Owns the names of unfinished folders, and the order of write, sync and rename. Does not know their
content.
"""

from __future__ import annotations

import secrets
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import structlog

from penstock.durable import sync
from penstock.weights.manifest import file_digest

PARTIAL = ".partial-"
"""Being written or being removed: the next save clears it away."""
DAMAGED = ".damaged-"
REPLACED = ".replaced-"
"""The old folder during a replacement."""

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownFile:
    """A file that is on disk and does not change."""

    path: Path
    digest: str


def new_token() -> int:
    """A unique token for the name of a folder; fits into a signed 64-bit number."""
    return secrets.randbits(63)


def partial_name(token: int) -> str:
    return f"{PARTIAL}{token:016x}"


def remove_partials(root: Path, *, keep: str) -> None:
    """Remove unfinished folders, except the one of this name."""
    for leftover in root.glob(f"{PARTIAL}*"):
        if leftover.name != keep:
            shutil.rmtree(leftover)


def remove(folders: Iterable[Path]) -> None:
    """Rename it first: half a folder must not be taken for a damaged one."""
    for folder in list(folders):
        hidden = folder.rename(folder.with_name(partial_name(new_token())))
        shutil.rmtree(hidden)


def replace_folder(made: Path, folder: Path) -> None:
    """Rename a folder to this name. An existing one is renamed first, because a folder cannot be
    renamed onto another; after a crash between the two, `recover_replaced` finds it."""
    aside = folder.with_name(f"{REPLACED}{folder.name}")
    if folder.exists():
        folder.rename(aside)
    made.rename(folder)
    sync(folder.parent)
    if aside.exists():
        remove([aside])


def recover_replaced(root: Path) -> None:
    """Undo replacements that a crash interrupted, and finish those that only lacked the removal."""
    for aside in root.glob(f"{REPLACED}*"):
        folder = root / aside.name.removeprefix(REPLACED)
        if folder.exists():
            remove([aside])
        else:
            aside.rename(folder)


def move_damaged(folder: Path, why: str) -> None:
    aside = folder.with_name(f"{DAMAGED}{folder.name}-{secrets.token_hex(4)}")
    _log.error("damaged checkpoint moved", folder=str(folder), now=str(aside), why=why)
    folder.rename(aside)


def digest(path: Path) -> str:
    """Hashed with all cores."""
    return file_digest(path)
