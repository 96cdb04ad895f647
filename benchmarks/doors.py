# SPDX-License-Identifier: Apache-2.0
"""Thousands of idle and dripping connections on each service, while one healthy caller works.

    python -m benchmarks.doors [--quick]

Figure: the 99th percentile of an authorised call under the flood. Baseline: the same caller before
the flood, in the same run; pairs of both, and their median ratio. The flood comes from several
processes and from other loopback addresses than the caller's. Quick: one pair for each service and
a tenth of the connections."""

from __future__ import annotations

import argparse
import contextlib
import os
import select
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from benchmarks.doors_service import KINDS
from benchmarks.harness import ROOT, log_line, process, result, scratch

IDLE, DRIPPING, ATTACKERS = 20_000, 2_000, 4
CALLS = 1_000
DRIP_S = 1.0
LINE, DRIP = b"GET / HTTP/1.1\r\nhost: x\r\n", b"x: y\r\n"


# --- the flood: a process of its own ------------------------------------------------------------


def flood(host: str, port: int, number: int, num_idle: int, num_dripping: int) -> None:
    """Open all connections, say so, then drip one byte into each of the dripping ones for ever;
    what the service closes is opened again. Attackers have machines of their own: here they take no
    core from the caller or the service."""
    os.nice(19)
    sources = [f"127.{10 + number}.{block}.{last}" for block in range(4) for last in range(1, 251)]

    def connect(index: int) -> socket.socket:
        caller = socket.socket()
        caller.setblocking(False)
        caller.bind((sources[index % len(sources)], 0))
        caller.connect_ex((host, port))
        return caller

    idle: list[socket.socket] = []
    for index in range(num_idle):
        with contextlib.suppress(OSError):  # the limit of open files
            idle.append(connect(index))
        if index % 100 == 99:
            time.sleep(0.01)  # or the backlog drops them
    dripping = [connect(index) for index in range(num_dripping)]
    has_begun = [False] * num_dripping
    print(len(idle) + len(dripping), flush=True)
    while True:
        for index, caller in enumerate(dripping):
            try:
                caller.send(DRIP if has_begun[index] else LINE)
                has_begun[index] = True
            except BlockingIOError:
                continue
            except OSError:
                caller.close()
                dripping[index], has_begun[index] = connect(index), False
        if select.select([sys.stdin], [], [], DRIP_S)[0]:
            return


@contextlib.contextmanager
def flooding(url: str, num_idle: int, num_dripping: int) -> Generator[int]:
    """The flood, until the block ends; the number of its connections."""
    where = urlsplit(url)
    children = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "benchmarks.doors", "--flood", str(where.hostname)),
                *(str(where.port), str(n)),
                *(str(num_idle // ATTACKERS), str(num_dripping // ATTACKERS)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        for n in range(ATTACKERS)
    ]
    try:
        yield sum(int(child.stdout.readline()) for child in children if child.stdout)
    finally:
        for child in children:
            child.kill()
            child.wait()


# --- the healthy caller ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Caller:
    address: tuple[str, int]
    request: bytes

    def p99_s(self, num_calls: int) -> float:
        """Of calls over one connection, every tenth over a new one."""
        latencies: list[float] = []
        with socket.create_connection(self.address, 60) as kept:
            kept.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._call(kept)  # known from now on
            for number in range(num_calls):
                began_at = time.perf_counter()
                if number % 10:
                    self._call(kept)
                else:
                    self._call_anew()
                latencies.append(time.perf_counter() - began_at)
                time.sleep(0.001)
        return sorted(latencies)[int(0.99 * num_calls)]

    def _call_anew(self) -> None:
        """Over a new connection; another if it was closed, as every client does."""
        while True:
            try:
                with socket.create_connection(self.address, 60) as fresh:
                    return self._call(fresh)
            except ConnectionError:
                continue

    def _call(self, caller: socket.socket) -> None:
        caller.sendall(self.request)
        answer = b""
        while b"\r\n\r\n" not in answer:
            if not (more := caller.recv(1 << 16)):
                raise ConnectionError("closed without an answer")
            answer += more
        head, _, body = answer.partition(b"\r\n\r\n")
        assert b" 200 " in head.splitlines()[0], head
        length = int(head.lower().split(b"content-length:")[1].split()[0])
        while len(body) < length:
            body += caller.recv(1 << 16)


def measure(kind: str, folder: Path, pairs: int, num_idle: int, num_dripping: int) -> list[float]:
    with process("benchmarks.doors_service", kind, str(folder)) as server:
        url, path, key = server.url.split()
        where = urlsplit(url)
        request = f"GET {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n\r\n"
        caller = Caller((str(where.hostname), where.port or 0), request.encode())
        caller.p99_s(CALLS // 10)
        service = psutil.Process(server.pid)
        before = service.memory_info().rss
        ratios: list[float] = []
        for _ in range(pairs):
            calm_s = caller.p99_s(CALLS)
            with flooding(url, num_idle, num_dripping) as opened:
                flooded_s = caller.p99_s(CALLS)
                files, grown = service.num_fds(), service.memory_info().rss - before
            ratios.append(flooded_s / calm_s)
            log_line(
                f"{kind}: p99 {1e3 * calm_s:.2f} ms, under {opened} connections "
                f"{1e3 * flooded_s:.2f} ms: x {ratios[-1]:.2f}; {files} files open, "
                f"{grown / 1e6:.0f} MB more"
            )
        return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--flood", nargs=5, metavar="ARGUMENT", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.flood:
        host, *numbers = options.flood
        flood(host, *map(int, numbers))
        return
    scale = 10 if options.quick else 1
    medians: dict[str, float] = {}
    with scratch(None) as folder:
        for kind in KINDS:
            ratios = measure(
                kind, folder / kind, 3 if options.quick else 5, IDLE // scale, DRIPPING // scale
            )
            medians[f"{kind}_p99_ratio"] = statistics.median(ratios)
    result(ratio=max(medians.values()), bound=2.0, **medians)


if __name__ == "__main__":
    main()
