# SPDX-License-Identifier: Apache-2.0
"""Patches between pulled versions: exactly what changed, only from deltas that were proven."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.contract.test_weights_deltas import WEIGHTS, versions, write_version
from tests.unit.weights.weight_servers import put_folder, running_weight_server

from penstock.errors import WeightsError
from penstock.weights.client import Puller
from penstock.weights.deltas.file_delta import layout_of
from penstock.weights.patches import POSITIONS, VALUES, tensors_to_verify
from penstock.weights.store import DirectoryStore


def read(path: Path) -> dict[str, NDArray[Any]]:
    raw, layout = path.read_bytes(), layout_of(path)
    dtypes = {"I32": "<i4", "F32": "<u4"}
    return {
        name: np.frombuffer(raw[found.start : found.end], dtypes[found.dtype])
        for name, found in layout.byte_ranges.items()
    }


def patched(base: Path, patch: Path) -> dict[str, NDArray[Any]]:
    changes, tensors = read(patch), {n: t.copy() for n, t in read(base / WEIGHTS).items()}
    for key, values in changes.items():
        if key.startswith(VALUES):
            name = key.removeprefix(VALUES)
            where = changes.get(POSITIONS + name, np.arange(tensors[name].size))
            is_new = tensors[name][where] != values
            assert is_new.mean() > 0.7, "little else; a later step may undo an earlier one"
            tensors[name][where] = values
    return tensors


def is_same(left: dict[str, NDArray[Any]], right: dict[str, NDArray[Any]]) -> bool:
    return left.keys() == right.keys() and all((left[n] == right[n]).all() for n in left)


@pytest.mark.parametrize("is_local", [False, True], ids=["rebuilt", "linked"])
@pytest.mark.parametrize("number", [1, 3], ids=["one step", "several steps"])
async def test_a_patch_is_exactly_what_changed(tmp_path: Path, is_local: bool, number: int) -> None:
    made = versions(tmp_path, 4)
    store = tmp_path / "store" if is_local else None
    puller = Puller(tmp_path / "cache", transfer="delta", store_root=store)
    async with running_weight_server(tmp_path) as caller:
        base = await puller.pull([caller], made[0])
        folder = await puller.pull([caller], made[number])
    patch = puller.make_patch(base, folder)
    assert patch is not None
    assert patch.stat().st_size < (folder / WEIGHTS).stat().st_size / 10
    assert is_same(patched(base, patch), read(folder / WEIGHTS))
    digests = json.loads(layout_of(patch).head[8:])["__metadata__"]["digests"]
    assert set(json.loads(digests)) == set(read(folder / WEIGHTS))
    assert puller.make_patch(base, folder) == patch, "made once"

    puller.prune([made[number].manifest_digest])
    assert patch.exists()
    puller.prune([made[0].manifest_digest])
    assert not patch.exists()


async def test_a_file_that_was_fetched_in_full_has_no_proven_delta(tmp_path: Path) -> None:
    made = versions(tmp_path, 2)
    puller = Puller(tmp_path / "cache", transfer="full")
    async with running_weight_server(tmp_path) as caller:
        base, folder = [await puller.pull([caller], version) for version in made]
    assert puller.make_patch(base, folder) is None


async def test_a_large_change_is_not_worth_a_patch(tmp_path: Path) -> None:
    first = put_folder(tmp_path, write_version(tmp_path / "hf-0", 0), 0)
    second = put_folder(tmp_path, write_version(tmp_path / "hf-1", 1, share=0.3), 1, first)
    puller = Puller(tmp_path / "cache", store_root=tmp_path / "store")
    async with running_weight_server(tmp_path) as caller:
        base, folder = [await puller.pull([caller], version) for version in (first, second)]
    assert puller.make_patch(base, folder) is None
    assert {path.name for path in folder.parent.iterdir()} == {base.name, folder.name}


async def test_a_damaged_delta_makes_no_patch(tmp_path: Path) -> None:
    made = versions(tmp_path, 2)
    puller = Puller(tmp_path / "cache", store_root=tmp_path / "store")
    async with running_weight_server(tmp_path) as caller:
        base, folder = [await puller.pull([caller], version) for version in made]
    [step] = DirectoryStore(tmp_path / "store").deltas()
    blob = DirectoryStore(tmp_path / "store").blob_path(step.blob)
    blob.chmod(0o644)
    blob.write_bytes(blob.read_bytes()[:-9] + b"\1" + blob.read_bytes()[-8:])
    with pytest.raises(WeightsError, match="does not match its digest"):
        puller.make_patch(base, folder)


def test_every_tensor_is_verified_in_turn_and_all_of_them_at_times() -> None:
    names = [f"layer.{number}" for number in range(60)]
    shares = [tensors_to_verify(names, number) for number in range(1, 26)]
    assert [len(share) for share in shares[:-1]] == [len(share) for share in shares[:-1] if share]
    assert max(len(share) for share in shares[:-1]) == 3
    assert set(shares[-1]) == set(names)
    seen = {name for number in range(26, 50) for name in tensors_to_verify(names, number)}
    assert len(seen) == 57, "all but the share of turn 0, which is that of the full check"
