# SPDX-License-Identifier: Apache-2.0
"""Adapters as versions: stored and pulled in PEFT format, with their base model."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.unit.weights.snapshot_folders import contents, safetensors_bytes, write_folder
from tests.unit.weights.weight_servers import POLICY, listening

from penstock.errors import WeightsError
from penstock.types import PolicyName, PublishedVersion
from penstock.weights.client import Puller
from penstock.weights.manifest import SnapshotManifest, parse_manifest
from penstock.weights.publish import StoredVersion, put_snapshot
from penstock.weights.serving.origin import Origin
from penstock.weights.serving.server import build
from penstock.weights.store import DirectoryStore
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.client import connect

ADAPTER = "adapter_model.safetensors"
CONFIG = {
    "auto_mapping": None,
    "base_model_name_or_path": "HuggingFaceTB/SmolLM2-135M-Instruct",
    "bias": "none",
    "inference_mode": True,
    "lora_alpha": 32,
    "lora_dropout": 0.0,
    "modules_to_save": None,
    "peft_type": "LORA",
    "r": 16,
    "target_modules": ["q_proj", "v_proj"],
    "task_type": "CAUSAL_LM",
}
NUM_LAYERS, HIDDEN, RANK = 10, 576, 16


def write_adapter(folder: Path, seed: int, share: float = 1.0) -> Path:
    """Output of `PeftModel.save_pretrained` in bf16, with a share of seed 0's elements changed."""
    folder.mkdir()
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    size = 0
    for layer in range(NUM_LAYERS):
        for module in ("q_proj", "v_proj"):
            for letter, shape in (("A", [RANK, HIDDEN]), ("B", [HIDDEN, RANK])):
                name = f"base_model.model.model.layers.{layer}.self_attn.{module}.lora_{letter}"
                end = size + 2 * RANK * HIDDEN
                entry = {"dtype": "BF16", "shape": shape, "data_offsets": [size, end]}
                header[f"{name}.weight"] = entry
                size = end
    data = bytearray(random.Random(0).randbytes(size))
    draw = random.Random(seed)
    if seed and share == 1.0:
        data = bytearray(draw.randbytes(size))
    elif seed:
        for _ in range(int(share * size / 2)):
            data[2 * draw.randrange(size // 2)] ^= 1
    (folder / ADAPTER).write_bytes(safetensors_bytes(header, bytes(data)))
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG, indent=2))
    (folder / "README.md").write_text("---\nlibrary_name: peft\n---\n")
    return folder


class Site:
    """A store with a model and adapters on it."""

    def __init__(self, tmp_path: Path) -> None:
        self.root = tmp_path / "store"
        self.model = self.put(write_folder(tmp_path / "model"), 0, policy="model")

    def put(
        self,
        folder: Path,
        number: int,
        *,
        policy: str = POLICY,
        base: str = "",
        after: StoredVersion | None = None,
    ) -> StoredVersion:
        return put_snapshot(
            self.root, folder, policy=PolicyName(policy), number=number, base=base, after=after
        )

    def manifest(self, version: StoredVersion) -> SnapshotManifest:
        store = DirectoryStore(self.root)
        return parse_manifest(store.read_manifest(version.manifest_digest))

    def wanted(self, version: StoredVersion) -> PublishedVersion:
        manifest = self.manifest(version)
        return PublishedVersion(
            policy=manifest.policy,
            incarnation=1,
            number=manifest.number,
            manifest_digest=version.manifest_digest,
        )


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@dataclass
class Wire:
    """Counts all bytes in both directions."""

    url: str
    num_bytes: int = 0
    tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])


