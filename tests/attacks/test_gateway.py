# SPDX-License-Identifier: Apache-2.0
"""What holders of an agent's key can do to the gateway, its engine, other agents and rewards."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from tests.contract.dataflow_server import serving
from tests.unit.gateway.gateway_harness import POLICY, FakeEngine, write_snapshot

from penstock.gateway import online as online_module
from penstock.gateway.online import EndedSession, OnlineGateway, SessionTerms
from penstock.gateway.online_routes import build_online_app
from penstock.gateway.renderer import Renderer
from penstock.types import RowId, SamplingSpec
from penstock.wire.auth import Audience, Role, Signer

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@dataclass
class Slots:
    """Slots without end; remembers what was delivered."""

    num: int = 0
    delivered: list[EndedSession] = field(default_factory=list[EndedSession])

    def acquire_slot(self) -> RowId | None:
        self.num += 1
        return RowId(f"p0-{self.num}.0.1")

    def release_slot(self, row_id: RowId) -> None:
        pass

    def deliver(self, ended: EndedSession) -> None:
        self.delivered.append(ended)


@dataclass
class Online:
    http: httpx2.AsyncClient
    signer: Signer
    slots: Slots

    def token(self, subject: str, role: Role = Role.SESSION) -> str:
        return self.signer.mint(role, [Audience.GATEWAY], ttl_s=600, subject=subject)

    async def open(self, token: str) -> dict[str, Any]:
        answer = await self.http.post("/sessions", headers=bearer(token), json={})
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def say(self, key: str) -> int:
        return (
            await self.http.post("/v1/chat/completions", headers=bearer(key), json=CHAT)
        ).status_code

    async def ask(self, method: str, path: str, key: str, body: Any = None) -> httpx2.Response:
        return await self.http.request(method, path, headers=bearer(key), json=body or {})


@asynccontextmanager
async def client_of(app: Starlette) -> AsyncIterator[httpx2.AsyncClient]:
    with serving(app) as url:
        async with httpx2.AsyncClient(base_url=url, timeout=60.0) as http:
            yield http


@pytest.fixture
async def online(tmp_path: Path) -> AsyncIterator[Online]:
    signer, slots = Signer.create(tmp_path / "keys", "run"), Slots()
    gateway = OnlineGateway(
        FakeEngine(),
        slots,
        SessionTerms(reward_deadline_s=600.0, idle_s=600.0, default_reward=None),
        signer.verifier(Audience.GATEWAY).verify,
        policies=[POLICY],
        sampling=SamplingSpec(max_tokens=8),
    )
    gateway.set_renderer(POLICY, Renderer.load(write_snapshot(tmp_path / "model")))
    async with client_of(build_online_app(gateway)) as http:
        yield Online(http, signer, slots)


# --- rewards and sessions -----------------------------------------------------------------------


@pytest.mark.finding(15)
async def test_an_agents_model_key_sets_no_reward(online: Online) -> None:
    """The key that calls the model cannot reward its own session; the reward key can, once."""
    opened = await online.open(online.token("shop"))
    agent, path = opened["api_key"], f"/sessions/{opened['id']}"
    assert await online.say(agent) == 200
    forged = await online.ask("POST", f"{path}/reward", agent, {"reward": 1e9})
    assert forged.status_code == 403 and "reward_key" in forged.json()["error"]["message"]
    assert online.slots.delivered == []
    judged = await online.ask("POST", f"{path}/reward", opened["reward_key"], {"reward": 0.5})
    assert judged.json()["state"] == "rewarded"
    assert [ended.reward for ended in online.slots.delivered] == [0.5]


@pytest.mark.finding(15)
async def test_one_owner_cannot_take_every_session(
    online: Online, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An owner gets half of the sessions at most, by any number of tokens; others still get in."""
    monkeypatch.setattr(online_module, "MAX_SESSIONS", 16)
    statuses = [
        (await online.ask("POST", "/sessions", online.token("greedy"))).status_code
        for _ in range(20)
    ]
    assert statuses == [200] * 8 + [429] * 12
    for owner in ("one", "two"):
        assert (await online.ask("POST", "/sessions", online.token(owner))).status_code == 200


