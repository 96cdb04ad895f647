# SPDX-License-Identifier: Apache-2.0
"""Named, ordered sources of tasks. A position is one integer, so it survives any restart.

Derives task keys and digests from content. Opens nothing: `opening` does.
"""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any, cast

from blake3 import blake3

from penstock.errors import ConfigError
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
    workflow: str = ""
    """What attempts its tasks; empty: the workflow of the run."""
    hash_content: Callable[[], str] | None = None
    """Digest of the stored rows, where there are any."""

    def task(self, ordinal: int, *, seed: int, workflow: str) -> Task:
        """The task at a position; `workflow` is the run's."""
        workflow = self.workflow or workflow
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

        Covers all stored rows. For a module, FIRST covers the first 64 tasks, and ALL those up
        to its limit, at most 100,000 and only if they can be generated quickly. Changes beyond that
        go unnoticed."""
        if self.hash_content is not None:
            return self.hash_content()
        keys, found = self._keys(seed), blake3()
        for key in islice(keys, NUM_SAMPLED_TASKS):
            found.update(key)
        first, num_hashed = found.hexdigest(), min(self.limit or 0, MAX_HASHED_TASKS)
        if num_hashed <= NUM_SAMPLED_TASKS:
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


def numbered_source(
    name: str,
    *,
    num_tasks: int | None,
    weight: float = 1.0,
    limit: int | None = None,
    workflow: str = "",
) -> Source:
    """Tasks that only an environment knows, each a number and a seed; `num_tasks` of them repeat,
    None: all differ."""

    def number(ordinal: int, seed: int) -> JsonObject:
        index = ordinal % num_tasks if num_tasks else ordinal
        return {"index": index, "seed": derive_seed(seed, name, "env", index) >> 32}

    return Source(name=name, weight=weight, make=number, limit=limit, workflow=workflow)
