# SPDX-License-Identifier: Apache-2.0
"""How do versions reach nodes at the far end of a long thin link?

Versions of SmolLM2 from a recorded training, whole and as deltas, over 300 ms and 20 Mbit/s to two
nodes with a link each; without loss, then with one packet in a hundred lost, under each congestion
control that the kernel has. `--quick`: a model of 30 MB, one node, no loss. Needs root."""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any, TypeVar

import msgspec

from benchmarks.cache import CACHE, set_up_engine
from benchmarks.harness import ROOT, log_line, result, scratch
from benchmarks.wan_link import Link, Side
from benchmarks.weights_messages import Arrival, Burst, Order, Published
from benchmarks.weights_origin import RUN, write_certificate
from penstock.types import PolicyName, PublishedVersion
from penstock.weights.client import NUM_RANGES
from penstock.weights.manifest import FileEntry, parse_manifest
from penstock.weights.pulling.links import Transfer
from penstock.weights.pulling.partial import piece_bytes
from penstock.weights.store import DirectoryStore
from penstock.wire.auth import Audience, Role, Signer

T = TypeVar("T")
DELAY_MS, RATE_MBIT = 150.0, 20.0
LOSS = 0.01
LOSSY_RANGES = 56
"""A connection under reno that loses so much carries half a Mbit/s at this distance."""
POLICY = PolicyName("policy")
PORT, BARE_PORT = 18090, 18091
TRACE = "smollm2-lr5e-6"
BURST = 100
"""Versions handed over for the percentile of what that blocks."""
QUICK_MB = 30
"""Of the model made for `--quick`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    loss: float
    congestion: str
    num_nodes: int
    num_ranges: int

    @property
    def name(self) -> str:
        return f"{self.loss:.0%} loss, {self.congestion}, {self.num_ranges} ranges"


@dataclass(slots=True)
class Measured:
    """Of one setting: every node, every version."""

    baseline_bytes_per_s: float = 0.0
    full: list[Arrival] = field(default_factory=list[Arrival])
    delta: list[Arrival] = field(default_factory=list[Arrival])

    @property
    def bytes_per_s(self) -> float:
        return mean(arrival.fetched_bytes / arrival.pull_s for arrival in self.full)

    @property
    def utilisation(self) -> float:
        """Of the link's bits, those that weights were; headers are none of them."""
        return self.bytes_per_s / (RATE_MBIT * 125_000)

    @property
    def delta_speedup(self) -> float:
        return self.full_s / self.delta_s

    @property
    def full_s(self) -> float:
        return mean(arrival.pull_s for arrival in self.full)

    @property
    def delta_s(self) -> float:
        return median(arrival.pull_s for arrival in self.delta)


# --- processes ----------------------------------------------------------------------------------


class Child:
    """A process that answers a line with a line."""

    def __init__(self, process: subprocess.Popen[Any]) -> None:
        self.process = process

    def send_line(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def read_reply(self, kind: type[T]) -> T:
        return msgspec.json.decode(self.line(), type=kind)

    def line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.process.args} ended; see its messages above")
        return line


def options(**more: str) -> dict[str, Any]:
    path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
    return {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "text": True,
        "cwd": ROOT,
        "env": {**os.environ, "PYTHONPATH": path, **more},
    }


def python(module: str, *words: object) -> list[str]:
    return [sys.executable, "-m", module, *map(str, words)]


def prioritised(argv: list[str]) -> list[str]:
    """As if on a machine of its own: what else runs on this one must not make a link slower."""
    return ["nice", "-n", "-10", *argv]


class World:
    """An origin with a link to each of its nodes."""

    def __init__(self, folder: Path, setting: Setting, links: Sequence[Link], token: str) -> None:
        self.setting = setting
        self._folder = folder
        self._links = links
        self._token = token
        addresses = [link.addresses["a"] for link in links]
        self._certificate = str(write_certificate(folder, addresses))
        self._start(
            0, "a", prioritised(python("benchmarks.weights_origin", "0.0.0.0", PORT, folder))
        )
        self._wait_for_origin()

    def _start(self, number: int, side: Side, argv: list[str], **more: str) -> Child:
        return Child(self._links[number].popen(side, argv, **options(**more)))

    def _wait_for_origin(self) -> None:
        host = self._links[0].addresses["a"]
        knock = f"import socket; socket.create_connection(({host!r}, {PORT})).close()"
        for _ in range(100):
            argv = [sys.executable, "-c", knock]
            child = self._links[0].popen("a", argv, stderr=subprocess.DEVNULL)
            if child.wait() == 0:
                return
            time.sleep(0.1)
        raise RuntimeError("the origin does not listen; see its messages above")

    def cache(self, number: int) -> Path:
        name = f"cache-{number}-{self.setting.loss}-{self.setting.congestion}"
        return self._folder / name

    def node(self, number: int, cache: Path) -> Child:
        url = f"https://{self._links[number].addresses['a']}:{PORT}"
        argv = prioritised(python("benchmarks.weights_node", url, cache))
        child = self._start(
            number, "b", argv, WEIGHTS_TOKEN=self._token, SSL_CERT_FILE=self._certificate
        )
        assert child.line() == "ready\n"
        return child

    def baseline_bytes_per_s(self, seconds: float) -> float:
        """Over one bare connection."""
        host = self._links[0].addresses["a"]
        server = self._start(0, "a", python("benchmarks.baselines.bulk", "serve", host, BARE_PORT))
        assert server.line() == "ready\n"
        argv = python("benchmarks.baselines.bulk", "read", host, BARE_PORT, seconds)
        found = float(self._start(0, "b", argv).line())
        server.process.kill()
        return found


