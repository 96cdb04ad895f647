# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
"""A trainer as weights see it, in a process of its own: versions from a recorded training, or of a
model made here, through the real publisher.

`weights_trainer.py FOLDER SOURCE`: publishes into FOLDER/store. SOURCE is a trace, or a size in MB.
A line `publish N` on stdin stores version N and answers with a `Published`; `burst K` hands over K
versions to another store as fast as a trainer would, and answers with a `Burst`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from scripts.make_trace import read_versions
from torch import Tensor

from benchmarks.weights_messages import Burst, Published, log_to_stderr
from penstock.trainer.publisher import Publisher
from penstock.trainer.ranks.regions import Weights
from penstock.trainer.snapshots import Snapshots
from penstock.trainer.weight_shares import WeightShare
from penstock.types import PolicyName
from penstock.weights.publish import StoredVersion

POLICY = PolicyName("policy")
VOCAB, HIDDEN = 4096, 512
SHARE = 0.01
"""Of the elements of a made model that a version changes."""
STEP_S = 0.1
"""Between two hand-overs of a burst; no training is so fast."""


class TimedSnapshots(Snapshots):
    """Knows how long its last copy took."""

    copy_s = 0.0

    def copy(self, weights: Weights) -> WeightShare:
        began_at = time.perf_counter()
        copied = super().copy(weights)
        self.copy_s = time.perf_counter() - began_at
        return copied


class Trainer:
    def __init__(self, folder: Path, model: Path) -> None:
        self._folder = folder
        self._model = model
        self._stored: dict[int, StoredVersion] = {}
        self._publisher, _ = self._publish_to("store", self._stored)

    def _publish_to(
        self, name: str, stored: dict[int, StoredVersion]
    ) -> tuple[Publisher, TimedSnapshots]:
        def in_use() -> tuple[list[str], list[str]]:
            digests = [version.manifest_digest for version in stored.values()]
            return digests, digests[-1:]

        snapshots = TimedSnapshots(self._folder / name, POLICY, self._model)
        return Publisher(snapshots, stored.__setitem__, in_use), snapshots

    def publish(self, weights: Mapping[str, Tensor], number: int) -> Published:
        began_at = time.perf_counter()
        self._publisher.submit(weights, number)
        wait_s = time.perf_counter() - began_at
        self._publisher.flush()
        return Published(
            manifest_digest=self._stored[number].manifest_digest,
            wait_s=wait_s,
            store_s=time.perf_counter() - began_at,
        )

    def burst(self, versions: list[Mapping[str, Tensor]], num: int) -> Burst:
        publisher, snapshots = self._publish_to("burst/store", {})
        found = Burst(copy_s=[], block_s=[])
        for number in range(num):
            began_at = time.perf_counter()
            publisher.submit(versions[number % len(versions)], number)
            took_s = time.perf_counter() - began_at
            found.copy_s.append(snapshots.copy_s)
            found.block_s.append(took_s - snapshots.copy_s)
            time.sleep(STEP_S)
        publisher.close()
        return found


# --- versions -----------------------------------------------------------------------------------


def write_model(folder: Path, num_mb: int) -> Path:
    """A Qwen3 of about this size in bfloat16, without a tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    per_layer = 12 * HIDDEN * HIDDEN
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=max(1, round((num_mb * 500_000 - VOCAB * HIDDEN) / per_layer)),
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    model: Any = Qwen3ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def synthetic_versions(folder: Path) -> Iterator[dict[str, NDArray[np.uint16]]]:
    """The model, then each time a share of its elements moved by one unit in the last place."""
    draw = np.random.default_rng(0)
    version = next(read_versions(folder.parent))
    while True:
        yield version
        version = {
            name: bits + (draw.random(bits.shape) < SHARE).astype(np.uint16)
            for name, bits in version.items()
        }


def as_tensors(version: Mapping[str, NDArray[np.uint16]]) -> dict[str, Tensor]:
    return {name: torch.from_numpy(bits).view(torch.bfloat16) for name, bits in version.items()}


def main(folder: Path, source: str) -> None:
    if source.isdecimal():
        model = write_model(folder / "made" / "0", int(source))
        versions = map(as_tensors, synthetic_versions(model))
    else:
        model = Path(source) / "0"
        versions = map(as_tensors, read_versions(Path(source)))
    trainer = Trainer(folder, model)
    at_hand: list[Mapping[str, Tensor]] = []
    print(json.dumps({"model_bytes": (model / "model.safetensors").stat().st_size}), flush=True)
    for line in sys.stdin:
        word, number = line.split()
        if word == "publish":
            at_hand = [*at_hand[-1:], next(versions)]
            answer = trainer.publish(at_hand[-1], int(number))
        else:
            answer = trainer.burst(at_hand, int(number))
        print(msgspec.json.encode(answer).decode(), flush=True)


if __name__ == "__main__":
    log_to_stderr()
    main(Path(sys.argv[1]), sys.argv[2])
