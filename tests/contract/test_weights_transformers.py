# SPDX-License-Identifier: Apache-2.0
"""A snapshot is an ordinary Hugging Face folder: transformers loads it bit for bit."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from tests.unit.weights.weight_servers import listening

from penstock.types import PolicyName, PublishedVersion
from penstock.weights.client import Puller
from penstock.weights.manifest import parse_manifest
from penstock.weights.publish import put_snapshot
from penstock.weights.serving.origin import Origin
from penstock.weights.serving.server import build
from penstock.weights.store import DirectoryStore
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.client import connect

pytest.importorskip("transformers")
torch: Any = importlib.import_module("torch")
transformers: Any = importlib.import_module("transformers")


def tiny_qwen3() -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=32,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=False,
    )
    return transformers.Qwen3ForCausalLM(config)


async def test_a_saved_model_is_pulled_bit_equal(tmp_path: Path) -> None:
    model = tiny_qwen3()
    model.save_pretrained(tmp_path / "hf", max_shard_size="100KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 1
    policy = PolicyName("policy")
    stored = put_snapshot(tmp_path / "store", tmp_path / "hf", policy=policy, number=0)
    wanted = PublishedVersion(
        policy=policy, incarnation=1, number=0, manifest_digest=stored.manifest_digest
    )
    signer = Signer.create(tmp_path / "keys", "run")
    token = signer.mint(Role.ROLLOUT, [Audience.WEIGHTS], ttl_s=3600)
    app = build(Origin(DirectoryStore(tmp_path / "store")), signer.verifier(Audience.WEIGHTS))
    async with listening(app) as url, connect(url, token) as caller:
        folder = await Puller(tmp_path / "cache").pull([caller], wanted)
    loaded = transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype="auto")
    saved = model.state_dict()
    assert saved.keys() == loaded.state_dict().keys()
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == saved[name].dtype
        assert torch.equal(tensor.view(torch.int32), saved[name].view(torch.int32))
    data = DirectoryStore(tmp_path / "store").read_manifest(stored.manifest_digest)
    digests = {tensor.name: tensor.digest for tensor in parse_manifest(data).tensors}
    assert digests == {
        name: blake3(tensor.detach().numpy().tobytes()).hexdigest()
        for name, tensor in saved.items()
    }
