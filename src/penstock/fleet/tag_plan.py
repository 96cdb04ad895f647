# SPDX-License-Identifier: Apache-2.0
"""Which resource works for which service: a pure function of inventory and services.

Colocated, disaggregated and mixed placements are tags, not modes. A resource with `rollout` and
`train` rolls out, and trains while the services that the caller asks for include a trainer. Starts
nothing, reads no clock."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from penstock.fleet.inventory import ROLLOUT, TRAIN, Resource, train_priority


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceNeed:
    """What a service asks for."""

    service: str
    tag: str
    """What the resource must be able to do."""
    selector: frozenset[str] = frozenset()
    """Tags that it must have, too."""
    count: int | None = None
    """All of them or none: a trainer cannot run with fewer ranks. None: all that are left."""

    def fits(self, resource: Resource) -> bool:
        return resource.is_alive and resource.tags >= self.selector | {self.tag}


class Cause(StrEnum):
    """Why a resource changes what it does."""

    DIED = "died"
    REPLACES_DEAD = "replaces_dead"
    """It takes the place of a dead resource."""
    NEEDED = "needed"
    """A service lacks resources: a trainer has enough data, or it has grown."""
    TAG_REMOVED = "tag_removed"
    """It may no longer do what it did."""
    RETURNED = "returned"
    """Its trainer needs it no longer."""
    ADDED = "added"
    """It was idle, and is put to use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    resource: str
    before: str | None
    after: str | None
    cause: Cause


@dataclass(frozen=True, slots=True, kw_only=True)
class TagPlan:
    """The desired state."""

    services: Mapping[str, str]
    """Service of each resource that has work."""
    changes: tuple[Change, ...]
    missing: Mapping[str, int]
    """Resources that services lack; such a trainer gets none at all."""

    def of(self, service: str) -> tuple[str, ...]:
        return tuple(name for name, found in self.services.items() if found == service)


def plan_tags(resources: Sequence[Resource], needs: Sequence[ServiceNeed]) -> TagPlan:
    """Give every living resource the work that its tags allow. Who works for a service with a count
    stays, as long as it fits; the rest of the count is filled by `train_priority`, from resources
    that are idle or do what can be interrupted. Needs without a count share what is left."""
    settled = list(resources)
    services, missing = _assign(settled, needs)
    for _ in needs:  # who gave way to a service that cannot be complete is free for another
        settled = [replace(one, service=services.get(one.name)) for one in settled]
        services, missing = _assign(settled, needs)
    counted = [need for need in needs if need.count is not None]
    changes = tuple(_changes(resources, services, {need.service for need in counted}))
    return TagPlan(services=services, changes=changes, missing=missing)


def _assign(
    resources: Sequence[Resource], needs: Sequence[ServiceNeed]
) -> tuple[dict[str, str], dict[str, int]]:
    counted = [need for need in needs if need.count is not None]
    services: dict[str, str] = {}
    for need in counted:
        for one in _ranked(need, resources)[: need.count]:
            if one.service == need.service:
                services[one.name] = need.service
    missing: dict[str, int] = {}
    for need in counted:
        _fill(need, resources, services, missing)
    others = [need for need in needs if need.count is None]
    for one in resources:
        fitting = [need.service for need in others if need.fits(one)]
        if one.name not in services and fitting:
            services[one.name] = _least_served(one, fitting, services)
    return services, missing


def _ranked(need: ServiceNeed, resources: Sequence[Resource]) -> list[Resource]:
    """Those that fit: its own first, then by priority, idle ones before busy ones, cheap ones
    before expensive ones."""
    sign = -1.0 if need.tag == TRAIN else 1.0
    return sorted(
        (one for one in resources if need.fits(one)),
        key=lambda one: (
            one.service != need.service,
            sign * train_priority(one),
            one.service is not None,
            one.cost_per_hour,
            one.name,
        ),
    )


def _fill(
    need: ServiceNeed,
    resources: Sequence[Resource],
    services: dict[str, str],
    missing: dict[str, int],
) -> None:
    """Give a service all that it asks for, or nothing."""
    assert need.count is not None
    lacking = need.count - sum(found == need.service for found in services.values())
    free = [one for one in _ranked(need, resources) if one.name not in services]
    if len(free) < lacking:
        missing[need.service] = lacking - len(free)
        for name in [name for name, found in services.items() if found == need.service]:
            del services[name]
        return
    services.update((one.name, need.service) for one in free[:lacking])


def _least_served(one: Resource, fitting: Sequence[str], services: Mapping[str, str]) -> str:
    if one.service is not None and one.service in fitting:
        return one.service
    given = [*services.values()]
    return min(fitting, key=given.count)


def _changes(
    resources: Sequence[Resource], services: Mapping[str, str], counted: set[str]
) -> Iterator[Change]:
    bereaved = [one.service for one in resources if not one.is_alive and one.service in counted]
    for one in resources:
        after = services.get(one.name)
        if after == one.service:
            continue
        if not one.is_alive:
            cause = Cause.DIED
        elif after in bereaved:
            bereaved.remove(after)
            cause = Cause.REPLACES_DEAD
        elif after in counted:
            cause = Cause.NEEDED
        elif after is None:
            cause = Cause.TAG_REMOVED
        else:
            cause = Cause.ADDED if one.service is None else Cause.RETURNED
        yield Change(resource=one.name, before=one.service, after=after, cause=cause)


# --- who should have which tag --------------------------------------------------------------------


def split_by_rates(
    resources: Sequence[Resource], *, rollout_tokens: float, train_tokens: float
) -> frozenset[str]:
    """Who trains if everybody does one thing only (disaggregated), so that most batches pass.
    `rollout_tokens`, `train_tokens`: of one batch. Needs measured rates."""
    alive = [one for one in resources if one.is_alive]
    fixed = [one for one in alive if TRAIN in one.tags and ROLLOUT not in one.tags]
    able = [one for one in alive if one.tags >= {TRAIN, ROLLOUT}]
    able.sort(key=lambda one: (-train_priority(one), one.name))

    def batches_per_s(number: int) -> float:
        training = {one.name for one in (*fixed, *able[:number])}
        trained = sum(one.train_tokens_per_s or 0.0 for one in alive if one.name in training)
        generated = sum(
            one.rollout_tokens_per_s or 0.0
            for one in alive
            if ROLLOUT in one.tags and one.name not in training
        )
        return min(trained / train_tokens, generated / rollout_tokens)

    best = max(range(len(able) + 1), key=batches_per_s)
    return frozenset(one.name for one in (*fixed, *able[:best]))
