# SPDX-License-Identifier: Apache-2.0
"""Writes the trajectories of a run for other programs, and reads them back.

Owns the choice of format and the layout of files: a Parquet file, a folder that `datasets` loads,
or ATIF documents. Holds one page in memory. A trajectory whose payload was freed has no tokens: it
is counted, never written with holes. Existing files are never replaced; a file appears when it is
complete.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.bounds import is_safe_name
from penstock.errors import ConfigError, StoreError
from penstock.runs.export.dataset_card import dataset_card
from penstock.runs.export.prompt_parts import PromptReader
from penstock.runs.export.trajectory_table import from_row, table_schema, to_row
from penstock.runs.history import open_run
from penstock.runs.recorded_trajectory import PayloadState, RecordedTrajectory
from penstock.types import Trajectory

ROWS_PER_GROUP = 256
ROWS_PER_SHARD = 16_384
"""Of a dataset folder: one Parquet file each."""


class TrajectoryFormat(StrEnum):
    PARQUET = "parquet"
    """One Parquet file."""
    DATASET = "dataset"
    """A folder for `datasets.load_dataset`, with a card; it can be pushed to a hub."""
    ATIF = "atif"
    """Documents of the Agent Trajectory Interchange Format: a line each in a `.jsonl` file, or a
    file each in a folder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedTrajectories:
    """What an export wrote."""

    path: Path
    format: TrajectoryFormat
    num_written: int
    num_without_tokens: int
    """Trajectories that were left out because their payload is gone."""
    num_too_long: int = 0
    """Left out because their steps, each with its full prompt, make no reasonable document."""


def export_trajectories(
    run: str | Path,
    to: str | Path,
    *,
    format: str | None = None,
    policy: str | None = None,
    steps: int | tuple[int | None, int | None] | None = None,
    outcome: str | None = None,
) -> ExportedTrajectories:
    """Write a run's trajectories to a new file or folder, as `penstock export trajectories` does:
    token ids, log-probs, versions, rewards, and their text.

    Args:
        run: Run folder, or its config file; running or finished.
        to: A new file ending in .parquet or .jsonl, or a new folder.
        format: parquet, dataset or atif; by default what `to` ends in, and dataset for a folder.
        policy: Only those with tokens of this policy.
        steps: Only those that this step trained, or the steps of an inclusive range.
        outcome: Only completed, truncated, failed or cancelled ones.
    """
    target = Path(to)
    chosen = _choose_format(target, format)
    ensure_new(target)
    with open_run(run) as opened:
        found = opened.trajectories(policy=policy, steps=steps, outcome=outcome)
        counted = _Stored(found, may_repeat=steps is not None)
        reader = PromptReader(opened.reader.decoder)
        with staged(target) as staging:
            if chosen is TrajectoryFormat.ATIF:
                num_written = _write_documents(counted, reader, staging)
            elif chosen is TrajectoryFormat.PARQUET:
                num_written = _write_parquet(counted, reader, staging)
            else:
                num_written = _write_shards(counted, reader, staging)
                card = dataset_card(opened.config, num_rows=num_written)
                (staging / "README.md").write_text(card)
    return ExportedTrajectories(
        path=target,
        format=chosen,
        num_written=num_written,
        num_without_tokens=counted.num_without_tokens,
        num_too_long=counted.num_too_long,
    )


def read_trajectories(path: str | Path) -> Iterator[Trajectory]:
    """Read back what `export_trajectories` wrote, in any of its formats: the same records, token
    for token.

    Args:
        path: A .parquet or .jsonl file, or a folder.
    """
    found = Path(path)
    if found.is_dir():
        files = sorted([*found.rglob("*.parquet"), *found.rglob("*.json"), *found.rglob("*.jsonl")])
    else:
        files = [found] if found.is_file() else []
    if not files:
        raise StoreError(
            f"{found} has no trajectories (.parquet, .jsonl or .json files); name a file or folder "
            "that `penstock export trajectories` wrote"
        )
    for file in files:
        yield from _read_parquet(file) if file.suffix == ".parquet" else _read_documents(file)


# --- where it goes --------------------------------------------------------------------------------


def _choose_format(target: Path, format: str | None) -> TrajectoryFormat:
    endings = {".parquet": TrajectoryFormat.PARQUET, ".jsonl": TrajectoryFormat.ATIF}
    ending = endings.get(target.suffix)
    if format is None:
        return ending or TrajectoryFormat.DATASET
    try:
        chosen = TrajectoryFormat(format)
    except ValueError:
        known = ", ".join(one.value for one in TrajectoryFormat)
        raise ConfigError(f"format {format!r} is unknown; use one of {known}") from None
    fits = ending is chosen or (ending is None and chosen is not TrajectoryFormat.PARQUET)
    if not fits:
        wanted = {
            TrajectoryFormat.PARQUET: "a file that ends in .parquet",
            TrajectoryFormat.DATASET: "a folder",
            TrajectoryFormat.ATIF: "a file that ends in .jsonl, or a folder",
        }[chosen]
        raise ConfigError(f"{target} does not fit the format {chosen.value}; name {wanted}")
    return chosen


