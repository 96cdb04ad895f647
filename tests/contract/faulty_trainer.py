# SPDX-License-Identifier: Apache-2.0
"""The foreign trainer with one planted fault.

`python -m tests.contract.faulty_trainer FAULT URL TOKEN_ENV STORE` runs one.
Each fault breaks the contract and lets the trainer go on, so that only its own rules may fail.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import msgspec
from blake3 import blake3
from recipes.foreign.trainer import Files, Record, Service, Store, Trainer


class GuessesIncarnation(Trainer):
    def incarnate(self) -> None:
        body = {"request_id": "guess", "expected": 0, "number": 0, "seq": 0}
        self.incarnation = self.dataflow.call("POST", self.path("/incarnations"), body)[
            "incarnation"
        ]


class WrongIncarnation(Trainer):
    def checkpoint(self) -> None:
        super().checkpoint()
        with suppress(HTTPError):
            body: Record = {"incarnation": self.incarnation + 1, "retained": []}
            self.dataflow.call("PUT", self.path("/checkpoints"), body)


class BatchBeforePublish(Trainer):
    def publish(self) -> None:
        if not self.number:
            body: Record = {"consumer": self.policy, "seq": 1, "incarnation": self.incarnation}
            self.dataflow.call("POST", "/v1/batches", {**body, "wait_s": 0.0})
        super().publish()


class PublishesBeforeBlobs(Trainer):
    def publish(self) -> None:
        good, self.store = self.store, Store(self.state / "elsewhere")
        super().publish()
        self.store = good
        self.store.put_version(self.policy, self.number, self.files)


class WrongTensorStore(Store):
    def put_version(self, policy: str, number: int, files: Files) -> tuple[str, str]:
        digest, _ = super().put_version(policy, number, files)
        manifest = json.loads((self.root / f"manifests/{digest}.json").read_bytes())
        first = manifest["tensors"][0]
        first["digest"] = blake3(b"other").hexdigest()
        shape = "x".join(map(str, first["shape"]))
        line = f"{first['name']} {first['dtype']} {shape} {first['digest']}\n"
        assert len(manifest["tensors"]) == 1
        manifest["weights_digest"] = blake3(line.encode()).hexdigest()
        raw = json.dumps(manifest).encode()
        self.put(raw, f"manifests/{blake3(raw).hexdigest()}.json")
        return blake3(raw).hexdigest(), manifest["weights_digest"]


class WrongTensorDigest(Trainer):
    def publish(self) -> None:
        self.store = WrongTensorStore(self.store.root)
        super().publish()


class PublishesUncommitted(Trainer):
    def train(self, batch: Record, payloads: list[bytes | None]) -> None:
        with suppress(HTTPError):
            self.number += 1
            self.publish()
        self.number -= 1
        super().train(batch, payloads)


class PublishesOnce(Trainer):
    def publish(self) -> None:
        if not self.number:
            super().publish()


class SkipsBatch(Trainer):
    def next_batch(self) -> Record | None:
        body: Record = {"consumer": self.policy, "incarnation": self.incarnation, "wait_s": 0.0}
        if not self.seq:
            self.dataflow.call("POST", "/v1/batches", {**body, "seq": 1})
            with suppress(HTTPError):
                self.dataflow.call("POST", "/v1/batches", {**body, "seq": 2})
        return super().next_batch()


class IgnoresRowsService(Service):
    """Never fetches rows."""

    def __init__(self, good: Service) -> None:
        self.url, self.headers = good.url, good.headers

    def call(self, method: str, path: str, body: Record | None = None) -> Record:
        if path.endswith("/rows"):
            return {"rows": [{"payload": msgspec.msgpack.encode({"reward": 0.0})}]}
        return super().call(method, path, body)


class CommitsUnread(Trainer):
    def incarnate(self) -> None:
        super().incarnate()
        self.dataflow = IgnoresRowsService(self.dataflow)


class CommitsTwoNumbers(Trainer):
    def train(self, batch: Record, payloads: list[bytes | None]) -> None:
        with suppress(HTTPError):
            body: Record = {"incarnation": self.incarnation, "number": self.number + 2}
            path = f"/v1/batches/{self.policy}.{batch['seq']}/commit"
            self.dataflow.call("POST", path, {**body, "skipped": "", "stats": {}})
        super().train(batch, payloads)


class OtherStatsService(IgnoresRowsService):
    """Sends other statistics after a commit was answered with 503."""

    def call(self, method: str, path: str, body: Record | None = None) -> Record:
        if path.endswith("/commit") and body is not None:
            data = msgspec.msgpack.encode(body)
            request = Request(self.url + path, data, self.headers, method=method)
            try:
                with urlopen(request, timeout=60) as answer:
                    return msgspec.msgpack.decode(answer.read())
            except HTTPError:
                body = {**body, "stats": {"other": 1.0}}
        return Service.call(self, method, path, body)


class OtherCommitOnRetry(Trainer):
    def incarnate(self) -> None:
        super().incarnate()
        self.dataflow = OtherStatsService(self.dataflow)


class NamesNoCheckpoint(Trainer):
    def checkpoint(self) -> None:
        pass


class NamesUnknownCheckpoint(Trainer):
    def checkpoint(self) -> None:
        body: Record = {"incarnation": self.incarnation, "retained": [[99, 99]]}
        self.dataflow.call("PUT", self.path("/checkpoints"), body)


class Overwrites(Trainer):
    def checkpoint(self) -> None:
        super().checkpoint()
        blob = self.store.root / "blobs" / blake3(self.files["config.json"]).hexdigest()
        blob.write_bytes(b"{}")

    def publish(self) -> None:
        """Works correctly at first, so that only the final check of the store finds it."""
        path = self.store.root / "blobs" / blake3(self.files["config.json"]).hexdigest()
        path.write_bytes(self.files["config.json"])
        super().publish()


class IgnoresFencing(Trainer):
    def run(self, init: Path | None) -> None:
        try:
            super().run(init)
        except HTTPError:
            self.incarnate()


FAULTS: dict[str, tuple[type[Trainer], set[str]]] = {
    "guesses-incarnation": (GuessesIncarnation, {"look-before-incarnation"}),
    "wrong-incarnation": (WrongIncarnation, {"incarnation-on-calls"}),
    "batch-before-publish": (BatchBeforePublish, {"restore-point-first"}),
    "publishes-before-blobs": (PublishesBeforeBlobs, {"store-before-publish"}),
    "wrong-tensor-digest": (WrongTensorDigest, {"digests-right"}),
    "publishes-uncommitted": (PublishesUncommitted, {"publish-committed"}),
    "publishes-once": (PublishesOnce, {"versions-published"}),
    "skips-batch": (SkipsBatch, {"batches-in-order"}),
    "commits-unread": (CommitsUnread, {"rows-before-commit"}),
    "commits-two-numbers": (CommitsTwoNumbers, {"commits-in-order"}),
    "other-commit-on-retry": (OtherCommitOnRetry, {"commit-repeated"}),
    "names-no-checkpoint": (NamesNoCheckpoint, {"checkpoints-named"}),
    "names-unknown-checkpoint": (NamesUnknownCheckpoint, {"checkpoints-named"}),
    "overwrites": (Overwrites, {"store-append-only"}),
    "ignores-fencing": (IgnoresFencing, {"fenced-stops"}),
}
"""By name: the trainer, and the rules that must fail, no others."""


if __name__ == "__main__":
    fault, url, token, store = sys.argv[1:]
    kind = FAULTS[fault][0]
    state = Path(store).parent / "state"
    kind(Service(url, token), Store(Path(store)), "policy", state).run(None)
