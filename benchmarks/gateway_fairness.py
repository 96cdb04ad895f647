# SPDX-License-Identifier: Apache-2.0
"""What a flood by one agent's key does to another's answers.

An agent asks calmly, in windows with and without a flood beside it, in turns: 256 connections of
another key that ask again as soon as they are answered. The engine answers a fixed number of calls
at a time, first come first served, as vLLM does. `--unfair` takes the gateway's turns away: the
figure must then be bad, or it measures something else."""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import uvloop

from benchmarks.gateway_load import Connection, Request, Window, load
from benchmarks.harness import Server, log_line, process, result
from benchmarks.local_run import quiet
from penstock.gateway.gateway import MAX_RUNNING, Gateway
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.gateway.renderer import Renderer
from penstock.gateway.server import build_app
from penstock.gateway.session import Session
from penstock.gateway.tokenizer_files import PLAIN_TEMPLATE, character_tokenizer
from penstock.types import PolicyName, SamplingSpec, Version
from penstock.wire.serving import server, tune_memory

POLICY = PolicyName("policy")
VERSION = Version(policy=POLICY, incarnation=1, number=0)
ENGINE_SLOTS = 128
ANSWER_S = 1.0
"""Long answers take seconds; the flood's rate follows from it."""
NUM_FLOODING = 256
NUM_CALM = 16
THINK_S = 0.1
MIN_PAIRS = 5
FLOOD, CALM = "flood", "calm"
MODULE = "benchmarks.gateway_fairness"


class QueueingEngine:
    """So many answers at a time; the others wait in the order in which they came."""

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(ENGINE_SLOTS)

    async def __call__(self, request: GenerationRequest) -> Completion:
        async with self._slots:
            await asyncio.sleep(ANSWER_S)
        return Completion.of([1, 2, 3], [-0.5] * 3, VERSION, is_cut=True)


class NamedSessions(Gateway):
    """The key is the name of a session, which opens with its first call."""

    def find(self, api_key: str, session_id: str | None = None) -> Session:
        if api_key not in self._by_key:
            sampling = SamplingSpec(max_tokens=8)
            self._by_key[api_key] = self.open(policies=[POLICY], sampling=sampling, seed=1)
        return self._by_key[api_key]


async def serve(*, is_fair: bool) -> None:
    gateway = NamedSessions(QueueingEngine(), max_running=MAX_RUNNING if is_fair else 1 << 30)
    with TemporaryDirectory() as name:
        folder = Path(name)
        vocabulary = ["<unk>", *"abcdefghijklmnopqrstuvwxyz "]
        tokenizer = character_tokenizer(vocabulary, ["<unk>"])
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        (folder / "chat_template.jinja").write_text(PLAIN_TEMPLATE)
        gateway.set_renderer(POLICY, Renderer.load(folder))
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    port: int = listener.getsockname()[1]
    tune_memory()
    print(f"http://127.0.0.1:{port}", flush=True)
    await server(build_app(gateway), "127.0.0.1", port).serve(sockets=[listener])


def request(key: str) -> Request:
    body = {"model": POLICY, "messages": [{"role": "user", "content": "how are you"}]}
    path, content = "/v1/chat/completions", json.dumps(body).encode()
    return Request.make(path, key, content, delay_s=0.0)


async def flood(url: str) -> None:
    """Ask without end; says once that every connection was answered."""
    connections = [await Connection.open(url) for _ in range(NUM_FLOODING)]
    waiting = set(connections)

    async def ask(connection: Connection) -> None:
        while True:
            await connection.ask(request(FLOOD))
            if waiting:
                waiting.discard(connection)
                if not waiting:
                    print(url, flush=True)

    await asyncio.gather(*map(ask, connections))


async def calm_window(gateway: Server, num_calls: int) -> Window:
    asks = [request(CALM)] * num_calls
    return await load(gateway, asks, num_clients=NUM_CALM, think_s=THINK_S)


async def measure(*, is_fair: bool, num_pairs: int, num_calls: int) -> dict[str, float]:
    ratios: list[float] = []
    with process(MODULE, "--serve", *([] if is_fair else ["--unfair"])) as gateway:
        await calm_window(gateway, NUM_CALM)
        for _ in range(num_pairs):
            alone = await calm_window(gateway, num_calls)
            with process(MODULE, "--flood", gateway.url):
                beside = await calm_window(gateway, num_calls)
            ratios.append(beside.whole_ms(0.99) / alone.whole_ms(0.99))
            log_line(
                f"p50 {alone.whole_ms(0.5):.0f} → {beside.whole_ms(0.5):.0f} ms, "
                f"p99 {alone.whole_ms(0.99):.0f} → {beside.whole_ms(0.99):.0f} ms"
            )
        await calm_window(gateway, 4 * NUM_CALM)  # the flood's last calls end meanwhile
    return {"p99_ratio": median(ratios), "worst_ratio": max(ratios)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="windows of about six seconds")
    parser.add_argument("--unfair", action="store_true", help="without turns; must be bad")
    parser.add_argument("--serve", action="store_true", help="be the gateway")
    parser.add_argument("--flood", metavar="URL", help="be the flood")
    options = parser.parse_args()
    quiet()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if options.serve:
            runner.run(serve(is_fair=not options.unfair))
        elif options.flood:
            runner.run(flood(options.flood))
        else:
            num_pairs, num_calls = (MIN_PAIRS, 100) if options.quick else (2 * MIN_PAIRS, 400)
            figures = runner.run(
                measure(is_fair=not options.unfair, num_pairs=num_pairs, num_calls=num_calls)
            )
            result(**figures, limit=1.2, is_met=int(figures["p99_ratio"] < 1.2))


if __name__ == "__main__":
    main()