@asynccontextmanager
async def wire_to(url: str) -> AsyncGenerator[Wire]:
    host, port = url.removeprefix("http://").split(":")

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while piece := await reader.read(1 << 16):
                wire.num_bytes += len(piece)
                writer.write(piece)
                await writer.drain()
        finally:
            writer.close()

    async def meet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        for pair in ((reader, there_writer), (there_reader, writer)):
            wire.tasks.add(asyncio.create_task(pump(*pair)))

    server = await asyncio.start_server(meet, "127.0.0.1", 0)
    here, there = server.sockets[0].getsockname()
    wire = Wire(f"http://{here}:{there}")
    try:
        yield wire
    finally:
        server.close()
        for task in wire.tasks:
            task.cancel()
        await asyncio.gather(*wire.tasks, return_exceptions=True)


# --- as versions ----------------------------------------------------------------------------------


async def test_an_adapter_transfers_at_most_its_size(tmp_path: Path, site: Site) -> None:
    """Bytes over the real server, including requests and headers: full, all changed, a little
    changed."""
    base = site.model.weights_digest
    folders = [
        write_adapter(tmp_path / "a0", 0),
        write_adapter(tmp_path / "a1", 1),
        write_adapter(tmp_path / "a2", 2, share=0.02),
        write_adapter(tmp_path / "a3", 0),
    ]
    versions: list[StoredVersion] = []
    for number, folder in enumerate(folders):
        after = versions[-1] if versions else None
        versions.append(site.put(folder, number, base=base, after=after))
    versions[2] = site.put(folders[2], 2, base=base, after=versions[0])
    size = sum(path.stat().st_size for path in folders[0].glob("adapter_*"))
    signer = Signer.create(tmp_path / "keys", "run")
    token = signer.mint(Role.ROLLOUT, [Audience.WEIGHTS], ttl_s=3600)
    app = build(Origin(DirectoryStore(site.root)), signer.verifier(Audience.WEIGHTS))
    moved: list[int] = []
    puller = Puller(tmp_path / "cache")
    async with listening(app) as url, wire_to(url) as wire, connect(wire.url, token) as caller:
        for version, source in zip(versions, folders, strict=True):
            before = wire.num_bytes
            folder = await puller.pull([caller], site.wanted(version))
            moved.append(wire.num_bytes - before)
            travelling = {n: d for n, d in contents(source).items() if n != "README.md"}
            assert contents(folder) == travelling
    print("bytes moved per byte of the adapter:", [round(num / size, 3) for num in moved])
    assert max(moved) <= 1.1 * size
    assert moved[2] <= 0.1 * size, "a delta"
    assert moved[3] <= 0.1 * size, "its files were there"


def test_an_adapter_names_its_base_and_a_model_has_none(tmp_path: Path, site: Site) -> None:
    adapter = write_adapter(tmp_path / "a", 0)
    stored = site.put(adapter, 0, base=site.model.weights_digest)
    manifest = site.manifest(stored)
    assert manifest.base == site.model.weights_digest
    assert [file.name for file in manifest.files] == ["adapter_config.json", ADAPTER]
    assert not site.manifest(site.model).is_adapter
    num_blobs = len(list((site.root / "blobs").iterdir()))
    other = write_adapter(tmp_path / "b", 1)
    with pytest.raises(WeightsError, match="pass the weights digest of its base"):
        site.put(other, 1)
    with pytest.raises(WeightsError, match="is not an adapter"):
        site.put(write_folder(tmp_path / "model-1", 1), 1, base=site.model.weights_digest)
    assert len(list((site.root / "blobs").iterdir())) == num_blobs, "nothing was copied"
    with pytest.raises(WeightsError, match="not a BLAKE3 digest"):
        site.put(other, 1, base="HuggingFaceTB/SmolLM2-135M-Instruct")


def test_an_adapter_of_the_same_weights_on_another_model_is_another_version(
    tmp_path: Path, site: Site
) -> None:
    adapter = write_adapter(tmp_path / "a", 0)
    model = site.put(write_folder(tmp_path / "model-1", 1), 1, policy="model")
    bases = (site.model.weights_digest, model.weights_digest)
    first, second = (site.put(adapter, 0, base=base) for base in bases)
    assert first.weights_digest == second.weights_digest
    assert first.manifest_digest != second.manifest_digest
