# SPDX-License-Identifier: Apache-2.0
"""Reads the logs of a run's last launch: one stream in order of time, from the end or as it grows.

Knows the format that `observe.logs` writes; keeps lines in another format as they are. Prints
nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import cast

from penstock.durable import open_regular
from penstock.errors import ConfigError
from penstock.fleet.run_folder import RunFolder
from penstock.plugins import suggest

POLL_S = 0.5
TAIL_BYTES = 1 << 20
"""Read at most this much from the end of a log, unless it is followed."""
MAX_NEW_BYTES = 64 << 20
"""Read at once."""
HIDDEN = frozenset({"service", "level", "timestamp", "msg"})


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of one service's log."""

    service: str
    at: float | None
    """Unix time; None for a line in another format."""
    level: str
    message: str
    fields: Mapping[str, object] = field(default_factory=dict[str, object])


def find_logs(folder: RunFolder, services: Sequence[str] = ()) -> dict[str, Path]:
    """The logs of the last launch, by service; only those named, if any are."""
    latest = folder.logs / "latest"
    known = {path.stem: path for path in sorted(latest.glob("*.log"))}
    if not known:
        raise ConfigError(
            f"{folder.path} has no logs: no launcher started it. A service that was started by "
            "hand logs to its own stderr"
        )
    found: dict[str, Path] = {}
    for service in services:
        matches = [name for name in known if name == service or name.startswith(f"{service}-")]
        if not matches:
            hint = suggest(service, known, "it has the services below.")
            raise ConfigError(
                f"no service {service!r} in the last launch of {folder.path}; {hint} "
                f"Services: {', '.join(known)}"
            )
        found |= {name: known[name] for name in matches}
    return found or known


def read_tail(logs: Mapping[str, Path], num_lines: int) -> list[LogLine]:
    """The last lines of all these logs together, in order of time."""
    ordered = [line for name, path in logs.items() for line in LogReader(name, path).tail()]
    return _in_order(ordered)[-num_lines:] if num_lines > 0 else []


def follow(folder: RunFolder, logs: Mapping[str, Path], num_lines: int) -> Iterator[LogLine]:
    """The last lines, then every new one, until the run ends.

    consumes: growing logs · produces: lines · waits for: POLL_S · ends: with the launcher"""
    readers = [LogReader(name, path) for name, path in logs.items()]
    first = _in_order([line for reader in readers for line in reader.tail()])
    yield from first[-num_lines:] if num_lines > 0 else ()
    while True:
        is_running = folder.launcher_pid() is not None  # before reading: its last lines count
        yield from _in_order([line for reader in readers for line in reader.new_lines()])
        if not is_running:
            return
        time.sleep(POLL_S)


class LogReader:
    """One log; reads each complete line once."""

    def __init__(self, service: str, path: Path) -> None:
        self._service = service
        self._path = path
        self._read_bytes = 0
        self._at: float | None = None

    def tail(self) -> list[LogLine]:
        """The lines in the last TAIL_BYTES; the next `new_lines` go on after them."""
        size = self._path.stat().st_size if self._path.exists() else 0
        self._read_bytes = max(0, size - TAIL_BYTES)
        is_cut = self._read_bytes > 0
        return self.new_lines()[1 if is_cut else 0 :]

    def new_lines(self) -> list[LogLine]:
        try:
            with open_regular(self._path) as file:
                file.seek(self._read_bytes)
                text = file.read(MAX_NEW_BYTES)
        except OSError:
            return []
        complete = text[: text.rfind(b"\n") + 1] if len(text) < MAX_NEW_BYTES else text
        self._read_bytes += len(complete)
        lines = complete.decode(errors="replace").split("\n")[:-1]  # text has more kinds of ends
        return [self._parse(line) for line in lines]

    def _parse(self, text: str) -> LogLine:
        """A line in another format, such as a traceback, belongs to the time of the one before."""
        try:
            found: object = json.loads(text)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or "msg" not in found:
            return LogLine(service=self._service, at=self._at, level="", message=text)
        record = cast("dict[str, object]", found)
        self._at = _unix_time(record.get("timestamp")) or self._at
        return LogLine(
            service=self._service,
            at=self._at,
            level=str(record.get("level", "")),
            message=str(record["msg"]),
            fields={name: value for name, value in record.items() if name not in HIDDEN},
        )


def _unix_time(text: object) -> float | None:
    try:
        return datetime.fromisoformat(str(text)).timestamp()
    except ValueError:
        return None


def _in_order(lines: list[LogLine]) -> list[LogLine]:
    """Sorted by time; lines of one log keep their order."""
    return sorted(lines, key=lambda line: line.at or 0.0)
