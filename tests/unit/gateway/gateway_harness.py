# SPDX-License-Identifier: Apache-2.0
"""A gateway over real HTTP with a scripted engine that answers letter by letter."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
from starlette.applications import Starlette
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from penstock.errors import EngineError
from penstock.gateway.gateway import Gateway
from penstock.gateway.generation import Completion, GenerationRequest, TokenChunk
from penstock.gateway.quotas import Quotas
from penstock.gateway.renderer import Renderer
from penstock.gateway.server import build_app
from penstock.gateway.session import Session
from penstock.types import (
    FinishReason,
    PolicyName,
    SamplingSpec,
    Version,
    VersionSpan,
    log_probs,
    token_ids,
)
from penstock.wire.serving import server

POLICY = PolicyName("policy")
START, END = "<|im_start|>", "<|im_end|>"
LINE_ENDS = "\x85\u2028\u2029"
"""Line ends of Python's `splitlines`, but of no protocol."""
LETTERS = "\n" + "".join(map(chr, range(32, 127))) + LINE_ENDS
VOCAB = {letter: at for at, letter in enumerate(LETTERS)} | {"ab": len(LETTERS)}
END_ID = len(VOCAB) + 1
WINDOW = 4096
ON_FIRE = 99.0
"""The temperature at which the engine fails."""

TEMPLATE = """
{%- if tools %}
{{- '<|im_start|>system\\nTools:\\n' }}
{%- for tool in tools %}{{- (tool | tojson) + '\\n' }}{%- endfor %}
{{- '<tool_call>{"name": "x", "arguments": {}}</tool_call><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.reasoning_content %}
{{- '<think>' + message.reasoning_content + '</think>' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments + '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}
{{- '<think></think>' }}
{%- endif %}
{%- endif %}"""


def write_snapshot(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer: Any = Tokenizer(BPE(vocab=VOCAB, merges=[("a", "b")]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([START, END])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    size = len(VOCAB) + 2
    config = {"vocab_size": size, "max_position_embeddings": WINDOW, "eos_token_id": END_ID}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    return folder


class FakeEngine:
    """Returns its lines in turn, repeating the last one; blocks while `gate` is closed."""

    def __init__(self) -> None:
        self.lines = ["abc"]
        self.is_live = True
        """Whether it streams its answers."""
        self.waits_at = 0
        """Letters streamed before it waits for the gate."""
        self.gate = asyncio.Event()
        self.gate.set()
        self.num_started = 0
        self.specs: list[SamplingSpec] = []
        self.prompts: list[list[int]] = []

    async def __call__(self, request: GenerationRequest) -> Completion:
        self.num_started += 1
        self.specs.append(request.sampling)
        self.prompts.append(list(request.prompt_ids))
        line = self.lines.pop(0) if len(self.lines) > 1 else self.lines[0]
        ids = [*(VOCAB[letter] for letter in line), END_ID]
        is_cut = len(ids) > request.sampling.max_tokens
        ids = ids[: request.sampling.max_tokens]
        for at, token in enumerate(ids):
            if at == self.waits_at:
                await self.gate.wait()
            if at == 2 and request.sampling.temperature == ON_FIRE:
                raise EngineError("the engine is on fire")
            if request.on_chunk is not None and self.is_live:
                version = Version(policy=request.policy, incarnation=1, number=0)
                request.on_chunk(TokenChunk(sampled_ids=[token], logprobs=[-0.25], version=version))
                await asyncio.sleep(0)
        return Completion(
            sampled_ids=token_ids(ids),
            logprobs=log_probs([-0.25] * len(ids)),
            spans=(VersionSpan(start=0, end=len(ids), incarnation=1, number=0),),
            finish=FinishReason.LENGTH if is_cut else FinishReason.STOP,
        )


@dataclass
class GatewayHarness:
    """A running gateway with one session."""

    url: str
    app: Starlette
    gateway: Gateway
    engine: FakeEngine
    session: Session

    def openai(self, *, path: str = "/v1", api_key: str = "") -> openai.AsyncOpenAI:
        key = api_key or self.session.api_key
        return openai.AsyncOpenAI(base_url=self.url + path, api_key=key, max_retries=0)

    def anthropic(self, *, path: str = "", **key: Any) -> Any:
        """Its client; untyped, since its overloads cannot be called with a dictionary."""
        return anthropic.AsyncAnthropic(
            base_url=self.url + path,
            max_retries=0,
            **(key or {"api_key": self.session.api_key}),
        )

    def http(self) -> httpx2.AsyncClient:
        headers = {"authorization": f"Bearer {self.session.api_key}"}
        return httpx2.AsyncClient(base_url=self.url, headers=headers, timeout=60)

    def prompt(self, index: int = -1) -> str:
        """A prompt as received by the engine."""
        return self.gateway.renderer(POLICY).decode(self.engine.prompts[index])


@asynccontextmanager
async def running_gateway(
    folder: Path, quotas: Quotas | None = None
) -> AsyncGenerator[GatewayHarness]:
    engine = FakeEngine()
    gateway = Gateway(engine)
    gateway.set_renderer(POLICY, Renderer.load(write_snapshot(folder)))
    session = gateway.open(policies=[POLICY], sampling=SamplingSpec(max_tokens=512), seed=3)
    app = build_app(gateway, quotas)
    service = server(app, "127.0.0.1", 0)
    task = asyncio.create_task(service.serve())
    await until(lambda: service.started)
    port = service.servers[0].sockets[0].getsockname()[1]
    try:
        yield GatewayHarness(f"http://127.0.0.1:{port}", app, gateway, engine, session)
    finally:
        service.should_exit = True
        engine.gate.set()
        await task


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(12_000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("waited a minute in vain")


async def let_the_server_notice() -> None:
    """Turns of the loop, not only time: after a stall, a sleep ends before the loop has looked at
    its sockets."""
    for _ in range(20):
        await asyncio.sleep(0.005)
