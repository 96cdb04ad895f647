# SPDX-License-Identifier: Apache-2.0
"""Swaps that cost what changed: versions that differ in 1 % of their elements, spread over all
tensors, go into a running engine, in turn as a patch and as full files.

How long the engine is paused and what it reads; then the same load with `kv: drop` and `kv: keep`:
tokens per second, and how far log-probs are from those of the version that they name. The engine
is vLLM where it is installed (`make setup-engine`), else `hf`; the JSON says which. Versions go
through a real store: published, pulled by link, patched from the store's deltas.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import shutil
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np

from benchmarks.harness import log_line, result, scratch
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.rollout.engines.hf import HfEngine
from penstock.rollout.engines.vllm import ChildServer, VllmEngine, default_environment
from penstock.types import (
    PolicyName,
    PublishedVersion,
    SamplingSpec,
    Version,
    view_ids,
    view_log_probs,
)
from penstock.weights.client import Puller
from penstock.weights.deltas.file_delta import layout_of
from penstock.weights.publish import StoredVersion, put_snapshot
from penstock.weights.serving.origin import Origin
from penstock.weights.serving.server import build
from penstock.weights.store import DirectoryStore
from penstock.wire.auth import Audience, Role, Signer
from penstock.wire.client import connect
from penstock.wire.serving import server

POLICY = PolicyName("policy")
SHARE = 0.01
WEIGHTS = "model.safetensors"
PROMPT_TOKENS, ANSWER_TOKENS = 256, 48
WARM_UP = 2
"""Swaps that are not counted: the first of each kind."""

Engine = VllmEngine | HfEngine


def smollm2() -> Path:
    cache = Path(os.environ.get("PENSTOCK_CACHE", "~/.cache/penstock")).expanduser()
    return cache / "models" / "SmolLM2-135M-Instruct"


def write_next(folder: Path, base: Path, number: int) -> Path:
    """The next version: 1 % of the elements of each tensor move by one bit pattern."""
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns(".*"))
    draw = np.random.default_rng(number)
    raw = np.memmap(folder / WEIGHTS, np.uint8, mode="r+")
    for tensor in layout_of(folder / WEIGHTS).byte_ranges.values():
        assert tensor.dtype == "BF16", "versions of SmolLM2 are in bfloat16"
        bits = raw[tensor.start : tensor.end].view("<u2")
        where = draw.integers(len(bits), size=max(1, int(SHARE * len(bits))))
        bits[where] ^= 1
    raw.flush()
    return folder


@dataclass
class Versions:
    """Staged versions, made one after the other."""

    root: Path
    puller: Puller
    caller: Any
    folders: list[Path] = field(default_factory=list[Path])
    written: list[Path] = field(default_factory=list[Path])
    last: PublishedVersion | None = None

    async def add(self) -> tuple[Path, Version]:
        number = len(self.folders)
        folder = self.root / f"hf-{number}"
        if number:
            write_next(folder, self.written[-1], number)
        else:
            shutil.copytree(smollm2(), folder, ignore=shutil.ignore_patterns(".*"))
        after = (
            None
            if self.last is None
            else StoredVersion(manifest_digest=self.last.manifest_digest, weights_digest="")
        )
        stored = await asyncio.to_thread(
            put_snapshot, self.root / "store", folder, policy=POLICY, number=number, after=after
        )
        self.last = PublishedVersion(
            policy=POLICY, incarnation=1, number=number, manifest_digest=stored.manifest_digest
        )
        self.written.append(folder)
        self.folders.append(await self.puller.pull([self.caller], self.last))
        if len(self.written) > 1:
            shutil.rmtree(self.written[-2])
        return self.folders[-1], Version(policy=POLICY, incarnation=1, number=number)

    def patch(self) -> Path:
        """From the last but one to the last."""
        made = self.puller.make_patch(self.folders[-2], self.folders[-1])
        assert made is not None, "the store has a delta between any two versions"
        return made


@asynccontextmanager
async def opened(root: Path) -> AsyncGenerator[Versions]:
    signer = Signer.create(root / "keys", "swap")
    token = signer.mint(Role.ROLLOUT, [Audience.WEIGHTS], ttl_s=36_000)
    app = build(Origin(DirectoryStore(root / "store")), signer.verifier(Audience.WEIGHTS))
    listening = server(app, "127.0.0.1", 0)
    task = asyncio.create_task(listening.serve())
    while not listening.started:  # noqa: ASYNC110 (uvicorn sets no event)
        await asyncio.sleep(0.01)
    host, port = listening.servers[0].sockets[0].getsockname()
    try:
        async with connect(f"http://{host}:{port}", token) as caller:
            yield Versions(root, Puller(root / "cache", store_root=root / "store"), caller)
    finally:
        listening.should_exit = True
        await task


@dataclass
class Load:
    """Agents that always have an answer under way."""

    engine: Engine
    answers: list[tuple[Sequence[int], Completion]] = field(
        default_factory=list[tuple[Sequence[int], Completion]]
    )
    num_tokens: int = 0
    is_over: bool = False
    has_answered: asyncio.Event = field(default_factory=asyncio.Event)

    async def agent(self, number: int) -> None:
        for turn in itertools.count():
            draw = np.random.default_rng([number, turn])
            prompt = draw.integers(1000, 40_000, PROMPT_TOKENS).tolist()
            answer = await self.engine(
                GenerationRequest(
                    prompt,
                    SamplingSpec(max_tokens=ANSWER_TOKENS, seed=turn),
                    policy=POLICY,
                    session=f"{number}.{turn}",
                )
            )
            self.num_tokens += len(view_ids(answer.sampled_ids))
            self.answers.append((prompt, answer))
            self.has_answered.set()
            if self.is_over:
                return


@asynccontextmanager
async def busy(engine: Engine, num_agents: int) -> AsyncGenerator[Load]:
    load = Load(engine)
    async with asyncio.TaskGroup() as tasks:
        for number in range(num_agents):
            tasks.create_task(load.agent(number))
        try:
            yield load
        finally:
            load.is_over = True


def make_engine(name: str, *, keeps_kv: bool = False) -> Engine:
    if name == "vllm":
        environment = default_environment()
        options = ("--dtype", "float32", "--max-model-len", "1024")
        return VllmEngine(ChildServer(environment, options), keeps_kv=keeps_kv)
    return HfEngine(torch_threads=2, keeps_kv=keeps_kv)


def num_patches(engine: Engine) -> int:
    if isinstance(engine, HfEngine):
        return engine.num_patches
    return 0 if engine.full_model is None else engine.full_model.num_patches


async def measure_pauses(
    engine: Engine, versions: Versions, num_swaps: int, num_agents: int
) -> dict[str, float]:
    """Swaps in turn: one as a patch, one as full files."""
    paused_ms: dict[str, list[float]] = {"patch": [], "full": []}
    patch_bytes, read_bytes = list[int](), list[int]()
    async with busy(engine, num_agents) as load:
        await load.has_answered.wait()
        for number in range(WARM_UP + 2 * num_swaps):
            folder, version = await versions.add()
            kind = "patch" if number % 2 else "full"
            if kind == "patch":
                patch_bytes.append(versions.patch().stat().st_size)
            began_at = time.monotonic()
            await engine.load(folder, version)
            swap_s = time.monotonic() - began_at
            assert (num_patches(engine) > 0) == (kind == "patch"), "the other kind was used"
            if kind == "patch" and isinstance(engine, VllmEngine) and engine.full_model:
                read_bytes.append(engine.full_model.num_bytes_read)
            if number >= WARM_UP:
                paused_ms[kind].append(1000 * engine.paused_s)
            log_line(f"{kind}: paused {1000 * engine.paused_s:.0f} ms of {swap_s:.1f} s")
    full_bytes = (versions.folders[-1] / WEIGHTS).stat().st_size
    ours, reload = median(paused_ms["patch"]), median(paused_ms["full"])
    return {
        "patch_mb": median(patch_bytes) / 1e6,
        "read_mb": median(read_bytes or patch_bytes) / 1e6,
        "full_mb": full_bytes / 1e6,
        "paused_ms": ours,
        "reload_paused_ms": reload,
        "pause_ratio": ours / reload,
        "num_answers": len(load.answers),
    }


async def measure_kv(
    engine: Engine, versions: Versions, num_swaps: int, num_agents: int, *, keeps_kv: bool
) -> dict[str, float]:
    """Tokens per second while new versions keep arriving, and the error of log-probs."""
    kind = "keep" if keeps_kv else "drop"
    try:
        first = len(versions.folders) - 1
        await engine.load(versions.folders[-1], _version(first))
        async with busy(engine, num_agents) as load:
            await load.has_answered.wait()
            num_before, began_at = load.num_tokens, time.monotonic()
            for _ in range(num_swaps):
                folder, version = await versions.add()
                versions.patch()
                await engine.load(folder, version)
            rate = (load.num_tokens - num_before) / (time.monotonic() - began_at)
        mixed = [pair for pair in load.answers if len(pair[1].spans) > 1]
        errors = log_prob_errors(versions, mixed[:8])
    finally:
        await engine.close()
    log_line(f"{kind}: {rate:.1f} tokens/s, {len(mixed)} answers of several versions")
    return {
        f"{kind}_tokens_per_s": rate,
        f"{kind}_error_mean": mean(errors),
        f"{kind}_error_max": max(errors),
    }


def log_prob_errors(
    versions: Versions, answers: Sequence[tuple[Sequence[int], Completion]]
) -> list[float]:
    """Of tokens after the first swap in their answer: the distance between their log-prob and that
    of the version that their span names, computed at once over the whole context."""
    import torch
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    wanted = sorted({span.number for _, answer in answers for span in answer.spans[1:]})
    errors: list[float] = []
    for number in wanted:
        model = auto.from_pretrained(versions.folders[number], dtype=torch.float32).eval()
        for prompt, answer in answers:
            ids = [*prompt, *view_ids(answer.sampled_ids)]
            recorded = view_log_probs(answer.logprobs)
            spans = [span for span in answer.spans[1:] if span.number == number]
            if not spans:
                continue
            with torch.inference_mode():
                logits = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(-1)
            for at in (at for span in spans for at in range(span.start, span.end)):
                expected = float(logits[len(prompt) + at - 1, ids[len(prompt) + at]])
                errors.append(abs(expected - recorded[at]))
    assert errors, "no answer saw a swap; make more swaps"
    return errors


def _version(number: int) -> Version:
    return Version(policy=POLICY, incarnation=1, number=number)


async def main(folder: Path, name: str, *, is_quick: bool) -> None:
    num_swaps, num_agents = (3, 4) if is_quick else (10, 8)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    async with opened(folder) as versions:
        # hf computes keys and values again in the pause, in both kinds alike; here it keeps them.
        engine = make_engine(name, keeps_kv=name == "hf")
        first, version = await versions.add()
        try:
            await engine.load(first, version)
            figures = await measure_pauses(engine, versions, num_swaps, num_agents)
        finally:
            await engine.close()
        for keeps_kv in (False, True):
            engine = make_engine(name, keeps_kv=keeps_kv)
            figures |= await measure_kv(engine, versions, num_swaps, num_agents, keeps_kv=keeps_kv)
    result(benchmark="swap", engine=name, model="SmolLM2-135M", **figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 swaps of each kind, not 10")
    parser.add_argument("--folder", type=Path, help="parent of the scratch folder")
    parser.add_argument("--engine", choices=("hf", "vllm"), help="vllm, if it is installed")
    arguments = parser.parse_args()
    if not smollm2().is_dir():
        parser.error(f"{smollm2()} is missing; run `make setup-engine`")
    has_vllm = (default_environment() / "bin" / "vllm").exists()
    engine_name = arguments.engine or ("vllm" if has_vllm else "hf")
    with scratch(arguments.folder) as where:
        asyncio.run(main(where, engine_name, is_quick=arguments.quick))
