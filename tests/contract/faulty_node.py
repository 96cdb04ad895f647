# SPDX-License-Identifier: Apache-2.0
"""The foreign rollout node with one planted fault.

`python -m tests.contract.faulty_node FAULT URL TOKEN_ENV` runs one.
Each fault breaks the contract once and lets the node go on, so that only its own rules may fail.
"""

from __future__ import annotations

import json
import secrets
import sys
from array import array
from contextlib import suppress
from http.client import HTTPException
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import msgspec
from recipes.foreign.rollout import Node, Record, Service, Table, row_id_of


class ChangesRetries(Service):
    """Sends what `change` returns when retrying a call, instead of the same bytes."""

    def __init__(self, good: Service, path: str) -> None:
        self.url, self.headers = good.url, good.headers
        self.path = path

    def change(self, body: Record) -> None:
        raise NotImplementedError

    def call(self, method: str, path: str, body: Record) -> Record:
        if path == self.path:
            data = msgspec.msgpack.encode(body)
            request = Request(self.url + path, data, self.headers, method=method)
            try:
                with urlopen(request, timeout=60) as answer:
                    return msgspec.msgpack.decode(answer.read())
            except (OSError, HTTPException):
                self.change(body)
        return super().call(method, path, body)


class WithNewRequestId(ChangesRetries):
    def change(self, body: Record) -> None:
        body["request_id"] = secrets.token_hex(8)


class WithOtherRows(ChangesRetries):
    def change(self, body: Record) -> None:
        for delivery in body["deliveries"]:
            row: Any = msgspec.msgpack.decode(delivery["payload"])
            delivery["payload"] = msgspec.msgpack.encode({**row, "reward": 1.0})


class NewRequestId(Node):
    def register(self) -> None:
        super().register()
        self.dataflow = WithNewRequestId(self.dataflow, "/v1/leases")


class OtherBytesOnRetry(Node):
    def register(self) -> None:
        super().register()
        self.dataflow = WithOtherRows(self.dataflow, "/v1/trajectories")


class BeatsBeforeRegister(Node):
    def register(self) -> None:
        with suppress(HTTPError):
            body: Record = {"boot_id": self.boot_id, "state": "starting", "live": []}
            self.dataflow.call("PUT", f"/v1/nodes/{self.node_id}", body)
        super().register()


class LeasesBeforeLive(Node):
    def register(self) -> None:
        super().register()
        if not self.live:
            request = {"request_id": "early", "node_id": self.node_id, "boot_id": self.boot_id}
            more: Record = {"max_slots": 1, "wait_s": 0.0, "live": [], "secret": self.secret}
            self.dataflow.call("POST", "/v1/leases", {**request, **more})


class OneLiveBeat(Node):
    def beat(self) -> None:
        while not self.live and not self.stopping.wait(0.05):
            body: Record = {"state": "starting", "live": self.live}
            self.apply_orders(self.call_registered("PUT", f"/v1/nodes/{self.node_id}", body))
        self.call_registered(
            "PUT", f"/v1/nodes/{self.node_id}", {"state": "live", "live": self.live}
        )


class IgnoresUnknown(Node):
    def call_registered(self, method: str, path: str, body: Record) -> Record:
        """Repeats a call that got 404 instead of registering."""
        while True:
            with suppress(HTTPError):
                proof = {"boot_id": self.boot_id, "secret": self.secret}
                return self.dataflow.call(method, path, {**body, **proof})


class Unverified(Node):
    """Fetches everything and checks nothing."""

    def load_target(self) -> None:
        target = self.target
        if target is None or (self.live and self.live[0]["number"] == target["number"]):
            return
        weights = Service(self.weights_url, self.token)
        try:
            manifest = json.loads(self.get(weights, "manifests", target["manifest_digest"]))
            blobs = {f["name"]: self.get(weights, "blobs", f["blob"]) for f in manifest["files"]}
        except ValueError:
            return
        self.table = Table(blobs)
        self.live = [{name: target[name] for name in ("policy", "incarnation", "number")}]
        self.awake.set()

    def get(self, weights: Service, kind: str, digest: str) -> bytes:
        return weights.send("GET", f"/v1/{kind}/{digest}")


class NoTensorCheck(Unverified):
    def get(self, weights: Service, kind: str, digest: str) -> bytes:
        return weights.fetch(kind, digest)


class NeverFetches(Node):
    def load_target(self) -> None:
        if self.target is not None:
            self.table = Table({})
            names = ("policy", "incarnation", "number")
            self.live = [{name: self.target[name] for name in names}]


