# SPDX-License-Identifier: Apache-2.0
"""Names that users of other frameworks type, and what they are called here.

Owns the search in the table `names_elsewhere.toml`, and the wording of the hint. A name is found in
any section, and sections around it decide between names that are too common to be clear alone.
Accepts none of them: a run file has one name for each thing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any, cast

from penstock.options import KeyPath

_COMMON = frozenset(
    {"ac", "dp", "enable", "env", "interval", "mode", "n", "name", "path", "port"}
    | {"project", "r", "rank", "source", "strategy", "tp", "type"}
)
"""Names that mean something only with the section they are in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameElsewhere:
    """A name of another framework."""

    framework: str
    name: str
    """As the framework writes it, with its sections: `data.train_files`."""
    key: str | None = None
    """The key of penstock; None if it has no such setting."""
    note: str = ""
    """How the meaning differs, or what to do instead."""
    values: Mapping[str, str] = field(default_factory=dict[str, str])
    """By their value, the line to write."""

    def hint(self, value: object, policy: str = "policy") -> str:
        """What to write instead of this name with this value."""
        written = str(value).lower() if isinstance(value, bool) else str(value)
        ours = self.values.get(written) or self.key
        if ours is None:
            return f"penstock has no such setting. {self.note}"
        ours = ours.replace("models.policy", f"models.{policy}")
        return f'did you mean "{ours}"? {self.note}'.rstrip()


@cache
def names_elsewhere() -> tuple[NameElsewhere, ...]:
    """All rows of the table, in its order."""
    import tomllib  # only for a mistake

    file = resources.files("penstock.config").joinpath("names_elsewhere.toml")
    table = tomllib.loads(file.read_text(encoding="utf-8"))
    return tuple(
        NameElsewhere(framework=framework, name=name, **_columns(row))
        for framework, rows in table.items()
        for name, row in rows.items()
    )


def _columns(row: str | dict[str, Any]) -> dict[str, Any]:
    return {"key": row} if isinstance(row, str) else row


def find_name(path: KeyPath) -> NameElsewhere | None:
    """The row that shares most of its last sections with this path, if any has its last word."""
    words = [part for part in path if isinstance(part, str)]
    best, most = None, (0, False)
    for row in names_elsewhere():
        name = row.name.split(".")
        shared = _shared_end(name, words)
        is_clear = shared > 1 or words[-1] not in _COMMON or row.name == words[-1]
        rank = (shared, shared == len(name))
        if shared and is_clear and rank > most:
            best, most = row, rank
    return best


def is_section_elsewhere(word: str) -> bool:
    """Whether another framework has a section of this name."""
    return any(word in row.name.split(".")[:-1] for row in names_elsewhere())


def find_names_in(path: KeyPath, section: object) -> Iterator[tuple[KeyPath, object]]:
    """(path, value) of every key of an unknown section, if any of them is a name elsewhere."""
    found = list(_keys(path, section))
    if any(len(key) > len(path) and find_name(key) for key, _ in found):
        yield from found


def find_section(path: KeyPath) -> NameElsewhere | None:
    """The row of the nearest section around this key."""
    around = (path[:length] for length in range(len(path) - 1, 0, -1))
    return next((row for section in around if (row := find_name(section))), None)


def _keys(path: KeyPath, value: object) -> Iterator[tuple[KeyPath, object]]:
    if not isinstance(value, Mapping) or not value:
        yield path, value
        return
    for key, child in cast(Mapping[str, object], value).items():
        yield from _keys((*path, key), child)


def _shared_end(name: list[str], words: list[str]) -> int:
    """How many words from the end on are the same."""
    pairs = zip(reversed(name), reversed(words), strict=False)
    count = 0
    for ours, theirs in pairs:
        if ours != theirs:
            break
        count += 1
    return count
