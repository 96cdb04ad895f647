# SPDX-License-Identifier: Apache-2.0
"""Random chains of versions through the store: whatever changed, every step and every leap over
several gives back the very bytes, and a delta never costs much more than the whole."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Generator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.chaos.filesystems import scratch
from tests.chaos.results_table import begin
from tests.chaos.version_chains import File, Tensor, Version, chains, tensors_of, write_version
from tests.unit.weights.snapshot_folders import contents
from tests.unit.weights.tensor_pairs import COMPILED, NUMPY, raw
from tests.unit.weights.weight_servers import POLICY, listening

from penstock.types import PublishedVersion
from penstock.weights.client import Puller
from penstock.weights.deltas import codec, delta, sparse
from penstock.weights.deltas.codec import apply_payload
from penstock.weights.deltas.delta import read_delta, write_delta
from penstock.weights.deltas.file_delta import apply_in_place, has_same_layout, make_delta
from penstock.weights.deltas.numpy_kernels import Kernels
from penstock.weights.manifest import (
    FileEntry,
    SnapshotManifest,
    digest_of,
    encode_manifest,
    parse_manifest,
)
from penstock.weights.publish import put_snapshot
from penstock.weights.serving.origin import Origin
from penstock.weights.serving.server import build
from penstock.weights.store import DirectoryStore
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.client import AsyncServiceClient, connect

CHAINS = int(os.environ.get("PENSTOCK_CHAINS", "300"))
HTTP_EVERY = 10
"""One chain of so many is pulled by a node; HTTP adds nothing to the others but time."""
ROOM_BYTES = 200
"""A delta's header and end."""
TENSOR_ROOM_BYTES = 64
"""Lengths and head of a frame, beside the tensor's name."""
BASE, TARGET = "0" * 64, "1" * 64

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(1800 + CHAINS)]


class World:
    """One front and one loop for all chains; each has a fresh store and a fresh cache."""

    def __init__(self, root: Path, runner: asyncio.Runner, caller: AsyncServiceClient) -> None:
        self.root = root
        self.runner = runner
        self.caller = caller
        self.seen = Counter[str]()

    def sweep(self) -> None:
        for path in self.root.iterdir():
            shutil.rmtree(path)

    def pull(self, wanted: PublishedVersion, cache: Path) -> Path:
        return self.runner.run(Puller(cache, transfer="delta").pull([self.caller], wanted))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Generator[World]:
    keys = tmp_path_factory.mktemp("keys")
    signer = Signer.create(keys / "run", "run")
    token = signer.mint(Role.ROLLOUT, [Audience.WEIGHTS], ttl_s=1e6)
    with (
        tempfile.TemporaryDirectory(prefix="penstock-chains-", dir=scratch(keys)) as name,
        asyncio.Runner() as runner,
    ):
        store = DirectoryStore(Path(name) / "store")
        app = build(Origin(store), signer.verifier(Audience.WEIGHTS))
        stack = AsyncExitStack()

        async def start() -> AsyncServiceClient:
            url = await stack.enter_async_context(listening(app))
            return await stack.enter_async_context(connect(url, token))

        yield World(Path(name), runner, runner.run(start()))
        runner.run(stack.aclose())


# --- one chain --------------------------------------------------------------------------------


def put_all(root: Path, chain: Sequence[Version]) -> list[SnapshotManifest]:
    """Each version after the one before it."""
    store, last = DirectoryStore(root / "store"), None
    found: list[SnapshotManifest] = []
    for number, version in enumerate(chain):
        folder = write_version(root / f"hf-{number}", version)
        last = put_snapshot(root / "store", folder, policy=POLICY, number=number, after=last)
        found.append(parse_manifest(store.read_manifest(last.manifest_digest)))
    return found


def weights_of(manifest: SnapshotManifest) -> dict[str, FileEntry]:
    return {file.name: file for file in manifest.files if file.name.endswith(".safetensors")}


def most_bytes(tensors: Sequence[Tensor]) -> float:
    """The whole and one percent, and a little for each tensor, however small."""
    full = sum(tensor.bits.nbytes for tensor in tensors)
    return 1.01 * full + ROOM_BYTES + sum(TENSOR_ROOM_BYTES + len(one.name) for one in tensors)


def layout(file: File) -> list[object]:
    return [(tensor.name, tensor.dtype, tensor.shape) for tensor in file]


class Node:
    """Files of one name, made from one another by deltas alone."""

    def __init__(self, root: Path, store: DirectoryStore) -> None:
        self._made = root / "made"
        self._made.mkdir(exist_ok=True)
        self._store = store

    def step(self, base: FileEntry, file: FileEntry, step: bytes) -> None:
        """From the file made last if it is the base, else from the store's."""
        start, made = self._made / base.blob, self._made / file.blob
        start = start if start.exists() else self._store.blob_path(base.blob)
        made.unlink(missing_ok=True)
        shutil.copyfile(start, made)
        apply_in_place(made, io.BytesIO(step), base_blob=base.blob)
        assert digest_of(made.read_bytes()) == file.blob


