# SPDX-License-Identifier: Apache-2.0
"""Formats the output of `penstock weights`: lines for people, objects for programs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.cli.output import format_bytes, pluralise, table
from penstock.weights.catalog import (
    SHORT_DIGEST_CHARS,
    Catalog,
    CatalogFile,
    CatalogVersion,
    count_changes,
    names_by_blob,
)
from penstock.weights.verify import Damage

if TYPE_CHECKING:
    from penstock.weights.compare import Comparison, TensorChange
    from penstock.weights.deltas.chain import DeltaEntry
    from penstock.weights.store import DirectoryStore

DASH = "–"
MAX_ROWS = 30
"""Tensors of a comparison to print."""
NAME_WIDTH = 38


def catalog_json(catalog: Catalog) -> dict[str, object]:
    return {
        "versions": [_summary(version) for version in catalog.versions],
        "damaged": catalog.damaged,
    }


def _summary(version: CatalogVersion) -> dict[str, object]:
    manifest = version.manifest
    return {
        "policy": manifest.policy,
        "number": manifest.number,
        "manifest_digest": version.digest,
        "weights_digest": manifest.weights_digest,
        "base": manifest.base,
        "bytes": version.num_bytes,
        "kept": _kept(version),
        "delta_bytes": version.delta_bytes,
    }


def list_lines(catalog: Catalog, blobs: Sequence[int]) -> list[str]:
    rows = [
        (
            version.name,
            version.digest[:SHORT_DIGEST_CHARS],
            format_bytes(version.num_bytes),
            _kept(version),
            format_bytes(version.delta_bytes) if version.delta_bytes else DASH,
            percent(version.delta_bytes, version.num_bytes) if version.delta_bytes else DASH,
            f"of {version.manifest.base[:SHORT_DIGEST_CHARS]}"
            if version.manifest.is_adapter
            else "",
        )
        for version in catalog.versions
    ]
    headers = ("version", "manifest", "size", "kept", "delta", "of size", "")
    return [
        *table(headers, rows, num_left_aligned=2),
        "",
        f"{pluralise(len(catalog.versions), 'version')} of "
        f"{', '.join(catalog.policies)}; the store holds {format_bytes(sum(blobs))} in "
        f"{pluralise(len(blobs), 'blob')}",
    ]


def _kept(version: CatalogVersion | CatalogFile) -> str:
    if version.is_full:
        return "whole"
    return "deltas" if version.is_available else "missing"


def version_json(version: CatalogVersion) -> dict[str, object]:
    return {
        **_summary(version),
        "files": [
            {
                "name": file.entry.name,
                "blob": file.entry.blob,
                "bytes": file.entry.bytes,
                "kept": _kept(file),
                "chain": file.chain,
                "deltas": file.deltas,
            }
            for file in version.files
        ],
        "tensors": version.manifest.tensors,
    }


def show_lines(store: DirectoryStore, catalog: Catalog, version: CatalogVersion) -> list[str]:
    manifest = version.manifest
    names = names_by_blob(catalog, manifest.policy)
    facts = [
        ("manifest", version.digest),
        ("weights", manifest.weights_digest),
        *([("base", _base(catalog, manifest.base))] if manifest.is_adapter else []),
        ("tensors", _tensors(version)),
    ]
    files = [
        (
            file.entry.name,
            file.entry.blob[:SHORT_DIGEST_CHARS],
            format_bytes(file.entry.bytes),
            _kept(file),
        )
        for file in version.files
    ]
    return [
        version.name,
        *(f"  {label:<9} {text}" for label, text in facts),
        "",
        *table(("file", "blob", "size", "kept"), files, num_left_aligned=2),
        *_chain_lines(version, names),
        *_delta_lines(store, version, names),
    ]


def _base(catalog: Catalog, base: str) -> str:
    for version in catalog.versions:
        if version.manifest.weights_digest == base and not version.manifest.is_adapter:
            return f"{base[:SHORT_DIGEST_CHARS]} ({version.name})"
    return f"{base} (not in this store)"


def _tensors(version: CatalogVersion) -> str:
    tensors = version.manifest.tensors
    dtypes = Counter(tensor.dtype for tensor in tensors)
    num_elements = sum(math.prod(tensor.shape) for tensor in tensors)
    kinds = ", ".join(f"{number:,} {dtype}" for dtype, number in dtypes.most_common())
    return f"{pluralise(len(tensors), 'tensor')} of {num_elements:,} elements ({kinds})"


def _chain_lines(version: CatalogVersion, names: dict[str, str]) -> Iterator[str]:
    for file in version.files:
        if file.chain:
            cost = format_bytes(sum(step.bytes for step in file.chain))
            steps = pluralise(len(file.chain), "delta")
            base = _name(names, file.chain[0].base)
            yield ""
            yield f"{file.entry.name}: rebuilt from {base} with {steps} of {cost}"


def _delta_lines(
    store: DirectoryStore, version: CatalogVersion, names: dict[str, str]
) -> Iterator[str]:
    rows = [
        (
            file.entry.name,
            _name(names, step.base),
            format_bytes(step.bytes),
            percent(step.bytes, file.entry.bytes),
            _density(store, file, step),
        )
        for file in version.files
        for step in file.deltas
    ]
    if rows:
        yield ""
        yield from table(
            ("delta to", "from", "size", "of file", "changed"), rows, num_left_aligned=2
        )


def _name(names: dict[str, str], blob: str) -> str:
    return names.get(blob, blob[:SHORT_DIGEST_CHARS])


def _density(store: DirectoryStore, file: CatalogFile, step: DeltaEntry) -> str:
    """Share of elements that the delta changes; "damaged" if it cannot be read."""
    from penstock.errors import WeightsError

    # Deltas keep the layout, so every file of the chain has the layout of the last.
    same_layout = (step.target, step.base, *(each.base for each in file.chain))
    try:
        found = count_changes(store, step, same_layout)
    except (WeightsError, OSError):
        return "damaged"
    return DASH if found is None else percent(*found)


def damage_lines(found: Iterable[Damage]) -> Iterator[str]:
    for number, damage in enumerate(found, 1):
        yield f"{number}. {damage.version} {damage.what}: {damage.why}"
        yield f"   {damage.path}"
        yield f"   {damage.fix}"


def diff_json(old: CatalogVersion, new: CatalogVersion, found: Comparison) -> dict[str, object]:
    return {
        "old": {"version": old.name, "manifest_digest": old.digest},
        "new": {"version": new.name, "manifest_digest": new.digest},
        "num_elements": found.num_elements,
        "num_changed": found.num_changed,
        "tensors": found.changes,
        "removed": found.removed,
        "added": found.added,
        "reshaped": found.reshaped,
    }


def diff_lines(old: CatalogVersion, new: CatalogVersion, found: Comparison) -> list[str]:
    changed = [change for change in found.changes if change.num_changed]
    rows = [_row(change) for change in changed[:MAX_ROWS]]
    lines = [
        f"{old.name} ({old.digest[:SHORT_DIGEST_CHARS]}) → {new.name} "
        f"({new.digest[:SHORT_DIGEST_CHARS]})",
        "",
    ]
    if rows:
        lines += [*table(("tensor", "changed", "share", "max ulps", "max abs"), rows), ""]
    if len(changed) > MAX_ROWS:
        lines += [f"… and {pluralise(len(changed) - MAX_ROWS, 'tensor')} more; --json has all", ""]
    share = percent(found.num_changed, found.num_elements)
    lines.append(
        f"{found.num_changed:,} of {found.num_elements:,} elements changed ({share}), "
        f"in {len(changed):,} of {pluralise(len(found.changes), 'tensor')}"
    )
    for label, names in (
        (f"only in {old.name}", found.removed),
        (f"only in {new.name}", found.added),
        ("different shape or dtype", found.reshaped),
    ):
        lines += [f"{label}: {shorten(name)}" for name in names]
    return lines


def _row(change: TensorChange) -> tuple[str, ...]:
    return (
        shorten(change.name),
        f"{change.num_changed:,}",
        percent(change.num_changed, change.num_elements),
        DASH if change.max_ulps is None else f"{change.max_ulps:,}",
        DASH if change.max_abs is None else f"{change.max_abs:.2g}",
    )


def shorten(name: str) -> str:
    """A long name without its middle: layers differ at the start, parameters at the end."""
    if len(name) <= NAME_WIDTH:
        return name
    head = NAME_WIDTH // 2
    return f"{name[:head]}…{name[head + 1 - NAME_WIDTH :]}"


def percent(part: int, total: int) -> str:
    """`0.84 %`, `12 %`; a nonzero share is never shown as zero."""
    share = 100 * part / total if total else 0.0
    if 0 < share < 0.01:
        return "<0.01 %"
    return f"{share:.2f} %" if share < 9.995 else f"{share:.0f} %"