class StaysOnFirst(Node):
    def load_target(self) -> None:
        if not self.live:
            super().load_target()


class NamesFirstVersion(Node):
    def attempt(self, table: Table, grant: Record, task: Record) -> Record:
        row = super().attempt(table, grant, task)
        row["turns"][0]["spans"][0]["number"] = 0
        return row


class SpoilsOneRow(Node):
    has_spoilt = False

    def attempt(self, table: Table, grant: Record, task: Record) -> Record:
        row = super().attempt(table, grant, task)
        if not self.has_spoilt:
            self.has_spoilt = True
            self.spoil(row, row["turns"][0])
        return row

    def spoil(self, row: Record, turn: Record) -> None:
        raise NotImplementedError


class OldEpoch(SpoilsOneRow):
    def spoil(self, row: Record, turn: Record) -> None:
        row["epoch"] -= 1
        row["row_id"] = row_id_of(row)


class SpanGap(SpoilsOneRow):
    def spoil(self, row: Record, turn: Record) -> None:
        turn["spans"][0]["start"] = 1


class PositiveLogprob(SpoilsOneRow):
    def spoil(self, row: Record, turn: Record) -> None:
        turn["logprobs"] = array("f", [0.5] * (len(turn["logprobs"]) // 4)).tobytes()


class RewardForFailure(SpoilsOneRow):
    def spoil(self, row: Record, turn: Record) -> None:
        row["outcome"] = {"kind": "failed", "reason": "engine"}
        row["reward"] = 0.0


class ForgetsSlot(Node):
    has_forgotten = False

    def deliver(self, rows: list[Record], released: list[str]) -> None:
        super().deliver(rows if self.has_forgotten else rows[1:], released)
        self.has_forgotten = True


class ProvesNothing(Node):
    """Sends one row without its secret, then as it should be."""

    has_sent = False

    def deliver(self, rows: list[Record], released: list[str]) -> None:
        if not self.has_sent:
            self.has_sent = True
            known, self.lease_secrets = self.lease_secrets, {}
            super().deliver(rows[:1], [])
            self.lease_secrets = known
            rows = rows[1:]
        super().deliver(rows, released)


class ResendsFenced(Node):
    def deliver(self, rows: list[Record], released: list[str]) -> None:
        super().deliver(rows, released)
        super().deliver(rows, [])


class IgnoresDrain(Node):
    def apply_orders(self, answer: Record) -> None:
        super().apply_orders({**answer, "orders": {**answer["orders"], "drain": False}})


FAULTS: dict[str, tuple[type[Node], set[str]]] = {
    "beats-before-register": (BeatsBeforeRegister, {"register-first"}),
    "one-live-beat": (OneLiveBeat, {"heartbeat-in-time"}),
    "ignores-unknown": (IgnoresUnknown, {"rejoin-when-unknown"}),
    "never-fetches": (
        NeverFetches,
        {
            "fetch-before-live",
            "corrupt-blob-refused",
            "wrong-tensor-refused",
            "spans-name-live",
        },
    ),
    "unverified": (Unverified, {"corrupt-blob-refused", "wrong-tensor-refused"}),
    "no-tensor-check": (NoTensorCheck, {"wrong-tensor-refused"}),
    "leases-before-live": (LeasesBeforeLive, {"lease-before-live"}),
    "new-request-id": (NewRequestId, {"lease-repeated"}),
    "other-bytes-on-retry": (OtherBytesOnRetry, {"delivery-repeated"}),
    "old-epoch": (OldEpoch, {"row-names-lease", "every-lease-ends"}),
    "span-gap": (SpanGap, {"spans-cover"}),
    "positive-logprob": (PositiveLogprob, {"logprobs-at-most-0"}),
    "reward-for-failure": (RewardForFailure, {"reward-by-outcome"}),
    "names-first-version": (NamesFirstVersion, {"spans-name-live", "new-version-loaded"}),
    "proves-nothing": (ProvesNothing, {"lease-proven"}),
    "resends-fenced": (ResendsFenced, {"fenced-dropped"}),
    "stays-on-first": (StaysOnFirst, {"new-version-loaded"}),
    "forgets-slot": (ForgetsSlot, {"every-lease-ends"}),
    "ignores-drain": (IgnoresDrain, {"drain-obeyed"}),
}
"""By name: the node, and the rules that must fail, no others."""


if __name__ == "__main__":
    fault, url, token = sys.argv[1:]
    FAULTS[fault][0](url, token).run()
