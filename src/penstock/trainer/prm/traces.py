# SPDX-License-Identifier: Apache-2.0
"""Traces: trajectories as text, step by step, with their outcome; and labels of their steps.

Owns the lines of the files that `penstock prm collect` and `label` write. A step is a turn of a
trained policy. Reads no run and calls no model."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.durable import sync
from penstock.errors import ConfigError

T = TypeVar("T")


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One turn."""

    prompt: str
    """What was added to the context since its parent, results of earlier steps included."""
    action: str
    """What the model wrote."""
    parent: int = -1
    """Index of the turn whose context it continues; -1 for a new context."""
    is_scored: bool = True
    """Whether a trained policy took the step; turns of others are context only."""
    malformed: str = ""
    """Why it is not a valid action; empty if it is. Its score is 0, and no model sees it."""


class Trace(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory."""

    row: str
    group: str
    task: dict[str, Any]
    """Payload of its task, for programs that label."""
    outcome: str
    reward: float | None
    steps: tuple[Step, ...]
    """All turns, in order."""

    def __post_init__(self) -> None:
        for index, step in enumerate(self.steps):
            if not -1 <= step.parent < index:
                raise ValueError(f"step {index}: its parent {step.parent} does not come before it")


class LabelledTrace(msgspec.Struct, frozen=True, kw_only=True):
    """A trace and the value of each of its steps."""

    trace: Trace
    labels: tuple[float | None, ...]
    """From 0 to 1 for each step; None where it is not scored or the judge gave no answer."""
    labeller: str
    """Who labelled: `judge:MODEL` or `program:MODULE:FUNCTION`."""
    text_digest: str
    """Of the function that built the text which was labelled."""


def read_lines(path: Path, kind: type[T]) -> Iterator[T]:
    """The records of a file of JSON lines; ConfigError names a line that is none."""
    decoder = msgspec.json.Decoder(kind)
    try:
        lines = path.open("rb")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}; check the path") from None
    with lines:
        for number, line in enumerate(lines, 1):
            try:
                yield decoder.decode(line)
            except (msgspec.DecodeError, RecursionError) as error:
                raise ConfigError(
                    f"{path}, line {number}: not a line of this kind of file ({error}); write it "
                    "again with `penstock prm collect` or `penstock prm label`"
                ) from None


def write_lines(path: Path, records: Iterable[object]) -> int:
    """Replace the file by these records, all or nothing; returns how many. Memory does not grow
    with their number."""
    encoder = msgspec.json.Encoder()
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary, num_lines = path.with_name(f".new-{path.name}"), 0
    with temporary.open("wb") as lines:
        for record in records:
            lines.write(encoder.encode(record) + b"\n")
            num_lines += 1
    sync(temporary)
    temporary.rename(path)
    return num_lines


def append_line(path: Path, record: object) -> None:
    """Add one record; after a crash the file may end in part of a line (`cut_torn_line`)."""
    with path.open("ab") as lines:
        lines.write(msgspec.json.encode(record) + b"\n")


def cut_torn_line(path: Path) -> None:
    """Remove the part of a line that a crash left at the end."""
    content = path.read_bytes()
    end = content.rfind(b"\n") + 1
    if end != len(content):
        with path.open("r+b") as lines:
            lines.truncate(end)
