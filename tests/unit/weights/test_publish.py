# SPDX-License-Identifier: Apache-2.0
"""Deltas are optional: whatever is wrong with the previous version, the new one is stored in
full."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from structlog.testing import capture_logs
from tests.unit.weights.snapshot_folders import weights_bytes
from tests.unit.weights.version_history import VersionHistory

from penstock.types import PolicyName
from penstock.weights import publish
from penstock.weights.manifest import parse_manifest
from penstock.weights.publish import StoredVersion, put_snapshot
from penstock.weights.store import DirectoryStore


def rewrite(path: Path, data: bytes) -> None:
    path.unlink()
    path.write_bytes(data)


def flipped(data: bytes, place: int) -> bytes:
    changed = bytearray(data)
    changed[place] ^= 1
    return bytes(changed)


def manifest_path(history: VersionHistory) -> Path:
    return history.store.blob_path("0" * 64).parents[1] / "manifests" / f"{history.digest(0)}.json"


def blob_path(history: VersionHistory) -> Path:
    return history.store.blob_path(history.file(0).blob)


DAMAGE: dict[str, Callable[[VersionHistory], object]] = {
    "manifest gone": lambda h: manifest_path(h).unlink(),
    "manifest empty": lambda h: rewrite(manifest_path(h), b""),
    "manifest flipped": lambda h: rewrite(
        manifest_path(h), flipped(manifest_path(h).read_bytes(), 40)
    ),
    "base gone": lambda h: blob_path(h).unlink(),
    "base empty": lambda h: rewrite(blob_path(h), b""),
    "base cut off": lambda h: rewrite(blob_path(h), blob_path(h).read_bytes()[:-9]),
    "base flipped in its weights": lambda h: rewrite(
        blob_path(h), flipped(blob_path(h).read_bytes(), -1)
    ),
    "base flipped in its header": lambda h: rewrite(
        blob_path(h), flipped(blob_path(h).read_bytes(), 30)
    ),
    "base is a folder": lambda h: (blob_path(h).unlink(), blob_path(h).mkdir()),
}


@pytest.fixture
def history(tmp_path: Path) -> VersionHistory:
    history = VersionHistory(tmp_path / "store")
    history.add_versions()
    return history


def is_full(history: VersionHistory, number: int) -> bool:
    """All of the version's files are stored in full."""
    manifest = parse_manifest(history.store.read_manifest(history.digest(number)))
    return all(map(history.store.has_blob, (file.blob for file in manifest.files)))


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_version_before_costs_only_the_delta(
    history: VersionHistory, damage: Callable[[VersionHistory], object]
) -> None:
    damage(history)
    with capture_logs() as logs:
        history.add_versions()
    assert [line["log_level"] for line in logs] == ["warning"]
    assert logs[0]["error"]
    assert is_full(history, 1)
    assert not list(history.store.deltas()), "a delta from damaged bytes leads nowhere"
    history.add_versions()
    assert history.store.deltas_to(history.file(2).blob), "the next has one again"


def test_a_codec_that_fails_costs_only_the_delta(
    history: VersionHistory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(publish, "make_delta", fail)
    history.add_versions()
    assert is_full(history, 1)
    assert not list(history.store.deltas())


def test_a_digest_that_is_none_costs_only_the_delta(
    history: VersionHistory, tmp_path: Path
) -> None:
    after = StoredVersion(manifest_digest="../../etc/passwd", weights_digest="")
    found = put_snapshot(
        tmp_path / "store", tmp_path / "hf-policy", policy=PolicyName("p"), number=9, after=after
    )
    assert history.store.read_manifest(found.manifest_digest)


def test_one_bad_file_does_not_cost_the_others_their_deltas(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path / "store")
    folder = tmp_path / "hf"
    folder.mkdir()
    last: StoredVersion | None = None
    blobs: list[dict[str, str]] = []
    for number in range(2):
        for name in ("one.safetensors", "two.safetensors"):
            data = weights_bytes({f"{name}.weight": (1000,)}, 1)
            (folder / name).write_bytes(flipped(data, -4) if number else data)
        last = put_snapshot(
            tmp_path / "store", folder, policy=PolicyName("p"), number=number, after=last
        )
        manifest = parse_manifest(store.read_manifest(last.manifest_digest))
        blobs.append({file.name: file.blob for file in manifest.files})
        if not number:
            store.blob_path(blobs[0]["one.safetensors"]).unlink()
    assert not store.deltas_to(blobs[1]["one.safetensors"])
    assert store.deltas_to(blobs[1]["two.safetensors"])


# --- an adapter with its model --------------------------------------------------------------------

MODEL, ADAPTER = "model.safetensors", "adapter_model.safetensors"


def write_adapted(folder: Path, seed: int) -> Path:
    """An unchanged model, and an adapter of this seed."""
    folder.mkdir(exist_ok=True)
    (folder / MODEL).write_bytes(weights_bytes({"w": (1000,)}, 0))
    (folder / ADAPTER).write_bytes(weights_bytes({"base_model.model.w.lora_A.weight": (9,)}, seed))
    (folder / "adapter_config.json").write_text("{}")
    return folder


def put_adapted(tmp_path: Path, number: int, after: StoredVersion | None = None) -> StoredVersion:
    return put_snapshot(
        tmp_path / "store",
        tmp_path / "hf",
        policy=PolicyName("p"),
        number=number,
        after=after,
        unchanged=[MODEL],
    )


def blobs_of(tmp_path: Path, stored: StoredVersion) -> dict[str, str]:
    store = DirectoryStore(tmp_path / "store")
    manifest = parse_manifest(store.read_manifest(stored.manifest_digest))
    return {file.name: file.blob for file in manifest.files}


def test_a_model_stored_with_its_adapter_is_its_base(tmp_path: Path) -> None:
    stored = put_adapted(write_adapted(tmp_path / "hf", 0).parent, 0)
    alone = tmp_path / "alone"
    alone.mkdir()
    (tmp_path / "hf" / MODEL).rename(alone / MODEL)
    model = put_snapshot(tmp_path / "store", alone, policy=PolicyName("m"), number=0)
    manifest = parse_manifest(
        DirectoryStore(tmp_path / "store").read_manifest(stored.manifest_digest)
    )
    assert manifest.base == model.weights_digest != manifest.weights_digest


def test_unchanged_files_are_neither_read_nor_copied(tmp_path: Path) -> None:
    """The file is not read: different bytes go unnoticed. Files without a previous version, or no
    longer in the store, are read."""
    first = put_adapted(write_adapted(tmp_path / "hf", 0).parent, 0)
    before = blobs_of(tmp_path, first)
    write_adapted(tmp_path / "hf", 1)
    (tmp_path / "hf" / MODEL).write_bytes(weights_bytes({"w": (1000,)}, 5))
    second = put_adapted(tmp_path, 1, first)
    after = blobs_of(tmp_path, second)
    assert after[MODEL] == before[MODEL] and after[ADAPTER] != before[ADAPTER]
    store = DirectoryStore(tmp_path / "store")
    store.blob_path(after[MODEL]).unlink()
    third = put_adapted(tmp_path, 2, second)
    assert blobs_of(tmp_path, third)[MODEL] != before[MODEL], "what lies there now"
    assert all(map(store.has_blob, blobs_of(tmp_path, third).values()))
    write_adapted(tmp_path / "hf", 1)
    again = put_adapted(tmp_path, 2)
    assert blobs_of(tmp_path, again)[MODEL] == before[MODEL]
