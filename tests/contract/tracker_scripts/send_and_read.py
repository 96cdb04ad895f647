# SPDX-License-Identifier: Apache-2.0
"""Sends the points of argv[3:] with the tracker of argv[1]. Without any, prints what the tracker
stored, read with its own library, as JSON: [step, value] pairs of a metric.

Runs in the environment of that library, with penstock's sources and none of its
dependencies but msgspec."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from penstock.observe.tracking import Point, TrackedRun, load_tracker
from penstock.plugins import load_module

NAME, FOLDER = sys.argv[1], Path(sys.argv[2])
RUN = TrackedRun(
    id="0123456789abcdef0",
    name="my-run",
    run="my-run",
    policy="policy",
    folder=FOLDER,
    config={"training": {"steps": 3}},
)
BLOCK = 32_768
STRANGE = "reward/role/a(b//../ü"
"""Nodes name roles."""


def point(number: int) -> Point:
    values = {"reward/mean": number / 8, "loss": -number / 4, STRANGE: 1.0}
    return Point(
        id=f"batch-{number}", index=number - 1, step=number, at=1000.0 + number, values=values
    )


def read_mlflow() -> list[tuple[int, float]]:
    client: Any = load_module("mlflow").MlflowClient()
    experiment = client.get_experiment_by_name("penstock")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.data.params == {"training.steps": "3"}
    assert run.data.metrics["reward/role/a_b/_/__/ü"] == 1.0
    found = client.get_metric_history(run.info.run_id, "reward/mean")
    return sorted((one.step, one.value) for one in found)


def read_wandb() -> list[tuple[int, float]]:
    """W&B's offline files are a log in the form of LevelDB, of protobuf records."""
    records: Any = load_module("wandb.proto.wandb_internal_pb2")
    found: list[tuple[int, float]] = []
    for path in sorted(FOLDER.glob("wandb/offline-run-*/*.wandb")):
        for data in log_records(path.read_bytes()):
            record: Any = records.Record.FromString(data)
            if record.WhichOneof("record_type") == "history":
                items = record.history.item
                values = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}
                found.append((values["step"], values["reward/mean"]))
    return sorted(found)


def read_trackio() -> list[tuple[int, float]]:
    storage: Any = load_module("trackio.sqlite_storage").SQLiteStorage
    assert storage.get_run_config("penstock", "my-run")["training"] == {"steps": 3}
    rows = storage.get_logs("penstock", "my-run")
    return [(row["step"], row["reward/mean"]) for row in rows]


def read_tensorboard() -> list[tuple[int, float]]:
    readers: Any = load_module("tensorboard.backend.event_processing.event_accumulator")
    found = readers.EventAccumulator(str(FOLDER / "tensorboard" / "policy"))
    found.Reload()
    return [(event.step, event.value) for event in found.Scalars("reward/mean")]


def log_records(data: bytes) -> list[bytes]:
    """Pieces of a record: 1 whole, 2 first, 3 middle, 4 last; each after checksum, length, kind."""
    records, at = [b""], 7  # after the file's own header
    while at + 7 <= len(data):
        if BLOCK - at % BLOCK < 7:
            at += BLOCK - at % BLOCK
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        records[-1] += data[at + 7 : at + 7 + length]
        if kind in (1, 4):
            records.append(b"")
        at += 7 + length
    return records[:-1]


if sys.argv[3:]:
    tracker = load_tracker(NAME)(RUN)
    tracker.send([point(int(number)) for number in sys.argv[3:]])
    tracker.close()
else:
    print(json.dumps(globals()[f"read_{NAME}"]()))
