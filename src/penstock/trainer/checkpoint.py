# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: what a trainer resumes from, with the cursor inside.

`step_N/` is an ordinary Hugging Face folder with two more files: the learner's other state as
safetensors (one file per rank), and `trainer.json` with the cursor and the BLAKE3 of every other
file and of itself. That one is written last, in a hidden folder that is renamed once all of it is
on disk. A folder without it, or one that does not match its digests, is moved away, and the next
older one is used. A checkpoint replaces another of the same number if only a critic has learned.

Owns these folders. Reads only files whose digest it has checked, and unpickles nothing. Deletes
only what it can read and what no trainer of a higher incarnation wrote; if there are checkpoints
and none is usable, it refuses to start from scratch.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import structlog

from penstock.config import identity_changes
from penstock.durable import copy_regular, is_regular, sync
from penstock.errors import ConfigError, Fenced, StoreError
from penstock.trainer.checkpoint_manifest import (
    Checkpoint,
    CheckpointManifest,
    Cursor,
    UnusableCheckpoint,
    read_checkpoint_manifest,
    weights_name,
    write_checkpoint_manifest,
    write_cursor,
)
from penstock.trainer.durable_files import (
    KnownFile,
    digest,
    move_damaged,
    new_token,
    partial_name,
    recover_replaced,
    remove,
    remove_partials,
    replace_folder,
)
from penstock.trainer.model_folders import link_or_copy
from penstock.trainer.state_shards import (
    OPTIMIZER,
    StateShard,
    state_names,
    wait_for_shards,
    write_shard,
    write_state,
)
from penstock.trainer.weight_shares import WeightShare, create_file, fill_file

NUM_KEPT = 2
_NAME = re.compile(r"step_(\d+)")

