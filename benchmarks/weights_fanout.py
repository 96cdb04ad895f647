# SPDX-License-Identifier: Apache-2.0
"""How many copies of a version leave the origin for a region of many nodes, and how long until all
of them have it?

An origin at one end of a link; at the other 1, 8 and 32 nodes behind one relay, then behind two
relays that ask a third. Origin, relays and bare baseline are processes of their
own; the nodes, one client with its own cache each, share one. Needs root for the link; without it
all is on loopback, and copies alone mean something."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Generator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any, Protocol

import msgspec
import numpy as np

from benchmarks.harness import ROOT, log_line, result, scratch
from benchmarks.wan_link import Link, Side
from penstock.observe import logs
from penstock.runs.relay import open_cache
from penstock.types import PolicyName, PublishedVersion
from penstock.weights.client import Puller
from penstock.weights.manifest import parse_manifest
from penstock.weights.publish import put_snapshot
from penstock.weights.serving.origin import Origin
from penstock.weights.serving.server import build
from penstock.weights.store import DirectoryStore
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.client import AsyncServiceClient
from penstock.wire.serving import serve, server

RUN = "fanout"
POLICY = PolicyName("policy")
NODES = (1, 8, 32)
NUM_RANGES = 4
"""Of each node at once: its relay is near, and all of them have this one machine."""
DELAY_MS = 25.0
ORIGIN_PORT, BARE_PORT, RELAY_PORT = 18080, 18081, 18082
SENT = re.compile(r"^penstock_weights_sent_bytes_total (\S+)$", re.M)
TTL_S = 24 * 3600.0


class Network(Protocol):
    """Where both ends are: on a link, or not."""

    @property
    def addresses(self) -> Mapping[Side, str]: ...

    def popen(self, side: Side, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]: ...


class Loopback:
    addresses: Mapping[Side, str] = {"a": "127.0.0.1", "b": "127.0.0.1"}

    def popen(self, side: Side, argv: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        return subprocess.Popen(argv, **options)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the process of the nodes is told."""

    origin: str
    relays: tuple[str, ...]
    """The nodes take turns in choosing one; none means that all ask the origin."""
    token: str
    relay_token: str
    wanted: PublishedVersion
    num_nodes: int
    folder: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    seconds: float
    """Until the last node had the version, verified."""
    egress_bytes: float
    """Of blobs, as the origin counts them."""


# --- the processes ----------------------------------------------------------------------------


def serve_origin(host: str, folder: Path) -> None:
    verifier = Signer.create(folder / "keys", RUN).verifier(Audience.WEIGHTS)
    app = build(Origin(DirectoryStore(folder / "store")), verifier)
    listener = socket.create_server((host, ORIGIN_PORT), backlog=1024)
    print("ready", flush=True)
    # A link of namespaces is nobody's network, so its address may go without TLS.
    server(app, "127.0.0.1", ORIGIN_PORT).run(sockets=[listener])


async def serve_relay(folder: Path, cache: Path, port: int, urls: Sequence[str]) -> None:
    """What `penstock relay` serves, which itself would refuse the link's address without TLS."""
    signer = Signer.read(folder / "keys", RUN)
    own = signer.mint(Role.RELAY, [Audience.WEIGHTS, Audience.RELAY], ttl_s=TTL_S)
    async with open_cache(urls, own, cache, max_bytes=1 << 30, warn=log_line) as source:
        await serve(build(source, signer.verifier(Audience.RELAY)), "127.0.0.1", port)


async def run_nodes(order: Order) -> Arrival:
    origins = [AsyncServiceClient(order.origin, order.token) for _ in range(order.num_nodes)]
    relays = [
        [AsyncServiceClient(order.relays[i % len(order.relays)], order.relay_token)]
        if order.relays
        else []
        for i in range(order.num_nodes)
    ]
    pulls = [
        Puller(Path(order.folder) / f"node-{i}", transfer="full", num_ranges=NUM_RANGES)
        for i in range(order.num_nodes)
    ]
    sent = await _sent(origins[0])
    began_at = time.perf_counter()
    await asyncio.gather(
        *(
            puller.pull([*near, far], order.wanted)
            for puller, near, far in zip(pulls, relays, origins, strict=True)
        )
    )
    seconds = time.perf_counter() - began_at
    egress_bytes = await _sent(origins[0]) - sent
    for caller in [*origins, *(caller for near in relays for caller in near)]:
        await caller.close()
    return Arrival(seconds=seconds, egress_bytes=egress_bytes)


