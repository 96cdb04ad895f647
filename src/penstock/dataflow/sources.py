# SPDX-License-Identifier: Apache-2.0
"""Named, ordered sources of tasks. A position is one integer, so it survives any restart.

Reads task modules and JSONL files, and derives task keys from content. Knows nothing about groups.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, cast

from blake3 import blake3

from penstock.errors import ConfigError
from penstock.plugins import load_module
from penstock.types import JsonObject, Task
from penstock.wire.codec import encode

MakeTask = Callable[[int, int], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    name: str
    weight: float
    make: MakeTask
    """Maps (ordinal, seed) to a payload."""
    limit: int | None
    """Total number of tasks; None for an endless stream."""
    num_distinct: int | None = None
    """Tasks before the source repeats; None if unknown."""

    def task(self, ordinal: int, *, seed: int, workflow: str) -> Task:
        made = cast(object, self.make(ordinal, seed))
        if not isinstance(made, Mapping):
            what = "None" if made is None else f"a value of type {type(made).__name__}"
            raise ConfigError(
                f"source {self.name!r}: make_task({ordinal}, {seed}) returned {what}; "
                'return a dict such as {"prompt": "…"}'
            )
        payload = dict(cast(Mapping[str, Any], made))
        encode(payload)  # fail here, in the source, if the payload cannot be encoded
        text = json.dumps([workflow, payload], sort_keys=True, ensure_ascii=False)
        return Task(
            key=blake3(text.encode()).hexdigest()[:32],
            source=self.name,
            ordinal=ordinal,
            payload=payload,
            workflow=workflow,
            seed=derive_seed(seed, self.name, ordinal),
        )

    def digest(self, seed: int) -> str:
        """Digest of its tasks, for `are_same_tasks`: FIRST, or FIRST/NUMBER:ALL.

        Covers all tasks of a file. For a module, FIRST covers the first 64 tasks, and ALL those up
        to its limit, at most 100,000 and only if they can be generated quickly. Changes beyond that
        go unnoticed."""
        keys, found = self._keys(seed), blake3()
        for key in islice(keys, self.num_distinct or NUM_SAMPLED_TASKS):
            found.update(key)
        first, num_hashed = found.hexdigest(), min(self.limit or 0, MAX_HASHED_TASKS)
        if self.num_distinct is not None or num_hashed <= NUM_SAMPLED_TASKS:
            return first
        give_up_at = time.monotonic() + HASH_BUDGET_S
        for key in islice(keys, num_hashed - NUM_SAMPLED_TASKS):
            if time.monotonic() > give_up_at:
                return first
            found.update(key)
        return f"{first}/{num_hashed}:{found.hexdigest()}"

    def _keys(self, seed: int) -> Iterator[bytes]:
        for ordinal in count():
            try:
                yield self.task(ordinal, seed=seed, workflow="").key.encode()
            except Exception:  # a module with fewer tasks; normally its `limit` prevents the call
                return


def are_same_tasks(known: str, digest: str) -> bool:
    """Whether two digests of a source agree, as far as both cover the same tasks."""
    (first, _, all_known), (other, _, all_now) = known.partition("/"), digest.partition("/")
    if all_known.partition(":")[0] != all_now.partition(":")[0]:
        return first == other  # they cover different numbers of tasks
    return (first, all_known) == (other, all_now)


def preferred_digest(known: str, digest: str) -> str:
    """The digest to keep: an incomplete one, as from a busy machine, does not replace a complete
    one of the same tasks."""
    is_incomplete = "/" in known and "/" not in digest
    return known if is_incomplete and are_same_tasks(known, digest) else digest


NUM_SAMPLED_TASKS = 64
"""Tasks of a module that are always hashed, to detect a changed data set."""
MAX_HASHED_TASKS = 100_000
"""Maximum number of tasks hashed for a module with a limit."""
HASH_BUDGET_S = 3.0
"""Maximum time to hash the tasks of a module."""


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that depends only on these parts."""
    digest = blake3("/".join(map(str, parts)).encode()).digest(8)
    return int.from_bytes(digest, "little") >> 1


def slot_seeds(seed: int, slots: range) -> tuple[int, ...]:
    """63-bit seeds for these slots of a task, sliced from one long digest: a digest per slot would
    cost more than the rest of a lease."""
    digest = blake3(str(seed).encode()).digest(8 * len(slots), seek=8 * slots.start)
    return tuple(word >> 1 for word in struct.unpack(f"<{len(slots)}Q", digest))


def session_source(name: str, *, weight: float = 1.0, limit: int | None = None) -> Source:
    """Placeholder tasks for agent sessions; only the agents know the actual tasks."""

    def place(ordinal: int, seed: int) -> JsonObject:
        return {"session": ordinal}

    return Source(name=name, weight=weight, make=place, limit=limit)


def open_source(name: str, where: str, *, weight: float = 1.0, limit: int | None = None) -> Source:
    """A module with `make_task(ordinal, seed)`, or a `.jsonl` file with one payload per line."""
    if where.endswith(".jsonl"):
        rows = _read_jsonl(Path(where))

        def from_rows(ordinal: int, seed: int) -> JsonObject:
            return rows[ordinal % len(rows)]

        return Source(name=name, weight=weight, make=from_rows, limit=limit, num_distinct=len(rows))
    try:
        module = load_module(where)
    except ConfigError as error:
        raise ConfigError(f"source {name!r}: {error}") from error.__cause__
    make = getattr(module, "make_task", None)
    if not callable(make):
        raise ConfigError(
            f"source {name!r}: {where} has no make_task(ordinal, seed); see penstock.tasks.reverse"
        )
    return Source(name=name, weight=weight, make=cast(MakeTask, make), limit=limit)


def _read_jsonl(path: Path) -> list[JsonObject]:
    rows: list[JsonObject] = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"source file {path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row: Any = json.loads(line)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{number}: invalid JSON: {error}") from None
        if not isinstance(row, dict):
            found = type(row).__name__
            raise ConfigError(f"{path}:{number}: a task must be a JSON object, got {found}")
        rows.append(cast(JsonObject, row))
    if not rows:
        raise ConfigError(f"source file {path} has no tasks; write one JSON object per line")
    return rows
