# SPDX-License-Identifier: Apache-2.0
"""A complete trainer with only the standard library, msgpack and blake3. Read it together with
docs/reference/protocol.md and write yours in any language. Each batch changes one element of the
weights.

python recipes/foreign/trainer.py URL --token-file FILE --store DIR [--policy NAME] [--init FOLDER]
    [--state DIR]
"""

import argparse
import json
import os
import secrets
import struct
import sys
import time
import urllib.request
from contextlib import suppress
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import msgpack
from blake3 import blake3

SUFFIXES = (".safetensors", ".json", ".jinja", ".txt", ".model")
Record = dict[str, Any]
Files = dict[str, bytes]


class Service:
    """Calls one service; sends the same bytes again if it is busy or does not respond."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url.rstrip("/")
        self.headers = {"Authorization": f"Bearer {token}"}
        self.headers |= {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}

    def call(self, method: str, path: str, body: Record | None = None) -> Record:
        data = None if body is None else msgpack.packb(body)
        wait_s = 0.1
        while True:
            request = urllib.request.Request(self.url + path, data, self.headers, method=method)
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return msgpack.unpackb(answer.read())
            except (OSError, HTTPException) as error:
                if isinstance(error, HTTPError) and error.code not in (429, 503, 507):
                    raise
                after = error.headers.get("Retry-After") if isinstance(error, HTTPError) else None
            time.sleep(float(after or wait_s))
            wait_s = min(2.0, 2 * wait_s)


class Store:
    """A folder of blobs and manifests named by their BLAKE3; nothing is ever overwritten."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("blobs", "manifests", "incoming"):
            (root / name).mkdir(parents=True, exist_ok=True)

    def put(self, data: bytes, place: str) -> None:
        """Atomic and durable: afterwards the file is complete, or does not exist."""
        incoming = self.root / "incoming" / secrets.token_hex(8)
        with incoming.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        final = self.root / place
        with suppress(FileExistsError):  # the same bytes already exist
            os.link(incoming, final)
        incoming.unlink()
        folder = os.open(final.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)

    def put_version(self, policy: str, number: int, files: Files) -> tuple[str, str]:
        """Blobs first, the manifest last; returns the digests to publish."""
        manifest: Record = {"format": 1, "policy": policy, "number": number, "files": []}
        tensors: list[Record] = []
        for name, data in files.items():
            blob = blake3(data).hexdigest()
            self.put(data, f"blobs/{blob}")
            manifest["files"].append({"name": name, "blob": blob, "bytes": len(data)})
            if name.endswith(".safetensors"):
                tensors += tensors_of(data)
        tensors.sort(key=lambda tensor: tensor["name"])
        lines = [
            f"{t['name']} {t['dtype']} {'x'.join(map(str, t['shape']))} {t['digest']}\n"
            for t in tensors
        ]
        weights_digest = blake3("".join(lines).encode()).hexdigest()
        manifest |= {"tensors": tensors, "weights_digest": weights_digest}
        raw = json.dumps(manifest).encode()
        digest = blake3(raw).hexdigest()
        self.put(raw, f"manifests/{digest}.json")
        return digest, weights_digest

    def read_version(self, manifest_digest: str) -> Files:
        manifest = json.loads((self.root / f"manifests/{manifest_digest}.json").read_bytes())
        return {
            file["name"]: (self.root / "blobs" / file["blob"]).read_bytes()
            for file in manifest["files"]
        }


def tensors_of(blob: bytes) -> list[Record]:
    """safetensors: 8 bytes of header length, a JSON header, raw tensors."""
    start = 8 + int.from_bytes(blob[:8], "little")
    found: list[Record] = []
    for name, entry in json.loads(blob[8:start]).items():
        if name != "__metadata__":
            first, last = entry.pop("data_offsets")
            digest = blake3(blob[start + first : start + last]).hexdigest()
            found.append({"name": name, "digest": digest, **entry})
    return found


def initial_files(init: Path | None) -> Files:
    """An ordinary Hugging Face folder, or a model of one tensor."""
    if init is not None:
        paths = [path for path in sorted(init.iterdir()) if path.name.endswith(SUFFIXES)]
        return {path.name: path.read_bytes() for path in paths}
    header = json.dumps({"w": {"dtype": "F32", "shape": [4], "data_offsets": [0, 16]}}).encode()
    weights = struct.pack("<Q", len(header)) + header + struct.pack("<4f", 0.0, 0.0, 0.0, 0.0)
    return {"model.safetensors": weights, "config.json": b'{"model_type": "foreign"}'}


def with_one_changed_element(files: Files, number: int) -> Files:
    """The "training": set the lowest byte of the first element to the number of steps."""
    name = min(name for name in files if name.endswith(".safetensors"))
    data = bytearray(files[name])
    data[8 + int.from_bytes(data[:8], "little")] = number % 256
    return {**files, name: bytes(data)}


