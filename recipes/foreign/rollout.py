# SPDX-License-Identifier: Apache-2.0
"""A whole rollout node in the standard library plus msgpack and blake3: read it beside
docs/protocol.md and write yours in any language. `Table` stands for a model, `score` for a reward.

python recipes/foreign/rollout.py URL --token TOKEN [--node-id NAME]
"""

import argparse
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
from typing import Any
from urllib.error import HTTPError

import msgpack
from blake3 import blake3

CAPACITY = 16
Record = dict[str, Any]


class Service:
    """Calls one service; after "later" or no answer at all, the same bytes are sent again."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url.rstrip("/")
        self.headers = {"Authorization": f"Bearer {token}"}
        self.headers |= {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}

    def call(self, method: str, path: str, body: Record) -> Record:
        return msgpack.unpackb(self.send(method, path, msgpack.packb(body)))

    def send(self, method: str, path: str, data: bytes | None = None) -> bytes:
        wait_s = 0.1
        while True:
            request = urllib.request.Request(self.url + path, data, self.headers, method=method)
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return answer.read()
            except (OSError, HTTPException) as error:
                if isinstance(error, HTTPError) and error.code not in (429, 503, 507):
                    raise
                told = error.headers.get("Retry-After") if isinstance(error, HTTPError) else None
            time.sleep(float(told or wait_s))
            wait_s = min(2.0, 2 * wait_s)

    def fetch(self, kind: str, digest: str) -> bytes:
        data = self.send("GET", f"/v1/{kind}/{digest}")
        if blake3(data).hexdigest() != digest:
            raise ValueError(f"{kind}: other bytes than {digest}")
        return data


def pull(weights: Service, digest: str) -> dict[str, bytes]:
    """The files of a version by name; ValueError when any byte is not what its digest says."""
    manifest = json.loads(weights.fetch("manifests", digest))
    files = {file["name"]: weights.fetch("blobs", file["blob"]) for file in manifest["files"]}
    found: dict[str, Record] = {}
    for name, blob in files.items():
        found |= tensors_of(blob) if name.endswith(".safetensors") else {}
    if found != {tensor["name"]: tensor for tensor in manifest["tensors"]}:
        raise ValueError("the tensors in the files are not those of the manifest")
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
    """The "model": one fixed distribution over letters; a snapshot only lends its vocabulary."""

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


class Node:
    def __init__(self, url: str, token: str, node_id: str) -> None:
        self.dataflow, self.token, self.weights_url = Service(url, token), token, ""
        self.node_id, self.boot_id = node_id, secrets.token_hex(8)  # new for each process
        self.stopping = threading.Event()
        self.awake = threading.Event()  # there is something to tell in a heartbeat
        self.wanted: Record | None = None
        self.live: list[Record] = []
        self.table: Table | None = None
        self.not_before = 0.0

    def run(self) -> None:
        self.register()
        beating = threading.Thread(target=self.beat, daemon=True)
        beating.start()
        while not self.stopping.is_set():
            self.load_wanted()
            if self.table is not None:
                self.work(self.table)
            self.stopping.wait(0.02)
        self.awake.set()
        beating.join()
        self.dataflow.send("DELETE", f"/v1/nodes/{self.node_id}?boot_id={self.boot_id}")

    def register(self) -> None:
        body = {"node_id": self.node_id, "boot_id": self.boot_id, "capacity": CAPACITY}
        answer = self.dataflow.call("POST", "/v1/nodes", {**body, "policies": [], "tags": []})
        self.heartbeat_s, self.sampling = answer["heartbeat_s"], answer["facts"]["sampling"]
        self.apply_wanted(answer)

    def call_registered(self, method: str, path: str, body: Record) -> Record:
        """A call as a member; a service that does not know us is told again who we are."""
        while True:
            try:
                return self.dataflow.call(method, path, {**body, "boot_id": self.boot_id})
            except HTTPError as refused:
                if refused.code != 404:
                    raise
            self.register()

    def apply_wanted(self, answer: Record) -> None:
        """Answers may overtake each other, so versions only ever move forward."""
        self.weights_url = answer.get("weights_url", self.weights_url)
        for wanted in answer["orders"]["wanted"]:
            if self.wanted is None or version_order(wanted) > version_order(self.wanted):
                self.wanted, self.not_before = wanted, 0.0
        if answer["orders"]["drain"]:
            self.stopping.set()

    def beat(self) -> None:
        """One heartbeat renews all leases of the node."""
        try:
            while not self.stopping.is_set():
                self.awake.clear()
                body = {"state": "live" if self.live else "starting", "live": self.live}
                self.apply_wanted(self.call_registered("PUT", f"/v1/nodes/{self.node_id}", body))
                self.awake.wait(self.heartbeat_s)
        except HTTPError:  # fenced: another took our place, as the answer to DELETE says again
            self.stopping.set()

    def load_wanted(self) -> None:
        wanted = self.wanted
        is_loaded = wanted and self.live and version_order(self.live[0]) == version_order(wanted)
        if wanted is None or is_loaded or time.monotonic() < self.not_before:
            return
        try:
            files = pull(Service(self.weights_url, self.token), wanted["manifest_digest"])
        except ValueError as damaged:  # fetch it again in a second; the old one keeps serving
            print(f"not loaded: {damaged}")
            self.not_before = time.monotonic() + 1.0
            return
        self.table = Table(files)
        self.live = [{name: wanted[name] for name in ("policy", "incarnation", "number")}]
        self.awake.set()

    def work(self, table: Table) -> None:
        request = {"node_id": self.node_id, "max_slots": CAPACITY, "wait_s": 2.0, "live": self.live}
        request["request_id"] = secrets.token_hex(8)  # repeated, it gets the same grants
        answer = self.call_registered("POST", "/v1/leases", request)
        self.apply_wanted(answer)
        grants, rows = answer["grants"], []
        while grants and not self.stopping.is_set():
            grant = grants.pop()
            rows.append(self.attempt(table, grant, answer["tasks"][grant["task"]]))
        if rows or grants:
            self.deliver(rows, [row_id_of(grant) for grant in grants])  # the rest is handed back

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
        deliveries = [{"row_id": row["row_id"], "payload": msgpack.packb(row)} for row in rows]
        body = {"node_id": self.node_id, "deliveries": deliveries, "released": released}
        for result in self.call_registered("POST", "/v1/trajectories", body)["results"]:
            if result["status"] in ("conflict", "invalid"):  # our bug; `fenced` just came too late
                print(f"refused: {result}")


def main() -> None:
    parser = argparse.ArgumentParser(description="A rollout node that samples from a fixed table.")
    parser.add_argument("url")
    parser.add_argument("--token", default=os.environ.get("PENSTOCK_TOKEN", ""))
    parser.add_argument("--node-id", default=f"foreign-{os.getpid()}")
    given = parser.parse_args()
    node = Node(given.url, given.token, given.node_id)
    signal.signal(signal.SIGTERM, lambda *_: (node.stopping.set(), signal.alarm(10)))
    node.run()


if __name__ == "__main__":
    main()
