# SPDX-License-Identifier: Apache-2.0
"""The other end of `benchmarks.publish`: `publish_node.py serve FOLDER` is the weight server of
FOLDER/store, `publish_node.py pull FOLDER NUM` a node that pulls and loads NUM versions as they
appear. Runs on the commit before, too, where a node cannot link."""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import sys
import time
from pathlib import Path
from typing import Any

from safetensors.torch import load_file  # pyright: ignore[reportUnknownVariableType]

from benchmarks.publish_ranks import POLICY, passed_bytes
from benchmarks.weights_messages import log_to_stderr
from penstock.types import PublishedVersion
from penstock.weights.client import Puller
from penstock.weights.deltas import file_delta
from penstock.weights.serving.origin import Origin
from penstock.weights.serving.server import build
from penstock.weights.store import DirectoryStore
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.client import AsyncServiceClient
from penstock.wire.serving import serve

RUN = "publish"
LOOPBACK = "127.0.0.1"


def serve_store(folder: Path) -> None:
    signer = Signer.create(folder / "keys", RUN)
    with socket.create_server((LOOPBACK, 0)) as probe:
        port = probe.getsockname()[1]
    token = signer.mint(Role.ROLLOUT, [Audience.WEIGHTS], ttl_s=36_000)
    place = folder / ".server"
    place.write_text(json.dumps({"url": f"http://{LOOPBACK}:{port}", "token": token}))
    place.rename(folder / "server.json")
    app = build(Origin(DirectoryStore(folder / "store")), signer.verifier(Audience.WEIGHTS))
    asyncio.run(serve(app, LOOPBACK, port))


async def pull(folder: Path, num_versions: int) -> None:
    server = json.loads(_await(folder / "server.json").read_text())
    can_link = "store_root" in inspect.signature(Puller).parameters
    options: dict[str, Any] = {"store_root": folder / "store"} if can_link else {}
    puller = Puller(folder / "cache", **options)
    caller = AsyncServiceClient(server["url"], server["token"])
    mapped = [0]
    real = file_delta._mapped  # pyright: ignore[reportPrivateUsage]

    def counting(path: Path, **words: bool):
        mapped[0] += path.stat().st_size
        return real(path, **words)

    file_delta._mapped = counting  # pyright: ignore[reportPrivateUsage]
    for number in range(num_versions):
        stored = json.loads(
            (await asyncio.to_thread(_await, folder / f"version-{number}.json")).read_text()
        )
        before, cpu_before_s = passed_bytes() + mapped[0], time.process_time()
        wanted = PublishedVersion(
            policy=POLICY,
            incarnation=1,
            number=number,
            manifest_digest=stored["manifest_digest"],
        )
        version = await puller.pull([caller], wanted)
        passed = passed_bytes() + mapped[0] - before
        weights = load_file(version / "model.safetensors")
        touched = sum(float(tensor.view(-1)[0]) for tensor in weights.values())
        for tensor in weights.values():
            tensor.clone()
        passed += (version / "model.safetensors").stat().st_size  # the load walks the file once
        cpu_s = time.process_time() - cpu_before_s
        puller.prune({stored["manifest_digest"]})
        at = time.monotonic()
        live = {"at": at, "passed": passed, "touched": touched, "cpu_s": cpu_s, **stored}
        hidden = folder / f".live-{number}"
        hidden.write_text(json.dumps(live))
        hidden.rename(folder / f"live-{number}.json")
        del weights
    await caller.close()


def _await(path: Path) -> Path:
    while not path.exists():
        time.sleep(0.01)
    return path


if __name__ == "__main__":
    log_to_stderr()
    if sys.argv[1] == "serve":
        serve_store(Path(sys.argv[2]))
    else:
        asyncio.run(pull(Path(sys.argv[2]), int(sys.argv[3])))
