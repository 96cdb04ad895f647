# SPDX-License-Identifier: Apache-2.0
"""Swaps that cost what changed: versions that differ in 1 % of their elements, spread over all
tensors, go into a running engine, in turn as a patch and as full files.

How long the engine is paused and what it reads; then the same load with `kv: drop` and `kv: keep`:
tokens per second, and how far log-probs are from those of the version that they name; then many
patches in a row under many agents, where every log-prob must agree with the version that it names.
The engine is vLLM where it is installed (`make setup-engine`), else `hf`; the JSON says which.
Versions go through a real store: published, pulled by link, patched from the store's deltas.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import shutil
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Sequence
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
SHORT_PROMPT_TOKENS, SHORT_ANSWER_TOKENS = 8, 16
"""Under many agents: every swap computes the keys and values of all of them again."""
WARM_UP = 2
"""Swaps that are not counted: the first of each kind."""
NUM_SWAPS, NUM_AGENTS = 200, 32
MOST_COMPARED = 1024
"""Answers, spread evenly over all swaps: comparing one costs more than sampling it."""
COMPARED_AT_ONCE = 8
LOUD = 1 << 4
"""A bit that moves log-probs far enough to tell versions apart."""
TOLERANCE = 1e-3
"""In log-probability, token by token: the rounding of another order of sums."""
PARTS = ("pauses", "kv", "agents")

Engine = VllmEngine | HfEngine
Answer = tuple[Sequence[int], Completion]
"""A prompt, and what followed it."""


def smollm2() -> Path:
    cache = Path(os.environ.get("PENSTOCK_CACHE", "~/.cache/penstock")).expanduser()
    return cache / "models" / "SmolLM2-135M-Instruct"


def flip(weights: Path, seeds: Sequence[int], bit: int) -> None:
    """Flip a bit in 1 % of the elements of each tensor, as many of them by each seed."""
    raw = np.memmap(weights, np.uint8, mode="r+")
    for seed in seeds:
        draw = np.random.default_rng(seed)
        for tensor in layout_of(weights).byte_ranges.values():
            assert tensor.dtype == "BF16", "versions of SmolLM2 are in bfloat16"
            bits = raw[tensor.start : tensor.end].view("<u2")
            num_changed = max(1, int(SHARE / len(seeds) * len(bits)))
            bits[draw.integers(len(bits), size=num_changed)] ^= bit
    raw.flush()


@dataclass
class Versions:
    """Staged versions, made one after the other."""

    root: Path
    puller: Puller
    caller: Any
    folders: list[Path] = field(default_factory=list[Path])
    written: list[Path] = field(default_factory=list[Path])
    last: PublishedVersion | None = None

    async def add(self, seeds: Sequence[int] = (), bit: int = 1) -> tuple[Path, Version]:
        """The next version differs from the last by these flips."""
        number = len(self.folders)
        folder = self.root / f"hf-{number}"
        base = self.written[-1] if number else smollm2()
        shutil.copytree(base, folder, ignore=shutil.ignore_patterns(".*"))
        if number:
            flip(folder / WEIGHTS, seeds or (number,), bit)
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

    def patch(self, base: int = -2, number: int = -1) -> Path:
        """From the last but one to the last, or between two others."""
        made = self.puller.make_patch(self.folders[base], self.folders[number])
        assert made is not None, "the store has a delta between any two versions"
        return made

    async def add_ring(self) -> list[Path]:
        """Three versions and patches from each to the next, also from the last to the first. Each
        patch changes 1 % of the elements: the sets P, Q and R are flipped in pairs."""
        first = len(self.folders)
        for seeds in ((1, 2), (1, 3), (2, 3), (1, 2)):
            await self.add(seeds, LOUD)
        self.patch(first, first + 1)
        self.patch(first + 1, first + 2)
        self.patch(first + 2, first)  # by the delta of the fourth, which has the bits of the first
        return self.folders[first : first + 3]


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
    prompt_tokens: int = PROMPT_TOKENS
    answer_tokens: int = ANSWER_TOKENS
    answers: list[Answer] = field(default_factory=list[Answer])
    num_tokens: int = 0
    is_over: bool = False
    has_answered: asyncio.Event = field(default_factory=asyncio.Event)

    async def agent(self, number: int) -> None:
        for turn in itertools.count():
            draw = np.random.default_rng([number, turn])
            prompt = draw.integers(1000, 40_000, self.prompt_tokens).tolist()
            answer = await self.engine(
                GenerationRequest(
                    prompt,
                    SamplingSpec(max_tokens=self.answer_tokens, seed=turn),
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
async def busy(load: Load, num_agents: int) -> AsyncGenerator[Load]:
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
    async with busy(Load(engine), num_agents) as load:
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
        async with busy(Load(engine), num_agents) as load:
            await load.has_answered.wait()
            num_before, began_at = load.num_tokens, time.monotonic()
            for _ in range(num_swaps):
                folder, version = await versions.add()
                versions.patch()
                await engine.load(folder, version)
            rate = (load.num_tokens - num_before) / (time.monotonic() - began_at)
        mixed = [pair for pair in load.answers if len(pair[1].spans) > 1]
        errors = log_prob_errors(versions.folders.__getitem__, mixed[:8], first_span=1)
    finally:
        await engine.close()
    log_line(f"{kind}: {rate:.1f} tokens/s, {len(mixed)} answers of several versions")
    return {
        f"{kind}_tokens_per_s": rate,
        f"{kind}_error_mean": mean(errors),
        f"{kind}_error_max": max(errors),
    }


async def measure_agents(
    engine: Engine, versions: Versions, num_swaps: int, num_agents: int
) -> dict[str, float]:
    """Patches in a row; every log-prob of an answer is compared with the version it names."""
    ring = await versions.add_ring()
    first = len(versions.folders)
    paused_s: list[float] = []
    load = Load(engine, SHORT_PROMPT_TOKENS, SHORT_ANSWER_TOKENS)
    try:
        await engine.load(ring[0], _version(first))
        began_at = time.monotonic()
        async with busy(load, num_agents):
            await load.has_answered.wait()
            for number in range(1, num_swaps + 1):
                await engine.load(ring[number % len(ring)], _version(first + number))
                assert num_patches(engine) == number, "full files were loaded"
                paused_s.append(engine.paused_s)
                if number % 10 == 0:
                    log_line(f"{number} swaps, {len(load.answers)} answers")
        spent_s = time.monotonic() - began_at
    finally:
        await engine.close()
    compared = load.answers[:: -(-len(load.answers) // MOST_COMPARED)]
    log_line(f"comparing {len(compared)} of {len(load.answers)} answers")
    errors = log_prob_errors(lambda number: ring[(number - first) % len(ring)], compared)
    others = log_prob_errors(
        lambda number: ring[(number + 1 - first) % len(ring)], compared[:num_agents]
    )
    return {
        "agents": num_agents,
        "swaps": num_swaps,
        "swaps_s": spent_s,
        "swaps_paused_ms": 1000 * median(paused_s),
        "swaps_answers": len(load.answers),
        "swaps_compared_answers": len(compared),
        "swaps_compared_versions": len({s.number for _, a in compared for s in a.spans}),
        "swaps_compared_log_probs": len(errors),
        "swaps_mixed_answers": sum(len(answer.spans) > 1 for _, answer in compared),
        "swaps_error_max": max(errors),
        "swaps_wrong_log_probs": sum(error > TOLERANCE for error in errors),
        "swaps_other_version_error": median(others),
    }


def log_prob_errors(
    folder_of: Callable[[int], Path], answers: Sequence[Answer], first_span: int = 0
) -> list[float]:
    """Of tokens from this span on: the distance between their log-prob and that of the version that
    their span names, computed at once over the whole context."""
    import torch
    from transformers import AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    wanted: defaultdict[Path, list[tuple[Answer, range]]] = defaultdict(list)
    for prompt, answer in answers:
        for span in answer.spans[first_span:]:
            tokens = range(len(prompt) + span.start, len(prompt) + span.end)
            wanted[folder_of(span.number)].append(((prompt, answer), tokens))
    errors: list[float] = []
    for folder, spans in wanted.items():
        model = auto.from_pretrained(folder, dtype=torch.float32).eval()
        for start in range(0, len(spans), COMPARED_AT_ONCE):
            part = spans[start : start + COMPARED_AT_ONCE]
            rows = [[*prompt, *view_ids(answer.sampled_ids)] for (prompt, answer), _ in part]
            longest = max(map(len, rows))
            padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
            with torch.inference_mode():  # padding follows what is read, so it changes nothing
                found = model(input_ids=padded).logits
            for ((prompt, answer), tokens), row, logits in zip(part, rows, found, strict=True):
                recorded = view_log_probs(answer.logprobs)
                for at in tokens:
                    expected = float(logits[at - 1].log_softmax(-1)[row[at]])
                    errors.append(abs(expected - recorded[at - len(prompt)]))
    assert errors, "no answer saw a swap; make more swaps"
    return errors


def _version(number: int) -> Version:
    return Version(policy=POLICY, incarnation=1, number=number)


async def main(folder: Path, name: str, arguments: argparse.Namespace) -> None:
    is_quick, parts = arguments.quick, arguments.only or PARTS
    num_swaps, num_agents = (3, 4) if is_quick else (10, 8)
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    figures: dict[str, float] = {}
    async with opened(folder) as versions:
        first, version = await versions.add()
        if "pauses" in parts:
            # hf computes keys and values again in the pause, in both kinds alike; here it keeps
            # them.
            engine = make_engine(name, keeps_kv=name == "hf")
            try:
                await engine.load(first, version)
                figures |= await measure_pauses(engine, versions, num_swaps, num_agents)
            finally:
                await engine.close()
        for keeps_kv in (False, True) if "kv" in parts else ():
            engine = make_engine(name, keeps_kv=keeps_kv)
            figures |= await measure_kv(engine, versions, num_swaps, num_agents, keeps_kv=keeps_kv)
        if "agents" in parts:
            swaps = arguments.swaps or (NUM_SWAPS // 20 if is_quick else NUM_SWAPS)
            figures |= await measure_agents(make_engine(name), versions, swaps, NUM_AGENTS)
    result(benchmark="swap", engine=name, model="SmolLM2-135M", **figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="3 swaps of each kind, not 10")
    parser.add_argument("--folder", type=Path, help="parent of the scratch folder")
    parser.add_argument("--engine", choices=("hf", "vllm"), help="vllm, if it is installed")
    parser.add_argument("--only", choices=PARTS, action="append", help="a part; may be repeated")
    parser.add_argument("--swaps", type=int, help="under many agents, instead of 200 (quick: 10)")
    arguments = parser.parse_args()
    if not smollm2().is_dir():
        parser.error(f"{smollm2()} is missing; run `make setup-engine`")
    has_vllm = (default_environment() / "bin" / "vllm").exists()
    engine_name = arguments.engine or ("vllm" if has_vllm else "hf")
    with scratch(arguments.folder) as where:
        asyncio.run(main(where, engine_name, arguments))
