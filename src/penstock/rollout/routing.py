# SPDX-License-Identifier: Apache-2.0
"""Routes a session to an engine of the pool: a pure function of session and engine loads.

Calls of one session share a growing prefix, which is cached only on the engine that served the last
call. Rendezvous hashing therefore gives each session a fixed order of engines, and the first one
that is available and below the load limit is chosen. This needs no state, all nodes agree, and when
an engine leaves, only its own sessions move.

Hashing alone is uneven: with few sessions, one engine may get twice its share, and the slowest
engine decides when a batch is full. The load limit is 1.25 times the mean. A session whose engine
is full always falls back to the same next engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from math import ceil

MAX_LOAD_FACTOR = 1.25
"""Most requests per engine, as a multiple of the mean over the available engines."""


def choose(session: str, loads: Mapping[int, int]) -> int:
    """Pick the engine for one more request; `loads` are the requests in flight per engine."""
    if len(loads) == 1:
        return next(iter(loads))
    most = ceil(MAX_LOAD_FACTOR * (sum(loads.values()) + 1) / len(loads))
    ordered = sorted(loads, key=lambda engine: _weight(session, engine))
    return next(engine for engine in ordered if loads[engine] < most)


def _weight(session: str, engine: int) -> bytes:
    return blake2b(f"{engine}\0{session}".encode(), digest_size=8).digest()
