# SPDX-License-Identifier: Apache-2.0
"""A trainer, a front, a relay and nodes as real processes, forked by one that has imported all they
need. Each may be told to kill itself at a named point.

A line is `{"process": …, "log": …, "kill_at": [point, calls] | null, …}`; the answer is the pid.
The children die with this process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import uvloop
from tests.chaos.weights_content import read_folder, value_of, write_folder

from penstock.errors import PenstockError
from penstock.fleet.processes import PARENT_PID_ENV, exit_with_parent
from penstock.types import PolicyName, PublishedVersion
from penstock.weights import retention
from penstock.weights.client import Puller
from penstock.weights.publish import delete_unreferenced, put_snapshot
from penstock.weights.pulling.cache import BlobCache
from penstock.weights.pulling.partial import Partial
from penstock.weights.serving.origin import Origin
from penstock.weights.serving.relay import Relay
from penstock.weights.serving.server import build
from penstock.weights.store import DirectoryStore
from penstock.wire.auth import Audience, Verifier
from penstock.wire.client import AsyncServiceClient, connect
from penstock.wire.serving import serve

POLICY = PolicyName("policy")
PUBLISH_S = 0.05
LOOK_S = 0.03
FENCED = 409
KEPT = 6
"""Versions that the ledger says are in use."""

POINTS: dict[str, tuple[Any, str]] = {
    "trainer: file copied": (DirectoryStore, "put_blob"),
    "trainer: files synced": (DirectoryStore, "sync_blobs"),
    "trainer: delta kept": (DirectoryStore, "put_delta"),
    "trainer: manifest kept": (DirectoryStore, "put_manifest"),
    "trainer: manifest deleted": (DirectoryStore, "delete_manifest"),
    "trainer: delta deleted": (DirectoryStore, "delete_delta"),
    "trainer: file deleted": (DirectoryStore, "delete_blob"),
    "node: piece written": (Partial, "write"),
    "node: file finished": (Partial, "finish"),
    "node: file made": (BlobCache, "rebuild"),
    "node: version staged": (BlobCache, "stage"),
    "node: cache pruned": (BlobCache, "prune"),
}
"""Each is passed twice: before the call and after it."""


def kill_at(point: str, num_calls: int) -> None:
    """Kill this process at the given one of the passes through this point."""
    owner, name = POINTS[point]
    real = getattr(owner, name)
    left = num_calls

    def pass_by() -> None:
        nonlocal left
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def call(*args: Any, **kwargs: Any) -> Any:
        pass_by()
        answer = real(*args, **kwargs)
        pass_by()
        return answer

    setattr(owner, name, call)


# --- parties -------------------------------------------------------------------------------------


def trainer(root: Path, ledger: str) -> None:
    """Take over, publish the restore point, and then one version after the other."""
    folder = root / f"trainer-{os.getpid()}"
    folder.mkdir(exist_ok=True)  # the system uses pids again
    with httpx2.Client(base_url=ledger, timeout=60) as caller:
        born = caller.post("/incarnate").raise_for_status().json()
        number, incarnation, after = born["number"], born["incarnation"], None
        retention.GRACE_S = 0.5
        while True:
            write_folder(folder, number)
            after = put_snapshot(root / "store", folder, policy=POLICY, number=number, after=after)
            body = {
                "incarnation": incarnation,
                "number": number,
                "manifest_digest": after.manifest_digest,
                "weights_digest": after.weights_digest,
            }
            if caller.post("/publish", json=body).status_code == FENCED:
                return
            used = caller.get("/used").json()
            delete_unreferenced(root / "store", used, used[-2:], anchor_every=4)
            time.sleep(PUBLISH_S)
            number += 1


async def weight_server(root: Path, port: int) -> None:
    verifier = Verifier.read(root / "keys", run="run", audience=Audience.WEIGHTS)
    await serve(build(Origin(DirectoryStore(root / "store")), verifier), "127.0.0.1", port, None)


async def relay(root: Path, port: int, upstream: str, token: str) -> None:
    verifier = Verifier.read(root / "keys", run="run", audience=Audience.RELAY)
    async with connect(upstream, token) as caller:
        source = Relay([caller], root / "relay", max_bytes=2 << 20)
        await serve(build(source, verifier), "127.0.0.1", port, None)


async def node(root: Path, name: str, ledger: str, weight_servers: list[list[str]]) -> None:
    """Pull what is wanted, load it, and tell what is served; again and again."""
    puller = Puller(root / name, transfer="delta")
    callers = [AsyncServiceClient(url, token) for url, token in weight_servers]
    served: tuple[PublishedVersion, dict[str, bytes]] | None = None
    async with httpx2.AsyncClient(base_url=ledger, timeout=60) as home:
        while True:
            answer = await home.get("/wanted")
            wanted = PublishedVersion(**answer.json()) if answer.content else None
            if wanted is not None and (served is None or served[0] != wanted):
                try:
                    async with asyncio.timeout(60):
                        folder = await puller.pull(callers, wanted)
                    loaded = read_folder(folder)
                    puller.require_unchanged(folder)
                    served = wanted, loaded
                    puller.prune([wanted.manifest_digest])
                except (PenstockError, OSError, TimeoutError) as error:
                    print(f"not loaded: {error!r}", flush=True)
            if served is not None:
                body = {"node": name, "number": served[0].number, "value": value_of(served[1])}
                await home.post("/served", json=body)
            await asyncio.sleep(LOOK_S)


PROCESSES: dict[str, Callable[..., Any]] = {
    "trainer": trainer,
    "weight_server": weight_server,
    "relay": relay,
    "node": node,
}


def main() -> None:
    os.environ[PARENT_PID_ENV] = str(os.getpid())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _run_process(order)
        print(pid, flush=True)


def _run_process(order: dict[str, Any]) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    exit_with_parent()
    os.setsid()
    out = os.open(order.pop("log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target in (1, 2):
        os.dup2(out, target)
    if (fault := order.pop("kill_at", None)) is not None:
        kill_at(*fault)
    run = PROCESSES[order.pop("process")]
    order["root"] = Path(order["root"])
    try:
        done = run(**order)
        if done is not None:
            uvloop.run(done)
    except BaseException:
        import traceback

        traceback.print_exc()
    os._exit(0)


if __name__ == "__main__":
    main()
