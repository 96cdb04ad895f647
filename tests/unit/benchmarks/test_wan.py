# SPDX-License-Identifier: Apache-2.0
"""The link itself, measured from inside with sockets of the kernel."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from benchmarks.harness import ROOT
from benchmarks.wan_link import SIDES, Link, Side

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/net/tun").exists(),
        reason="needs root rights and /dev/net/tun",
    ),
]

ECHO = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind((sys.argv[1], 7000))
print('ready', flush=True)
while True: s.sendto(*s.recvfrom(2000))
"""
PING = """
import socket, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.connect((sys.argv[1], 7000))
s.settimeout(float(sys.argv[2]))
for _ in range(5):
    began = time.monotonic()
    try: s.send(b'?'); s.recv(10); print(time.monotonic() - began)
    except TimeoutError: pass
"""
SINK = """
import socket, sys, time
server = socket.create_server((sys.argv[1], 7001)); print('ready', flush=True)
for _ in range(int(sys.argv[2])):
    peer, _ = server.accept(); began = time.monotonic(); got = 0
    while piece := peer.recv(1 << 16): got += len(piece)
    print(got, time.monotonic() - began, flush=True)
"""
SOURCE = """
import socket, sys
with socket.create_connection((sys.argv[1], 7001)) as s: s.sendall(bytes(int(sys.argv[2])))
"""
BURST = """
import socket, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(int(sys.argv[2])): s.sendto(bytes(972), (sys.argv[1], 7002))
"""
OWNER = """
import subprocess, sys
from benchmarks.wan_link import Link
with Link() as link:
    inside = "import subprocess; subprocess.Popen(['sleep', '99']); print(1, flush=True); input()"
    child = link.popen('b', [sys.executable, '-c', inside], stdin=-1, stdout=subprocess.PIPE)
    child.stdout.readline()
    print(link.namespace('a'), link.namespace('b'), flush=True)
    input()
"""
MB = 1_000_000


def start(link: Link, side: Side, script: str, *words: object) -> subprocess.Popen[Any]:
    argv = [sys.executable, "-c", script, *map(str, words)]
    return link.popen(side, argv, stdout=subprocess.PIPE, text=True)


def serve(link: Link, side: Side, script: str, *words: object) -> subprocess.Popen[Any]:
    child = start(link, side, script, link.addresses[side], *words)
    assert child.stdout is not None and child.stdout.readline() == "ready\n"
    return child


def ping(link: Link, *, address: str = "", patience_s: float = 5.0) -> list[float]:
    """Seconds of each round trip from `a` that came back."""
    out, _ = start(link, "a", PING, address or link.addresses["b"], patience_s).communicate()
    return sorted(map(float, out.split()))


def transfer_s(link: Link, sink: subprocess.Popen[Any], num_bytes: int) -> float:
    assert start(link, "a", SOURCE, link.addresses["b"], num_bytes).wait() == 0
    assert sink.stdout is not None
    got, seconds = sink.stdout.readline().split()
    assert int(got) == num_bytes
    return float(seconds)


def inside(namespaces: Sequence[int]) -> set[int]:
    found: set[int] = set()
    for pid in psutil.pids():
        try:
            if os.stat(f"/proc/{pid}/ns/net").st_ino in namespaces:
                found.add(pid)
        except OSError:
            continue
    return found


def counted(link: Link, num_packets: int, *fates: str) -> Mapping[str, int]:
    """What became of the packets to `b`, once the link has seen this many meet one of these
    fates."""
    deadline = time.monotonic() + 120.0
    while sum((there := link.stats()["ab"])[fate] for fate in fates) < num_packets:
        assert time.monotonic() < deadline, there
        time.sleep(0.02)
    return there


def test_a_round_trip_takes_twice_the_delay() -> None:
    with Link(delay_ms=150) as link:
        serve(link, "b", ECHO)
        trips = ping(link)
    assert len(trips) == 5
    assert 0.300 <= min(trips) < 0.590


def test_a_transfer_takes_its_size_by_the_rate_which_may_change() -> None:
    """The queue takes all of it, so that no loss, and no recovery of TCP from it, plays a part."""
    with Link(delay_ms=5, rate_mbit=20, queue_kb=5000) as link:
        sink = serve(link, "b", SINK, 2)
        assert 0.7 < transfer_s(link, sink, 3 * MB) / 1.2 < 5
        link.set(rate_mbit=8)
        assert 0.7 < transfer_s(link, sink, MB) / 1.0 < 5
        carried = link.stats()
    assert 4 * MB < carried["ab"]["bytes"] < 4.4 * MB
    assert carried["ba"]["bytes"] < MB


def test_loss_is_near_its_setting() -> None:
    with Link(delay_ms=1, loss=0.1) as link:
        start(link, "a", BURST, link.addresses["b"], 500).wait()
        there = counted(link, 500, "delivered", "lost")
    assert there["packets"] == 500
    assert 30 <= there["lost"] <= 70


def test_a_full_queue_drops_what_comes() -> None:
    """100 packets of 1,000 bytes at once: ten wait, and one leaves in each 1.6 s meanwhile."""
    with Link(rate_mbit=0.005, queue_kb=10) as link:
        start(link, "a", BURST, link.addresses["b"], 100).wait()
        assert 70 <= counted(link, 100, "packets")["overflowed"] <= 90


def test_a_cut_drops_all_until_it_is_mended() -> None:
    with Link(delay_ms=1) as link:
        serve(link, "b", ECHO)
        link.cut()
        assert ping(link, patience_s=0.05) == []
        assert counted(link, 5, "cut")["cut"] == 5
        link.restore()
        assert len(ping(link)) == 5


def test_two_links_of_one_origin() -> None:
    with Link(delay_ms=1) as one, Link(delay_ms=40, beside=one) as other:
        for link in (one, other):
            serve(link, "b", ECHO)
        far = min(ping(one, address=other.addresses["b"]))
        assert min(ping(one)) < far and far >= 0.08


def test_congestion_control_is_that_of_the_namespace() -> None:
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    for name in allowed:
        with Link(congestion=name) as link:
            setting = ["cat", "/proc/sys/net/ipv4/tcp_congestion_control"]
            for side in SIDES:
                child = link.popen(side, setting, stdout=subprocess.PIPE, text=True)
                assert child.communicate()[0].strip() == name
    with pytest.raises(ValueError, match="may use congestion control"):
        Link(congestion="hope")


def test_nothing_is_left_after_an_exception() -> None:
    namespaces: list[int] = []
    with pytest.raises(KeyError), Link() as link:
        child = link.popen("a", ["sleep", "99"])
        namespaces += [os.stat(link.namespace(side)).st_ino for side in SIDES]
        while child.pid not in inside(namespaces):  # nsenter is not through yet
            time.sleep(0.01)
        raise KeyError
    assert not inside(namespaces)


def test_nothing_is_left_when_the_owner_is_killed() -> None:
    named = subprocess.run(["ip", "netns", "list"], capture_output=True).stdout
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", OWNER], cwd=ROOT, **pipes) as owner:
        assert owner.stdout is not None
        paths = owner.stdout.readline().split()
        namespaces = [os.stat(path).st_ino for path in paths]
        carrier = psutil.Process(int(paths[0].split("/")[2]))
        assert len(inside(namespaces)) == 2  # the child and the child's own
        owner.kill()
    psutil.wait_procs([carrier], timeout=10)
    assert not carrier.is_running() or carrier.status() == psutil.STATUS_ZOMBIE
    assert not inside(namespaces)
    assert subprocess.run(["ip", "netns", "list"], capture_output=True).stdout == named