@contextlib.contextmanager
def world(folder: Path, setting: Setting, token: str) -> Generator[World]:
    with contextlib.ExitStack() as links:
        made: list[Link] = []
        for _ in range(setting.num_nodes):
            link = Link(
                delay_ms=DELAY_MS,
                rate_mbit=RATE_MBIT,
                loss=setting.loss,
                congestion=setting.congestion,
                beside=made[0] if made else None,
            )
            made.append(links.enter_context(link))
        yield World(folder, setting, made, token)


class Versions:
    """A trainer, and what it has published."""

    def __init__(self, folder: Path, source: str) -> None:
        argv = python("benchmarks.weights_trainer", folder, source)
        self._child = Child(subprocess.Popen(argv, **options()))
        self.model_bytes = self._child.read_reply(dict[str, int])["model_bytes"]
        self.published: list[Published] = []

    def publish(self) -> PublishedVersion:
        self._child.send_line(f"publish {len(self.published)}")
        self.published.append(self._child.read_reply(Published))
        return self[len(self.published) - 1]

    def __getitem__(self, number: int) -> PublishedVersion:
        digest = self.published[number].manifest_digest
        return PublishedVersion(policy=POLICY, incarnation=1, number=number, manifest_digest=digest)

    def burst(self, num: int) -> Burst:
        self._child.send_line(f"burst {num}")
        return self._child.read_reply(Burst)

    def close(self) -> None:
        with self._child.process as process:
            process.kill()


# --- measurements -------------------------------------------------------------------------------


def send(nodes: Sequence[Child], order: Order) -> list[Arrival]:
    """To all nodes at once."""
    for node in nodes:
        node.send_line(msgspec.json.encode(order).decode())
    return [node.read_reply(Arrival) for node in nodes]


def measure(here: World, versions: Versions, num_deltas: int, baseline_s: float) -> Measured:
    """Number 0 whole, then the others, each as a delta."""
    found = Measured(baseline_bytes_per_s=here.baseline_bytes_per_s(baseline_s))
    nodes = [here.node(n, here.cache(n)) for n in range(here.setting.num_nodes)]

    def order(number: int, transfer: Transfer) -> Order:
        num_ranges = here.setting.num_ranges
        return Order(wanted=versions[number], transfer=transfer, num_ranges=num_ranges)

    found.full = send(nodes, order(0, "full"))
    log_arrivals(here.setting, "full", 0, found.full)
    for number in range(1, 1 + num_deltas):
        if number == len(versions.published):
            versions.publish()
        arrived = send(nodes, order(number, "delta"))
        log_arrivals(here.setting, "delta", number, arrived)
        found.delta += arrived
    for node in nodes:
        node.process.kill()
    log_line(
        f"{here.setting.name}: utilisation {found.utilisation:.2f}, one bare connection "
        f"{found.baseline_bytes_per_s / RATE_MBIT / 125_000:.2f}, "
        f"delta {found.delta_speedup:.1f} times as fast"
    )
    return found


def log_arrivals(setting: Setting, kind: str, number: int, arrived: list[Arrival]) -> None:
    for node, arrival in enumerate(arrived):
        log_line(
            f"{setting.name}: version {number} {kind} to node {node}: "
            f"{arrival.fetched_bytes / 1e6:.2f} MB in {arrival.pull_s:.1f} s, "
            f"load {arrival.load_s:.1f} s, downtime {arrival.downtime_s:.2f} s"
        )


def refetched_bytes(here: World, wanted: PublishedVersion, store: Path) -> int:
    """Kill a node in the middle of a whole version and start it again: how many of the bytes that
    it had were fetched again."""
    cache = here.cache(0).with_name("broken")
    order = Order(
        wanted=wanted, transfer="full", num_ranges=here.setting.num_ranges, is_loaded=False
    )
    node = here.node(0, cache)
    node.send_line(msgspec.json.encode(order).decode())
    files = parse_manifest(DirectoryStore(store).read_manifest(wanted.manifest_digest)).files
    while missing_bytes(cache, files) > sum(file.bytes for file in files) / 2:
        time.sleep(0.1)
    node.process.kill()
    node.process.wait()
    left = missing_bytes(cache, files)
    [arrival] = send([here.node(0, cache)], order)
    log_line(
        f"killed half-way with {left / 1e6:.1f} MB to come: {arrival.fetched_bytes / 1e6:.1f} came"
    )
    return arrival.fetched_bytes - left


