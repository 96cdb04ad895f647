# SPDX-License-Identifier: Apache-2.0
"""Who works for which service, by tags, priorities and rates."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.fleet.inventory import ROLLOUT, TRAIN, Peaks, Resource, train_priority
from penstock.fleet.tag_plan import Cause, ServiceNeed, TagPlan, plan_tags, split_by_rates

TRAINER, NODES = "trainer", "nodes"
ROLLOUTS = ServiceNeed(service=NODES, tag=ROLLOUT)
H100 = Peaks(flops_per_s=990e12, bytes_per_s=3.35e12)
H20 = Peaks(flops_per_s=148e12, bytes_per_s=4.0e12)

resource_sets = st.lists(
    st.tuples(
        st.sets(st.sampled_from([ROLLOUT, TRAIN, "eu", "spot"])),
        st.sampled_from([None, TRAINER, "other", NODES]),
        st.booleans(),
        st.integers(1, 5),
        st.integers(1, 5),
    ),
    max_size=8,
).map(
    lambda drawn: [
        Resource(
            name=f"r{index}",
            tags=frozenset(tags),
            service=service,
            is_alive=is_alive,
            rollout_tokens_per_s=float(generated),
            train_tokens_per_s=float(trained),
        )
        for index, (tags, service, is_alive, generated, trained) in enumerate(drawn)
    ]
)


def make_needs(first: int, second: int, selector: set[str]) -> list[ServiceNeed]:
    return [
        ServiceNeed(service=TRAINER, tag=TRAIN, count=first, selector=frozenset(selector)),
        ServiceNeed(service="other", tag=TRAIN, count=second),
        ROLLOUTS,
    ]


need_sets = st.builds(
    make_needs,
    st.integers(0, 4),
    st.integers(0, 4),
    st.sets(st.sampled_from(["eu", "spot"]), max_size=1),
)


def both(name: str, **fields: object) -> Resource:
    return replace(Resource(name=name, tags=frozenset({ROLLOUT, TRAIN})), **fields)


def trainer(count: int) -> ServiceNeed:
    return ServiceNeed(service=TRAINER, tag=TRAIN, count=count)


def carried_out(resources: Sequence[Resource], plan: TagPlan) -> list[Resource]:
    return [replace(one, service=plan.services.get(one.name)) for one in resources]


@given(resource_sets, need_sets)
def test_everybody_does_what_its_tags_allow_and_gangs_are_complete_or_absent(
    resources: list[Resource], needs: list[ServiceNeed]
) -> None:
    plan = plan_tags(resources, needs)
    by_service, by_name = {n.service: n for n in needs}, {one.name: one for one in resources}
    assert all(by_service[s].fits(by_name[name]) for name, s in plan.services.items())
    sizes = Counter(plan.services.values())
    for need in needs[:2]:
        assert sizes[need.service] == (0 if need.service in plan.missing else need.count)
    idle = [one for one in resources if one.name not in plan.services]
    assert not any(ROLLOUTS.fits(one) for one in idle)


@given(resource_sets, need_sets)
def test_a_plan_that_was_carried_out_changes_nothing_more(
    resources: list[Resource], needs: list[ServiceNeed]
) -> None:
    plan = plan_tags(resources, needs)
    after = carried_out(resources, plan)
    again = plan_tags(after, needs)
    assert again.services == plan.services and again.changes == ()
    changed = {change.resource for change in plan.changes}
    assert changed == {a.name for a, b in zip(resources, after, strict=True) if a != b}


@given(resource_sets, st.integers(1, 4))
def test_a_dead_trainer_is_replaced_by_the_holder_of_train_with_the_highest_priority(
    resources: list[Resource], count: int
) -> None:
    need = trainer(count)
    before = carried_out(resources, plan_tags(resources, [need, ROLLOUTS]))
    gang = [one for one in before if one.service == TRAINER]
    if not gang:
        return
    died = [replace(one, is_alive=one is not gang[0] and one.is_alive) for one in before]
    plan = plan_tags(died, [need, ROLLOUTS])
    if plan.missing:
        return
    [new] = [change for change in plan.changes if change.cause is Cause.REPLACES_DEAD]
    assert [c.cause for c in plan.changes if c.resource == gang[0].name] == [Cause.DIED]
    by_name = {one.name: one for one in died}
    others = [one for one in died if need.fits(one) and one.name not in plan.of(TRAINER)]
    assert all(train_priority(by_name[new.resource]) >= train_priority(one) for one in others)


def test_the_roofline_sends_compute_to_training_and_bandwidth_to_rollout() -> None:
    """An H20 has more bandwidth than an H100 and a seventh of its compute."""
    fast, wide = both("h100", peaks=H100), both("h20", peaks=H20)
    assert train_priority(fast) > train_priority(wide) > 0
    plan = plan_tags([wide, fast], [trainer(1), ROLLOUTS])
    assert plan.services == {"h100": TRAINER, "h20": NODES}
    measured = replace(wide, train_tokens_per_s=900.0, rollout_tokens_per_s=10.0)
    assert train_priority(measured) == 90.0, "a measurement beats the roofline"


def test_placements_are_tags() -> None:
    """The same services on resources with one tag each, with both, and mixed."""
    roll, train = frozenset({ROLLOUT}), frozenset({TRAIN})
    disaggregated = [both("a", tags=roll), both("b", tags=train)]
    colocated = [both("a"), both("b")]
    mixed = [both("a", tags=roll), both("b")]
    while_training = [trainer(1), ROLLOUTS]
    assert plan_tags(disaggregated, while_training).services == {"a": NODES, "b": TRAINER}
    assert plan_tags(disaggregated, [ROLLOUTS]).services == {"a": NODES}
    assert plan_tags(colocated, [trainer(2), ROLLOUTS]).services == {"a": TRAINER, "b": TRAINER}
    assert plan_tags(colocated, [ROLLOUTS]).services == {"a": NODES, "b": NODES}
    assert plan_tags(mixed, while_training).services == {"a": NODES, "b": TRAINER}
    assert plan_tags(mixed, [ROLLOUTS]).services == {"a": NODES, "b": NODES}


def test_every_change_says_why() -> None:
    resources = [both("a", service=NODES), both("b")]
    preempted = plan_tags(resources, [trainer(2), ROLLOUTS])
    assert [change.cause for change in preempted.changes] == [Cause.NEEDED, Cause.NEEDED]
    returned = plan_tags(carried_out(resources, preempted), [ROLLOUTS])
    assert [change.cause for change in returned.changes] == [Cause.RETURNED, Cause.RETURNED]
    bare = [replace(one, tags=frozenset[str]()) for one in carried_out(resources, returned)]
    assert {change.cause for change in plan_tags(bare, [ROLLOUTS]).changes} == {Cause.TAG_REMOVED}
    joined = plan_tags([both("c")], [ROLLOUTS])
    assert [change.cause for change in joined.changes] == [Cause.ADDED]


def test_a_gang_that_cannot_be_complete_leaves_its_resources_to_rollout() -> None:
    resources = [both("a", service=TRAINER), both("b", service=TRAINER, is_alive=False)]
    plan = plan_tags(resources, [trainer(2), ROLLOUTS])
    assert plan.missing == {TRAINER: 1} and plan.services == {"a": NODES}


@given(
    st.integers(1, 7),
    st.floats(0.1, 10.0),
    st.sampled_from([(1.0, 1.0), (2.0, 1.0), (1.0, 3.0)]),
)
def test_no_other_split_of_equal_machines_passes_more_batches(
    number: int, ratio: float, rates: tuple[float, float]
) -> None:
    machines = [
        both(f"r{n}", rollout_tokens_per_s=rates[0], train_tokens_per_s=rates[1])
        for n in range(number)
    ]

    def batches_per_s(training: frozenset[str]) -> float:
        generated = rates[0] * (number - len(training))
        return min(rates[1] * len(training), generated / ratio)

    names = [one.name for one in machines]
    every = [frozenset(some) for n in range(number + 1) for some in combinations(names, n)]
    found = split_by_rates(machines, rollout_tokens=ratio, train_tokens=1.0)
    assert batches_per_s(found) == pytest.approx(max(map(batches_per_s, every)))