_log = structlog.get_logger(__name__)


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
        """config: values that must be unchanged when a checkpoint is restored, unless changes are
        accepted, by key."""
        self.root = root
        self._policy = policy
        self._config = dict(config or {})
        self._accepts_changes = accepts_changes
        self._every = every
        self._complete: list[Checkpoint] = []

    @property
    def last(self) -> Checkpoint:
        """The newest complete one; there is one once `open_newest` found or `save` wrote it."""
        return self._complete[-1]

    @property
    def retained(self) -> tuple[tuple[int, int], ...]:
        """(number, seq) of each complete checkpoint, oldest first."""
        return tuple((one.cursor.number, one.cursor.seq) for one in self._complete)

    def open_newest(self) -> Checkpoint | None:
        """Read the folder again; the newest complete checkpoint wins, damaged ones are moved away.

        None means that there are no checkpoints at all: starting at number 0 next to checkpoints
        that cannot be read would throw them away."""
        recover_replaced(self.root)
        self._complete, unusable = self.scan(is_lazy=True)
        if unusable and not self._complete:
            raise StoreError(
                f"{self.root} has checkpoints, but none that could be restored:\n"
                f"{format_unusable(unusable)}\n"
                "  nothing was changed. Make them readable or restore a copy; to start again at "
                "number 0, move these folders away"
            )
        if self._complete:
            self._refuse_changes(self._complete[-1])
        for folder, why in unusable.items():
            move_damaged(folder, why)
        return self._complete[-1] if self._complete else None

    def scan(self, *, is_lazy: bool = False) -> tuple[list[Checkpoint], dict[Path, str]]:
        """(usable checkpoints, oldest first; what is wrong with the others, by folder). For
        readers: moves nothing.

        is_lazy: only the newest usable checkpoint is hashed; the files of older ones must exist."""
        complete: list[Checkpoint] = []
        unusable: dict[Path, str] = {}
        for _, folder in sorted(_numbered(self.root), reverse=True):
            try:
                complete.append(self._read(folder, is_hashed=not (is_lazy and complete)))
            except UnusableCheckpoint as error:
                if folder.exists():  # else its trainer pruned it meanwhile
                    unusable[folder] = str(error)
        return complete[::-1], dict(reversed(unusable.items()))

    def read_step(self, number: int) -> Checkpoint:
        """The checkpoint of this number; another rank has just checked its digests."""
        folder = self.root / f"step_{number}"
        return Checkpoint(folder=folder, state=read_checkpoint_manifest(folder))

    def changes(self, found: Checkpoint) -> list[str]:
        """Config changes since this one was saved; empty if its config was not recorded."""
        saved = found.state.config
        return identity_changes(saved, self._config) if saved else []

    def is_due(self, cursor: Cursor) -> bool:
        return cursor.number >= self.last.cursor.number + self._every

    def save(
        self,
        cursor: Cursor,
        *,
        weights: WeightShare | KnownFile,
        state: StateShard,
        static: Sequence[Path],
        num_ranks: int = 1,
        token: int | None = None,
        monitor_state: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Make this state durable; complete when this returns, never half visible.

        weights: rank 0's share; or a file that has them already, which is linked.
        num_ranks, token: other ranks write their shards of the state, and their shares of weights
        that are not linked, into the hidden folder with this token, and are waited for.
        static: files that stay as they are. With an adapter's config among them, `weights` are the
        adapter's, and the files of its base model are hard-linked from one checkpoint to the next.
        Raises Fenced if a trainer of a higher incarnation has saved here."""
        self._check_owner(cursor)
        partial = self._partial_folder(new_token() if token is None else token)
        for path in static:
            carry = link_or_copy if path.suffix == ".safetensors" else shutil.copyfile
            carry(path, partial / path.name)
        name = weights_name(path.name for path in static)
        known = _put_weights(partial / name, weights)
        if num_ranks == 1:
            write_state(partial / OPTIMIZER, state)
        else:
            write_shard(partial, 0, num_ranks, state)
            known |= wait_for_shards(partial, num_ranks)
        return self._make_visible(
            partial, cursor, num_ranks=num_ranks, known=known, monitor_state=monitor_state
        )

    def advance_cursor(self, cursor: Cursor, monitor_state: Mapping[str, Any]) -> Checkpoint:
        """Advance the cursor of the newest one: batches since then changed nothing else."""
        assert cursor.number == self.last.cursor.number, "another number has other weights"
        unreadable = self._unreadable(cursor)
        if why := unreadable.get(self.last.folder):
            raise StoreError(
                f"the newest checkpoint, {self.last.folder}, was damaged after it was saved: {why}"
                "\n  its cursor cannot be advanced, and it was left as it is. Start the "
                "trainer again: it moves this one away and resumes from the previous one"
            )
        self._move_damaged(unreadable)
        self._complete[-1] = write_cursor(self.last, cursor, monitor_state)
        return self.last

    def fork_from(self, other: Checkpoint) -> Checkpoint:
        """Copy the state of another run as number 0 of this one, verifying digests of the copy."""
        partial = self._partial_folder(new_token())
        for name, expected in other.state.files.items():
            try:
                copy_regular(other.folder / name, partial / name)
            except FileNotFoundError as error:
                raise _pruned_error(other.folder) from error
            if digest(partial / name) != expected:
                raise StoreError(f"{other.folder / name} is damaged: its digest is not {expected}")
        beginning = Cursor(number=0, seq=0, incarnation=0)
        return self._make_visible(partial, beginning, num_ranks=other.state.num_ranks)

    def _partial_folder(self, token: int) -> Path:
        """Other ranks may have started to write into this one."""
        partial = self.root / partial_name(token)
        remove_partials(self.root, keep=partial.name)
        partial.mkdir(parents=True, exist_ok=True)
        return partial

    def _make_visible(
        self,
        partial: Path,
        cursor: Cursor,
        *,
        num_ranks: int = 1,
        known: Mapping[str, str] | None = None,
        monitor_state: Mapping[str, Any] | None = None,
    ) -> Checkpoint:
        """Sync everything in this folder to disk, then make it visible in one step. Files of known
        digests are on disk already."""
        files = dict(known or {})
        for path in sorted(partial.iterdir()):
            if path.name not in files:
                files[path.name] = self._digest_of(path)
                sync(path)
        manifest = CheckpointManifest(
            policy=self._policy,
            cursor=cursor,
            config=self._config,
            files=files,
            num_ranks=num_ranks,
            monitor_state=dict(monitor_state or {}),
        )
        write_checkpoint_manifest(partial, manifest)
        folder = self.root / f"step_{cursor.number}"
        self._check_owner(cursor)  # again: writing may have taken minutes
        # Higher numbers are from a trainer that was replaced; this number may be our last one, if
        # only a critic has learned since.
        remove(path for number, path in _numbered(self.root) if number > cursor.number)
        replace_folder(partial, folder)
        self._complete = [one for one in self._complete if one.folder != folder]
        self._complete.append(Checkpoint(folder=folder, state=manifest))
        self._prune()
        return self._complete[-1]

    def _digest_of(self, path: Path) -> str:
        """Reuse the recorded digest of a hard-linked file, so that disk corruption is detected."""
        if self._complete:
            before = self._complete[-1]
            twin = before.folder / path.name
            if path.name in before.state.files and twin.exists() and twin.samefile(path):
                return before.state.files[path.name]
        return digest(path)

    def _prune(self) -> None:
        self._complete = self._complete[-NUM_KEPT:]
        kept = {one.folder for one in self._complete}
        remove(path for _, path in _numbered(self.root) if path not in kept)

    def _check_owner(self, cursor: Cursor) -> None:
        """Before anything is removed: a successor's checkpoint raises Fenced, and unreadable ones
        are moved away."""
        self._move_damaged(self._unreadable(cursor))

    def _unreadable(self, cursor: Cursor) -> dict[Path, str]:
        """Why each unreadable checkpoint is, by folder; Fenced if a successor has saved one."""
        unreadable: dict[Path, str] = {}
        for _, folder in _numbered(self.root):
            try:
                incarnation = read_checkpoint_manifest(folder).cursor.incarnation
            except UnusableCheckpoint as error:
                unreadable[folder] = str(error)
                continue
            if incarnation > cursor.incarnation:
                raise Fenced(
                    f"{folder} was saved by incarnation {incarnation} of {self._policy}; "
                    f"incarnation {cursor.incarnation} was replaced and does not touch it"
                )
        return unreadable

    def _move_damaged(self, unreadable: Mapping[Path, str]) -> None:
        """Moved checkpoints no longer count towards `NUM_KEPT`."""
        for folder, why in unreadable.items():
            move_damaged(folder, why)
        self._complete = [one for one in self._complete if one.folder not in unreadable]

    def _read(self, folder: Path, *, is_hashed: bool) -> Checkpoint:
        state = read_checkpoint_manifest(folder)
        needed = [weights_name(state.files), *state_names(state.num_ranks)]
        for name, expected in {**dict.fromkeys(needed, ""), **state.files}.items():
            try:
                path = folder / name
                is_whole = is_regular(path) and (not is_hashed or digest(path) == expected)
            except OSError as error:
                raise UnusableCheckpoint(f"{name}: {error}") from error
            if not is_whole:
                raise UnusableCheckpoint(f"{name} is damaged")
        if state.policy != self._policy:
            raise UnusableCheckpoint(f"it belongs to policy {state.policy}, not {self._policy}")
        return Checkpoint(folder=folder, state=state)

    def _refuse_changes(self, found: Checkpoint) -> None:
        changes = self.changes(found)
        if changes and not self._accepts_changes:
            lines = "\n".join(f"    {change}" for change in changes)
            raise ConfigError(
                f"{found.folder} was saved with a different config:\n{lines}\n"
                "  undo these changes, or pass --accept-changes to accept them"
            )
        if changes:
            _log.warning("config changed on resume", folder=str(found.folder), changes=changes)


def _put_weights(path: Path, weights: WeightShare | KnownFile) -> dict[str, str]:
    """Write or link the weights; the digest by name of a file that is durable already."""
    if not isinstance(weights, KnownFile):
        create_file(path, weights.layout)
        fill_file(path, weights)
        return {}
    link_or_copy(weights.path, path)
    return {path.name: weights.digest} if path.samefile(weights.path) else {}


def _pruned_error(folder: Path) -> StoreError:
    left = ", ".join(path.name for _, path in sorted(_numbered(folder.parent))) or "none"
    return StoreError(
        f"{folder} was pruned by its trainer during the copy; choose one of {folder.parent}: {left}"
    )


def format_unusable(unusable: Mapping[Path, str]) -> str:
    """One line per checkpoint, with what is wrong with it."""
    return "\n".join(f"    {folder.name}: {why}" for folder, why in unusable.items())


def _numbered(root: Path) -> list[tuple[int, Path]]:
    if not root.is_dir():
        return []
    matches = ((_NAME.fullmatch(path.name), path) for path in root.iterdir())
    return [(int(match[1]), path) for match, path in matches if match]
