# SPDX-License-Identifier: Apache-2.0
"""Expert choices as vLLM returns them, and the refusal where it cannot: without vLLM."""

from __future__ import annotations

import asyncio
import base64
import io
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from penstock.errors import EngineError
from penstock.gateway.generation import GenerationRequest
from penstock.rollout.engines.vllm import server
from penstock.rollout.engines.vllm.expert_choices import read_experts
from penstock.rollout.engines.vllm.generate_api import CompletionParser
from penstock.rollout.engines.vllm.server import ChildServer
from penstock.types import NO_CHOICE, PolicyName, SamplingSpec, Version

POLICY = PolicyName("p")
VERSION = Version(policy=POLICY, incarnation=1, number=0)


def npy(values: Any) -> str:
    content = io.BytesIO()
    np.save(content, values, allow_pickle=False)
    return base64.b64encode(content.getvalue()).decode()


CHOSEN = np.array([[[7, 0], [1, 2]], [[3, 4], [5, 6]]], np.uint8)
"""Two tokens, two layers, two experts."""


def test_choices_end_with_the_token_that_was_not_computed() -> None:
    found = read_experts(npy(CHOSEN), 8, 3)
    assert (found.num_layers, found.num_chosen, found.num_experts) == (2, 2, 8)
    assert found.choices == CHOSEN.tobytes() + NO_CHOICE * 4
    assert read_experts(npy(CHOSEN), 8, 5).choices == NO_CHOICE * 8 + found.choices, "cached tokens"
    wide = read_experts(npy(CHOSEN.astype(np.uint16)), 300, 3)
    assert wide.choices == CHOSEN.astype("<u2").tobytes() + NO_CHOICE * 8


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "returned no expert choices; start it with"),
        ("no base64!", "cannot read"),
        (npy(CHOSEN[0]), "cannot read"),
        (npy(CHOSEN.astype(np.float32)), "float32"),
        (npy(CHOSEN + 1), "8 experts"),
        (npy(np.concatenate([CHOSEN] * 2)), "for 3 tokens"),
    ],
)
def test_what_is_not_the_choices_of_this_answer_is_refused(text: str | None, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        read_experts(text, 8, 3)


@pytest.mark.parametrize("num_experts", [0, 8])
def test_a_completion_carries_them_if_they_are_recorded(num_experts: int) -> None:
    request = GenerationRequest([1, 2], SamplingSpec(), policy=POLICY, session="s")
    parser = CompletionParser(lambda: VERSION, request, num_experts=num_experts)
    choice = {
        "token_ids": [3],
        "logprobs": {"content": [{"token_id": 3, "logprob": -0.5}]},
        "finish_reason": "stop",
        "weight_versions": [{"version": str(VERSION), "start": 0, "end": 1}],
        "routed_experts": npy(CHOSEN),
    }
    parser.feed_event(msgspec.json.encode({"choices": [choice]}))
    experts = parser.completion({str(VERSION): VERSION}).experts
    assert experts == (read_experts(npy(CHOSEN), 8, 3) if num_experts else None)


def test_a_server_on_a_cpu_is_not_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "bin" / "vllm"
    program.parent.mkdir()
    program.touch(mode=0o755)
    monkeypatch.setattr(server, "visible_devices", list)
    with pytest.raises(EngineError, match=r"on a CPU; .* use engine: hf"):
        asyncio.run(ChildServer(tmp_path, records_experts=True).start(tmp_path))
