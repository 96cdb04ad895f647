# SPDX-License-Identifier: Apache-2.0
"""A complete rollout node with only the standard library, msgpack and blake3. Read it together with
docs/reference/protocol.md and write yours in any language. `Table` replaces the model, `score`
the reward.

python recipes/foreign/rollout.py URL --token-file FILE
"""

import argparse
import base64
import json
import math
import os
import random
import secrets
import signal
import threading
import time
import urllib.request
from array import array
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import msgpack
from blake3 import blake3

CAPACITY = 16
Record = dict[str, Any]


class Service:
    """Calls one service; sends the same bytes again if it is busy or does not respond."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url.rstrip("/")
        self.headers = {"Authorization": f"Bearer {token}"}
        self.headers |= {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}

    def call(self, method: str, path: str, body: Record) -> Record:
        return msgpack.unpackb(self.send(method, path, msgpack.packb(body)))

    def send(self, method: str, path: str, data: bytes | None = None, secret: str = "") -> bytes:
        wait_s, headers = 0.1, {**self.headers, "X-Penstock-Secret": secret}
        while True:
            request = urllib.request.Request(self.url + path, data, headers, method=method)
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return answer.read()
            except (OSError, HTTPException) as error:
                if isinstance(error, HTTPError) and error.code not in (429, 503, 507):
                    raise
                after = error.headers.get("Retry-After") if isinstance(error, HTTPError) else None
            time.sleep(float(after or wait_s))
            wait_s = min(2.0, 2 * wait_s)

    def fetch(self, kind: str, digest: str) -> bytes:
        data = self.send("GET", f"/v1/{kind}/{digest}")
        if blake3(data).hexdigest() != digest:
            raise ValueError(f"{kind}: the bytes do not match digest {digest}")
        return data


def pull(weights: Service, digest: str) -> dict[str, bytes]:
    """The files of a version by name; raises ValueError if any byte does not match its digest."""
    manifest = json.loads(weights.fetch("manifests", digest))
    files = {file["name"]: weights.fetch("blobs", file["blob"]) for file in manifest["files"]}
    found: dict[str, Record] = {}
    for name, blob in files.items():
        found |= tensors_of(blob) if name.endswith(".safetensors") else {}
    if found != {tensor["name"]: tensor for tensor in manifest["tensors"]}:
        raise ValueError("the tensors in the files do not match the manifest")
    return files


def tensors_of(blob: bytes) -> dict[str, Record]:
    """safetensors: 8 bytes of header length, a JSON header, raw tensors."""
    start = 8 + int.from_bytes(blob[:8], "little")
    found: dict[str, Record] = {}
    for name, entry in json.loads(blob[8:start]).items():
        if name != "__metadata__":
            first, last = entry.pop("data_offsets")
            digest = blake3(blob[start + first : start + last]).hexdigest()
            found[name] = {"name": name, "digest": digest, **entry}
    return found


class Table:
    """The "model": a fixed distribution over letters; only the vocabulary is from the snapshot."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.ids = {chr(code): code for code in range(128)}
        if "tokenizer.json" in files:
            vocabulary = json.loads(files["tokenizer.json"])["model"]["vocab"]
            self.ids = {text: i for text, i in vocabulary.items() if len(text) == 1}
        self.letters = sorted(text for text in self.ids if text.isalpha())

    def encode(self, text: str) -> bytes:
        return array("i", [self.ids[c] for c in text if c in self.ids]).tobytes()

    def sample(self, num_tokens: int, temperature: float, seed: int) -> tuple[str, bytes]:
        """Text, and the log-probability of each letter under the table at this temperature."""
        weights = [(1 + rank) ** (1 / temperature) for rank in range(len(self.letters))]
        drawn = random.Random(seed).choices(range(len(weights)), weights, k=num_tokens)
        logprobs = array("f", [math.log(weights[rank] / sum(weights)) for rank in drawn])
        return "".join(self.letters[rank] for rank in drawn), logprobs.tobytes()


def score(completion: str, task: Record) -> float:
    answer = task["payload"].get("answer", "")
    return sum(a == b for a, b in zip(completion, answer, strict=False)) / max(1, len(answer))


def version_order(version: Record) -> tuple[int, int]:
    return version["incarnation"], version["number"]


def row_id_of(grant: Record) -> str:
    return f"{grant['group_id']}.{grant['slot']}.{grant['epoch']}"


def name_in(token: str) -> str:
    """Whom the token is for: the node is that, or that and `.SUFFIX`."""
    for part in token.split(".")[1:]:
        decoded = base64.urlsafe_b64decode(part + "=" * (-len(part) % 4))
        if decoded.startswith(b"{") and "subject" in (said := json.loads(decoded)):
            return said["subject"]
    raise ValueError("this is not a penstock token")


