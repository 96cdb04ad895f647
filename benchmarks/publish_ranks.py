# SPDX-License-Identifier: Apache-2.0
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportArgumentType=false
"""One rank of `benchmarks.publish`: `publish_ranks.py SIDE FOLDER RANK NUM_RANKS MILLIONS
NUM_VERSIONS`.

Holds its shard of a model in float32 and publishes versions in bfloat16, then saves a checkpoint.
It also runs on the commit before ranks wrote their own shares (SIDE is `before`, not `ours`): there
rank 0 gathers everything. Leaves its figures in FOLDER/rank-RANK.json.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3Config

from benchmarks.harness import log_line
from benchmarks.weights_messages import log_to_stderr
from penstock.config.stages import ParallelConfig
from penstock.trainer import snapshots as snapshots_module
from penstock.trainer.checkpoint import Checkpoints, Cursor
from penstock.trainer.checkpoint_saver import Saver, ShardSaver
from penstock.trainer.ranks.group import make_rank_group
from penstock.trainer.ranks.regions import local
from penstock.trainer.ranks.sharding import gather, shard
from penstock.types import PolicyName
from penstock.weights import publish as publish_module
from penstock.weights.deltas import file_delta
from penstock.weights.publish import StoredVersion

POLICY = PolicyName("policy")
CHANGED_EVERY = 100
"""One element in so many changes between two versions."""


def make_model(millions: int) -> Any:
    """A Qwen3 without content, of about this size."""
    hidden = 2048 if millions >= 500 else 1024
    vocab, middle = 16384, 3 * hidden
    per_layer = (4 + 9) * hidden * hidden
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=middle,
        num_hidden_layers=max(1, round((millions * 1e6 - 2 * vocab * hidden) / per_layer)),
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        head_dim=64,
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


class MappedBytes:
    """Bytes of files that this process mapped and walked through; `/proc/self/io` has the rest."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._count(file_delta, "_mapped")
        self._count(publish_module, "file_digest")

    def _count(self, module: Any, name: str) -> None:
        real = getattr(module, name)

        def counting(path: Path, **options: Any) -> Any:
            self.num_bytes += path.stat().st_size
            return real(path, **options)

        setattr(module, name, counting)


def passed_bytes() -> int:
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"]) + int(lines["wchar"])