def check_steps(world: World, chain: Sequence[Version], found: Sequence[SnapshotManifest]) -> None:
    """A file has a delta from the one before it just if both have one layout."""
    store = DirectoryStore(world.root / "store")
    node = Node(world.root, store)
    for (before, version), (old, new) in zip(pairwise(chain), pairwise(found), strict=True):
        bases = weights_of(old)
        for name, file in weights_of(new).items():
            base = bases.get(name)
            if base is None or base.blob == file.blob:
                continue
            steps = [one for one in store.deltas_to(file.blob) if one.base == base.blob]
            assert len(steps) == (layout(before[name]) == layout(version[name])), name
            for step in steps:
                assert step.bytes <= most_bytes(version[name])
                node.step(base, file, store.blob_path(step.blob).read_bytes())
                world.seen["file deltas"] += 1


def check_merged_delta(world: World, first: SnapshotManifest, last: SnapshotManifest) -> None:
    """What an origin merges: all changes since the first version at once."""
    store = DirectoryStore(world.root / "store")
    bases = weights_of(first)
    for name, file in weights_of(last).items():
        base = bases.get(name, file)
        paths = store.blob_path(base.blob), store.blob_path(file.blob)
        if base.blob != file.blob and has_same_layout(*paths):
            out = io.BytesIO()
            make_delta(*paths, out, base_blob=base.blob, target_blob=file.blob)
            Node(world.root, store).step(base, file, out.getvalue())
            world.seen["leaps"] += 1


def check_tensors(old: Version, new: Version) -> None:
    """Whatever was added, renamed, resized or moved to another file."""
    bases, tensors = tensors_of(old), tensors_of(new)
    out = io.BytesIO()
    write_delta(
        out,
        BASE,
        TARGET,
        [
            (
                name,
                one.bits.itemsize,
                raw(bases[name].bits) if name in bases else None,
                raw(one.bits),
            )
            for name, one in tensors.items()
        ],
    )
    assert out.tell() <= most_bytes(list(tensors.values()))
    made = {
        name: bases[name].bits.copy().view(np.uint8)
        if name in bases and bases[name].bits.nbytes == one.bits.nbytes
        else np.zeros(one.bits.nbytes, np.uint8)
        for name, one in tensors.items()
    }
    _, frames = read_delta(
        io.BytesIO(out.getvalue()), {name: one.bits.nbytes for name, one in tensors.items()}
    )
    for frame in frames:
        apply_payload(frame.payload, [made[name].data for name in frame.names], frame.item_bytes)
    for name, one in tensors.items():
        assert made[name].tobytes() == one.bits.tobytes(), name


def check_pulls(world: World, found: Sequence[SnapshotManifest]) -> None:
    """One node takes every version, another only the first and the last."""
    wanted = [
        PublishedVersion(
            policy=POLICY, incarnation=1, number=one.number,
            manifest_digest=digest_of(encode_manifest(one)),
        )
        for one in found
    ]  # fmt: skip
    for cache, some in (("every", wanted), ("ends", [wanted[0], wanted[-1]])):
        for one in some:
            folder = world.pull(one, world.root / cache)
            assert contents(folder) == contents(world.root / f"hf-{one.number}")
            world.seen["pulls"] += 1


# --- all of them ------------------------------------------------------------------------------


def _always(kernels: Kernels, num_bytes: int) -> Kernels:
    return kernels


def test_every_version_comes_back_by_every_way(world: World) -> None:
    figures = begin("chains of versions")

    @given(
        chain=chains(),
        kernels=st.sampled_from([NUMPY, COMPILED]),
        is_fine=st.booleans(),
        luck=st.integers(0, HTTP_EVERY - 1),
    )
    @settings(
        max_examples=CHAINS,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        database=None,
    )
    def check(chain: list[Version], kernels: Kernels, is_fine: bool, luck: int) -> None:
        world.sweep()
        figures.trials += 1
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(codec, "_kernels_for", partial(_always, kernels))
            if is_fine:  # so that small tensors have many seams
                patch.setattr(type(kernels), "chunk_bytes", 512)
                patch.setattr(sparse, "STEP", 64)
                patch.setattr(delta, "SHARED_FRAME_BYTES", 4096)
            found = put_all(world.root, chain)
            check_steps(world, chain, found)
            check_merged_delta(world, found[0], found[-1])
            for old, new in [*pairwise(chain), (chain[0], chain[-1])]:
                check_tensors(old, new)
            if luck == 0:
                check_pulls(world, found)
        figures.acknowledged += len(found)

    check()
    figures.note = ", ".join(f"{count:,} {what}" for what, count in world.seen.items())
    figures.require_clean()
    assert all(world.seen[what] for what in ("file deltas", "leaps", "pulls"))
