# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what a trainer resumes from, with the cursor inside.

`step_N/` is an ordinary Hugging Face folder with two more files: the learner's other state as
safetensors, and `trainer.json` with the cursor and the BLAKE3 of every other file. That one is
written last, in a hidden folder that is renamed when all of it is on disk; a folder without it, or
one that does not fit its digests, is set aside, and the next older one counts.

Owns these folders. Reads only files whose digest it has checked, and unpickles nothing. Deletes
only what it can read and what no trainer of a higher incarnation wrote; where checkpoints stand and
none can be used, it refuses to begin again.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import structlog
from blake3 import blake3
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.config import changed
from penstock.errors import BadRequest, ConfigError, Fenced, StoreError
from penstock.trainer.models import WEIGHTS, link_or_copy
from penstock.weights.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from penstock.wire.codec import JSON, decode, encode_json

OPTIMIZER = "optimizer.safetensors"
STATE = "trainer.json"
NUM_KEPT = 2
FORMAT = 1
_NAME = re.compile(r"step_(\d+)")
_PARTIAL = ".partial-"
"""Being written or being removed: whoever saves next clears it away."""
_DAMAGED = ".damaged-"

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """Where in its data a trainer stands."""

    number: int
    """Version number: batches that changed the weights."""
    seq: int
    """The last batch inside, trained or skipped."""
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerState:
    """`trainer.json`."""

    policy: str
    cursor: Cursor
    files: dict[str, str]
    """BLAKE3 of each other file, by name."""
    config: dict[str, str] = field(default_factory=dict[str, str])
    """What may not change between this and the next step, by key; empty: nobody wrote it down."""
    format: int = FORMAT


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    """What every `trainer.json`, also a later one, says first."""

    format: int


class _Unusable(Exception):
    """Why a folder cannot be restored from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete one, its digests checked when it was found or written."""

    folder: Path
    state: TrainerState

    @property
    def cursor(self) -> Cursor:
        return self.state.cursor

    def read_state(self) -> dict[str, Tensor]:
        return load_file(self.folder / OPTIMIZER)


class Checkpoints:
    """The checkpoints of one policy in one folder, at most `NUM_KEPT` of them."""

    def __init__(
        self,
        root: Path,
        *,
        policy: str,
        every: int,
        config: Mapping[str, str] | None = None,
        accepts_changes: bool = False,
    ) -> None:
        """config: by key, what must be as it was when a checkpoint is restored, unless changes are
        accepted."""
        self._root = root
        self._policy = policy
        self._config = dict(config or {})
        self._accepts_changes = accepts_changes
        self._every = every
        self._complete: list[Checkpoint] = []

    @property
    def last(self) -> Checkpoint:
        """The newest complete one; there is one once `newest` found or `save` wrote it."""
        return self._complete[-1]

    @property
    def retained(self) -> tuple[tuple[int, int], ...]:
        """(number, seq) of each complete checkpoint, oldest first."""
        return tuple((one.cursor.number, one.cursor.seq) for one in self._complete)

    def newest(self) -> Checkpoint | None:
        """Read the folder anew; the newest complete checkpoint wins, damaged ones are set aside.

        None means that there is not one folder: to begin at number 0 beside checkpoints that
        cannot be read would be to throw them away."""
        self._complete, unusable = self._look()
        if unusable and not self._complete:
            listed = "\n".join(f"    {folder.name}: {why}" for folder, why in unusable)
            raise StoreError(
                f"{self._root} has checkpoints, but none that could be restored:\n{listed}\n"
                "  nothing was changed. Make them readable or bring back a copy; to begin again at "
                "number 0, move these folders away"
            )
        if self._complete:
            self._refuse_changes(self._complete[-1])
        for folder, why in unusable:
            _set_aside(folder, why)
        return self._complete[-1] if self._complete else None

    def complete(self) -> list[Checkpoint]:
        """Those that could be restored, oldest first. For readers: nothing is set aside."""
        return self._look()[0]

    def _look(self) -> tuple[list[Checkpoint], list[tuple[Path, str]]]:
        complete: list[Checkpoint] = []
        unusable: list[tuple[Path, str]] = []
        for _, folder in sorted(_numbered(self._root)):
            try:
                complete.append(self._read(folder))
            except _Unusable as error:
                unusable.append((folder, str(error)))
        return complete, unusable

    def is_due(self, cursor: Cursor) -> bool:
        return cursor.number >= self.last.cursor.number + self._every

    def save(
        self,
        cursor: Cursor,
        *,
        weights: Mapping[str, Tensor],
        state: Mapping[str, Tensor],
        static: Sequence[Path],
    ) -> Checkpoint:
        """Make this state durable; complete when this returns, never half visible.

        static: files that stay as they are. With an adapter's config among them `weights` are the
        adapter's, and those of its model are linked from one checkpoint to the next.
        Raises Fenced when a trainer of a higher incarnation has saved here."""
        self._check_owner(cursor)
        if self._complete and self._complete[-1].cursor.number == cursor.number:
            self._complete[-1] = _move_cursor(self._complete[-1], cursor)
            return self._complete[-1]
        hidden = self._hidden()
        for path in static:
            carry = link_or_copy if path.suffix == ".safetensors" else shutil.copyfile
            carry(path, hidden / path.name)
        name = _weights_name(path.name for path in static)
        save_file(dict(weights), hidden / name, metadata={"format": "pt"})
        save_file(dict(state), hidden / OPTIMIZER)
        return self._show(hidden, cursor)

    def begin_from(self, other: Checkpoint) -> Checkpoint:
        """The state of another run as number 0 of this one, digested again in the copy."""
        hidden = self._hidden()
        for name, digest in other.state.files.items():
            shutil.copyfile(other.folder / name, hidden / name)
            if _digest(hidden / name) != digest:
                raise StoreError(f"{other.folder / name} is damaged: its digest is not {digest}")
        return self._show(hidden, Cursor(number=0, seq=0, incarnation=0))

    def _hidden(self) -> Path:
        self._root.mkdir(parents=True, exist_ok=True)
        for leftover in self._root.glob(f"{_PARTIAL}*"):
            shutil.rmtree(leftover)
        hidden = _partial(self._root)
        hidden.mkdir()
        return hidden

    def _show(self, hidden: Path, cursor: Cursor) -> Checkpoint:
        """Everything in this folder on disk first, then visible at once."""
        files = {path.name: self._digest_of(path) for path in sorted(hidden.iterdir())}
        for name in files:
            _sync(hidden / name)
        described = TrainerState(
            policy=self._policy, cursor=cursor, config=self._config, files=files
        )
        _write_state(hidden, described)
        folder = self._root / f"step_{cursor.number}"
        self._check_owner(cursor)  # again: writing may have taken minutes
        # What stands at this number or beyond is of a trainer that was replaced.
        _remove(path for number, path in _numbered(self._root) if number >= cursor.number)
        hidden.rename(folder)
        _sync(self._root)
        self._complete.append(Checkpoint(folder=folder, state=described))
        self._prune()
        return self._complete[-1]

    def _digest_of(self, path: Path) -> str:
        """That of a linked file is known, and is what it must have, whatever a disk did to it."""
        if self._complete:
            before = self._complete[-1]
            twin = before.folder / path.name
            if path.name in before.state.files and twin.exists() and twin.samefile(path):
                return before.state.files[path.name]
        return _digest(path)

    def _prune(self) -> None:
        self._complete = self._complete[-NUM_KEPT:]
        kept = {one.folder for one in self._complete}
        _remove(path for _, path in _numbered(self._root) if path not in kept)

    def _check_owner(self, cursor: Cursor) -> None:
        """Before anything is removed: a successor's checkpoint ends us, and what cannot be read is
        set aside."""
        for _, folder in _numbered(self._root):
            try:
                incarnation = _read_state(folder).cursor.incarnation
            except _Unusable as error:
                _set_aside(folder, str(error))
                continue
            if incarnation > cursor.incarnation:
                raise Fenced(
                    f"{folder} was saved by incarnation {incarnation} of {self._policy}; "
                    f"incarnation {cursor.incarnation} was replaced and leaves it as it is"
                )

    def _read(self, folder: Path) -> Checkpoint:
        state = _read_state(folder)
        named = {_weights_name(state.files): "", OPTIMIZER: "", **state.files}
        for name, digest in named.items():
            try:
                is_whole = _digest(folder / name) == digest
            except OSError as error:
                raise _Unusable(str(error)) from error
            if not is_whole:
                raise _Unusable(f"{name} is damaged")
        if state.policy != self._policy:
            raise _Unusable(f"it is of policy {state.policy}, not {self._policy}")
        return Checkpoint(folder=folder, state=state)

    def _refuse_changes(self, found: Checkpoint) -> None:
        changes = changed(found.state.config, self._config) if found.state.config else []
        if changes and not self._accepts_changes:
            listed = "\n".join(f"    {change}" for change in changes)
            raise ConfigError(
                f"{found.folder} was saved under another config:\n{listed}\n"
                "  undo these changes, or go on with them by --accept-changes"
            )
        if changes:
            _log.warning("going on with another config", folder=str(found.folder), changes=changes)


