# SPDX-License-Identifier: Apache-2.0
"""A long thin link between processes of one machine: two network namespaces, a TUN device in each,
and one process that carries packets from one to the other, late, at a rate, and not all of them.

Owns the namespaces, which have no names: they end with the last process inside. Whatever a `Link`
started, and what that started, is killed when the link closes or when its owner dies, even by
SIGKILL. Nothing inside reaches the host or any other network. Needs root, /dev/net/tun, `ip` and
`nsenter`; not `tc netem`, which many kernels lack. IPv4 only; packets never overtake one another.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import json
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

Side = Literal["a", "b"]
SIDES: tuple[Side, Side] = ("a", "b")

CLONE_NEWNET = 0x40000000
TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
MTU = 1500
BURST = 64
"""Packets taken from one device before the other has its turn."""
IPV4 = Path("/proc/sys/net/ipv4")
"""Settings of the namespace of whoever opens them."""
_numbers = itertools.count()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the link does to packets, each way."""

    delay_ms: float = 150.0
    """One way; a round trip takes twice this."""
    rate_mbit: float = 20.0
    """Of IP packets, headers included."""
    loss: float = 0.0
    """Share of packets lost after they have used the link."""
    queue_kb: float = 750.0
    """As much may wait for the link, here one bandwidth-delay product; the rest is dropped."""
    is_cut: bool = False

    def __post_init__(self) -> None:
        if self.delay_ms < 0 or self.rate_mbit <= 0 or self.queue_kb <= 0 or not 0 <= self.loss < 1:
            raise ValueError(f"{self}: rate and queue are above 0, delay at least 0, loss in 0..1")


class Link:
    """Two namespaces and the link between them, until the block ends.

    `beside` makes side `a` that other link's side `a`: one origin with a link to each of its nodes.
    `congestion` is TCP's, for connections made in either namespace (with `beside`, in `b`).
    """

    def __init__(
        self,
        *,
        delay_ms: float = 150.0,
        rate_mbit: float = 20.0,
        loss: float = 0.0,
        queue_kb: float = 750.0,
        congestion: str = "reno",
        beside: Link | None = None,
    ) -> None:
        self._shape = Shape(delay_ms=delay_ms, rate_mbit=rate_mbit, loss=loss, queue_kb=queue_kb)
        allowed = (IPV4 / "tcp_allowed_congestion_control").read_text().split()
        if congestion not in allowed:
            raise ValueError(f"a namespace may use congestion control {allowed}, not {congestion}")
        number = next(_numbers) % 256
        self.addresses: Mapping[Side, str] = {"a": f"10.77.{number}.1", "b": f"10.77.{number}.2"}
        self._setup = {
            "device": f"wan{number}",
            "addresses": self.addresses,
            "congestion": congestion,
            "beside": beside.namespace("a") if beside else None,
        }
        self._namespaces: Mapping[Side, str] = {}
        self._children: list[subprocess.Popen[Any]] = []

    def __enter__(self) -> Self:
        if os.geteuid() != 0:
            raise RuntimeError("a WAN link makes network namespaces: run this as root")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._carrier = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno()), json.dumps(self._setup)],
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is for the owner, who then closes the link
            )
        try:
            self._namespaces = self._receive()
            self._ask()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Kill what is inside; the carrier finds it all, as it does when this process dies."""
        for child in self._children:
            child.kill()  # by pid: it may be at the door of its namespace still
        self._control.close()
        self._carrier.wait()
        for child in self._children:
            with child:  # closes its pipes, and waits
                pass

    def namespace(self, side: Side) -> str:
        """Path to give to `nsenter --net=`."""
        return self._namespaces[side]

    def popen(self, side: Side, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """As `subprocess.Popen`, inside; its pid is that of the command itself."""
        child = subprocess.Popen(["nsenter", f"--net={self.namespace(side)}", *argv], **options)
        self._children.append(child)
        return child

    def set(
        self,
        *,
        delay_ms: float | None = None,
        rate_mbit: float | None = None,
        loss: float | None = None,
        queue_kb: float | None = None,
    ) -> None:
        """Change a link in use; what is not named stays."""
        named = {"delay_ms": delay_ms, "rate_mbit": rate_mbit, "loss": loss, "queue_kb": queue_kb}
        changes: dict[str, Any] = {
            name: value for name, value in named.items() if value is not None
        }
        self._shape = replace(self._shape, **changes)
        self._ask()

    def cut(self) -> None:
        """Drop everything from now on, and what is under way; nobody is told."""
        self._shape = replace(self._shape, is_cut=True)
        self._ask()

    def restore(self) -> None:
        self._shape = replace(self._shape, is_cut=False)
        self._ask()

    def stats(self) -> Mapping[str, Mapping[str, int]]:
        """Counts of `ab` and `ba`: `packets` and `bytes` that came; of the packets, how many were
        `delivered`, `lost`, `overflowed` the queue or were `cut`."""
        return self._ask()

    def _ask(self) -> Any:
        self._control.send(json.dumps(asdict(self._shape)).encode())
        return self._receive()

    def _receive(self) -> Any:
        answer = self._control.recv(1 << 16)
        if not answer:
            raise RuntimeError("the process that carries the packets ended; see its message above")
        return json.loads(answer)


# ------------------------------------------------------------------------------------- the carrier


class LinkDirection:
    """One direction: when does a packet that comes now leave, if ever."""

    def __init__(self) -> None:
        self.under_way: deque[tuple[float, bytes]] = deque()
        self.counts = dict.fromkeys(
            ("packets", "bytes", "delivered", "lost", "overflowed", "cut"), 0
        )
        self._free_at = 0.0
        """When the last packet that came is on the wire."""
        self._random = random.Random(0)

    def enqueue(self, packet: bytes, now: float, shape: Shape) -> None:
        self.counts["packets"] += 1
        self.counts["bytes"] += len(packet)
        bytes_per_s = shape.rate_mbit * 125_000
        waits_s = max(0.0, self._free_at - now)
        if shape.is_cut:
            self.counts["cut"] += 1
        elif waits_s * bytes_per_s + len(packet) > shape.queue_kb * 1000:
            self.counts["overflowed"] += 1
        else:
            self._free_at = now + waits_s + len(packet) / bytes_per_s
            if self._random.random() < shape.loss:
                self.counts["lost"] += 1
            else:
                self.under_way.append((self._free_at + shape.delay_ms / 1e3, packet))

    def deliver(self, device: int, now: float) -> None:
        while self.under_way and self.under_way[0][0] <= now:
            os.write(device, self.under_way.popleft()[1])
            self.counts["delivered"] += 1

    def cut(self) -> None:
        self.counts["cut"] += len(self.under_way)
        self.under_way.clear()
        self._free_at = 0.0


def forward_packets(control: socket.socket, devices: Mapping[Side, int]) -> None:
    """Carry packets until the owner is gone; each message of its is a shape, answered by counts."""
    shape = Shape()
    directions = {"ab": LinkDirection(), "ba": LinkDirection()}
    routes = [
        (devices["a"], devices["b"], directions["ab"]),
        (devices["b"], devices["a"], directions["ba"]),
    ]
    while True:
        due = [
            direction.under_way[0][0] for direction in directions.values() if direction.under_way
        ]
        wait_s = max(0.0, min(due) - time.monotonic()) if due else None
        ready, _, _ = select.select([control, *devices.values()], [], [], wait_s)
        if control in ready:
            message = control.recv(1 << 16)
            if not message:
                return
            shape = Shape(**json.loads(message))
            for direction in directions.values() if shape.is_cut else ():
                direction.cut()
            control.send(
                json.dumps(
                    {name: direction.counts for name, direction in directions.items()}
                ).encode()
            )
        for source, target, direction in routes:
            for packet in packets(source) if source in ready else ():
                direction.enqueue(packet, time.monotonic(), shape)
            direction.deliver(target, time.monotonic())


def packets(device: int) -> list[bytes]:
    """What waits at a device, IPv4 only: the kernel's own IPv6 greetings are nobody's traffic."""
    found: list[bytes] = []
    with contextlib.suppress(BlockingIOError):
        while len(found) < BURST:
            found.append(os.read(device, 1 << 16))
    return [packet for packet in found if packet[0] >> 4 == 4]


class Namespaces:
    """Makes and enters network namespaces; Python 3.11 has no calls of its own for that."""

    def __init__(self) -> None:
        self._libc = ctypes.CDLL(None, use_errno=True)

    def make(self) -> int:
        """A descriptor of a new one, which this process is now in."""
        self._check(self._libc.unshare(CLONE_NEWNET))
        return os.open("/proc/self/ns/net", os.O_RDONLY)

    def enter(self, namespace: int) -> None:
        self._check(self._libc.setns(namespace, CLONE_NEWNET))

    def _check(self, result: int) -> None:
        if result:
            code = ctypes.get_errno()
            raise OSError(code, f"network namespace: {os.strerror(code)}")


def open_device(name: str, address: str, peer: str) -> int:
    """A TUN device of the namespace this process is in, up and with its address."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH14x", name.encode(), IFF_TUN | IFF_NO_PI))
    for words in (
        f"address add {address} peer {peer} dev {name}",
        f"link set {name} mtu {MTU} txqueuelen 5000 up",
        "link set lo up",
    ):
        subprocess.run(["ip", *words.split()], check=True)
    return device