class Trainer:
    def __init__(self, dataflow: Service, store: Store, policy: str, state: Path) -> None:
        self.dataflow, self.store, self.policy, self.state = dataflow, store, policy, state
        self.incarnation, self.number, self.seq = 0, 0, 0
        self.files: Files = {}

    def run(self, init: Path | None) -> None:
        self.restore(init)
        self.incarnate()
        self.publish()  # the restore point comes first
        while batch := self.next_batch():
            path = f"/v1/batches/{self.policy}.{self.seq + 1}/rows"
            rows = self.dataflow.call("POST", path, {"indexes": None})
            self.train(batch, [row["payload"] for row in rows["rows"]])
            self.publish()
            self.checkpoint()

    def restore(self, init: Path | None) -> None:
        """Start from the last checkpoint, or from the initial model."""
        self.state.mkdir(parents=True, exist_ok=True)
        cursor = self.state / "cursor.json"
        if not cursor.exists():
            self.files = initial_files(init)
            return
        saved = json.loads(cursor.read_bytes())
        self.number, self.seq = saved["number"], saved["seq"]
        self.files = self.store.read_version(saved["manifest"])

    def incarnate(self) -> None:
        """Become the only trainer of this policy; any earlier trainer is fenced from now on."""
        body: Record = {"request_id": secrets.token_hex(8), "number": self.number, "seq": self.seq}
        for tries_left in (2, 1, 0):
            body["expected"] = self.dataflow.call("GET", self.path())["incarnation"]
            try:
                answer = self.dataflow.call("POST", self.path("/incarnations"), body)
                self.incarnation = answer["incarnation"]
                return
            except HTTPError as error:  # another trainer was faster: read the state again
                if error.code != 409 or not tries_left:
                    raise

    def next_batch(self) -> Record | None:
        body = {"consumer": self.policy, "seq": self.seq + 1, "incarnation": self.incarnation}
        while True:
            answer = self.dataflow.call("POST", "/v1/batches", {**body, "wait_s": 20.0})
            if answer["manifest"] is not None or answer["end"]:
                return answer["manifest"]

    def train(self, batch: Record, payloads: list[bytes | None]) -> None:
        """Commit number + 1 if the weights changed, otherwise the same number with a reason."""
        rewards = [msgpack.unpackb(payload)["reward"] for payload in payloads if payload]
        body: Record = {"incarnation": self.incarnation, "skipped": "", "stats": {}}
        if rewards:
            self.files = with_one_changed_element(self.files, self.number + 1)
            self.number += 1
            body["stats"] = {"reward": sum(rewards) / len(rewards)}
        else:
            body["skipped"] = "all rows of the batch are unavailable"
        path = f"/v1/batches/{self.policy}.{batch['seq']}/commit"
        self.dataflow.call("POST", path, {**body, "number": self.number})
        self.seq = batch["seq"]

    def publish(self) -> None:
        self.manifest, weights = self.store.put_version(self.policy, self.number, self.files)
        body = {"incarnation": self.incarnation, "number": self.number}
        body |= {"manifest_digest": self.manifest, "weights_digest": weights}
        self.dataflow.call("POST", self.path("/versions"), body)

    def checkpoint(self) -> None:
        """The weights are already in the store, so only the cursor must be saved."""
        saved = {"number": self.number, "seq": self.seq, "manifest": self.manifest}
        (self.state / "cursor.partial").write_text(json.dumps(saved))
        (self.state / "cursor.partial").replace(self.state / "cursor.json")
        body = {"incarnation": self.incarnation, "retained": [[self.number, self.seq]]}
        self.dataflow.call("PUT", self.path("/checkpoints"), body)

    def path(self, rest: str = "") -> str:
        return f"/v1/policies/{self.policy}{rest}"


def main() -> None:
    parser = argparse.ArgumentParser(description="A trainer that changes one element per batch.")
    parser.add_argument("url")
    file = os.environ.get("PENSTOCK_TOKEN_FILE")
    parser.add_argument("--token-file", type=Path, default=file, required=not file)
    parser.add_argument("--store", type=Path, required=True, help="the run's weight store")
    parser.add_argument("--policy", default="policy")
    parser.add_argument("--init", type=Path, help="Hugging Face folder of number 0")
    parser.add_argument("--state", type=Path, help="checkpoint folder (default: next to the store)")
    given = parser.parse_args()
    state = given.state or given.store.parent / f"foreign-trainer-{given.policy}"
    dataflow = Service(given.url, given.token_file.read_text().strip())
    try:
        Trainer(dataflow, Store(given.store), given.policy, state).run(given.init)
    except HTTPError as error:  # 409 fenced: replaced by a newer trainer
        sys.exit(f"stopped: {error} {error.read().decode()}")


if __name__ == "__main__":
    main()