def _weights_name(beside: Iterable[str]) -> str:
    """Of the file that changes from step to step, by the names of others."""
    return ADAPTER_WEIGHTS if ADAPTER_CONFIG in beside else WEIGHTS


def _read_state(folder: Path) -> TrainerState:
    try:
        content = (folder / STATE).read_bytes()
        written = decode(content, _Format, media_type=JSON).format
        if written > FORMAT:
            raise StoreError(
                f"{folder} was written by a newer penstock: its format is {written}, this one "
                f"reads up to {FORMAT}. Go on with that version; nothing was changed"
            )
        return decode(content, TrainerState, media_type=JSON)
    except (OSError, BadRequest) as error:
        raise _Unusable(str(error)) from error


def _move_cursor(known: Checkpoint, cursor: Cursor) -> Checkpoint:
    """Batches skipped since change nothing but the cursor."""
    if known.cursor == cursor:
        return known
    state = replace(known.state, cursor=cursor)
    _write_state(known.folder, state)
    return Checkpoint(folder=known.folder, state=state)


def _write_state(folder: Path, state: TrainerState) -> None:
    temporary = folder / f".{STATE}"
    temporary.write_text(json.dumps(json.loads(encode_json(state)), indent=2) + "\n")
    _sync(temporary)
    temporary.rename(folder / STATE)
    _sync(folder)


def _numbered(root: Path) -> list[tuple[int, Path]]:
    if not root.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in root.iterdir())
    return [(int(match[1]), path) for match, path in matches if match]


def _partial(root: Path) -> Path:
    return root / f"{_PARTIAL}{secrets.token_hex(4)}"


def _remove(folders: Iterable[Path]) -> None:
    """Out of sight first: half a folder must not look like a damaged one."""
    for folder in list(folders):
        hidden = folder.rename(_partial(folder.parent))
        shutil.rmtree(hidden)


def _set_aside(folder: Path, why: str) -> None:
    aside = folder.with_name(f"{_DAMAGED}{folder.name}-{secrets.token_hex(4)}")
    _log.error("checkpoint set aside", folder=str(folder), now=str(aside), why=why)
    folder.rename(aside)


def _digest(path: Path) -> str:
    return blake3().update_mmap(path).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
