# SPDX-License-Identifier: Apache-2.0
"""What lies in a run folder, read once: the run file, the acknowledgement logs and all ledgers.

Owns the order of reading, from which follows what may differ between the ledgers of a running run:
acknowledgements, then home, then every partition, then once more what home tells partitions. So
whatever home built on is in the partitions, and whatever partitions repeat is in the later look at
home. Judges nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from penstock.audit.config import REWARD, RunFile, read_run_file
from penstock.audit.ledger import Books, Facts, Work, opened
from penstock.audit.payloads import Content, Segments
from penstock.audit.records import (
    Batch,
    Checkpoints,
    Column,
    Commit,
    Fate,
    Fork,
    Group,
    Issued,
    Lease,
    Manifest,
    Row,
    Source,
    Version,
    decode_manifest,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Far:
    """The ledger of a further partition."""

    index: int
    state: str
    work: Work
    facts: Facts
    """Its replica of what home told it, and its end of the link."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All of it. What home keeps is of one moment, and what partitions keep of a later one."""

    run_file: RunFile
    acknowledged: frozenset[str]
    issued: dict[str, Issued]
    groups: dict[str, Group]
    """Of all partitions, as the next five."""
    leases: list[Lease]
    """In order of group, slot and epoch within each partition."""
    rows: dict[str, Row]
    columns: dict[str, dict[str, Column]]
    """By row and name."""
    judging: frozenset[tuple[str, str]]
    """(group, policy): closed, and its rows lack columns that the policy judges by."""
    contents: dict[str, Content]
    """By row id: what the payload says, as far as it can be read."""
    fates: list[Fate]
    batches: list[Batch]
    """In order of consumer and seq."""
    manifests: dict[str, Manifest]
    """By the batch's name; damaged ones are missing."""
    commits: list[Commit]
    forks: list[Fork]
    versions: list[Version]
    sources: list[Source]
    freed: frozenset[str]
    """Groups whose payload nobody may ask for any more."""
    checkpoints: list[Checkpoints]
    home: Facts
    far: dict[int, Far]
    """By index: partitions besides home's own whose ledger there is."""
    later: Facts
    """Home's, after all partitions were read; the same as `home` when there are none."""
    missing: Mapping[int, str]
    """State by index: partitions that were declared lost, or drained and taken away."""
    weights: Path

    def rows_by_group(self) -> dict[str, list[Row]]:
        found: defaultdict[str, list[Row]] = defaultdict(list)
        for row in self.rows.values():
            found[row.group_id].append(row)
        return found

    def is_excused(self, group_id: str) -> bool:
        """Its partition is lost, so nobody can show its rows; or gone, and they were freed."""
        state = self.missing.get(partition_of(group_id))
        return state == "lost" or (state is not None and group_id in self.freed)

    def reward(self, row: Row) -> float | None:
        """What rules and trainers see: as delivered, or as a stage wrote it."""
        if REWARD not in self.run_file.needs:
            return row.reward
        column = self.columns.get(row.row_id, {}).get(REWARD)
        return None if column is None else column.value


def partition_of(name: str) -> int:
    """The partition in the name of a group or row, -1 when it names none."""
    index = name.partition("-")[0].removeprefix("p")
    return int(index) if index.isdecimal() else -1


def read(run_dir: Path) -> Evidence:
    run_file = read_run_file(run_dir / "config.yaml")
    acknowledged = frozenset(_read_acknowledged(run_dir / "acks"))
    folder = run_dir / "ledger"
    with opened(folder) as ledger:
        work, home, books = ledger.work(), ledger.facts(), ledger.books()
    folders = _folders(folder, books)
    far = {index: _read_far(index, state, path) for index, (state, path) in folders.items()}
    later = home
    if far:
        with opened(folder) as ledger:
            later = ledger.facts()
    works = [(folder, work), *((folders[index][1], one.work) for index, one in far.items())]
    return Evidence(
        run_file=run_file,
        acknowledged=acknowledged,
        issued=home.issued,
        groups={group.group_id: group for _, work in works for group in work.groups},
        leases=[lease for _, work in works for lease in work.leases],
        rows={row.row_id: row for _, work in works for row in work.rows},
        columns=_by_row(chain.from_iterable(work.columns for _, work in works)),
        judging=frozenset(
            (one.group_id, one.policy)
            for _, work in works
            for one in work.completions
            if one.state == "judging"
        ),
        contents={
            row_id: content
            for path, work in works
            for row_id, content in read_contents(path, work.rows, later.freed).items()
        },
        fates=home.fates,
        batches=books.batches,
        manifests={b.name: m for b in books.batches if (m := decode_manifest(b)) is not None},
        commits=home.commits,
        forks=home.forks,
        versions=home.versions,
        sources=books.sources,
        freed=home.freed,
        checkpoints=books.checkpoints,
        home=home,
        far=far,
        later=later,
        missing={p.index: p.state for p in books.partitions if p.index not in far},
        weights=run_dir / "weights",
    )


def _folders(folder: Path, books: Books) -> dict[int, tuple[str, Path]]:
    """State and ledger of each partition that must have one. A lost one is not asked, whatever its
    folder holds; one that is drained and empty may be taken away."""
    found: dict[int, tuple[str, Path]] = {}
    for partition in books.partitions:
        path = folder / f"p{partition.index}"
        is_away = partition.state == "gone" and not (path / "ledger.db").exists()
        if partition.state != "lost" and not is_away:
            found[partition.index] = (partition.state, path)
    return found


def _read_far(index: int, state: str, folder: Path) -> Far:
    with opened(folder) as ledger:
        return Far(index=index, state=state, work=ledger.work(), facts=ledger.facts())


def _by_row(columns: Iterable[Column]) -> dict[str, dict[str, Column]]:
    found: defaultdict[str, dict[str, Column]] = defaultdict(dict)
    for column in columns:
        found[column.row_id][column.name] = column
    return dict(found)


def read_contents(folder: Path, rows: Iterable[Row], freed: Set[str]) -> dict[str, Content]:
    """What the payload of these rows says, wherever it lies by now."""
    with Segments(folder / "segments") as segments:
        found = {row.row_id: _content(segments, row, freed) for row in rows}
        if not any(content.damage for content in found.values()):
            return found
        # A running service may have moved or deleted payload since its tables were read.
        with opened(folder) as ledger:
            now, freed_by_now = ledger.rows(), ledger.freed()
        for row in now:
            if row.row_id in found and found[row.row_id].damage:
                found[row.row_id] = _content(segments, row, freed_by_now)
    return found


def _content(segments: Segments, row: Row, freed: Set[str]) -> Content:
    if row.group_id in freed:
        return Content(is_freed=True)
    return segments.content(row.segment, row.offset, row.length, row.digest, row.blob)


def _read_acknowledged(folder: Path) -> Iterable[str]:
    for path in sorted(folder.glob("*")):  # one file per node, whatever it is called
        # A node killed in mid-write leaves half a line; the id on it may be cut.
        whole, _, _ = path.read_bytes().rpartition(b"\n")
        yield from filter(None, whole.decode(errors="replace").split("\n"))