class Rank:
    def __init__(
        self, folder: Path, rank: int, num_ranks: int, millions: int, *, is_before: bool
    ) -> None:
        self.is_before = is_before
        self.folder = folder
        self.rank = rank
        self.num_ranks = num_ranks
        ranks = make_rank_group(ParallelConfig(dp=num_ranks))
        assert ranks is not None
        self.ranks = ranks
        self.model = make_model(millions)
        shard(self.model, self.model, ranks)
        self.model.to_empty(device="cpu")
        torch.manual_seed(rank)
        with torch.no_grad():
            for parameter in self.model.parameters():
                local(parameter).normal_(std=0.02)
        self.mapped = MappedBytes()
        self.figures: dict[str, list[float]] = {"bare_s": [], "blocked_s": []}
        self.figures |= {"passed": [], "cpu_s": []}
        self.digests: list[str] = []
        self.buffers: list[Tensor] = []
        store, static = folder / "store", folder / "model"
        if rank == 0:
            static.mkdir()
            self.model.config.dtype = torch.bfloat16  # of versions; the model is in float32
            self.model.config.save_pretrained(static)
        dist.barrier()  # the others read its precision
        if rank == 0:
            self.snapshots = snapshots_module.Snapshots(store, POLICY, static)
            from penstock.trainer.publisher import Publisher

            options = {} if is_before else {"num_ranks": num_ranks}
            self.publisher = Publisher(self.snapshots, self._announce, self._in_use, **options)
        elif not is_before:
            from penstock.trainer.publisher import ShareWriter

            self.writer = ShareWriter(store, static, rank=rank)
        if not is_before:
            from penstock.trainer.file_tensors import file_tensors

            self.file_tensors = file_tensors(self.model)

    def _announce(self, number: int, stored: StoredVersion) -> None:
        done = {"manifest_digest": stored.manifest_digest, "stored_at": time.monotonic()}
        self.digests.append(stored.manifest_digest)
        hidden = self.folder / f".version-{number}"
        hidden.write_text(json.dumps(done))
        hidden.rename(self.folder / f"version-{number}.json")

    def _in_use(self) -> tuple[list[str], list[str]]:
        return self.digests, self.digests[-1:]

    @torch.no_grad()
    def weights(self) -> dict[str, Any]:
        state = self.model.state_dict(keep_vars=True)
        if self.is_before:
            gathered = gather(state, self.ranks)
            return snapshots_module.weights_of(self.model, gathered) if gathered else {}
        assert self.file_tensors is not None
        return {name: one.part_of(state[one.source]) for name, one in self.file_tensors.items()}

    def change(self, number: int) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                flat = local(parameter).view(-1)
                flat[number::CHANGED_EVERY] += 0.01

    def bare_copy(self) -> float:
        """What no publishing can be faster than: a copy of the share into memory in bfloat16."""
        shares = [local(parameter.detach()) for parameter in self.model.parameters()]
        if not self.buffers:
            self.buffers = [torch.zeros(share.shape, dtype=torch.bfloat16) for share in shares]
        dist.barrier()
        began_at = time.perf_counter()
        for buffer, share in zip(self.buffers, shares, strict=True):
            buffer.copy_(share)
        return time.perf_counter() - began_at

    def publish(self, number: int) -> None:
        self.change(number)
        self.figures["bare_s"].append(self.bare_copy())
        before = passed_bytes() + self.mapped.num_bytes
        dist.barrier()
        began_at, started_at = time.perf_counter(), time.monotonic()
        cpu_before_s = time.process_time()
        if self.is_before:
            weights = self.weights()
            if self.rank == 0:
                self.publisher.submit(weights, number)
            del weights
        elif self.rank == 0:
            self.publisher.submit(self.weights(), number, token=number + 1)
        else:
            self.writer.submit(number + 1, self.weights())
        self.figures["blocked_s"].append(time.perf_counter() - began_at)
        if self.rank == 0:
            (self.folder / f"started-{number}.json").write_text(json.dumps(started_at))
            self.publisher.flush()
        elif not self.is_before:
            self.writer.flush()
        dist.barrier()
        self.figures["passed"].append(passed_bytes() + self.mapped.num_bytes - before)
        self.figures["cpu_s"].append(time.process_time() - cpu_before_s)
        live = self.folder / f"live-{number}.json"
        while not live.exists():  # a node has it
            time.sleep(0.02)
        dist.barrier()
        if self.rank == 0:
            blocked_s, live_s = self.figures["blocked_s"][-1], time.perf_counter() - began_at
            log_line(f"version {number}: blocked {blocked_s:.2f} s, live after {live_s:.1f} s")

    def save(self) -> None:
        """A checkpoint of weights in float32, of which versions have other bits; then a start."""
        root = self.folder / "checkpoints"
        checkpoints = Checkpoints(root, policy=POLICY, every=1)
        dist.barrier()
        began_at = time.perf_counter()
        token = 77
        if self.rank == 0:
            saver = Saver(
                checkpoints,
                check_allowed=lambda: None,
                on_saved=lambda: None,
                num_ranks=self.num_ranks,
            )
            saver.submit(
                Cursor(number=1, seq=1, incarnation=1),
                weights=self.weights(),
                state={"one": torch.ones(1)},
                static=[self.folder / "model" / "config.json"],
                token=token,
                monitor_state={},
            )
        else:
            saver = ShardSaver(root, rank=self.rank, num_ranks=self.num_ranks)
            weights = self.weights()
            saver.submit(token, {"one": torch.ones(1)}, *([] if self.is_before else [weights]))
        self.figures["checkpoint_blocked_s"] = [time.perf_counter() - began_at]
        saver.flush()
        self.figures["checkpoint_s"] = [time.perf_counter() - began_at]
        saver.close()
        dist.barrier()
        if self.rank == 0:
            again = Checkpoints(root, policy=POLICY, every=1)
            began_at = time.perf_counter()
            assert again.open_newest() is not None
            self.figures["restart_s"] = [time.perf_counter() - began_at]
        dist.barrier()


def main(side: str, folder: Path, rank: int, num_ranks: int, num: tuple[int, int]) -> None:
    """num: millions of parameters, and versions."""
    millions, num_versions = num
    torch.set_num_threads(1)
    store = cast(Any, dist).FileStore(str(folder / "rendezvous"), num_ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    one = Rank(folder, rank, num_ranks, millions, is_before=side == "before")
    for number in range(num_versions):
        one.publish(number)
    one.save()
    figures = {
        **one.figures,
        "elements": [sum(p.numel() for p in one.model.parameters())],
        "resident_bytes": [1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss],
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps(figures))
    dist.barrier()
    os._exit(0)


if __name__ == "__main__":
    log_to_stderr()
    of_rank, of_ranks, *sizes = map(int, sys.argv[3:])
    main(sys.argv[1], Path(sys.argv[2]), of_rank, of_ranks, (sizes[0], sizes[1]))
