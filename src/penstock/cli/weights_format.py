# SPDX-License-Identifier: Apache-2.0
"""What `penstock weights` prints: lines for people, objects for programs. Formats only."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from penstock.cli.output import counted, size, table
from penstock.weights.catalog import SHORT, Catalog, KeptFile, KeptVersion, names_by_blob
from penstock.weights.verify import Damage

if TYPE_CHECKING:
    from penstock.weights.compare import Comparison, TensorChange
    from penstock.weights.deltas.chain import DeltaEntry
    from penstock.weights.store import DirectoryStore

NONE = "–"
MAX_ROWS = 30
"""Tensors of a comparison that people are shown."""
NAME_WIDTH = 38


# --- ls -------------------------------------------------------------------------------------------


def listed(catalog: Catalog) -> dict[str, object]:
    return {
        "versions": [_summary(version) for version in catalog.versions],
        "damaged": catalog.damaged,
    }


def _summary(version: KeptVersion) -> dict[str, object]:
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
            version.digest[:SHORT],
            size(version.num_bytes),
            _kept(version),
            size(version.delta_bytes) if version.delta_bytes else NONE,
            percent(version.delta_bytes, version.num_bytes) if version.delta_bytes else NONE,
            f"of {version.manifest.base[:SHORT]}" if version.manifest.is_adapter else "",
        )
        for version in catalog.versions
    ]
    heads = ("version", "manifest", "size", "kept", "delta", "of size", "")
    return [
        *table(heads, rows, left=2),
        "",
        f"{counted(len(catalog.versions), 'version')} of "
        f"{', '.join(catalog.policies)}; the store holds {size(sum(blobs))} in "
        f"{counted(len(blobs), 'blob')}",
    ]


def _kept(version: KeptVersion | KeptFile) -> str:
    if version.is_whole:
        return "whole"
    return "deltas" if version.is_there else "missing"


# --- show -----------------------------------------------------------------------------------------


def shown(version: KeptVersion) -> dict[str, object]:
    return {
        **_summary(version),
        "files": [
            {
                "name": file.entry.name,
                "blob": file.entry.blob,
                "bytes": file.entry.bytes,
                "kept": _kept(file),
                "way": file.way,
                "deltas": file.deltas,
            }
            for file in version.files
        ],
        "tensors": version.manifest.tensors,
    }


def show_lines(store: DirectoryStore, catalog: Catalog, version: KeptVersion) -> list[str]:
    manifest = version.manifest
    names = names_by_blob(catalog, manifest.policy)
    facts = [
        ("manifest", version.digest),
        ("weights", manifest.weights_digest),
        *([("base", _base(catalog, manifest.base))] if manifest.is_adapter else []),
        ("tensors", _tensors(version)),
    ]
    files = [
        (file.entry.name, file.entry.blob[:SHORT], size(file.entry.bytes), _kept(file))
        for file in version.files
    ]
    return [
        version.name,
        *(f"  {label:<9} {text}" for label, text in facts),
        "",
        *table(("file", "blob", "size", "kept"), files, left=2),
        *_way_lines(version, names),
        *_delta_lines(store, version, names),
    ]


def _base(catalog: Catalog, base: str) -> str:
    for version in catalog.versions:
        if version.manifest.weights_digest == base and not version.manifest.is_adapter:
            return f"{base[:SHORT]} ({version.name})"
    return f"{base} (not in this store)"


def _tensors(version: KeptVersion) -> str:
    tensors = version.manifest.tensors
    dtypes = Counter(tensor.dtype for tensor in tensors)
    num_elements = sum(math.prod(tensor.shape) for tensor in tensors)
    kinds = ", ".join(f"{number:,} {dtype}" for dtype, number in dtypes.most_common())
    return f"{counted(len(tensors), 'tensor')} of {num_elements:,} elements ({kinds})"


def _way_lines(version: KeptVersion, names: dict[str, str]) -> Iterator[str]:
    for file in version.files:
        if file.way:
            cost = size(sum(step.bytes for step in file.way))
            steps = counted(len(file.way), "delta")
            base = _name(names, file.way[0].base)
            yield ""
            yield f"{file.entry.name}: made from {base}, {steps} of {cost}"


def _delta_lines(
    store: DirectoryStore, version: KeptVersion, names: dict[str, str]
) -> Iterator[str]:
    rows = [
        (
            file.entry.name,
            _name(names, step.base),
            size(step.bytes),
            percent(step.bytes, file.entry.bytes),
            _density(store, file, step),
        )
        for file in version.files
        for step in file.deltas
    ]
    if rows:
        yield ""
        yield from table(("delta to", "from", "size", "of file", "changed"), rows, left=2)


def _name(names: dict[str, str], blob: str) -> str:
    return names.get(blob, blob[:SHORT])


def _density(store: DirectoryStore, file: KeptFile, step: DeltaEntry) -> str:
    """Elements that the delta changes; one that cannot be read says so."""
    from penstock.errors import WeightsError
    from penstock.weights.deltas.density import count_changes

    # Deltas keep the layout, so every file along the way has that of the last.
    whole = (step.target, step.base, *(each.base for each in file.way))
    try:
        found = count_changes(store, step, whole)
    except (WeightsError, OSError):
        return "damaged"
    return NONE if found is None else percent(*found)


# --- verify ---------------------------------------------------------------------------------------


def damage_lines(found: Iterable[Damage]) -> Iterator[str]:
    for number, damage in enumerate(found, 1):
        yield f"{number}. {damage.version} {damage.what}: {damage.why}"
        yield f"   {damage.path}"
        yield f"   {damage.cure}"


# --- diff -----------------------------------------------------------------------------------------


def differences(old: KeptVersion, new: KeptVersion, found: Comparison) -> dict[str, object]:
    return {
        "old": {"version": old.name, "manifest_digest": old.digest},
        "new": {"version": new.name, "manifest_digest": new.digest},
        "num_elements": found.num_elements,
        "num_changed": found.num_changed,
        "tensors": found.changes,
        "only_old": found.only_old,
        "only_new": found.only_new,
        "reshaped": found.reshaped,
    }


def diff_lines(old: KeptVersion, new: KeptVersion, found: Comparison) -> list[str]:
    changed = [change for change in found.changes if change.num_changed]
    rows = [_row(change) for change in changed[:MAX_ROWS]]
    lines = [f"{old.name} ({old.digest[:SHORT]}) → {new.name} ({new.digest[:SHORT]})", ""]
    if rows:
        lines += [*table(("tensor", "changed", "share", "max ulps", "max abs"), rows), ""]
    if len(changed) > MAX_ROWS:
        lines += [f"… and {counted(len(changed) - MAX_ROWS, 'tensor')} more; --json has all", ""]
    share = percent(found.num_changed, found.num_elements)
    lines.append(
        f"{found.num_changed:,} of {found.num_elements:,} elements changed ({share}), "
        f"in {len(changed):,} of {counted(len(found.changes), 'tensor')}"
    )
    for label, names in (
        (f"only in {old.name}", found.only_old),
        (f"only in {new.name}", found.only_new),
        ("of another shape or type", found.reshaped),
    ):
        lines += [f"{label}: {shorten(name)}" for name in names]
    return lines


def _row(change: TensorChange) -> tuple[str, ...]:
    return (
        shorten(change.name),
        f"{change.num_changed:,}",
        percent(change.num_changed, change.num_elements),
        NONE if change.max_ulps is None else f"{change.max_ulps:,}",
        NONE if change.max_abs is None else f"{change.max_abs:.2g}",
    )


def shorten(name: str) -> str:
    """A long name without its middle: layers differ at the front, parameters at the back."""
    if len(name) <= NAME_WIDTH:
        return name
    front = NAME_WIDTH // 2
    return f"{name[:front]}…{name[front + 1 - NAME_WIDTH :]}"


def percent(part: int, whole: int) -> str:
    """`0.84 %`, `12 %`; what is more than nothing never reads as nothing."""
    share = 100 * part / whole if whole else 0.0
    if 0 < share < 0.01:
        return "<0.01 %"
    return f"{share:.2f} %" if share < 9.995 else f"{share:.0f} %"
