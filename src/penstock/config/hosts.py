# SPDX-License-Identifier: Apache-2.0
"""The hosts of a run: machines with their devices, memory, tags and addresses.

Owns the shape of `hosts` and Slurm's notation for ranges of names (`gpu[0-7]`, `gpu[00-03,08]`).
Does not decide what runs where: that is `device_layout` for devices, and the planner for memory."""

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveFloat

from penstock.config.base import NAME, Section, non_blank
from penstock.config.stages import Tags
from penstock.plugins import quoted

TRAIN = "train"
"""The tag of hosts that trainers are placed on."""
MAX_HOSTS = 4096
_RANGE = re.compile(r"(?P<head>[^\[\],]*)\[(?P<parts>[0-9,-]+)\](?P<tail>[^\[\],]*)")
_PART = re.compile(r"(?P<first>[0-9]{1,9})(?:-(?P<last>[0-9]{1,9}))?")
_FIX = "write a name, or a range like gpu[0-7] or gpu[00-03,08]"


class Place(NamedTuple):
    """One device of one host."""

    host: str
    device: int

    def __str__(self) -> str:
        return f"{self.host}:{self.device}"


def expand(text: str) -> tuple[str, ...]:
    """The names that this text means, in order; ValueError if it means none."""
    if "[" not in text and "]" not in text:
        return (text,)
    found = _RANGE.fullmatch(text)
    if found is None:
        raise ValueError(f"{quoted(text)} is not a range of names; {_FIX}")
    numbers: list[str] = []
    for part in found["parts"].split(","):
        bounds = _PART.fullmatch(part)
        if bounds is None:
            raise ValueError(f"{quoted(part)} in {quoted(text)} is not a range; {_FIX}")
        first, last = bounds["first"], bounds["last"] or bounds["first"]
        size = int(last) - int(first) + 1
        if size < 1 or size + len(numbers) > MAX_HOSTS:
            raise ValueError(
                f"{quoted(part)} in {quoted(text)} has {max(size, 0)} numbers; a range goes up, "
                f"and has at most {MAX_HOSTS}"
            )
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return tuple(f"{found['head']}{number}{found['tail']}" for number in numbers)


def _host_name(value: str) -> str:
    for name in expand(value):
        if not NAME.fullmatch(name):
            raise ValueError(
                f"{quoted(value)} is not valid here; use up to 64 letters, digits, _ or -, or a "
                "range like gpu[0-7]"
            )
    return value


def _address(value: str) -> str:
    expand(non_blank(value))
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
    """Every host by its own name, with its own address. Names that occur twice keep the first:
    `host_contradictions` refuses them."""
    found: dict[str, HostConfig] = {}
    for written, host in hosts.items():
        names = expand(written)
        addresses = expand(host.address) if host.address else names
        for name, address in zip(names, addresses, strict=False):
            found.setdefault(name, host.model_copy(update={"address": address}))
    return found


def names_of(written: Sequence[str]) -> tuple[str, ...]:
    """The hosts of a list such as `training.hosts`."""
    return tuple(name for text in written for name in expand(text))
