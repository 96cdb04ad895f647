# SPDX-License-Identifier: Apache-2.0
"""Decides where a sandboxed program may connect: granted names and ports, public addresses.

A grant is a host name, for ports 80 (plain) and 443 (CONNECT), or NAME:PORT for one other port. A
name that resolves to any address that is not public is refused, although it is granted. IPv4:PORT
grants exactly that address, also an internal one; never a link-local one. All other ways to write
an address are refused: decimal, octal, hex, IPv6, with user names, dots at the end or escapes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from penstock.errors import ConfigError

HTTP_PORT, HTTPS_PORT = 80, 443
_LABEL = r"[a-z0-9_](?:[a-z0-9_-]{0,61}[a-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}\Z){_LABEL}(?:\.{_LABEL})*", re.ASCII)
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*", re.ASCII)
_AUTHORITY = re.compile(r"([^:@/\\?#\s\[\]%]+)(?::([0-9]{1,5}))?", re.ASCII)
_INTERNAL_NAMES = ("localhost", "local", "localdomain", "internal", "instance-data", "metadata")
"""Names, and endings of names, that mean this machine, this network or a cloud's metadata."""

_INTERNAL_V4 = tuple(
    map(
        IPv4Network,
        (
            *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
            *("172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16"),
            *("198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3"),
            "168.63.129.16/32",  # a cloud's metadata server at a public address
        ),
    )
)
_LINK_LOCAL = IPv4Network("169.254.0.0/16")
_PUBLIC_V6 = IPv6Network("2000::/3")
_INTERNAL_V6 = tuple(map(IPv6Network, ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")))
"""Within 2000::/3; they carry or translate to IPv4 addresses, or are for documents."""


class Denied(Exception):
    """The program may not go there; the text says why, for the program."""


@dataclass(frozen=True, slots=True)
class Target:
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class EgressRules:
    def __init__(self, hosts: Iterable[str]) -> None:
        self._plain: set[Target] = set()
        self._tunnels: set[Target] = set()
        for grant in hosts:
            target = _read_grant(grant)
            self._plain.add(target if target.port else Target(target.host, HTTP_PORT))
            self._tunnels.add(target if target.port else Target(target.host, HTTPS_PORT))

    def check(self, target: Target, *, is_tunnel: bool) -> None:
        """Raise Denied unless the target is granted."""
        if target not in (self._tunnels if is_tunnel else self._plain):
            raise Denied(
                f"{target} is not granted; the owner of the run grants hosts by name, under "
                "`hosts` of the grants in `sandbox`"
            )

    def check_addresses(self, target: Target, addresses: Iterable[str]) -> list[str]:
        """The addresses to connect to; raises Denied if one of them is not public."""
        granted = _ip_of(target.host)
        found = [ip_address(address.partition("%")[0]) for address in addresses]
        if not found:
            raise Denied(f"{target.host} has no address")
        for address in found:
            if granted is not None and address == granted and granted not in _LINK_LOCAL:
                continue
            if not is_public(address):
                raise Denied(f"{target.host} resolves to {address}, which is not a public address")
        return [str(address) for address in found]


def _read_grant(grant: str) -> Target:
    try:
        target = read_authority(grant, default_port=0)
    except Denied as error:
        raise ConfigError(
            f"{grant!r} grants no host: {error}; write a name like api.example.com, "
            "api.example.com:8443 or 10.0.0.5:8000"
        ) from None
    if not target.port and _ip_of(target.host) is not None:
        raise ConfigError(f"{grant!r} grants an address without a port; write {grant}:PORT")
    return target


def read_authority(text: str, *, default_port: int) -> Target:
    """A host name or an IPv4 address in its usual form, and a port. Raises Denied."""
    match = _AUTHORITY.fullmatch(text.lower())
    if match is None or not _NAME.fullmatch(match[1]):
        raise Denied(f"{text[:200]!r} is not a plain host name")
    host, port = match[1], int(match[2]) if match[2] else default_port
    if match[2] and not 1 <= port <= 65535:
        raise Denied(f"{port} is not a port")
    labels = host.split(".")
    if _NUMBER.fullmatch(labels[-1]) and _ip_of(host) is None:
        raise Denied(f"{host} is an address in an unusual form")
    if labels[-1] in _INTERNAL_NAMES:
        raise Denied(f"{host} is an internal name")
    return Target(host, port)


def _ip_of(host: str) -> IPv4Address | None:
    """The address that the host is, if it is written as four plain decimal numbers."""
    try:
        address = IPv4Address(host)
    except ValueError:
        return None
    return address if str(address) == host else None


def is_public(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv4Address):
        return not any(address in network for network in _INTERNAL_V4)
    return address in _PUBLIC_V6 and not any(address in network for network in _INTERNAL_V6)
