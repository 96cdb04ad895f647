# SPDX-License-Identifier: Apache-2.0
"""The routes of a Tinker server: keys, ids and ownership, as the SDK uses them."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
from tests.unit.tinker.tinker_harness import TINY, make_folder, pass_body, read_logprobs

from penstock.errors import ConfigError
from penstock.tinker import sampling, server
from penstock.tinker.folder import ServerFile, TinkerFolder
from penstock.tinker.protocol import (
    MESSAGES,
    PROTOBUF,
    ForwardBackward,
    Sample,
    read_forward_backward,
    read_sample,
)
from penstock.tinker.serving import app_of, open_service

DAY_S = 86_400.0
WAIT_S = 300.0


@dataclass(slots=True)
class Api:
    folder: TinkerFolder
    http: httpx2.AsyncClient

    async def post(self, path: str, body: Any, *, key: str, status: int = 200) -> Any:
        answer = await self.http.post(f"/api/v1/{path}", json=body, headers={"X-API-Key": key})
        assert answer.status_code == status, answer.text
        return answer.json()

    async def session(self, key: str) -> str:
        return (await self.post("create_session", {"tags": []}, key=key))["session_id"]

    async def result(self, id: str, *, key: str) -> httpx2.Response:
        headers = {"X-API-Key": key, "Accept": PROTOBUF}
        while True:
            found = await self.http.post(
                "/api/v1/retrieve_future", json={"request_id": id}, headers=headers
            )
            assert found.status_code == 200, found.text
            if found.headers["content-type"] == PROTOBUF or "try_again" not in found.text:
                return found


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    folder = make_folder(tmp_path / "server")
    async with open_service(folder) as service:
        transport = httpx2.ASGITransport(app=app_of(folder, service))
        async with httpx2.AsyncClient(
            transport=transport, base_url="http://tinker", timeout=WAIT_S
        ) as http:
            yield Api(folder, http)


async def test_a_client_trains_saves_and_samples(api: Api) -> None:
    """The bodies are those of the SDK."""
    key = api.folder.issue_key("alice", ttl_s=DAY_S)
    session = await api.session(key)
    created = await api.post(
        "create_model",
        {"session_id": session, "model_seq_id": 0, "base_model": TINY, "type": "create_model"},
        key=key,
    )
    model = (await api.result(created["request_id"], key=key)).json()["model_id"]
    assert created["model_id"] == model == f"{session}:train:0"
    info = await api.post("get_info", {"model_id": model}, key=key)
    assert info["lora_rank"] == 32 and info["model_data"]["model_name"] == TINY
    body = pass_body(model, 1, [([4, 5], {"target_tokens": [5, 6]})])
    headers = {"X-API-Key": key, "Content-Type": PROTOBUF}
    sent = await api.http.post("/api/v1/forward_backward", content=body, headers=headers)
    logprobs, metrics = read_logprobs(
        (await api.result(sent.json()["request_id"], key=key)).content
    )
    assert metrics["loss:sum"] == pytest.approx(-logprobs.sum(), rel=1e-6)
    step = {"model_id": model, "seq_id": 2, "adam_params": {"learning_rate": 0.01}}
    stepped = await api.post("optim_step", step, key=key)
    metrics = (await api.result(stepped["request_id"], key=key)).json()["metrics"]
    assert metrics["grad_norm"] > 0 and metrics["is_applied"] == 1
    saved = await api.post(
        "save_weights_for_sampler", {"model_id": model, "seq_id": 3, "path": "x"}, key=key
    )
    path = (await api.result(saved["request_id"], key=key)).json()["path"]
    assert path == f"tinker://{model}/sampler_weights/x"
    opened = await api.post(
        "create_sampling_session",
        {"session_id": session, "sampling_session_seq_id": 7, "model_path": path},
        key=key,
    )
    prompt = {"chunks": [{"tokens": [4, 5], "type": "encoded_text"}]}
    asked = {
        "sampling_session_id": opened["sampling_session_id"],
        "seq_id": 0,
        "num_samples": 2,
        "prompt": prompt,
        "sampling_params": {"max_tokens": 3, "temperature": 1.0, "top_k": -1, "top_p": 1.0},
    }
    sample = await api.post("asample", asked, key=key)
    assert len(sample["sample_sequence_ids"]) == 2
    found = MESSAGES["SampleResponse"]()
    found.ParseFromString((await api.result(sample["request_id"], key=key)).content)
    assert 1 <= np.frombuffer(found.sequences[0].tokens, np.int32).size <= 3
    sampler = await api.http.get(
        f"/api/v1/samplers/{opened['sampling_session_id']}", headers={"X-API-Key": key}
    )
    assert sampler.json()["model_path"] == path


async def test_what_belongs_to_others_does_not_exist(api: Api) -> None:
    alice, bob = (api.folder.issue_key(name, ttl_s=DAY_S) for name in ("alice", "bob"))
    session = await api.session(alice)
    body = {"session_id": session, "model_seq_id": 0, "base_model": TINY}
    created = await api.post("create_model", body, key=alice)
    await api.result(created["request_id"], key=alice)
    model = created["model_id"]
    await api.post("create_model", body, key=bob, status=404)
    await api.post("get_info", {"model_id": model}, key=bob, status=404)
    await api.post("retrieve_future", {"request_id": created["request_id"]}, key=bob, status=404)
    step = {"model_id": model, "seq_id": 1, "adam_params": {}}
    await api.post("optim_step", step, key=bob, status=404)
    later = api.folder.issue_key("alice", ttl_s=DAY_S)
    assert (await api.post("get_info", {"model_id": model}, key=later))["model_id"] == model


async def test_keys(api: Api, tmp_path: Path) -> None:
    key = api.folder.issue_key("alice", ttl_s=DAY_S)
    await api.session(key)
    for wrong in ("", "tml-nonsense", key[:-4] + "AAAA"):
        await api.post("create_session", {"tags": []}, key=wrong, status=401)
    other = make_folder(tmp_path / "other").issue_key("alice", ttl_s=DAY_S)
    await api.post("create_session", {"tags": []}, key=other, status=401)
    expired = api.folder.issue_key("alice", ttl_s=-1.0)
    await api.post("create_session", {"tags": []}, key=expired, status=401)
    api.folder.revoke("alice")
    with pytest.raises(ConfigError, match="was revoked"):
        api.folder.issue_key("alice", ttl_s=DAY_S)
    with pytest.raises(ConfigError, match="other settings"):
        api.folder.prepare(ServerFile(model="other", init=TINY))


async def test_a_revoked_key_is_refused_by_the_next_server(tmp_path: Path) -> None:
    """A running one looks every second."""
    folder = make_folder(tmp_path)
    key = folder.issue_key("alice", ttl_s=DAY_S)
    folder.revoke("alice")
    async with open_service(folder) as service:
        transport = httpx2.ASGITransport(app=app_of(folder, service))
        async with httpx2.AsyncClient(transport=transport, base_url="http://tinker") as http:
            found = await http.get("/api/v1/healthz", headers={"X-API-Key": key})
            assert found.status_code == 401


async def test_bodies_that_are_no_requests(api: Api) -> None:
    key = api.folder.issue_key("alice", ttl_s=DAY_S)
    headers = {"X-API-Key": key, "Content-Type": PROTOBUF}
    for body in (b"", b"\xff\xff", b"\x0a\xff\xff\xff\xff\x0f", pass_body("m", 1, [([], {})])):
        found = await api.http.post("/api/v1/forward_backward", content=body, headers=headers)
        assert found.status_code == 400, found.text
    await api.post("optim_step", {"model_id": "x"}, key=key, status=400)
    too_long = b"\0" * (33 << 20)
    found = await api.http.post("/api/v1/forward_backward", content=too_long, headers=headers)
    assert found.status_code == 413


async def test_a_body_is_parsed_off_the_event_loop(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = api.folder.issue_key("alice", ttl_s=DAY_S)
    headers = {"X-API-Key": key, "Content-Type": PROTOBUF}
    is_on_loop: list[bool] = []

    def noted(body: bytes) -> ForwardBackward:
        is_on_loop.append(threading.current_thread() is threading.main_thread())
        return read_forward_backward(body)

    monkeypatch.setattr(server, "read_forward_backward", noted)
    body = pass_body("unknown", 1, [([4], {"target_tokens": [5]})])
    found = await api.http.post("/api/v1/forward_backward", content=body, headers=headers)
    assert found.status_code == 404, found.text
    assert is_on_loop == [False]


async def test_a_sampling_request_is_read_off_the_event_loop(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = api.folder.issue_key("alice", ttl_s=DAY_S)
    is_on_loop: list[bool] = []

    def noted(content: bytes, window: int) -> Sample:
        is_on_loop.append(threading.current_thread() is threading.main_thread())
        return read_sample(content, window)

    monkeypatch.setattr(sampling, "read_sample", noted)
    body = {
        "sampling_session_id": "unknown",
        "seq_id": 0,
        "prompt": {"chunks": [{"tokens": [4]}]},
        "sampling_params": {},
    }
    await api.post("asample", body, key=key, status=404)
    assert is_on_loop == [False]
