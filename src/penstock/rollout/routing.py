# SPDX-License-Identifier: Apache-2.0
"""Which engine of a pool answers a session: pure functions of the session and the engines' loads.

A session's calls share ever longer prefixes, and only the engine that answered the last call has
them in its cache. So each session has its own order of the engines (rendezvous hashing: the engines
by a hash of session and engine), and takes the first that is well and not crowded. Nothing is
stored, every node agrees, and when an engine leaves only its own sessions move.

Hashing alone is uneven: with few sessions one engine may get twice its share, and the slowest
engine decides when a batch is full. So no engine is given more than 1.25 times the mean of all, and
a session whose engine is full goes to the next of its order, the same one each time.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from math import ceil

MAX_LOAD_FACTOR = 1.25
"""Most requests of one engine, as a multiple of the mean over those that may be chosen."""


def choose(session: str, loads: Mapping[int, int]) -> int:
    """The engine for one more request, among those whose requests in flight are given."""
    if len(loads) == 1:
        return next(iter(loads))
    most = ceil(MAX_LOAD_FACTOR * (sum(loads.values()) + 1) / len(loads))
    ordered = sorted(loads, key=lambda engine: _weight(session, engine))
    return next(engine for engine in ordered if loads[engine] < most)


def _weight(session: str, engine: int) -> bytes:
    return blake2b(f"{engine}\0{session}".encode(), digest_size=8).digest()