async def _sent(origin: AsyncServiceClient) -> float:
    text = (await origin.request("GET", "/metrics")).text
    match = SENT.search(text)
    assert match is not None, "the origin counts no bytes"
    return float(match.group(1))


# --- the world --------------------------------------------------------------------------------


def make_model(folder: Path, num_bytes: int) -> None:
    """Two shards of random bits, and the small files of a snapshot."""
    folder.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for shard in (1, 2):
        data = draw.integers(0, 1 << 16, num_bytes // 4, np.uint16).tobytes()
        entry = {"dtype": "BF16", "shape": [num_bytes // 4], "data_offsets": [0, len(data)]}
        head = json.dumps({f"layer.{shard}.weight": entry}).encode()
        name = f"model-0000{shard}-of-00002.safetensors"
        (folder / name).write_bytes(struct.pack("<Q", len(head)) + head + data)
    (folder / "config.json").write_text("{}")
    (folder / "tokenizer.json").write_text("{}")


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    network: Network
    folder: Path
    signer: Signer
    wanted: PublishedVersion
    model_bytes: int

    @property
    def origin(self) -> str:
        return f"http://{self.network.addresses['a']}:{ORIGIN_PORT}"

    @contextlib.contextmanager
    def process(self, side: Side, *words: str, env: Mapping[str, str] = {}) -> Generator[IO[str]]:
        """Python inside, until the block ends; yields its stdout."""
        path = os.pathsep.join([str(ROOT), str(ROOT / "src")])
        child = self.network.popen(
            side,
            [sys.executable, *words],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": path, **env},
        )
        try:
            assert child.stdout is not None
            yield child.stdout
        finally:
            child.kill()
            child.wait()
            if child.stdout is not None:
                child.stdout.close()

    @contextlib.contextmanager
    def relay(self, number: int, upstreams: Sequence[str] = ()) -> Generator[str]:
        """A relay near the nodes, with an empty cache."""
        port = RELAY_PORT + number
        cache = self.folder / f"relay-{number}-{time.monotonic_ns()}"
        words = ["-m", "benchmarks.weights_fanout", "--relay", str(self.folder), str(cache)]
        with self.process("b", *words, str(port), *upstreams, self.origin):
            yield f"http://127.0.0.1:{port}"

    def nodes(self, num: int, relays: Sequence[str]) -> Arrival:
        order = Order(
            origin=self.origin,
            relays=tuple(relays),
            token=self.signer.mint(Role.ROLLOUT, [Audience.WEIGHTS], ttl_s=TTL_S),
            relay_token=self.signer.mint(Role.ROLLOUT, [Audience.RELAY], ttl_s=TTL_S),
            wanted=self.wanted,
            num_nodes=num,
            folder=str(self.folder / f"nodes-{time.monotonic_ns()}"),
        )
        words = ("-m", "benchmarks.weights_fanout", "--nodes", json.dumps(asdict(order)))
        with self.process("b", *words) as said:
            return msgspec.json.decode(said.read(), type=Arrival)

    def bare_bytes_per_s(self, seconds: float) -> float:
        """Over one connection that carries nothing else."""
        host = self.network.addresses["a"]
        bulk = ("-m", "benchmarks.baselines.bulk")
        with self.process("a", *bulk, "serve", host, str(BARE_PORT)) as said:
            said.readline()
            with self.process("b", *bulk, "read", host, str(BARE_PORT), str(seconds)) as rate:
                return float(rate.read())


@contextlib.contextmanager
def world(network: Network, folder: Path, model_bytes: int) -> Generator[World]:
    make_model(folder / "model", model_bytes)
    stored = put_snapshot(folder / "store", folder / "model", policy=POLICY, number=0)
    wanted = PublishedVersion(
        policy=POLICY, incarnation=1, number=0, manifest_digest=stored.manifest_digest
    )
    manifest = DirectoryStore(folder / "store").read_manifest(stored.manifest_digest)
    made = World(
        network=network,
        folder=folder,
        signer=Signer.create(folder / "keys", RUN),
        wanted=wanted,
        model_bytes=sum(file.bytes for file in parse_manifest(manifest).files),
    )
    words = ("-m", "benchmarks.weights_fanout", "--origin", str(folder), network.addresses["a"])
    with made.process("a", *words) as said:
        said.readline()
        yield made


@contextlib.contextmanager
def topology(made: World, name: str) -> Generator[list[str]]:
    """The relays that nodes are told of: none, one, or two that ask a third."""
    with contextlib.ExitStack() as relays:
        if name == "direct":
            yield []
            return
        first = relays.enter_context(made.relay(0))
        wait_for(made, first)
        if name == "relay":
            yield [first]
            return
        leaves = [relays.enter_context(made.relay(number, [first])) for number in (1, 2)]
        for leaf in leaves:
            wait_for(made, leaf)
        yield leaves


def wait_for(made: World, url: str) -> None:
    """From where it can be reached."""
    host, port = url.removeprefix("http://").split(":")
    knock = f"""
import socket, sys, time
for _ in range(3000):
    try: socket.create_connection(({host!r}, {port})); sys.exit()
    except OSError: time.sleep(0.02)
sys.exit("nobody listens")"""
    with made.process("b", "-c", knock) as said:
        said.read()


# --- all of it --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """So many nodes behind such relays, once."""

    copies: float
    seconds: float
    near_s: float
    """The same again, with relays that have it: what nodes and relays take without the link."""
    link_s: float
    """One copy over the bare link."""


def measure(made: World, name: str, num_nodes: int, bare_s: float) -> Cell:
    with topology(made, name) as relays:
        rate = made.bare_bytes_per_s(bare_s)
        first, again = made.nodes(num_nodes, relays), made.nodes(num_nodes, relays)
    egress_bytes = first.egress_bytes + (again.egress_bytes if relays else 0.0)
    cell = Cell(
        copies=egress_bytes / made.model_bytes,
        seconds=first.seconds,
        near_s=again.seconds,
        link_s=made.model_bytes / rate,
    )
    log_line(
        f"{name:6} {num_nodes:3} nodes: {cell.copies:6.3f} copies from the origin, all there after "
        f"{cell.seconds:5.1f} s; the bare link takes {cell.link_s:5.1f} s for one, and without "
        f"it nodes and relays {cell.near_s:5.1f} s"
    )
    return cell


def figures(found: Mapping[tuple[str, int], Sequence[Cell]]) -> dict[str, float]:
    cells = [cell for each in found.values() for cell in each]
    link_s = median(cell.link_s for cell in cells)
    made = {"origin_egress_copies": max(cell.copies for cell in cells)}
    for (name, num), each in found.items():
        made[f"copies_{name}_{num}"] = max(cell.copies for cell in each)
        made[f"time_vs_link_{name}_{num}"] = median(cell.seconds / link_s for cell in each)
        made[f"time_vs_bound_{name}_{num}"] = median(
            cell.seconds / max(link_s, cell.near_s) for cell in each
        )
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smaller model, one round")
    parser.add_argument("--folder", type=Path, help="where to write; on a real disk")
    parser.add_argument("--rate-mbit", type=float, default=16.0, help="of the link")
    parser.add_argument("--origin", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--relay", nargs="+", help=argparse.SUPPRESS)
    parser.add_argument("--nodes", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.origin:
        return serve_origin(options.origin[1], Path(options.origin[0]))
    if options.relay:
        shared, cache, port, *urls = options.relay
        return asyncio.run(serve_relay(Path(shared), Path(cache), int(port), urls))
    if options.nodes:
        logs.configure("nodes", level="warning")
        arrival = asyncio.run(run_nodes(msgspec.json.decode(options.nodes, type=Order)))
        return print(json.dumps(asdict(arrival)), flush=True)
    model_bytes, rounds, bare_s = (8 << 20, 1, 3.0) if options.quick else (20 << 20, 3, 6.0)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(scratch(options.folder))
        network: Network = Loopback()
        if os.geteuid() == 0:
            link = Link(delay_ms=DELAY_MS, rate_mbit=options.rate_mbit)
            network = stack.enter_context(link)
        else:
            log_line("without root there is no link: times mean little, copies are what they are")
        made = stack.enter_context(world(network, folder, model_bytes))
        found: dict[tuple[str, int], list[Cell]] = {}
        for _ in range(rounds):
            for name in ("relay", "tree"):
                for num in NODES:
                    one = measure(made, name, num, bare_s)
                    found.setdefault((name, num), []).append(one)
    result(**figures(found))


if __name__ == "__main__":
    main()