def ensure_new(target: Path) -> None:
    if target.exists():
        raise ConfigError(f"{target} exists, and an export replaces nothing; choose another name")


@contextmanager
def staged(target: Path) -> Generator[Path]:
    """A path beside the target that becomes it when the block succeeds."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        staging = temporary / target.name
        yield staging
        os.rename(staging, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class _Stored:
    """Iterates over trajectories that have their payload, and counts the others. Chosen by steps,
    a trajectory comes once for each batch that contains it; it is passed on once."""

    def __init__(self, found: Iterable[RecordedTrajectory], *, may_repeat: bool) -> None:
        self._found = found
        self._seen: set[str] | None = set() if may_repeat else None
        self.num_without_tokens = 0
        self.num_too_long = 0

    def __iter__(self) -> Iterator[RecordedTrajectory]:
        for one in self._found:
            if self._seen is not None:
                if one.row_id in self._seen:
                    continue
                self._seen.add(one.row_id)
            if one.state is PayloadState.STORED:
                yield one
            else:
                self.num_without_tokens += 1


# --- writing --------------------------------------------------------------------------------------


def _write_shards(found: Iterable[RecordedTrajectory], reader: PromptReader, folder: Path) -> int:
    (folder / "data").mkdir(parents=True)
    rest, num_written = iter(found), 0
    for shard in range(1 << 31):
        path = folder / "data" / f"train-{shard:05}.parquet"
        written = _write_parquet(islice(rest, ROWS_PER_SHARD), reader, path)
        num_written += written
        if shard and not written:
            path.unlink()
        if written < ROWS_PER_SHARD:
            break
    return num_written


def _write_parquet(found: Iterable[RecordedTrajectory], reader: PromptReader, path: Path) -> int:
    arrow, parquet = _arrow()
    schema = table_schema()
    rest, num_written = iter(found), 0
    with parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        while page := [_row(one, reader) for one in islice(rest, ROWS_PER_GROUP)]:
            writer.write_table(arrow.Table.from_pylist(page, schema=schema))
            num_written += len(page)
    return num_written


def _row(one: RecordedTrajectory, reader: PromptReader) -> dict[str, Any]:
    assert one.payload is not None, "it is stored"
    return to_row(one, reader.read(one.payload))


def _write_documents(found: _Stored, reader: PromptReader, path: Path) -> int:
    from penstock.runs.export.atif_document import (
        MAX_PROMPT_TOKENS,
        num_prompt_tokens,
        to_document,
        to_json,
    )

    def documents() -> Iterator[tuple[str, str]]:
        for one in found:
            assert one.payload is not None, "it is stored"
            if num_prompt_tokens(one.payload) > MAX_PROMPT_TOKENS:
                found.num_too_long += 1
                continue
            yield one.row_id, to_json(to_document(one, reader.read(one.payload)))

    if path.suffix == ".jsonl":
        with path.open("w") as file:
            return sum(bool(file.write(text + "\n")) for _, text in documents())
    path.mkdir()
    num_written = 0
    for name, text in documents():
        if not is_safe_name(name):  # the run may belong to another user
            raise StoreError(
                f"the ledger names a row {name[:80]!r}, which names no file; it is damaged"
            )
        (path / f"{name}.json").write_text(text + "\n")
        num_written += 1
    return num_written


# --- reading --------------------------------------------------------------------------------------


def _read_parquet(path: Path) -> Iterator[Trajectory]:
    _, parquet = _arrow()
    with parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=ROWS_PER_GROUP):
            for at, row in enumerate(batch.to_pylist(), 1):
                yield from_row(row, origin=f"{path}: row {row.get('row_id') or at}")


def _read_documents(path: Path) -> Iterator[Trajectory]:
    from penstock.runs.export.atif_document import from_json

    if path.suffix == ".json":
        yield from_json(path.read_bytes(), origin=str(path))
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield from_json(line, origin=f"{path}: line {number}")


def _arrow() -> tuple[Any, Any]:
    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ModuleNotFoundError:
        raise ConfigError(
            "Parquet needs pyarrow, which is not installed; pip install 'penstock-rl[data]'"
        ) from None
