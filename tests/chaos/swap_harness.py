# SPDX-License-Identifier: Apache-2.0
"""A node's engines, loader and gateway in this process, and agents that stream from them over HTTP.

The engine is a parameter: how to write its snapshots, build it and kill it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any, Protocol, cast

import httpx2
import torch
from tests.unit.rollout.engines import byte_qwen3, tiny_qwen3
from tests.unit.rollout.fake_dataflow import POLICY, wanted
from tests.unit.rollout.killable_engine import Paused, Restartable
from tests.unit.rollout.polling import eventually
from tests.unit.rollout.snapshot_files import TEMPLATE
from tests.unit.rollout.test_weight_loader import Announced
from tests.unit.weights.patch_files import patch_between
from transformers import AutoModelForCausalLM

from penstock.dataflow.service.nodes.messages import NodeDirectives
from penstock.gateway.gateway import Gateway
from penstock.gateway.session import Session
from penstock.rollout.endpoint import Endpoint
from penstock.rollout.engine import Engine
from penstock.rollout.engine_pool import EnginePools, PoolStats
from penstock.rollout.engines.hf import HfEngine
from penstock.rollout.membership import Membership, NodeOrders
from penstock.rollout.weight_loader import Loader
from penstock.types import (
    FinishReason,
    PublishedVersion,
    SamplingSpec,
    Turn,
    view_ids,
    view_log_probs,
)

NUM_MODELS = 3
"""Different weights, selected by version number."""
TOLERANCE = 1e-3
ANSWER_TOKENS = 48
START_S = 600.0


class Killable(Engine, Protocol):
    @property
    def paused_s(self) -> float: ...

    @property
    def num_patches(self) -> int: ...

    async def kill(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Kind:
    name: str
    write: Callable[[Path, int], Path]
    make: Callable[[Paused], Killable]


def _write_tiny(folder: Path, seed: int) -> Path:
    return tiny_qwen3.write_snapshot(folder, seed=seed, end_id=tiny_qwen3.VOCAB_SIZE)


def _write_bytes(folder: Path, seed: int) -> Path:
    """Larger, because vLLM does not support heads of 16; without an end token."""
    byte_qwen3.write_snapshot(folder, seed=seed)
    for name, key in (("config.json", "eos_token_id"), ("tokenizer_config.json", "eos_token")):
        settings = json.loads((folder / name).read_text())
        settings.pop(key, None)
        (folder / name).write_text(json.dumps(settings))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class KillableVllm(Restartable):
    """vLLM as a child process; SIGKILL ends all its processes. It restarts automatically."""

    def __init__(self, paused: Paused) -> None:
        from penstock.rollout.engines.vllm import ChildServer, VllmEngine, default_environment

        self._server = ChildServer(default_environment(), ("--dtype", "float32"))
        super().__init__(lambda: VllmEngine(self._server), paused)

    async def kill(self) -> None:
        group = self._server.group
        assert group is not None
        os.killpg(group, signal.SIGKILL)

    async def close(self) -> None:
        await super().kill()


HF = Kind("hf", _write_tiny, lambda paused: Restartable(HfEngine, paused))
VLLM = Kind("vllm", _write_bytes, KillableVllm)


class Folders:
    """Replaces the fetcher: the weights of each version number."""

    def __init__(self, folders: Sequence[Path], *, is_patched: bool = False) -> None:
        self._folders = folders
        self._is_patched = is_patched

    async def __call__(self, weights_url: str, target: PublishedVersion) -> Path:
        return self._folders[target.number % NUM_MODELS]

    def require_unchanged(self, folder: Path) -> None:
        return None

    def make_patch(self, base: Path, folder: Path) -> None:
        if self._is_patched:
            patch_between(base, folder, folder.parent / "scratch")

    def prune_except(self, keep: Collection[str]) -> None:
        return None

    async def close(self) -> None:
        return None


@dataclass(slots=True)
class SwapHarness:
    engines: EnginePools
    made: list[Killable]
    paused: Paused
    gateway: Gateway
    endpoint: Endpoint
    orders: NodeOrders
    announced: Announced
    models: list[Any]
    sessions: list[Session] = field(default_factory=list[Session])
    errors: list[str] = field(default_factory=list[str])
    """Errors that agents saw."""
    num_answers: int = 0
    pauses_s: list[float] = field(default_factory=list[float])
    longest_silence_s: float = 0.0
    is_over: bool = False

    @property
    def stats(self) -> PoolStats:
        return self.engines.stats()[POLICY]

    async def want(self, number: int) -> None:
        """Publish a version, and wait until every engine that is alive serves it."""
        self.orders.apply(NodeDirectives(wanted=(wanted(number),)))
        served = {POLICY: number}
        await eventually(lambda: self.announced.live and self.announced.live[-1] == served, START_S)
        self.pauses_s += [engine.paused_s for engine in self.made if engine.paused_s]

    async def until_all_serve(self) -> None:
        await eventually(lambda: self.stats.num_serving == len(self.made), START_S)

    @asynccontextmanager
    async def agents(self, num_sessions: int) -> AsyncGenerator[None]:
        """Agents stream until the block ends; each then finishes its answer."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(num_sessions):
                sampling = SamplingSpec(max_tokens=ANSWER_TOKENS)
                session = self.gateway.open(policies=[POLICY], sampling=sampling, seed=number)
                self.sessions.append(session)
                tasks.create_task(self._agent(session, number))
            try:
                await eventually(lambda: self.num_answers >= num_sessions // 2, START_S)
                yield
            finally:
                self.is_over = True

    async def _agent(self, session: Session, number: int) -> None:
        headers = {"Authorization": f"Bearer {session.api_key}"}
        async with httpx2.AsyncClient(headers=headers, timeout=START_S) as http:
            at = 0
            while not self.is_over:
                at += 1
                content = "".join(tiny_qwen3.LETTERS[(number * 5 + at * k) % 10] for k in range(6))
                body = {
                    "model": POLICY,
                    "messages": [{"role": "user", "content": content}],
                    "stream": True,
                }
                try:
                    await self._stream(http, body)
                except Exception as error:
                    self.errors.append(f"session {number}, call {at}: {error!r}")
                self.num_answers += 1

    async def _stream(self, http: httpx2.AsyncClient, body: dict[str, Any]) -> None:
        finish, last, heard_at = None, "", 0.0
        url = f"{self.endpoint.url}/chat/completions"
        async with http.stream("POST", url, json=body) as answer:
            if answer.status_code != 200:
                raise AssertionError((await answer.aread()).decode())
            async for line in answer.aiter_lines():
                if not line.startswith("data: "):
                    continue
                now = time.monotonic()
                if heard_at:
                    self.longest_silence_s = max(self.longest_silence_s, now - heard_at)
                last, heard_at = line[6:], now
                if last != "[DONE]":
                    event = json.loads(last)
                    assert "error" not in event, last
                    finish = event["choices"][0]["finish_reason"] or finish
        assert (finish, last) == ("length", "[DONE]"), f"ended with {finish!r}, {last!r}"

    def turns(self) -> Iterator[tuple[list[int], Turn]]:
        """Every turn with its full context."""
        for session in self.sessions:
            turns = session.turns()
            for turn in turns:
                context = list(view_ids(turn.prompt_ids))
                parent = turn.parent
                while parent >= 0:
                    before = turns[parent]
                    context = [
                        *view_ids(before.prompt_ids),
                        *view_ids(before.sampled_ids),
                        *context,
                    ]
                    parent = before.parent
                yield context, turn

    def wrong(self) -> Iterator[str]:
        """Turns that are cut short, or whose log-probs do not match their versions."""
        for context, turn in self.turns():
            where = f"{turn.spans}"
            if turn.finish is not FinishReason.LENGTH or not turn.reached_agent:
                yield f"{turn.finish} after {len(view_ids(turn.sampled_ids))} tokens: {where}"
            elif len(view_ids(turn.sampled_ids)) != ANSWER_TOKENS:
                yield f"{len(view_ids(turn.sampled_ids))} tokens: {where}"
            elif (off := self._off(context, turn)) > TOLERANCE:
                yield f"log-probs off by {off:.3g}: {where}"

    def _off(self, context: list[int], turn: Turn) -> float:
        sampled = list(view_ids(turn.sampled_ids))
        recorded = torch.tensor(list(view_log_probs(turn.logprobs)))
        expected = torch.empty_like(recorded)
        ids: Any = torch.tensor([[*context, *sampled]])
        for span in turn.spans:
            with torch.inference_mode():
                logits = self.models[span.number % NUM_MODELS](input_ids=ids).logits[0]
            logprobs = logits.log_softmax(-1)
            for at in range(span.start, span.end):
                expected[at] = logprobs[len(context) + at - 1, sampled[at]]
        return float((expected - recorded).abs().max())

    def report(self) -> str:
        stats = self.stats
        num_mixed = sum(len(turn.spans) > 1 for _, turn in self.turns())
        return (
            f"{self.num_answers:,} answers, {num_mixed:,} of several versions; "
            f"{stats.num_continued} continued, {stats.num_restarted} restarted; answers paused for "
            f"{_ms(self.pauses_s)}; engine out of routing {_ms(stats.swap_s)}; "
            f"longest silence {1000 * self.longest_silence_s:.0f} ms"
        )


def _ms(times_s: Sequence[float]) -> str:
    if not times_s:
        return "never"
    return f"p50 {1000 * median(times_s):.0f}, max {1000 * max(times_s):.0f} ms"


@asynccontextmanager
async def world(
    kind: Kind,
    root: Path,
    *,
    num_engines: int,
    max_paused: float = 0.25,
    is_patched: bool = False,
) -> AsyncGenerator[SwapHarness]:
    """Version 0 is live at the start. `is_patched`: versions differ in 1 % of the elements of each
    tensor, and patches lead from each to the next."""
    if is_patched:
        folders = [kind.write(root / str(number), 0) for number in range(NUM_MODELS)]
        for number, folder in enumerate(folders):
            tiny_qwen3.change_a_little(folder, number)
    else:
        folders = [kind.write(root / str(seed), seed) for seed in range(NUM_MODELS)]
    made: list[Killable] = []
    paused = Paused()

    def make() -> Engine:
        made.append(kind.make(paused))
        return made[-1]

    engines = EnginePools([POLICY], make, num_engines=num_engines, max_paused=max_paused)
    gateway, announced, orders = Gateway(engines), Announced(), NodeOrders()
    membership = cast(Membership, announced)
    endpoint = Endpoint(gateway)
    fetcher = Folders(folders, is_patched=is_patched)
    loader = Loader(orders, membership, engines, gateway, fetcher)
    auto: Any = AutoModelForCausalLM
    models = [auto.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders]
    made_world = SwapHarness(engines, made, paused, gateway, endpoint, orders, announced, models)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(engines.close)
        for loop in (loader.run(), endpoint.run()):
            stack.push_async_callback(_end, asyncio.create_task(loop))
        await made_world.want(0)
        await made_world.until_all_serve()
        yield made_world


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
