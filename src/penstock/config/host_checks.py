# SPDX-License-Identifier: Apache-2.0
"""Contradictions of `hosts` with themselves and with the sections that name a host.

Changes no value. Whether devices suffice is decided in `device_layout`, memory in the planner."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from penstock.addresses import is_loopback
from penstock.config.hosts import MAX_HOSTS, expand, names_of, num_names
from penstock.config.run_sections import RunSections
from penstock.options import Contradiction, KeyPath
from penstock.plugins import unknown


def host_contradictions(config: RunSections) -> Iterator[Contradiction]:
    too_many = [*_too_many_hosts(config)]
    yield from too_many
    if too_many:
        return
    yield from _repeated_hosts(config)
    yield from _addresses(config)
    yield from _unknown_hosts(config)
    yield from _launcher_hosts(config)


def _too_many_hosts(config: RunSections) -> Iterator[Contradiction]:
    lists = {at: written or () for at, written in _training_hosts(config).items()}
    keys: dict[KeyPath, int] = {("hosts",): sum(map(num_names, config.hosts))}
    keys |= {(*at, "hosts"): sum(map(num_names, written)) for at, written in lists.items()}
    for key, number in keys.items():
        if number > MAX_HOSTS:
            text = f"{number:,} hosts; a run has at most {MAX_HOSTS:,}"
            yield Contradiction(text=text, keys=(key, key[:-1]))


def _training_hosts(config: RunSections) -> dict[KeyPath, tuple[str, ...] | None]:
    """By section, where policies differ."""
    found: dict[KeyPath, tuple[str, ...] | None] = {("training",): config.training.hosts}
    for name, model in config.models.items():
        if model.training is not None and model.training.hosts != config.training.hosts:
            found["models", name, "training"] = model.training.hosts
    return found


def _repeated_hosts(config: RunSections) -> Iterator[Contradiction]:
    seen: dict[str, str] = {}
    for written in config.hosts:
        for name in expand(written):
            if name in seen:
                text = f"host {name} is in {seen[name]} and in {written}; write each host once"
                yield Contradiction(text=text, keys=(("hosts", written),))
                break
            seen[name] = written


def _addresses(config: RunSections) -> Iterator[Contradiction]:
    for written, host in config.hosts.items():
        number, num_addresses = num_names(written), num_names(host.address or written)
        if num_addresses != number:
            text = f"{written} are {number} hosts and {host.address} {num_addresses} "
            text += "addresses; write a range of the same length, like 10.0.0.[10-17]"
            yield Contradiction(text=text, keys=(("hosts", written, "address"),))


def _unknown_hosts(config: RunSections) -> Iterator[Contradiction]:
    known = config.all_hosts
    for at, written in _training_hosts(config).items():
        names = names_of(written or ())
        repeated = next((name for name, times in Counter(names).items() if times > 1), None)
        missing = next((name for name in names if name not in known), None)
        if missing is not None:
            none = "declare it under hosts"
            text = unknown("host", missing, known, none=none)
            yield Contradiction(text=text, keys=((*at, "hosts"), at))
        elif repeated is not None:
            text = f"host {repeated} is named twice; its ranks are as many as its devices"
            yield Contradiction(text=f"{text}: name it once", keys=((*at, "hosts"), at))


def _launcher_hosts(config: RunSections) -> Iterator[Contradiction]:
    if config.launcher != "ssh":
        return
    if not config.hosts:
        text = "ssh has no hosts to go to: name this machine and the others under hosts, each with "
        yield Contradiction(text=f"{text}its address", keys=(("launcher",),))
    elif len(config.all_hosts) > 1 and is_loopback(config.network.host):
        text = f"other hosts cannot reach the services at {config.network.host}: set network.host, "
        text += "advertise and tls; `penstock tls init` makes the certificates"
        yield Contradiction(text=text, keys=(("launcher",), ("network",)))
    known = sorted({tag for host in config.all_hosts.values() for tag in host.tags})
    for at, place in _places(config):
        if missing := [tag for tag in place if tag not in known]:
            yield Contradiction(text=unknown("tag", missing[0], known), keys=(at,))


def _places(config: RunSections) -> Iterator[tuple[KeyPath, tuple[str, ...]]]:
    """Of all services but stages, which may name what a cluster brings later."""
    yield ("dataflow", "place"), config.dataflow.place or ()
    yield ("weights", "place"), config.weights.place or ()
    yield ("training", "place"), config.training.place or ()
    for name, model in config.models.items():
        yield ("models", name, "place"), model.place or ()
        if model.training is not None and model.training.place != config.training.place:
            yield ("models", name, "training", "place"), model.training.place or ()
