# SPDX-License-Identifier: Apache-2.0
"""The plugin for vLLM's processes, as far as it can be tested without vLLM."""

from __future__ import annotations

import importlib
import multiprocessing
import sys
import time
from collections.abc import AsyncIterator
from importlib.metadata import distributions
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from penstock.errors import EngineError
from penstock.gateway.generation import GenerationRequest
from penstock.rollout.engines.vllm.generate_api import CompletionParser
from penstock.rollout.engines.vllm.server import PLUGIN_DIR
from penstock.types import PolicyName, SamplingSpec, Version, view_ids, view_log_probs

ROUTE = "vllm.entrypoints.scale_out.token_in_token_out"
POLICY = PolicyName("p")
VERSION = Version(policy=POLICY, incarnation=1, number=0)
WAITING = "vllm.distributed.device_communicators.shm_broadcast"


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A stub of the patched vLLM module, in a process that is not vLLM's server; undoes the patches
    of torch."""
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    module = ModuleType(WAITING)
    monkeypatch.setitem(sys.modules, WAITING, module)
    monkeypatch.setattr(torch, "Generator", torch.Generator)
    monkeypatch.syspath_prepend(PLUGIN_DIR)
    return module


def apply_patches() -> None:
    """Find and call the plugin as vLLM does."""
    (found,) = distributions(path=[str(PLUGIN_DIR)])
    (plugin,) = found.entry_points.select(group="vllm.general_plugins")
    plugin.load()()


def test_on_a_cpu_waiting_takes_no_processor_time(waiting: Any) -> None:
    apply_patches()
    began_at, spent_s = time.monotonic(), time.process_time()
    for _ in range(200):
        waiting.sched_yield()
    passed_s = time.monotonic() - began_at
    assert passed_s >= 0.02
    assert time.process_time() - spent_s < 0.5 * passed_s


def test_on_a_cpu_a_draw_can_be_taken_back_without_an_offset(waiting: Any) -> None:
    apply_patches()
    generator: Any = torch.Generator()
    generator.manual_seed(1)
    generator.set_offset(generator.get_offset() - 4)


def test_a_gpu_keeps_vllms_own_ways(waiting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.Generator
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    apply_patches()
    assert not hasattr(waiting, "sched_yield")
    assert torch.Generator is before


class Response:
    """As much of vLLM's response as the plugin uses."""

    def __init__(self, choices: list[dict[str, Any]]) -> None:
        self.choices = choices

    def __iter__(self) -> Any:
        return iter(vars(self).items())

    @classmethod
    def model_construct(cls, **fields: Any) -> Response:
        return cls(**fields)

    def model_dump(self) -> dict[str, Any]:
        return {"choices": self.choices}


class ServingTokens:
    """vLLM's way of answering."""

    async def serve_tokens_full_generator(
        self, request: Any, results: AsyncIterator[Any], request_id: str
    ) -> Any:
        outputs = [output async for result in results for output in result.outputs]
        if not outputs:
            return SimpleNamespace(error="disconnected")
        params, (output,) = request.sampling_params, outputs
        entries = zip(output.token_ids, output.logprobs, strict=True)
        content = [{"token_id": i, "logprob": found[i].logprob} for i, found in entries if found]
        choice = {
            "token_ids": output.token_ids,
            "logprobs": {"content": content} if params.logprobs is not None else None,
            "finish_reason": "length",
            "weight_versions": [{"version": "v", "start": 0, "end": len(output.token_ids)}],
        }
        return Response([choice])


@pytest.fixture
def serving(waiting: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's serving class with the plugin, in the server's process."""
    for name, members in (
        ("serving", {"ServingTokens": type("Serving", (ServingTokens,), {})}),
        ("protocol", {"GenerateTokensResponse": Response}),
    ):
        module = ModuleType(f"{ROUTE}.{name}")
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: None)
    apply_patches()
    return importlib.import_module(f"{ROUTE}.serving").ServingTokens()


async def answer(serving: Any, logprobs: list[float | None], **extra_args: bool) -> Any:
    """One whole answer, of as many tokens as log-probs."""
    found = [
        {i: SimpleNamespace(logprob=p)} if p is not None else {} for i, p in enumerate(logprobs)
    ]
    output = SimpleNamespace(token_ids=list(range(len(logprobs))), logprobs=found)

    async def results() -> AsyncIterator[Any]:
        if logprobs:
            yield SimpleNamespace(outputs=[output])

    params = SimpleNamespace(extra_args=extra_args or None, logprobs=0)
    request = SimpleNamespace(sampling_params=params)
    return await serving.serve_tokens_full_generator(request, results(), "r")


def parse(response: Any) -> tuple[list[int], list[float]]:
    request = GenerationRequest([1], SamplingSpec(), policy=POLICY, session="s")
    parser = CompletionParser(lambda: VERSION, request)
    parser.feed_event(msgspec.json.encode(response.model_dump()))
    completion = parser.completion({"v": VERSION})
    return list(view_ids(completion.sampled_ids)), list(view_log_probs(completion.logprobs))


async def test_a_packed_answer_has_the_bits_of_one_in_objects(serving: Any) -> None:
    logprobs: list[float | None] = torch.tensor([-0.1, 0.0, -7.25, -1e-9, -30.7]).tolist()
    packed = await answer(serving, logprobs, penstock_packed=True)
    assert packed.model_dump()["choices"][0]["token_ids"] is None
    plain = await answer(serving, logprobs)
    assert "packed" not in plain.model_dump()["choices"][0]
    assert parse(packed) == parse(plain) == ([0, 1, 2, 3, 4], logprobs)


@pytest.mark.parametrize("broken", [None, float("nan"), float("-inf")])
async def test_a_packed_answer_without_a_log_prob_is_refused(
    serving: Any, broken: float | None
) -> None:
    with pytest.raises(EngineError, match="NaN"):
        parse(await answer(serving, [-0.5, broken, -0.5], penstock_packed=True))


async def test_an_error_of_the_server_stays_one(serving: Any) -> None:
    assert (await answer(serving, [], penstock_packed=True)).error == "disconnected"


@pytest.mark.parametrize("packed", ["AAAA", "AAAAAAAAAAA", "no base64!", "AAAAAAAAAAAAAAAA"])
def test_packed_bytes_that_are_no_tokens_are_refused(packed: str) -> None:
    choice = {"packed": packed, "finish_reason": "stop", "weight_versions": []}
    with pytest.raises(EngineError):
        parse(SimpleNamespace(model_dump=lambda: {"choices": [choice]}))