class Node:
    def __init__(self, url: str, token: str) -> None:
        self.dataflow, self.token, self.weights_url = Service(url, token), token, ""
        self.boot_id = secrets.token_hex(8)  # new for each process
        self.node_id = f"{name_in(token)}.{self.boot_id}"
        self.secret = ""  # of this process; from its registration
        self.lease_secrets: dict[str, str] = {}  # by row id
        self.stopping = threading.Event()
        self.awake = threading.Event()  # set to send a heartbeat now
        self.target: Record | None = None
        self.live: list[Record] = []
        self.table: Table | None = None
        self.not_before = 0.0

    def run(self) -> None:
        self.register()
        beating = threading.Thread(target=self.beat, daemon=True)
        beating.start()
        while not self.stopping.is_set():
            self.load_target()
            if self.table is not None:
                self.work(self.table)
            self.stopping.wait(0.02)
        self.awake.set()
        beating.join()
        path = f"/v1/nodes/{self.node_id}?boot_id={self.boot_id}"
        self.dataflow.send("DELETE", path, secret=self.secret)

    def register(self) -> None:
        body = {"node_id": self.node_id, "boot_id": self.boot_id, "capacity": CAPACITY}
        answer = self.dataflow.call("POST", "/v1/nodes", {**body, "policies": [], "tags": []})
        self.secret = answer["secret"]
        self.heartbeat_s, self.sampling = answer["heartbeat_s"], answer["facts"]["sampling"]
        self.apply_orders(answer)

    def call_registered(self, method: str, path: str, body: Record) -> Record:
        """A call of a registered node; registers again if the service does not know it."""
        while True:
            try:
                proof = {"boot_id": self.boot_id, "secret": self.secret}
                return self.dataflow.call(method, path, {**body, **proof})
            except HTTPError as error:
                if error.code != 404:
                    raise
            self.register()

    def apply_orders(self, answer: Record) -> None:
        """Responses may arrive out of order, so target versions only move forward."""
        self.weights_url = answer.get("weights_url", self.weights_url)
        for target in answer["orders"]["wanted"]:
            if self.target is None or version_order(target) > version_order(self.target):
                self.target, self.not_before = target, 0.0
        if answer["orders"]["drain"]:
            self.stopping.set()

    def beat(self) -> None:
        """One heartbeat renews all leases of the node."""
        try:
            while not self.stopping.is_set():
                self.awake.clear()
                body = {"state": "live" if self.live else "starting", "live": self.live}
                self.apply_orders(self.call_registered("PUT", f"/v1/nodes/{self.node_id}", body))
                self.awake.wait(self.heartbeat_s)
        except HTTPError:  # fenced: replaced by another process; DELETE will fail the same way
            self.stopping.set()

    def load_target(self) -> None:
        target = self.target
        is_loaded = target and self.live and version_order(self.live[0]) == version_order(target)
        if target is None or is_loaded or time.monotonic() < self.not_before:
            return
        try:
            files = pull(Service(self.weights_url, self.token), target["manifest_digest"])
        except ValueError as damaged:  # fetch it again in a second; the old version stays live
            print(f"not loaded: {damaged}")
            self.not_before = time.monotonic() + 1.0
            return
        self.table = Table(files)
        self.live = [{name: target[name] for name in ("policy", "incarnation", "number")}]
        self.awake.set()

    def work(self, table: Table) -> None:
        request = {"node_id": self.node_id, "max_slots": CAPACITY, "wait_s": 2.0, "live": self.live}
        request["request_id"] = secrets.token_hex(8)  # a retry gets the same grants
        answer = self.call_registered("POST", "/v1/leases", request)
        self.apply_orders(answer)
        grants, rows = answer["grants"], []
        self.lease_secrets = {row_id_of(grant): grant["secret"] for grant in grants}
        while grants and not self.stopping.is_set():
            grant = grants.pop()
            rows.append(self.attempt(table, grant, answer["tasks"][grant["task"]]))
        if rows or grants:
            self.deliver(rows, [row_id_of(grant) for grant in grants])  # release the rest

    def attempt(self, table: Table, grant: Record, task: Record) -> Record:
        spec, (incarnation, number) = self.sampling, version_order(self.live[0])
        text, logprobs = table.sample(spec["max_tokens"], spec["temperature"], grant["seed"])
        span = {"start": 0, "end": len(text), "incarnation": incarnation, "number": number}
        turn = {
            "policy": self.live[0]["policy"],
            "parent": -1,
            "prompt_ids": table.encode(task["payload"].get("prompt", "")),
            "sampled_ids": table.encode(text),
            "logprobs": logprobs,
            "spans": [span],
            "sampling": {**spec, "top_p": 1.0, "top_k": 0, "seed": grant["seed"], "stop": []},
            "finish": "length",
        }
        return {
            **{name: grant[name] for name in ("group_id", "slot", "epoch", "attempt")},
            "row_id": row_id_of(grant),
            "node_id": self.node_id,
            "turns": [turn],
            "reward": score(text, task),
            "outcome": {"kind": "truncated", "reason": "length"},
        }

    def deliver(self, rows: list[Record], released: list[str]) -> None:
        secret_of = self.lease_secrets.get
        deliveries = [
            {"row_id": name, "payload": msgpack.packb(row), "secret": secret_of(name, "")}
            for row in rows
            for name in (row["row_id"],)
        ]
        returned = {name: secret_of(name, "") for name in released}
        body = {"node_id": self.node_id, "deliveries": deliveries, "released": returned}
        for result in self.call_registered("POST", "/v1/trajectories", body)["results"]:
            if result["status"] in ("conflict", "invalid"):  # a bug; `fenced` is only late
                print(f"rejected: {result}")


def main() -> None:
    parser = argparse.ArgumentParser(description="A rollout node that samples from a fixed table.")
    parser.add_argument("url")
    file = os.environ.get("PENSTOCK_TOKEN_FILE")
    parser.add_argument("--token-file", type=Path, default=file, required=not file)
    given = parser.parse_args()
    node = Node(given.url, given.token_file.read_text().strip())
    signal.signal(signal.SIGTERM, lambda *_: (node.stopping.set(), signal.alarm(10)))
    node.run()


if __name__ == "__main__":
    main()