def kill_in_namespaces(namespaces: Sequence[int]) -> None:
    """Kill whatever runs in these namespaces, until nothing does."""
    inside = {os.fstat(namespace).st_ino for namespace in namespaces}
    while True:
        found = 0
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it ended meanwhile
                if (entry / "ns" / "net").stat().st_ino in inside:
                    os.kill(int(entry.name), signal.SIGKILL)
                    found += 1
        if not found:
            return
        time.sleep(0.01)


def main(control: socket.socket, setup: Mapping[str, Any]) -> None:
    os.nice(-10)  # a packet that waits for a busy processor is a slower link
    spaces = Namespaces()
    coordinator = os.open("/proc/self/ns/net", os.O_RDONLY)
    namespaces: dict[Side, int] = {}
    devices: dict[Side, int] = {}
    addresses = setup["addresses"]
    for side, other in (SIDES, SIDES[::-1]):
        if side == "a" and setup["beside"]:
            namespaces[side] = os.open(setup["beside"], os.O_RDONLY)
            spaces.enter(namespaces[side])
        else:
            namespaces[side] = spaces.make()
            (IPV4 / "tcp_congestion_control").write_text(setup["congestion"])
            # Else a connection would begin with what the one before it learned.
            (IPV4 / "tcp_no_metrics_save").write_text("1")
        devices[side] = open_device(setup["device"], addresses[side], addresses[other])
    spaces.enter(coordinator)
    paths = {side: f"/proc/{os.getpid()}/fd/{number}" for side, number in namespaces.items()}
    try:
        control.send(json.dumps(paths).encode())
        forward_packets(control, devices)
    finally:
        kill_in_namespaces(
            [number for side, number in namespaces.items() if side == "b" or not setup["beside"]]
        )


if __name__ == "__main__":
    main(socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2]))