def missing_bytes(cache: Path, files: Sequence[FileEntry]) -> int:
    found = 0
    for file in files:
        blob = cache / "blobs" / file.blob
        path = blob.with_name(f"{file.blob}.partial")
        if blob.exists():
            continue
        if not path.exists():
            found += file.bytes
            continue
        with contextlib.suppress(FileNotFoundError):  # it is whole now
            found += _unmarked_bytes(path, file)
    return found


def _unmarked_bytes(path: Path, file: FileEntry) -> int:
    """Only reads: after the blob's bytes and the piece size follows a mark per finished piece."""
    if path.stat().st_size == file.bytes:
        return 0
    with path.open("rb") as partial:
        partial.seek(file.bytes + 8)
        marks = partial.read()
    size = piece_bytes(file.bytes)
    starts = range(0, file.bytes, size)
    return sum(
        min(size, file.bytes - start)
        for number, start in enumerate(starts)
        if marks[number : number + 1] != b"\1"
    )


# --- all of it ----------------------------------------------------------------------------------


def settings(*, is_quick: bool) -> list[Setting]:
    def one(loss: float, congestion: str, num_ranges: int = NUM_RANGES) -> Setting:
        num_nodes = 1 if is_quick else 2
        return Setting(loss=loss, congestion=congestion, num_nodes=num_nodes, num_ranges=num_ranges)

    if is_quick:
        return [one(0.0, "reno")]
    allowed = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control").read_text().split()
    lossy = [one(LOSS, "reno", LOSSY_RANGES)]
    return [one(0.0, "reno"), *lossy, *([one(LOSS, "bbr")] if "bbr" in allowed else [])]


def trace() -> str:
    set_up_engine()
    return str(CACHE / "traces" / TRACE)


def percentile_ms(seconds: Sequence[float], share: float) -> float:
    ordered = sorted(seconds)
    return 1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="30 MB, one node, no loss")
    parser.add_argument("--folder", type=Path, help="for what is written; on a real disk")
    given = parser.parse_args()
    source = str(QUICK_MB) if given.quick else trace()
    with scratch(given.folder) as folder:
        run(folder, source, settings(is_quick=given.quick))


def run(folder: Path, source: str, chosen: Sequence[Setting]) -> None:
    is_quick = len(chosen) == 1
    token = Signer.create(folder / "keys", RUN).mint(Role.ROLLOUT, [Audience.WEIGHTS], ttl_s=7200)
    versions = Versions(folder, source)
    versions.publish()
    versions.publish()  # bursts need two
    burst = versions.burst(BURST)
    found: dict[str, Measured] = {}
    again = 0
    for setting in chosen:
        with world(folder, setting, token) as here:
            measured = measure(here, versions, 3 if is_quick else 5, 10.0 if is_quick else 20.0)
            if not found:
                again = refetched_bytes(here, versions[0], folder / "store")
            found[f"{setting.loss:.0%}_{setting.congestion}"] = measured
    versions.close()
    report(versions, found, burst, again)


def report(versions: Versions, found: dict[str, Measured], burst: Burst, refetched: int) -> None:
    first = next(iter(found.values()))
    lossy = {
        f"{key}_{name.removeprefix('1%_')}_1pct": value
        for name, one in found.items()
        if name.startswith("1%")
        for key, value in (
            ("link_utilisation_full", one.utilisation),
            ("ratio", one.bytes_per_s / one.baseline_bytes_per_s),
            ("delta_s", one.delta_s),
            ("delta_speedup", one.delta_speedup),
        )
    }
    result(
        link_utilisation_full=first.utilisation,
        baseline_utilisation=first.baseline_bytes_per_s / (RATE_MBIT * 125_000),
        ratio=first.bytes_per_s / first.baseline_bytes_per_s,
        full_s=first.full_s,
        delta_s=first.delta_s,
        delta_speedup=first.delta_speedup,
        downtime_delta_s=max(arrival.downtime_s for arrival in first.delta),
        downtime_full_s=max(arrival.downtime_s for arrival in first.full),
        publish_block_p99_ms=percentile_ms(burst.block_s, 0.99),
        publish_copy_ms=1e3 * median(burst.copy_s),
        trainer_wait_s=median(published.wait_s for published in versions.published),
        trainer_store_s=median(published.store_s for published in versions.published),
        refetched_bytes=refetched,
        model_mb=versions.model_bytes / 1e6,
        **lossy,
    )


if __name__ == "__main__":
    main()