async def test_an_agent_cannot_forget_its_bad_sessions(online: Online) -> None:
    """An agent that deletes its failures would choose its own training data."""
    opened = await online.open(online.token("shop"))
    await online.say(opened["api_key"])
    path = f"/sessions/{opened['id']}"
    assert (await online.ask("DELETE", path, opened["api_key"])).status_code == 403
    assert (await online.ask("GET", path, opened["api_key"])).json()["state"] == "open"
    assert (await online.ask("DELETE", path, opened["reward_key"])).json()["state"] == "forgotten"


async def test_a_reward_key_calls_no_model(online: Online) -> None:
    """Whoever judges cannot add turns to what it judges."""
    opened = await online.open(online.token("shop"))
    assert await online.say(opened["reward_key"]) == 401
    answer = await online.ask(
        "POST", f"/sessions/{opened['id']}/v1/chat/completions", opened["reward_key"], CHAT
    )
    assert answer.status_code == 401


async def test_keys_of_one_session_do_nothing_to_another(online: Online) -> None:
    """The keys of a session are strangers to every other session, also of the same owner."""
    mine, other = await online.open(online.token("a")), await online.open(online.token("a"))
    theirs = await online.open(online.token("b"))
    for victim in (other, theirs):
        for key in (mine["api_key"], mine["reward_key"]):
            path = f"/sessions/{victim['id']}"
            tries = [
                await online.ask("POST", f"{path}/reward", key, {"reward": 1}),
                await online.ask("POST", f"{path}/end", key),
                await online.ask("DELETE", path, key),
                await online.ask("GET", path, key),
                await online.ask("POST", f"{path}/v1/chat/completions", key, CHAT),
            ]
            assert [answer.status_code for answer in tries] == [401] * 5
    assert online.slots.delivered == []


async def test_another_owners_token_neither_sees_nor_rewards_a_session(online: Online) -> None:
    """Tokens of other owners get the same answer for a session of somebody else and for none."""
    theirs = await online.open(online.token("b"))
    for name in (theirs["id"], "no-such-session"):
        path = f"/sessions/{name}"
        for method, at in (("GET", path), ("POST", f"{path}/reward"), ("DELETE", path)):
            answer = await online.ask(method, at, online.token("a"), {"reward": 1})
            assert answer.status_code == 404, (method, at)


async def test_a_renewed_token_still_owns_its_sessions(online: Online) -> None:
    """Ownership follows the subject: a new token of the same holder is no second owner."""
    opened = await online.open(online.token("shop"))
    path = f"/sessions/{opened['id']}"
    assert (await online.ask("GET", path, online.token("shop"))).status_code == 200


@pytest.mark.parametrize("role", [Role.ROLLOUT, Role.STAGE, Role.READER, Role.RELAY, Role.TRAINER])
async def test_tokens_of_other_services_open_no_session(online: Online, role: Role) -> None:
    """A node's, stage's or relay's token is no agent's: confused deputies get 403."""
    answer = await online.ask("POST", "/sessions", online.token("x", role))
    assert answer.status_code == 403


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e10", "1e400", '"1"', "[1]"])
async def test_rewards_that_are_no_bounded_number_are_refused(online: Online, value: str) -> None:
    """A reward that would poison an advantage never leaves the gateway."""
    opened = await online.open(online.token("shop"))
    await online.say(opened["api_key"])
    answer = await online.http.post(
        f"/sessions/{opened['id']}/reward",
        headers={**bearer(opened["reward_key"]), "content-type": "application/json"},
        content=f'{{"reward": {value}}}',
    )
    assert answer.status_code == 400
    assert online.slots.delivered == []
