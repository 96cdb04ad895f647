# SPDX-License-Identifier: Apache-2.0
"""Which nodes are started and retired: spot first, dead and slow ones leave first."""

from __future__ import annotations

import random

import pytest

from penstock.fleet.autoscaler import (
    NodeHealth,
    NodeType,
    PoolNode,
    Retirement,
    RetireReason,
    ScaleMode,
    plan,
    wanted_after,
)

SPOT = NodeType(name="spot", cost_per_hour=1.0, spot=True, max_nodes=2)
CHEAP = NodeType(name="cheap", cost_per_hour=2.0)
BIG = NodeType(name="big", gpus=4, cost_per_hour=6.0)
TYPES = {one.name: one for one in (CHEAP, SPOT, BIG)}


def node(
    name: str,
    node_type: str | None = "cheap",
    health: NodeHealth = NodeHealth.SERVING,
    tokens_per_s: float | None = 100.0,
) -> PoolNode:
    known = TYPES.get(node_type or "", CHEAP)
    return PoolNode(
        name=name,
        node_type=node_type,
        health=health,
        gpus=known.gpus,
        cost_per_hour=known.cost_per_hour,
        tokens_per_s=tokens_per_s,
    )


def retired(*nodes: PoolNode, wanted: int) -> list[tuple[str, str]]:
    return [(one.name, one.reason) for one in plan(wanted, nodes, TYPES.values()).retire]


@pytest.mark.parametrize(
    ("lacking", "expected", "missing"),
    [
        (1, ("spot",), 0),
        (2, ("spot", "spot"), 0),
        (3, ("spot", "spot", "cheap"), 0),
        (6, ("spot", "spot", "big"), 0),  # 1.5 per GPU, and it fits
        (7, ("spot", "spot", "big", "cheap"), 0),
    ],
)
def test_spot_first_then_the_cheapest_that_fits(
    lacking: int, expected: tuple[str, ...], missing: int
) -> None:
    found = plan(lacking, [], TYPES.values())
    assert (found.start, found.missing_gpus) == (expected, missing)


def test_a_type_that_fails_is_passed_over_and_what_no_type_has_is_missing() -> None:
    assert plan(1, [], TYPES.values(), blocked=["spot"]).start == ("cheap",)
    assert plan(2, [node("a", "spot"), node("b", "spot")], [SPOT]).start == ()
    full = plan(5, [node("a", "spot")], [SPOT])
    assert (full.start, full.missing_gpus) == (("spot",), 3)


def test_a_rest_smaller_than_every_type_is_rounded_up_and_not_undone() -> None:
    started = plan(2, [], [BIG])
    assert started.start == ("big",)
    assert plan(2, [node("a", "big")], [BIG]).retire == ()


def test_the_dead_are_retired_and_replaced() -> None:
    found = plan(2, [node("a"), node("b", health=NodeHealth.DEAD)], [CHEAP])
    assert found.retire == (Retirement(name="b", reason=RetireReason.DEAD),)
    assert found.start == ("cheap",)


def test_suspects_leave_first_then_the_idle_then_the_slow() -> None:
    slow, fast = node("slow", tokens_per_s=10.0), node("fast", tokens_per_s=90.0)
    new = node("new", tokens_per_s=None)
    suspect = node("suspect", health=NodeHealth.SUSPECT)
    starting = node("starting", health=NodeHealth.STARTING, tokens_per_s=None)
    pool = (fast, new, slow, starting, suspect)
    order = ["suspect", "starting", "slow", "fast", "new"]
    for wanted in range(5, -1, -1):
        assert [name for name, _ in retired(*pool, wanted=wanted)] == order[: 5 - wanted]
    assert retired(*pool, wanted=2)[-1] == ("slow", RetireReason.SLOW)


def test_of_equal_speed_the_more_expensive_leaves() -> None:
    assert retired(node("a", "spot"), node("b", "cheap"), wanted=1)[0][0] == "b"


def test_nodes_of_others_count_and_stay() -> None:
    assert retired(node("guest", None, tokens_per_s=0.0), node("mine"), wanted=0) == [
        ("mine", RetireReason.SLOW)
    ]
    assert plan(2, [node("guest", None)], [CHEAP]).start == ("cheap",)


def test_who_leaves_does_not_count() -> None:
    leaving = node("a", health=NodeHealth.LEAVING)
    assert plan(1, [leaving], [CHEAP]).start == ("cheap",)
    assert retired(leaving, wanted=0) == []


def test_whatever_the_pool_one_plan_is_enough() -> None:
    """After a plan is carried out, the next one has nothing to do."""
    for seed in range(300):
        rng = random.Random(seed)
        pool = [
            node(f"n{i}", rng.choice([*TYPES, None]), rng.choice([*NodeHealth]))
            for i in range(rng.randrange(8))
        ]
        wanted = rng.randrange(12)
        first = plan(wanted, pool, TYPES.values())
        gone = {one.name for one in first.retire}
        after = [one for one in pool if one.name not in gone]
        after += [
            node(f"s{i}", kind, NodeHealth.STARTING, None) for i, kind in enumerate(first.start)
        ]
        again = plan(wanted, after, TYPES.values())
        assert (again.start, again.retire) == ((), ()), seed
        size = sum(one.gpus for one in after if one.counts)
        assert first.missing_gpus == max(0, wanted - size)
        assert not first.start or size - wanted < max(one.gpus for one in TYPES.values())


def test_only_act_follows_the_rule() -> None:
    assert wanted_after(3, target_gpus=5, is_action=True, mode=ScaleMode.ACT) == 5
    assert wanted_after(3, target_gpus=5, is_action=False, mode=ScaleMode.ACT) == 3
    assert wanted_after(None, target_gpus=5, is_action=True, mode=ScaleMode.RECOMMEND) is None
