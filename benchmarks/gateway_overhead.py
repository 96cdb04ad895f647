# SPDX-License-Identifier: Apache-2.0
"""What the gateway costs between an agent and its engine.

The same load goes straight to the engine and through the gateway, window by window in turns. First
to a bare server in the engine's place: latency added at a set rate of 1,000-token answers, a closed
loop, streams. Then to SmolLM2 on vLLM: tokens per second of 1, 8 and 32 agents."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import uvloop

from benchmarks.cache import ensure, smollm2
from benchmarks.gateway_load import Request, Window, load
from benchmarks.gateway_service import POLICY
from benchmarks.harness import MIN_PAIRS, Server, log_line, process, result
from benchmarks.local_run import quiet
from penstock.gateway.generation import ChunkCallback, GenerationRequest
from penstock.gateway.renderer import Renderer
from penstock.rollout.engines.vllm import ChildServer, default_environment
from penstock.rollout.engines.vllm.generate_api import request_body
from penstock.rollout.snapshot import read_snapshot
from penstock.types import PolicyName, SamplingSpec, Version

DIRECT = Version(policy=PolicyName("direct"), incarnation=0, number=0)
"""Not the gateway's version, so that both sides do not share vLLM's prefix cache."""
RATE_PER_S = 550.0
SHARE = 0.025
"""Of what the closed loop does without the gateway: on a slow machine the rate falls with it."""
NUM_CLIENTS = 64
NUM_STREAMS = 8
ANSWER_TOKENS = 1_000
STREAM_TOKENS = 64
DELAY_MS = (20, 60)
CALLS_PER_SESSION = 4
WORDS = (1_000, 2_000)
"""Ids of SmolLM2's tokenizer that are whole words."""
CONCURRENCY = (1, 8, 32)
VLLM_OPTIONS = (
    *("--max-model-len", "1024", "--max-num-seqs", "32", "--dtype", "bfloat16"),
    *("--max-num-batched-tokens", "8192"),
)
"""All prompts fit one step: vLLM 0.32 on CPUs dies of a seeded request whose prompt it splits."""
Figures = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A call as both sides make it."""

    text: str
    session: str
    num_tokens: int
    seed: int
    """Tells the bare server how long to wait."""
    is_streamed: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    num_calls: int
    num_clients: int
    num_tokens: int
    think_s: float = 0.0
    delay_ms: tuple[int, int] = (0, 0)
    is_streamed: bool = False

    def asks(self, window: int) -> Iterator[ParsedRequest]:
        """Every question is another one."""
        draw = random.Random(window)
        for number in range(self.num_calls):
            a, b = draw.randrange(10**6), draw.randrange(10**6)
            client, call = number % self.num_clients, number // self.num_clients
            yield ParsedRequest(
                text=f"Question {window}.{number}: what is the sum of {a} and {b}, what is the "
                "difference, and which of the two is larger? Explain every step at length.",
                session=f"{window}.{client}.{call // CALLS_PER_SESSION}",
                num_tokens=self.num_tokens,
                seed=256 * draw.randrange(10**6) + draw.randint(*self.delay_ms),
                is_streamed=self.is_streamed,
            )


# --- both sides -------------------------------------------------------------------------------


def engine_calls(folder: Path) -> Callable[[ParsedRequest], Request]:
    """What the gateway sends to its engine."""
    renderer, snapshot = Renderer.load(folder), read_snapshot(folder)

    def make(ask: ParsedRequest) -> Request:
        ids = renderer.encode(renderer.render([{"role": "user", "content": ask.text}]))
        sampling = SamplingSpec(max_tokens=ask.num_tokens, seed=ask.seed)
        on_chunk: ChunkCallback | None = (lambda chunk: None) if ask.is_streamed else None
        call = GenerationRequest(ids, sampling, policy=POLICY, session="s", on_chunk=on_chunk)
        body = request_body(call, snapshot, DIRECT)
        return Request.make("/inference/v1/generate", "", body, delay_s=ask.seed % 256 / 1e3)

    return make


def agent_call(ask: ParsedRequest) -> Request:
    fields = {
        "model": POLICY,
        "messages": [{"role": "user", "content": ask.text}],
        "max_tokens": ask.num_tokens,
        "seed": ask.seed,
        "stream": ask.is_streamed,
        "stream_options": {"include_usage": True},
    }
    body = json.dumps(fields).encode()
    return Request.make("/v1/chat/completions", ask.session, body, delay_s=ask.seed % 256 / 1e3)


class Pairs:
    """Windows on both sides, in turns."""

    def __init__(self, engine: Server, gateway: Server, folder: Path) -> None:
        self._sides = ((engine, engine_calls(folder)), (gateway, agent_call))
        self._num_windows = 0

    async def run(self, num: int, of: Load) -> list[tuple[Window, Window]]:
        return [await self._pair(of) for _ in range(num)]

    async def _pair(self, of: Load) -> tuple[Window, Window]:
        self._num_windows += 1
        asks = list(of.asks(self._num_windows))
        found: list[Window] = []
        order = self._sides if self._num_windows % 2 else self._sides[::-1]
        for server, make in order:
            requests = [make(ask) for ask in asks]
            found.append(
                await load(server, requests, num_clients=of.num_clients, think_s=of.think_s)
            )
        direct, ours = found if self._num_windows % 2 else found[::-1]
        return direct, ours


# --- with a bare server in the engine's place -------------------------------------------------


async def simulated(pairs: Pairs, *, num_pairs: int, seconds: float) -> Figures:
    closed = Load(num_calls=10 * NUM_CLIENTS, num_clients=NUM_CLIENTS, num_tokens=ANSWER_TOKENS)
    await pairs.run(1, closed)
    loops = checked(await pairs.run(num_pairs, closed), closed)
    most_per_s = median(direct.calls_per_s for direct, _ in loops)
    log_line(
        f"closed loop: {most_per_s:.0f}/s, through {median(w.calls_per_s for _, w in loops):.0f}/s"
    )
    paced = paced_load(min(RATE_PER_S, SHARE * most_per_s), seconds)
    calm = checked(await pairs.run(num_pairs, paced), paced)
    for direct, ours in calm:
        log_line(
            f"{ours.calls_per_s:5.0f}/s p50 {direct.whole_ms(0.5):5.1f} → {ours.whole_ms(0.5):5.1f}"
            f" ms, p99 {direct.whole_ms(0.99):5.1f} → {ours.whole_ms(0.99):5.1f} ms,"
            f" {1e3 * ours.cpu_s / len(ours.calls):.2f} ms of processor time per call"
        )
    streamed = stream_load(seconds)
    streams = checked(await pairs.run(num_pairs, streamed), streamed)
    for direct, ours in streams:
        log_line(f"first token {direct.first_ms(0.5):5.1f} → {ours.first_ms(0.5):5.1f} ms")
    return {
        "added_p50_ms": median(ours.whole_ms(0.5) - direct.whole_ms(0.5) for direct, ours in calm),
        "added_p99_ms": median(
            ours.whole_ms(0.99) - direct.whole_ms(0.99) for direct, ours in calm
        ),
        "direct_p50_ms": median(direct.whole_ms(0.5) for direct, _ in calm),
        "direct_p99_ms": median(direct.whole_ms(0.99) for direct, _ in calm),
        "rate_per_s": median(ours.calls_per_s for _, ours in calm),
        "cpu_ms": median(1e3 * ours.cpu_s / len(ours.calls) for _, ours in calm),
        "closed_per_s": median(ours.calls_per_s for _, ours in loops),
        "closed_direct_per_s": most_per_s,
        "closed_p50_ms": median(ours.whole_ms(0.5) for _, ours in loops),
        "closed_direct_p50_ms": median(direct.whole_ms(0.5) for direct, _ in loops),
        "added_first_token_ms": median(
            ours.first_ms(0.5) - direct.first_ms(0.5) for direct, ours in streams
        ),
        "stream_cpu_ms": median(1e3 * ours.cpu_s / len(ours.calls) for _, ours in streams),
    }


def paced_load(rate_per_s: float, seconds: float) -> Load:
    return Load(
        num_calls=int(rate_per_s * seconds),
        num_clients=NUM_CLIENTS,
        num_tokens=ANSWER_TOKENS,
        think_s=max(0.0, NUM_CLIENTS / rate_per_s - sum(DELAY_MS) / 2e3),
        delay_ms=DELAY_MS,
    )


def stream_load(seconds: float) -> Load:
    """A token every 20 ms, so a stream takes a good second."""
    return Load(
        num_calls=max(NUM_STREAMS, int(NUM_STREAMS * seconds / 1.6)),
        num_clients=NUM_STREAMS,
        num_tokens=STREAM_TOKENS,
        think_s=0.3,
        delay_ms=DELAY_MS,
        is_streamed=True,
    )


def checked(found: list[tuple[Window, Window]], of: Load) -> list[tuple[Window, Window]]:
    """A figure is worth nothing if an answer is not whole."""
    for window in (window for pair in found for window in pair):
        lengths = {call.num_tokens for call in window.calls}
        if lengths != {of.num_tokens} or len(window.calls) != of.num_calls:
            raise RuntimeError(f"{len(window.calls)} answers of {lengths} tokens; {of} was asked")
    return found


async def with_bare_server(
    folder: Path, *, num_pairs: int, seconds: float, slow_ms: float
) -> Figures:
    with (
        process("benchmarks.gateway_upstream", *map(str, WORDS)) as engine,
        process(
            "benchmarks.gateway_service", engine.url, str(folder), "--slow-ms", str(slow_ms)
        ) as gateway,
    ):
        return await simulated(Pairs(engine, gateway, folder), num_pairs=num_pairs, seconds=seconds)


# --- with vLLM --------------------------------------------------------------------------------


async def with_vllm(folder: Path, *, num_pairs: int, calls_each: int, slow_ms: float) -> Figures:
    child = ChildServer(default_environment(), VLLM_OPTIONS)
    log_line("vLLM starts: half a minute, more on a slow machine")
    url, _ = await child.start(folder)
    try:
        engine = Server(url=url, pid=child.group or 0)
        words = ("benchmarks.gateway_service", url, str(folder), "--slow-ms", str(slow_ms))
        with process(*words) as gateway:
            pairs = Pairs(engine, gateway, folder)
            figures: Figures = {}
            for num in CONCURRENCY:
                figures |= await _throughput(pairs, num, num_pairs, calls_each)
            return figures
    finally:
        await child.stop()


async def _throughput(pairs: Pairs, num: int, num_pairs: int, calls_each: int) -> Figures:
    of = Load(num_calls=num * calls_each, num_clients=num, num_tokens=STREAM_TOKENS)
    await pairs.run(1, of)
    found = await pairs.run(num_pairs, of)
    for direct, ours in found:
        log_line(f"{num} agents: {direct.tokens_per_s:.0f} → {ours.tokens_per_s:.0f} tokens/s")
    return {
        f"ratio_{num}": median(ours.tokens_per_s / direct.tokens_per_s for direct, ours in found),
        f"tokens_per_s_{num}": median(ours.tokens_per_s for _, ours in found),
        f"direct_tokens_per_s_{num}": median(direct.tokens_per_s for direct, _ in found),
    }


# --- all of it --------------------------------------------------------------------------------


def model_folder(*, quick: bool) -> Path:
    """SmolLM2's, made by `make setup-engine` as vLLM is."""
    ensure(default_environment(), quick=quick)
    return smollm2(quick=quick)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter windows; 3 minutes")
    parser.add_argument("--folder", help="not used: nothing is written")
    parser.add_argument("--slow-ms", type=float, default=0.0, help="the gateway sleeps per call")
    parser.add_argument("--simulated", action="store_true", help="without vLLM")
    options = parser.parse_args()
    quiet()
    folder, slow_ms = model_folder(quick=options.quick), options.slow_ms
    num_pairs, seconds = (2, 3.0) if options.quick else (MIN_PAIRS, 8.0)
    load_average = os.getloadavg()[0]

    async def measure() -> Figures:
        figures = await with_bare_server(
            folder, num_pairs=num_pairs, seconds=seconds, slow_ms=slow_ms
        )
        if options.simulated:
            return figures
        num_real, calls_each = (1, 1) if options.quick else (5, 2)
        real = await with_vllm(folder, num_pairs=num_real, calls_each=calls_each, slow_ms=slow_ms)
        return {"ratio": real[f"ratio_{CONCURRENCY[-1]}"], **figures, **real}

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result(**runner.run(measure()), pairs=num_pairs, load_average=load_average)


if __name__ == "__main__":
    main()
