# SPDX-License-Identifier: Apache-2.0
"""Sessions stay on their engine, no engine is crowded, and a lost engine moves only its own."""

from __future__ import annotations

import random

import pytest

from penstock.rollout.routing import MAX_LOAD_FACTOR, choose

SESSIONS = [f"session-{number}" for number in range(2000)]


def idle(*engines: int) -> dict[int, int]:
    return dict.fromkeys(engines, 0)


def test_a_session_stays_and_sessions_spread() -> None:
    chosen = [choose(session, idle(0, 1, 2, 3)) for session in SESSIONS]
    assert chosen == [choose(session, idle(3, 2, 1, 0)) for session in SESSIONS]
    for engine in range(4):
        assert 400 < chosen.count(engine) < 600


def test_a_lost_engine_moves_only_its_own_sessions() -> None:
    before = {session: choose(session, idle(0, 1, 2, 3)) for session in SESSIONS}
    after = {session: choose(session, idle(0, 1, 3)) for session in SESSIONS}
    moved = [session for session in SESSIONS if before[session] != after[session]]
    assert moved == [session for session in SESSIONS if before[session] == 2]
    assert {after[session] for session in moved} == {0, 1, 3}


@pytest.mark.parametrize("num_engines", [1, 2, 3, 4, 7])
def test_no_engine_holds_much_more_than_the_mean(num_engines: int) -> None:
    draw = random.Random(num_engines)
    loads = idle(*range(num_engines))
    running: list[int] = []
    for _ in range(3000):
        engine = choose(f"few-{draw.randrange(5)}", loads)  # few sessions: hashing alone is uneven
        loads[engine] += 1
        running.append(engine)
        assert loads[engine] <= MAX_LOAD_FACTOR * sum(loads.values()) / num_engines + 1
        if len(running) > draw.randrange(1, 80):
            loads[running.pop(draw.randrange(len(running)))] -= 1


def test_a_crowded_session_has_a_second_home() -> None:
    coordinator = choose("a", idle(0, 1, 2))
    second = choose("a", {engine: 9 * (engine == coordinator) for engine in range(3)})
    assert second != coordinator
    assert choose("a", {engine: 40 * (engine == coordinator) for engine in range(3)}) == second
