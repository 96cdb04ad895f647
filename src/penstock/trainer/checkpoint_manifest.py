# SPDX-License-Identifier: Apache-2.0
"""The checkpoint manifest (`trainer.json`): cursor and a digest per file.

It starts with its own digest: the BLAKE3 of all its bytes except the digest's. So no bit of it
changes unnoticed, whatever later versions put into it.

Owns the form of that file and its versions, not the folders or the other files.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from penstock.durable import read_regular, write_durably
from penstock.errors import BadRequest, StoreError
from penstock.trainer.model_folders import WEIGHTS
from penstock.trainer.state_shards import ShardedState, open_state, state_names
from penstock.weights.manifest import ADAPTER_CONFIG, ADAPTER_WEIGHTS
from penstock.wire.codec import JSON, decode, encode_json

STATE = "trainer.json"
MAX_STATE_BYTES = 64 << 20
MAX_RANKS = 1 << 16
FORMAT = 3
"""The version that is written, and the highest that can be read."""
_DIGEST = re.compile(rb'\{\s*"digest": "([0-9a-f]{64})"')


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """A trainer's position in its data."""

    number: int
    """Version number: batches that changed the weights."""
    seq: int
    """The last batch inside, trained or skipped."""
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointManifest:
    """`trainer.json`."""

    policy: str
    cursor: Cursor
    files: dict[str, str]
    """BLAKE3 of each other file, by name."""
    config: dict[str, str] = field(default_factory=dict[str, str])
    """Config that may not change between this and the next step, by key; empty if it was not
    recorded."""
    num_ranks: int = 1
    """Number of shards of the learner's other state."""
    format: int = FORMAT
    monitor_state: dict[str, Any] = field(default_factory=dict[str, Any])
    """State over the batches up to the cursor, for alarms and quarantine; the loop owns its form.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class _Format:
    """The first keys of every `trainer.json`, including later versions."""

    format: int


class UnusableCheckpoint(Exception):
    """Why a folder cannot be restored from."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint, whose digests were checked when it was found or written."""

    folder: Path
    state: CheckpointManifest

    @property
    def cursor(self) -> Cursor:
        return self.state.cursor

    def read_state(self) -> ShardedState:
        """The learner's other state, for any number of ranks; each tensor is read on access."""
        return open_state([self.folder / name for name in state_names(self.state.num_ranks)])


def weights_name(other_names: Iterable[str]) -> str:
    """The name of the weights file, given the names of the others."""
    return ADAPTER_WEIGHTS if ADAPTER_CONFIG in other_names else WEIGHTS


def read_checkpoint_manifest(folder: Path) -> CheckpointManifest:
    try:
        content = read_regular(folder / STATE, MAX_STATE_BYTES)
        has_digest = _check(content)
        written = decode(content, _Format, media_type=JSON).format
        if written > FORMAT:
            raise StoreError(
                f"{folder} was written by a newer penstock: its format is {written}, this one "
                f"reads up to {FORMAT}. Use that version; nothing was changed"
            )
        found = decode(content, CheckpointManifest, media_type=JSON)
    except (OSError, BadRequest) as error:
        raise UnusableCheckpoint(str(error)) from error
    if not has_digest:
        raise UnusableCheckpoint(f"{STATE} is damaged: it does not start with its digest")
    if wrong := [name for name in found.files if not _is_file_name(name)]:
        raise UnusableCheckpoint(
            f"{STATE} names {wrong[0][:80]!r}, not the name of a file in its folder"
        )
    if not 1 <= found.num_ranks <= MAX_RANKS:
        raise UnusableCheckpoint(f"{STATE} names {found.num_ranks} ranks, not 1 to {MAX_RANKS}")
    return found


def write_cursor(known: Checkpoint, cursor: Cursor, monitor_state: Mapping[str, Any]) -> Checkpoint:
    """Rewrite the cursor and the monitor state; batches skipped since change nothing else."""
    if known.cursor == cursor:
        return known
    state = replace(known.state, cursor=cursor, monitor_state=dict(monitor_state))
    write_checkpoint_manifest(known.folder, state)
    return Checkpoint(folder=known.folder, state=state)


def write_checkpoint_manifest(folder: Path, state: CheckpointManifest) -> None:
    rest = json.dumps({"digest": "", **json.loads(encode_json(state))}, indent=2) + "\n"
    own = blake3(rest.encode()).hexdigest()
    text = rest.replace('"digest": ""', f'"digest": "{own}"', 1)
    write_durably(folder / STATE, text.encode())


def _is_file_name(name: str) -> bool:
    """No path: a fork copies these files from another run's folder, which may be of others."""
    return name not in ("", ".", "..") and not {"/", "\0"} & {*name}


def _check(content: bytes) -> bool:
    """Whether it starts with a digest, which is then correct."""
    found = _DIGEST.match(content)
    if found is None:
        return False
    rest = content[: found.start(1)] + content[found.end(1) :]
    if blake3(rest).hexdigest().encode() != found[1]:
        raise UnusableCheckpoint(f"{STATE} is damaged: it does not match its digest")
    return True
