# SPDX-License-Identifier: Apache-2.0
"""The hosts of a run: machines with their devices, memory, tags and addresses.

Owns the shape of `hosts` and Slurm's notation for ranges of names (`gpu[0-7]`, `gpu[00-03,08]`).
Does not decide what runs where: that is `device_layout` for devices, and the planner for memory."""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat

from penstock.config.base import NAME, Section, non_blank
from penstock.config.stages import Tags
from penstock.plugins import quoted

TRAIN = "train"
"""The tag of hosts that trainers are placed on."""
MAX_HOSTS = 4096
"""Of a run, and so of a range."""
MAX_ADDRESS_CHARS = 253
"""Of a name or address: a range repeats it for each of its hosts."""
_RANGE = re.compile(r"(?P<head>[^\[\],]*)\[(?P<parts>[0-9,-]+)\](?P<tail>[^\[\],]*)")
_PART = re.compile(r"(?P<first>[0-9]{1,9})(?:-(?P<last>[0-9]{1,9}))?")
_FIX = "write a name, or a range like gpu[0-7] or gpu[00-03,08]"


class Place(NamedTuple):
    """One device of one host."""

    host: str
    device: int

    def __str__(self) -> str:
        return f"{self.host}:{self.device}"


class _Range(NamedTuple):
    """What a text means, before it is written out."""

    head: str
    numbers: Sequence[tuple[range, int]] = ()
    """With how many digits each is written at least; none: the head is the name."""
    tail: str = ""

    @property
    def num_names(self) -> int:
        return sum(len(numbers) for numbers, _ in self.numbers) if self.numbers else 1

    def name(self, number: int, num_digits: int) -> str:
        return f"{self.head}{str(number).zfill(num_digits)}{self.tail}"

    def names(self) -> Iterator[str]:
        if not self.numbers:
            yield self.head
        for numbers, num_digits in self.numbers:
            for number in numbers:
                yield self.name(number, num_digits)

    def longest(self) -> Iterator[str]:
        """Of each part; if these are valid, all names are."""
        if not self.numbers:
            yield self.head
        for numbers, num_digits in self.numbers:
            yield self.name(numbers[-1], num_digits)


def _parse(text: str) -> _Range:
    """ValueError if it means no name."""
    if "[" not in text and "]" not in text:
        return _Range(text)
    found = _RANGE.fullmatch(text)
    if found is None:
        raise ValueError(f"{quoted(text)} is not a range of names; {_FIX}")
    numbers, size = list[tuple[range, int]](), 0
    for part in found["parts"].split(","):
        bounds = _PART.fullmatch(part)
        if bounds is None:
            raise ValueError(f"{quoted(part)} in {quoted(text)} is not a range; {_FIX}")
        first, last = bounds["first"], bounds["last"] or bounds["first"]
        here = range(int(first), int(last) + 1)
        size += len(here)
        if not here or size > MAX_HOSTS:
            raise ValueError(
                f"{quoted(part)} in {quoted(text)} has {len(here)} numbers; a range goes up, "
                f"and has at most {MAX_HOSTS}"
            )
        numbers.append((here, len(first)))
    return _Range(found["head"], numbers, found["tail"])


def expand(text: str) -> tuple[str, ...]:
    """The names that this text means, in order; ValueError if it means none."""
    return tuple(_parse(text).names())


def num_names(text: str) -> int:
    """How many it means."""
    return _parse(text).num_names


def _host_name(value: str) -> str:
    for name in _parse(value).longest():
        if not NAME.fullmatch(name):
            raise ValueError(
                f"{quoted(value)} is not valid here; use up to 64 letters, digits, _ or -, or a "
                "range like gpu[0-7]"
            )
    return value


def _address(value: str) -> str:
    for address in _parse(non_blank(value)).longest():
        if len(address) > MAX_ADDRESS_CHARS:
            raise ValueError(
                f"{quoted(value)} has more than {MAX_ADDRESS_CHARS} characters, which no name or "
                "address has; shorten it"
            )
    return value


HostName = Annotated[str, AfterValidator(_host_name)]
"""A host, or several in Slurm's notation."""


class HostConfig(Section):
    """One machine, or identical ones under a range of names."""

    devices: NonNegativeInt = 0
    """GPUs of each; 0: a machine that computes on its CPU."""
    memory_gb: float = Field(gt=0)
    """Memory for models in GB (10^9 bytes): of each device, or of the machine without devices."""
    tags: Tags = (TRAIN,)
    """Labels that services request with `place`; trainers go to hosts with `train`, nodes to those
    with `rollout`."""
    address: Annotated[str, AfterValidator(_address)] | None = None
    """Name or address at which the other hosts reach it, or a range of the same length,
    like 10.0.0.[10-17]; null: its name."""
    tflops: PositiveFloat | None = None
    """What each device, or the machine without devices, computes at most in 16 bits: 10^12
    operations per second. With memory_gb_per_s, launcher ssh sends trainers first to the hosts that
    compute most for the speed of their memory, and nodes to the others."""
    memory_gb_per_s: PositiveFloat | None = None
    """What it reads from its memory at most: 10^9 bytes per second."""


Hosts = Mapping[HostName, HostConfig]


def expanded(hosts: Hosts) -> dict[str, HostConfig]:
    """Every host by its own name, with its own address. Names that occur twice keep the first, and
    those after the first MAX_HOSTS are left out: `host_contradictions` refuses both."""
    found: dict[str, HostConfig] = {}
    for name, address, host in islice(_each(hosts), MAX_HOSTS):
        found.setdefault(name, host.model_copy(update={"address": address}))
    return found


def _each(hosts: Hosts) -> Iterator[tuple[str, str, HostConfig]]:
    for written, host in hosts.items():
        addresses = _parse(host.address or written).names()
        for name, address in zip(_parse(written).names(), addresses, strict=False):
            yield name, address, host


def names_of(written: Sequence[str]) -> tuple[str, ...]:
    """The hosts of a list such as `training.hosts`; of more than MAX_HOSTS the first."""
    return tuple(islice((name for text in written for name in _parse(text).names()), MAX_HOSTS))
