# SPDX-License-Identifier: Apache-2.0
"""TensorBoard: event files in RUN/tensorboard/POLICY.

One event holds all values of a point, so that a point is stored completely or not at all. Each
start begins a new file, because the last one may end in half an event, and reads which points the
older files have."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from penstock.observe.tracking import Point, TrackedRun
from penstock.plugins import load_module

_EVAL = "eval/"


class TensorBoard:
    def __init__(self, run: TrackedRun) -> None:
        self._folder = run.folder / "tensorboard" / run.policy
        self._events: Any = load_module("tensorboard.compat.proto.event_pb2")
        self._summaries: Any = load_module("tensorboard.compat.proto.summary_pb2")
        self._records: Any = load_module("tensorboard.summary.writer.record_writer")
        self._loader: Any = load_module("tensorboard.backend.event_processing.event_file_loader")
        self._file: BinaryIO | None = None
        self._stored = set(self._read_stored())

    def send(self, points: Sequence[Point]) -> None:
        new = [point for point in points if _key(point.step, point.values) not in self._stored]
        if not new:
            return
        file = self._file or self._new_file()
        writer = self._records.RecordWriter(file)
        for point in new:
            values = [
                self._summaries.Summary.Value(tag=name, simple_value=value)
                for name, value in point.values.items()
            ]
            event = self._events.Event(
                wall_time=point.at,
                step=point.step,
                summary=self._summaries.Summary(value=values),
            )
            writer.write(event.SerializeToString())
        file.flush()
        os.fsync(file.fileno())
        self._stored.update(_key(point.step, point.values) for point in new)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _new_file(self) -> BinaryIO:
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns():020}.{socket.gethostname()}.{os.getpid()}"
        self._file = (self._folder / name).open("xb")
        head = self._events.Event(wall_time=time.time(), file_version="brain.Event:2")
        self._records.RecordWriter(self._file).write(head.SerializeToString())
        return self._file

    def _read_stored(self) -> Iterator[tuple[bool, int]]:
        for path in sorted(self._folder.glob("events.out.tfevents.*")):
            for event in self._loader.EventFileLoader(str(path)).Load():
                if event.HasField("summary"):
                    yield _key(event.step, [value.tag for value in event.summary.value])


def _key(step: int, names: Any) -> tuple[bool, int]:
    """A step has one point of its training and one of its evaluation."""
    return any(name.startswith(_EVAL) for name in names), int(step)


TRACKER = TensorBoard
