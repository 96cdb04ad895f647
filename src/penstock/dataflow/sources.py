# SPDX-License-Identifier: Apache-2.0
"""Named, ordered suppliers of tasks. A position is one integer, so it survives any restart.

Owns reading a task module or a JSONL file and naming tasks by content. Knows nothing of groups.
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
    """(ordinal, seed) to payload."""
    limit: int | None
    """Tasks in all; None for an endless stream."""
    num_distinct: int | None = None
    """Tasks before the first comes again; None when nobody knows."""

    def task(self, ordinal: int, *, seed: int, workflow: str) -> Task:
        made = cast(object, self.make(ordinal, seed))
        if not isinstance(made, Mapping):
            what = "None" if made is None else f"a value of type {type(made).__name__}"
            raise ConfigError(
                f"source {self.name!r}: make_task({ordinal}, {seed}) returned {what}; "
                'return a dict such as {"prompt": "…"}'
            )
        payload = dict(cast(Mapping[str, Any], made))
        encode(payload)  # what cannot travel is the source's mistake, and must be told here
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
        """Of its tasks, for `are_same_tasks`: FIRST, or FIRST/NUMBER:ALL.

        A file is looked at whole. Of a module FIRST is of the first 64 tasks, and ALL of those up
        to its limit, if they are made in little time and are not more than 100,000. What lies
        behind, and in a module without a limit behind the first 64, may change unnoticed."""
        keys, found = self._keys(seed), blake3()
        for key in islice(keys, self.num_distinct or NUM_SAMPLED_TASKS):
            found.update(key)
        first, num_wanted = found.hexdigest(), min(self.limit or 0, MAX_HASHED_TASKS)
        if self.num_distinct is not None or num_wanted <= NUM_SAMPLED_TASKS:
            return first
        give_up_at = time.monotonic() + HASH_BUDGET_S
        for key in islice(keys, num_wanted - NUM_SAMPLED_TASKS):
            if time.monotonic() > give_up_at:
                return first
            found.update(key)
        return f"{first}/{num_wanted}:{found.hexdigest()}"

    def _keys(self, seed: int) -> Iterator[bytes]:
        for ordinal in count():
            try:
                yield self.task(ordinal, seed=seed, workflow="").key.encode()
            except Exception:  # a module with fewer tasks, which its `limit` keeps from being asked
                return


def are_same_tasks(known: str, digest: str) -> bool:
    """By two digests of a source: as far as both have looked."""
    (first, _, all_known), (other, _, all_now) = known.partition("/"), digest.partition("/")
    if all_known.partition(":")[0] != all_now.partition(":")[0]:
        return first == other  # one had another limit, or no time
    return (first, all_known) == (other, all_now)


def preferred_digest(known: str, digest: str) -> str:
    """Of a source that was looked at again: a look that was cut short, as on a busy machine, does
    not replace a whole one at the same tasks."""
    is_cut_short = "/" in known and "/" not in digest
    return known if is_cut_short and are_same_tasks(known, digest) else digest


NUM_SAMPLED_TASKS = 64
"""Tasks of a module by which a changed data set is noticed at least."""
MAX_HASHED_TASKS = 100_000
HASH_BUDGET_S = 3.0
"""Tasks of a module with a limit that are looked at, and how long that may take."""


def derive_seed(*parts: object) -> int:
    """A 63-bit seed that depends on nothing but these parts."""
    digest = blake3("/".join(map(str, parts)).encode()).digest(8)
    return int.from_bytes(digest, "little") >> 1


def slot_seeds(seed: int, slots: range) -> tuple[int, ...]:
    """63-bit seeds for these slots of a task, cut out of one long digest: one for each slot would
    cost more than all else in a lease."""
    digest = blake3(str(seed).encode()).digest(8 * len(slots), seek=8 * slots.start)
    return tuple(word >> 1 for word in struct.unpack(f"<{len(slots)}Q", digest))


def session_source(name: str, *, weight: float = 1.0, limit: int | None = None) -> Source:
    """Places for sessions: what is asked in them only their agents know."""

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
            raise ConfigError(f"{path}:{number}: no JSON: {error}") from None
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number}: a task is a JSON object, this is another value")
        rows.append(cast(JsonObject, row))
    if not rows:
        raise ConfigError(f"source file {path} holds no tasks")
    return rows
