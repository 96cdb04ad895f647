# SPDX-License-Identifier: Apache-2.0
"""What holders of an agent's key can do to the gateway, its engine, other agents and rewards."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx2
import pytest
from starlette.applications import Starlette
from tests.contract.dataflow_server import serving
from tests.unit.gateway import bpe
from tests.unit.gateway.gateway_harness import POLICY, FakeEngine, write_snapshot
from tests.unit.gateway.test_server import ESCAPES, FORBIDDEN
from tests.unit.rollout.polling import eventually

from penstock.bounds import MAX_TURNS
from penstock.errors import TooLarge
from penstock.gateway import answer_history, owners, prompts, renderer, server, turn_tree
from penstock.gateway.answer_history import AnswerHistory
from penstock.gateway.dialects.limits import MAX_SCHEMA_BYTES, checked_schema
from penstock.gateway.dialects.messages import MESSAGES
from penstock.gateway.gateway import Gateway, Session
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.gateway.model_calls import Answer, Call, RawPrompt, ToolCall, Usage
from penstock.gateway.online import EndedSession, OnlineGateway, SessionTerms
from penstock.gateway.online_routes import build_online_app
from penstock.gateway.prompts import LOOP_IDS
from penstock.gateway.quotas import Quotas
from penstock.gateway.renderer import Renderer
from penstock.gateway.server import MAX_BODY_BYTES, build_app
from penstock.types import FinishReason, JsonObject, RowId, SamplingSpec, Version, view_ids
from penstock.wire import keys
from penstock.wire.auth import Audience, Role, Signer, read_unverified
from penstock.wire.denied import Denied, write_denied
from penstock.wire.doors import MAX_PIPELINED

CHAT = {"model": "policy", "messages": [{"role": "user", "content": "hi"}]}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@dataclass
class Slots:
    """As many slots as `num_free` says; remembers what was delivered."""

    num: int = 0
    num_free: int = 1 << 30
    delivered: list[EndedSession] = field(default_factory=list[EndedSession])

    def acquire_slot(self) -> RowId | None:
        if not self.num_free:
            return None
        self.num += 1
        self.num_free -= 1
        return RowId(f"p0-{self.num}.0.1")

    def release_slot(self, row_id: RowId) -> None:
        self.num_free += 1

    def deliver(self, ended: EndedSession) -> None:
        self.num_free += 1
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
async def client_of(app: Starlette) -> AsyncGenerator[httpx2.AsyncClient]:
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
        signer.verifier(Audience.GATEWAY),
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
    monkeypatch.setattr(owners, "MAX_SESSIONS", 16)
    statuses = [
        (await online.ask("POST", "/sessions", online.token("greedy"))).status_code
        for _ in range(20)
    ]
    assert statuses == [200] * 8 + [429] * 12
    for owner in ("one", "two"):
        assert (await online.ask("POST", "/sessions", online.token(owner))).status_code == 200


@pytest.mark.parametrize("how", ["end", "forget"])
async def test_slots_that_one_owner_gives_back_unused_have_a_rate(
    online: Online, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Each is written to the ledger twice: a session token made it grow by 2 GB an hour."""
    monkeypatch.setattr(owners, "MAX_UNUSED", 4)
    monkeypatch.setattr(owners, "UNUSED_PER_S", 0.0)
    shop, bank = online.token("shop"), online.token("bank")
    recorded: list[bool] = []
    for _ in range(12):
        opened = await online.open(shop)
        recorded.append(opened["is_recorded"])
        path, verb = f"/sessions/{opened['id']}", "POST"
        path, verb = (f"{path}/end", verb) if how == "end" else (path, "DELETE")
        assert (await online.ask(verb, path, opened["reward_key"])).status_code == 200
    assert recorded == 4 * [True] + 8 * [False]
    assert (await online.open(bank))["is_recorded"]


async def test_one_owner_cannot_take_every_recorded_slot(online: Online) -> None:
    """With a call of a token per slot and hour, no conversation of others was trained on. Alone it
    may have all of them."""
    online.slots.num_free = 8
    greedy, shop = online.token("greedy"), online.token("shop")
    taken = [await online.open(greedy) for _ in range(8)]
    assert all(one["is_recorded"] for one in taken)
    assert not (await online.open(shop))["is_recorded"], "none is left; but it has asked"
    for opened in taken[:4]:
        assert await online.say(opened["api_key"]) == 200
        path = f"/sessions/{opened['id']}/reward"
        await online.ask("POST", path, opened["reward_key"], {"reward": 0.5})
        assert not (await online.open(greedy))["is_recorded"]
    recorded = [(await online.open(shop))["is_recorded"] for _ in range(5)]
    assert recorded == [True] * 4 + [False]


async def test_one_owner_cannot_fill_the_memory_with_turns(
    online: Online, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of its 2,048 sessions may have 128 MiB."""
    monkeypatch.setattr(owners, "MAX_KEPT_BYTES", 20_000)
    shop, greedy = online.token("shop"), online.token("greedy")
    opened = [await online.open(greedy) for _ in range(8)]
    statuses: list[int] = []
    while 429 not in statuses:
        statuses += [await online.say(one["api_key"]) for one in opened]
        assert len(statuses) < 4000
    assert await online.say((await online.open(shop))["api_key"]) == 200
    for one in opened:
        path = f"/sessions/{one['id']}/reward"
        await online.ask("POST", path, one["reward_key"], {"reward": 0.5})
    assert await online.say((await online.open(greedy))["api_key"]) == 200


async def test_the_texts_of_turns_count_in_the_memory_of_their_owner(
    online: Online, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some tokens are a hundred spaces long: of a prompt of 4 MB, 128 KB were counted."""
    monkeypatch.setattr(owners, "MAX_KEPT_BYTES", 1 << 20)
    opened = await online.open(online.token("greedy"))

    def one_token(renderer: Renderer, text: str) -> tuple[int, ...]:
        return (1,)

    def any_length(text: str, renderer: Renderer) -> None:
        pass

    monkeypatch.setattr(Renderer, "encode_large", one_token)
    monkeypatch.setattr(prompts, "_check_length", any_length)
    statuses: list[int] = []
    for number in range(12):
        message = {"role": "user", "content": f"{number}{' ' * 100_000}"}
        body = {**CHAT, "messages": [message]}
        path = "/v1/chat/completions"
        statuses.append((await online.ask("POST", path, opened["api_key"], body)).status_code)
    assert statuses[0] == 200 and statuses[-1] == 429, statuses


async def test_calls_without_messages_keep_no_ids_of_their_prompts(tmp_path: Path) -> None:
    """What an agent was answered is looked at with its next messages. Who only continues texts
    never sends any: each call kept 36 bytes for every token of the whole conversation."""
    gateway = Gateway(engine := EchoEngine())
    gateway.set_renderer(POLICY, Renderer.load(write_snapshot(tmp_path / "model")))
    session = gateway.open(policies=[POLICY], sampling=SamplingSpec(max_tokens=8), seed=0)
    ids = [3] * 3_000
    for _ in range(10):
        answer = await session.call(RawPrompt(prompt=[*ids]))
        ids += [*view_ids(session.turn(answer.turn).sampled_ids), 3]
    engine.requests.clear()
    gc.collect()
    lists: list[list[Any]] = [one for one in gc.get_objects() if type(one) is list]
    kept = [one for one in lists if one[:3_000] == [3] * 3_000]
    assert len(kept) <= 2, "ids, and the result of the last call"
    assert len(session.turns()) == 10 and len(session.turns()[-1].prompt_ids) == 4


@pytest.mark.parametrize(
    ("bound", "most"), [("MAX_TURNS", 3), ("MAX_TOKENS", 40), ("MAX_SESSION_BYTES", 2_000)]
)
async def test_a_session_does_not_grow_without_end(
    online: Online, monkeypatch: pytest.MonkeyPatch, bound: str, most: int
) -> None:
    """The gateway keeps every turn of an open session in memory: calls of one agent for days, none
    of them too large, would end it for all others. Its row would be refused anyway."""
    monkeypatch.setattr(turn_tree, bound, most)
    token = online.token("shop")
    opened = await online.open(token)
    statuses = [await online.say(opened["api_key"]) for _ in range(12)]
    served = statuses.count(200)
    assert 0 < served < 12
    assert statuses == [200] * served + [413] * (12 - served)
    path = f"/sessions/{opened['id']}/reward"
    judged = await online.ask("POST", path, opened["reward_key"], {"reward": 0.5})
    assert judged.json()["state"] == "rewarded"
    assert [len(ended.turns) for ended in online.slots.delivered] == [served]
    assert await online.say((await online.open(token))["api_key"]) == 200


async def test_schemas_do_not_make_a_row_too_large(
    online: Online, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns keep the schema of their call, up to 64 KiB each: 4,096 of few tokens made a row that
    the dataflow refuses, and that ended the gateway with every open session."""
    monkeypatch.setattr(turn_tree, "MAX_SESSION_BYTES", 5 * MAX_SCHEMA_BYTES)
    opened = await online.open(online.token("shop"))
    schema = {"type": "object", "description": "x" * (MAX_SCHEMA_BYTES - 100)}
    body = {**CHAT, **with_schema(schema)}
    assert await online.say(opened["api_key"]) == 200, "one turn to train on"
    answers = [
        await online.ask("POST", "/v1/chat/completions", opened["api_key"], body) for _ in range(7)
    ]
    assert [answer.status_code for answer in answers] == [200] * 5 + [413] * 2
    assert "schemas" in answers[-1].json()["error"]["message"]
    path = f"/sessions/{opened['id']}/reward"
    await online.ask("POST", path, opened["reward_key"], {"reward": 0.5})
    assert [len(ended.turns) for ended in online.slots.delivered] == [6]


async def test_calls_at_the_same_time_do_not_exceed_a_full_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All begin while there is room; only as many are kept as the row may have."""
    monkeypatch.setattr(turn_tree, "MAX_TURNS", 3)
    engine = FakeEngine()
    engine.gate.clear()
    gateway = Gateway(engine)
    gateway.set_renderer(POLICY, Renderer.load(write_snapshot(tmp_path)))
    session = gateway.open(policies=[POLICY], sampling=SamplingSpec(max_tokens=8), seed=1)
    messages = [{"role": "user", "content": "hi"}]
    calls = [asyncio.create_task(session.chat(messages)) for _ in range(8)]
    await eventually(lambda: engine.num_started == 8)
    engine.gate.set()
    answers = await asyncio.gather(*calls, return_exceptions=True)
    refused = [answer for answer in answers if isinstance(answer, TooLarge)]
    assert len(refused) == 5 and len(session.turns()) == 3


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


@pytest.mark.parametrize("how", ["name", "token", "key"])
async def test_revoking_a_token_ends_the_sessions_that_it_opened(
    how: str, online: Online, tmp_path: Path
) -> None:
    """Neither key outlives its owner: no model call, no reward, nothing to train on."""
    token = online.token("shop")
    opened, judged, other = [await online.open(one) for one in (token, token, online.token("b"))]
    for one in (opened, judged, other):
        assert await online.say(one["api_key"]) == 200
    certificate = keys.certificate_of(".".join(token.split(".")[1:3]))
    denied = {
        "name": Denied(serial=1, subjects=frozenset({"shop"})),
        "token": Denied(serial=1, tokens={getattr(read_unverified(token), "id", ""): "shop"}),
        "key": Denied(serial=1, keys={certificate.key_id: 1.0}),
    }
    write_denied(tmp_path / "keys", denied[how])
    while (await online.ask("GET", f"/sessions/{opened['id']}", token)).status_code != 401:
        pass  # services look at the list once a second
    assert await online.say(opened["api_key"]) == 401
    path = f"/sessions/{judged['id']}/reward"
    answer = await online.ask("POST", path, judged["reward_key"], {"reward": 1e9})
    assert answer.status_code == 401 and "revoked" in answer.json()["error"]["message"]
    assert online.slots.delivered == []
    assert await online.say(other["api_key"]) == (401 if how == "key" else 200)


async def test_tokens_of_other_services_open_no_session(online: Online) -> None:
    """A node's, stage's or relay's token is no agent's: confused deputies get 403."""
    for role in (Role.ROLLOUT, Role.STAGE, Role.READER, Role.RELAY, Role.TRAINER):
        answer = await online.ask("POST", "/sessions", online.token("x", role))
        assert answer.status_code == 403, role


async def test_rewards_that_are_no_bounded_number_are_refused(online: Online) -> None:
    """A reward that would poison an advantage never leaves the gateway."""
    opened = await online.open(online.token("shop"))
    await online.say(opened["api_key"])
    for value in ("NaN", "Infinity", "-Infinity", "1e10", "1e400", '"1"', "[1]"):
        answer = await online.http.post(
            f"/sessions/{opened['id']}/reward",
            headers={**bearer(opened["reward_key"]), "content-type": "application/json"},
            content=f'{{"reward": {value}}}',
        )
        assert answer.status_code == 400, value
    assert online.slots.delivered == []


# --- prompts that stop the gateway --------------------------------------------------------------


@dataclass
class Gate:
    """A gateway with a real tokenizer, an attacker's key and a victim's key."""

    http: httpx2.AsyncClient
    gateway: Gateway
    renderer: WatchedRenderer
    engine: EchoEngine
    loop_thread: int
    attacker: Session
    victim: Session

    async def ask(self, session: Session, **fields: Any) -> httpx2.Response:
        body = {"model": "policy", "messages": [{"role": "user", "content": "hi"}], **fields}
        return await self.http.post(
            "/v1/chat/completions", json=body, headers=bearer(session.api_key)
        )

    async def say(self, session: Session, text: str, **fields: Any) -> httpx2.Response:
        return await self.ask(session, messages=[{"role": "user", "content": text}], **fields)


class WatchedRenderer(Renderer):
    """Notes how much was tokenised or decoded, and in which thread."""

    seen: list[tuple[int, int]]
    decoded: list[tuple[int, int]]
    rendered_in: list[int]

    def note(self, text: str) -> None:
        self.seen.append((threading.get_ident(), len(text)))

    def encode(self, text: str) -> tuple[int, ...]:
        self.note(text)
        return super().encode(text)

    def encode_large(self, text: str) -> tuple[int, ...]:
        self.note(text)
        return super().encode_large(text)

    def decode_escaped(self, ids: Sequence[int]) -> str:
        self.decoded.append((threading.get_ident(), len(ids)))
        return super().decode_escaped(ids)

    def render(self, *args: Any, **named: Any) -> str:
        self.rendered_in.append(threading.get_ident())
        return super().render(*args, **named)

    def num_chars(self, thread: int | None = None) -> int:
        """Characters that were tokenised, in one thread or in all."""
        return sum(num for seen_in, num in self.seen if thread in (None, seen_in))


class EchoEngine:
    """Answers one token; keeps what it was asked."""

    def __init__(self) -> None:
        self.requests: list[GenerationRequest] = []

    async def __call__(self, request: GenerationRequest) -> Completion:
        self.requests.append(request)
        version = Version(policy=request.policy, incarnation=1, number=0)
        return Completion.of([5], [-0.25], version, is_cut=False)


@asynccontextmanager
async def running(quotas: Quotas | None = None) -> AsyncGenerator[Gate]:
    renderer = WatchedRenderer(
        bpe.tokenizer(), bpe.TEMPLATES["append-only"], window=bpe.WINDOW, stop_ids=frozenset({1})
    )
    renderer.seen, renderer.decoded, renderer.rendered_in = [], [], []
    engine = EchoEngine()
    gateway = Gateway(engine)
    gateway.set_renderer(POLICY, renderer)
    sessions = [
        gateway.open(policies=[POLICY], sampling=SamplingSpec(max_tokens=8), seed=seed)
        for seed in range(2)
    ]
    async with client_of(build_app(gateway, quotas)) as http:
        gate = Gate(http, gateway, renderer, engine, 0, *sessions)
        assert (await gate.say(gate.victim, "who am I")).status_code == 200
        gate.loop_thread = renderer.seen[-1][0]
        renderer.seen.clear()
        renderer.decoded.clear()
        renderer.rendered_in.clear()
        yield gate


@pytest.fixture
async def gate() -> AsyncIterator[Gate]:
    async with running() as gate:
        yield gate


MANY_MB = "the weather in Paris is rainy today " * 116_000
"""Just below the limit of a body."""


@pytest.mark.finding(5)
async def test_prompts_that_cannot_fit_are_refused_before_they_are_tokenised(gate: Gate) -> None:
    """4 × 4 MB from one key: refused by their length, so that nothing is computed for them."""
    answers = await asyncio.gather(*(gate.say(gate.attacker, MANY_MB) for _ in range(4)))
    assert [answer.status_code for answer in answers] == [400] * 4
    assert "context length" in answers[0].json()["error"]["message"]
    assert gate.renderer.num_chars() == 0, "it tokenised a prompt that cannot fit"
    assert len(gate.engine.requests) == 1


@pytest.mark.finding(5)
async def test_large_prompts_do_not_stop_other_agents(gate: Gate) -> None:
    """While one key's large prompts are tokenised, another key's calls go on."""
    large = "word " * 70_000
    attack = asyncio.gather(*(gate.say(gate.attacker, f"{at} {large}") for at in range(4)))
    num_answered = 0
    while not attack.done():
        assert (await gate.say(gate.victim, f"question {num_answered}")).status_code == 200
        num_answered += 1
    assert {answer.status_code for answer in await attack} <= {200, 400}
    assert gate.renderer.num_chars() > 4 * len(large)
    assert gate.renderer.num_chars(gate.loop_thread) < len(large), "it tokenised on the event loop"
    assert num_answered >= 20


@pytest.mark.parametrize("part", ["[]", "{}", '""', '"a":1', "1"])
async def test_a_body_of_very_many_parts_is_not_built(
    gate: Gate, part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 MB of empty lists in a field that nobody reads: no other agent was answered for most of a
    second, and 90 MB of memory were taken for as long as the call waited. It cost no quota."""
    built: list[int] = []
    real = server.decode

    def decode(body: bytes, *args: Any, **named: Any) -> Any:
        built.append(len(body))
        return real(body, *args, **named)

    monkeypatch.setattr(server, "decode", decode)
    parts = ",".join([part] * (MAX_BODY_BYTES // (len(part) + 1) - 256))
    parts = f"{{{parts}}}" if ":" in part else f"[{parts}]"
    message = f'{{"role": "user", "content": "hi", "x": {parts}}}'
    body = f'{{"model": "policy", "messages": [{message}]}}'.encode()
    headers = bearer(gate.attacker.api_key)
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/responses", "/v1/completions"):
        answer = await gate.http.post(path, content=body, headers=headers)
        assert answer.status_code == 400 and "lists and objects" in answer.text, answer.text[:200]
    assert not built
    quoted = '[{"a": "\\\\", ' * 9000
    assert "lists and objects" not in (await gate.say(gate.victim, quoted)).text
    assert built


async def test_many_messages_are_rendered_off_the_event_loop(gate: Gate) -> None:
    """And in a process of their own: some templates look back from each message to all others."""
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    answer = await gate.ask(gate.attacker, messages=turns * 64 + turns[:1])
    assert answer.status_code in {200, 400}  # 400: more than the window
    assert gate.renderer.rendered_in and gate.loop_thread not in gate.renderer.rendered_in
    gate.renderer.rendered_in.clear()
    large_tool = {
        "type": "function",
        "function": {"name": "f", "parameters": {"x": "y" * (64 << 10)}},
    }
    assert (await gate.ask(gate.attacker, tools=[large_tool])).status_code in {200, 400}
    assert gate.renderer.rendered_in and gate.loop_thread not in gate.renderer.rendered_in
    gate.renderer.rendered_in.clear()
    assert (await gate.say(gate.victim, "a question")).status_code == 200
    assert gate.renderer.rendered_in == [], "a small prompt was rendered with large ones"


def test_a_body_of_small_blocks_is_read_in_one_pass() -> None:
    """4 MB of them were copied once for each: seconds in which no other agent was answered."""

    def cpu_s(num_blocks: int) -> float:
        blocks = [{"type": "text", "text": "x" * 25}] * num_blocks
        fields = {"model": "p", "max_tokens": 1, "messages": [{"role": "user", "content": blocks}]}
        began = time.process_time()
        [call] = MESSAGES.read(fields).calls
        took_s = time.process_time() - began
        assert isinstance(call, Call)
        [message] = call.messages
        assert message["content"] == "\n".join(["x" * 25] * num_blocks)
        return took_s

    assert cpu_s(80_000) < 64 * max(0.01, cpu_s(5_000))


def test_many_equal_answers_are_not_searched_for_each_message() -> None:
    """An agent that gets the same answer again and again sends them back by the thousand."""

    def cpu_s(num_answers: int) -> float:
        history = AnswerHistory()
        for turn in range(num_answers):
            usage = Usage(prompt_tokens=1, completion_tokens=1)
            answer = Answer(text="", finish=FinishReason.LENGTH, turn=turn, usage=usage)
            history.remember(POLICY, turn - 1, answer, lambda: "sampled")
        messages = [{"role": "assistant", "content": ""}] * 512
        history.find(POLICY, messages[:1])
        began = time.process_time()
        assert len(history.find(POLICY, messages)) == len(messages)
        return time.process_time() - began

    assert cpu_s(MAX_TURNS) < 16 * max(0.02, cpu_s(16))


def called(arguments: str) -> dict[str, Any]:
    return ToolCall(id="c", name="f", arguments=arguments).body


def test_arguments_of_many_parts_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are JSON within a text, whose parts nobody had counted: 4 MB of empty lists took a
    second and a half in which no other agent was answered. What the model wrote itself is known
    without reading it."""
    read: list[str] = []

    def loads(text: str) -> Any:
        read.append(text)
        return json.loads(text)

    history = AnswerHistory()
    own = '{"a":  [1]}'
    call = ToolCall(id="c", name="f", arguments=own)
    usage = Usage(prompt_tokens=1, completion_tokens=1)
    answer = Answer(text="", finish=FinishReason.STOP, turn=0, usage=usage, tool_calls=(call,))
    history.remember(POLICY, -1, answer, lambda: "sampled")
    history.find(POLICY, [])
    monkeypatch.setattr(answer_history, "loads", loads)
    monkeypatch.setattr(renderer, "loads", loads)

    def found(*arguments: str) -> list[int]:
        messages = [
            {"role": "assistant", "content": "", "tool_calls": [called(one)]} for one in arguments
        ]
        return sorted(history.find(POLICY, messages))

    assert found(own, '{"a":[1]}', '{"a":[2]}') == [0, 1]
    assert read == ['{"a":[1]}', '{"a":[2]}'], "its own was read again"
    read.clear()
    many = f"[{','.join(['[]'] * 200_000)}]"
    short = [f'{{"a": "{number:0100}"}}' for number in range(20_000)]
    assert found(many, *short, own) == [20_001]
    assert renderer.with_object(called(many)) == called(many), "it stays a text"
    assert sum(map(len, read)) <= answer_history.MAX_READ_CHARS


@pytest.mark.finding(5)
async def test_refused_prompts_cost_quota() -> None:
    """A key that only sends what is refused runs out of its quota like any other."""
    async with running(Quotas(tokens_per_minute=10_000)) as gate:
        statuses = [(await gate.say(gate.attacker, MANY_MB)).status_code for _ in range(4)]
        assert statuses[0] == 400 and statuses[-1] == 429
        assert (await gate.say(gate.victim, "hello")).status_code == 200


async def test_many_choices_tokenise_their_prompt_once(gate: Gate) -> None:
    """n=64 with a large prompt does the work of one prompt, not of 64."""
    large = "word " * 10_000
    answer = await gate.say(gate.attacker, large, n=64)
    assert answer.status_code == 200
    assert gate.renderer.num_chars() < 2 * len(large)


async def test_a_list_of_ids_beyond_the_window_is_refused_unread(gate: Gate) -> None:
    """Half a million token ids are refused by their number; no id is looked at or decoded."""
    body = {"model": "policy", "prompt": [7] * 500_000}
    answer = await gate.http.post(
        "/v1/completions", json=body, headers=bearer(gate.attacker.api_key)
    )
    assert answer.status_code == 400 and "context length" in answer.text
    assert len(gate.engine.requests) == 1


async def test_long_prompts_of_ids_are_decoded_off_the_event_loop(gate: Gate) -> None:
    """One body of half a million ids, every second one a control token, held it for two seconds."""
    ids = [1, 7] * 40_000
    body = {"model": "policy", "prompt": [ids, ids[:-2], ids[:8]]}
    answer = await gate.http.post(
        "/v1/completions", json=body, headers=bearer(gate.attacker.api_key)
    )
    assert answer.status_code == 200
    lengths = [len(request.prompt_ids) for request in gate.engine.requests[1:]]
    assert sorted(lengths) == [8, 79_998, 80_000]
    on_loop = [num for seen_in, num in gate.renderer.decoded if seen_in == gate.loop_thread]
    assert sum(num for _, num in gate.renderer.decoded) >= 159_998
    assert max(on_loop) <= LOOP_IDS, "it decoded on the event loop"


# --- what reaches the engine --------------------------------------------------------------------


def with_schema(schema: Any) -> dict[str, Any]:
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    return {"response_format": format}


BROKEN_SCHEMAS: dict[str, Any] = {
    "a pattern that is no regex": {"type": "string", "pattern": "["},
    "a pattern with an open group": {"properties": {"x": {"pattern": "(a"}}},
    "a pattern that is a number": {"type": "string", "pattern": 5},
    "a pattern that looks behind": {"type": "string", "pattern": "(?<=a|bc)d"},
    "a key pattern that is no regex": {"patternProperties": {"*": {}}},
    "a type that does not exist": {"type": "something"},
    "a list of types with a wrong one": {"items": {"type": ["string", "invalid"]}},
    "a type that is a number": {"type": 7},
    "a negative count": {"type": "array", "minItems": -1},
    "a count that is text": {"type": "string", "maxLength": "9"},
    "a reference to another server": {"$ref": "http://169.254.169.254/latest"},
    "a reference to a file": {"properties": {"x": {"$ref": "file:///etc/passwd"}}},
}


async def test_schemas_that_break_grammar_compilers_do_not_reach_the_engine(gate: Gate) -> None:
    """As in CVE-2025-48944: one bad regex or type ended the engine for everybody."""
    for name, schema in BROKEN_SCHEMAS.items():
        answer = await gate.ask(gate.attacker, **with_schema(schema))
        assert answer.status_code == 400, (name, answer.text)
    assert len(gate.engine.requests) == 1, "only the first question of the victim"


async def test_schemas_that_only_look_broken_pass(gate: Gate) -> None:
    """Properties may be called `pattern` or `type`, and constants may hold anything."""
    schema = {
        "type": "object",
        "properties": {"type": {"const": {"type": "cat"}}, "pattern": True, "$ref": {}},
        "patternProperties": {"^x-": {"type": ["string", "null"], "pattern": "^a+$"}},
        "default": {"pattern": "["},
        "$defs": {"x": {"$ref": "#/$defs/x"}},
    }
    assert (await gate.ask(gate.attacker, **with_schema(schema))).status_code == 200
    assert json.loads(gate.engine.requests[-1].sampling.json_schema or "") == schema


def test_patterns_with_wide_sets_cost_no_more_than_others() -> None:
    """A schema of 64 KB took the gateway for more than a minute: Python compiles a set of many
    characters for milliseconds, and nothing else ran meanwhile."""

    def least_s(one: str) -> float:
        found: list[float] = []
        for number in range(5):  # other patterns each time: Python keeps what it compiled
            patterns: JsonObject = {f"{number}{key}" + one * 40: {} for key in range(5)}
            began = time.process_time()
            checked_schema({"patternProperties": patterns}, "schema")
            found.append(time.process_time() - began)
        return min(found)

    assert least_s("[a-\uffff]") < 20 * least_s("[a-z]")


async def test_tool_schemas_are_only_text(gate: Gate) -> None:
    """A broken schema in a tool goes into the prompt; the engine compiles nothing."""
    tool = {"name": "f", "parameters": {"type": "something", "pattern": "["}}
    answer = await gate.ask(gate.attacker, tools=[{"type": "function", "function": tool}])
    assert answer.status_code == 200
    assert not gate.engine.requests[-1].sampling.json_schema


ENGINE_FIELDS: dict[str, Any] = {
    "prompt_embeds": "AAAA",
    "logits_processors": ["os.system"],
    "structured_outputs": {"regex": "["},
    "guided_json": {"type": "something"},
    "guided_regex": "[",
    "guided_grammar": "root ::= root",
    "allowed_token_ids": [1],
    "bad_words": ["x"],
    "min_tokens": 10**9,
    "stop_token_ids": [1],
    "chat_template": "{{ cycler.__init__.__globals__ }}",
    "use_beam_search": True,
    "truncate_prompt_tokens": -1,
}


async def test_fields_of_the_engine_are_refused(gate: Gate) -> None:
    """Fields that vLLM would obey are refused by name, not passed on."""
    for name, value in ENGINE_FIELDS.items():
        answer = await gate.ask(gate.attacker, **{name: value})
        assert answer.status_code == 400 and name in answer.text, name
    assert len(gate.engine.requests) == 1


async def test_unknown_fields_stop_at_the_gateway(gate: Gate) -> None:
    """Fields that nobody knows here are dropped: the engine gets ids and a sampling spec."""
    fields: dict[str, Any] = {
        "kv_transfer_params": {"remote_host": "attacker"},
        "cache_salt": "@shared",
        "priority": -(10**9),
        "vllm_xargs": {"x": 1},
        "lora_request": {"path": "/etc"},
        "mm_processor_kwargs": {"x": 1},
        "request_id": "../../x",
    }
    assert (await gate.ask(gate.attacker)).status_code == 200
    assert (await gate.ask(gate.attacker, **fields)).status_code == 200
    plain, attacked = gate.engine.requests[-2:]
    assert list(plain.prompt_ids) == list(attacked.prompt_ids)
    assert replace(plain.sampling, seed=0) == replace(attacked.sampling, seed=0)


def media(url: str) -> dict[str, dict[str, Any]]:
    """A request with media by address for each dialect."""
    chat_parts: list[Any] = [
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "audio_url", "audio_url": {"url": url}},
        {"type": "video_url", "video_url": {"url": url}},
        {"type": "input_audio", "input_audio": {"data": url}},
        {"type": "file", "file": {"file_id": url}},
    ]
    image = {"type": "image", "source": {"type": "url", "url": url}}
    document = {"type": "document", "source": {"type": "url", "url": url}}
    inputs: list[Any] = [
        {"type": "input_image", "image_url": url},
        {"type": "input_file", "file_url": url},
    ]
    bodies: dict[str, dict[str, Any]] = {
        f"/v1/chat/completions#{at}": {"messages": [{"role": "user", "content": [part]}]}
        for at, part in enumerate(chat_parts)
    }
    for at, part in enumerate((image, document)):
        content = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 8}
        bodies[f"/v1/messages#{at}"] = content
    for at, part in enumerate(inputs):
        bodies[f"/v1/responses#{at}"] = {"input": [{"role": "user", "content": [part]}]}
    return bodies


async def test_media_addresses_are_refused_and_never_fetched(gate: Gate) -> None:
    """No part of a message makes the gateway or the engine call an address of the agent's."""
    with socket.create_server(("127.0.0.1", 0)) as canary:
        canary.setblocking(False)
        for path, body in media(f"http://127.0.0.1:{canary.getsockname()[1]}/x").items():
            answer = await gate.http.post(
                path.partition("#")[0],
                json={"model": "policy", **body},
                headers=bearer(gate.attacker.api_key),
            )
            assert answer.status_code == 400, (path, answer.text)
        with pytest.raises(BlockingIOError):
            canary.accept()
    assert len(gate.engine.requests) == 1


CAPS: dict[str, dict[str, Any]] = {
    "choices": {"n": 65},
    "no choice": {"n": 0},
    "negative choices": {"n": -1},
    "choices beyond 64 bits": {"n": 2**70},
    "long answers": {"max_tokens": 10**9},
    "no answer": {"max_tokens": -1},
    "stop strings": {"stop": ["x"] * 17},
    "long stop strings": {"stop": ["x" * 10_000]},
    "hot": {"temperature": 1e300},
    "cold": {"temperature": -1},
    "top_p": {"top_p": 0},
    "seed": {"seed": 2**63},
    "tools": {"tools": [{"type": "function", "function": {"name": "f"}}] * 129},
    "large tools": {"tools": [{"type": "function", "function": {"name": "f", "x": "x" * 300_000}}]},
}


async def test_requests_beyond_the_caps_are_refused(gate: Gate) -> None:
    """One request cannot ask for unbounded work."""
    for name, fields in CAPS.items():
        answer = await gate.ask(gate.attacker, **fields)
        assert answer.status_code in (400, 413), (name, answer.text)
    assert len(gate.engine.requests) == 1


async def test_no_path_of_an_engine_exists_on_a_gateway_for_agents(online: Online) -> None:
    """More than 60 paths × 8 methods × 11 encodings, with a valid key: every answer is 404. The
    gateway's own metrics take no agent's key."""
    opened = await online.open(online.token("shop"))
    paths = [path for path in FORBIDDEN if path not in ("/sessions", "/metrics")]
    assert len(paths) >= 60
    methods = ("GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS", "HEAD", "TRACE")
    requests = [(method, path) for path in paths for method in methods]
    requests += [("POST", escape(path)) for path in paths for escape in ESCAPES]
    url = httpx2.URL(str(online.http.base_url))
    statuses = await raw_statuses(url, opened["api_key"], requests)
    found = [
        (request, status)
        for request, status in zip(requests, statuses, strict=True)
        if status != 404
    ]
    assert found == []
    assert await raw_statuses(url, opened["api_key"], [("GET", "/metrics")]) == [401]


def batched(items: list[tuple[str, str]], size: int) -> list[list[tuple[str, str]]]:
    return [items[at : at + size] for at in range(0, len(items), size)]


async def raw_statuses(url: httpx2.URL, key: str, requests: list[tuple[str, str]]) -> list[int]:
    """Statuses over one connection, without a client that would normalize the paths. The requests
    of a batch are sent at once."""
    reader, writer = await asyncio.open_connection(url.host, url.port)
    statuses: list[int] = []
    for batch in batched(requests, MAX_PIPELINED // 2):
        for method, path in batch:
            head = f"{method} {path} HTTP/1.1\r\nhost: x\r\nx-api-key: {key}\r\n"
            writer.write(f"{head}content-length: 2\r\n\r\n{{}}".encode())
        for method, _ in batch:
            answer = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            statuses.append(int(answer.split()[1]))
            if method != "HEAD":
                await reader.readexactly(int(answer.partition("content-length:")[2].split()[0]))
    writer.close()
    await writer.wait_closed()
    return statuses


@pytest.mark.parametrize("num_sessions", [1, 20])
async def test_one_owner_cannot_fill_the_memory_with_bodies(
    gate: Gate, num_sessions: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 200 calls may send 4 MB: most wait unread, and another key is answered meanwhile;
    however many sessions the owner opens."""
    app, sent, stop = build_app(gate.gateway), 0, asyncio.Event()
    piece = bytes(1 << 20)
    victim_id = gate.victim.id

    def owner_of(session_id: str) -> str:
        return "victim" if session_id == victim_id else "greedy"

    monkeypatch.setattr(gate.gateway, "queue_key", owner_of)
    sessions = [gate.attacker] + [
        gate.gateway.open(policies=gate.attacker.policies, sampling=SamplingSpec(), seed=at)
        for at in range(num_sessions - 1)
    ]

    async def call(key: str) -> None:
        num_pieces = 0

        async def receive() -> dict[str, Any]:
            nonlocal num_pieces, sent
            if num_pieces == 3:
                await stop.wait()
                return {"type": "http.disconnect"}
            num_pieces += 1
            sent += len(piece)
            return {"type": "http.request", "body": piece, "more_body": True}

        async def send(message: Any) -> None:
            pass

        headers = [(b"authorization", f"Bearer {key}".encode())]
        scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions"}
        scope |= {"raw_path": b"/v1/chat/completions", "query_string": b"", "headers": headers}
        await app(scope, receive, send)

    keys = [sessions[at % num_sessions].api_key for at in range(200)]
    calls = [asyncio.create_task(call(key)) for key in keys]
    for _ in range(50):
        await asyncio.sleep(0)
    assert sent <= 64 << 20
    before = sent
    calls.append(asyncio.create_task(call(gate.victim.api_key)))
    for _ in range(50):
        await asyncio.sleep(0)
    assert sent == before + 3 * len(piece)
    stop.set()
    await asyncio.gather(*calls)
    assert sent == 201 * 3 * len(piece), "all had their turn"


async def test_calls_in_work_count_as_long_as_they_last(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A body that was read stays in memory while its call waits for an engine."""
    monkeypatch.setattr("penstock.gateway.server.MAX_HELD_BYTES", 1000)
    app, finish, num_running = build_app(gate.gateway), asyncio.Event(), 0
    attacker_runs, victim_runs = asyncio.Event(), asyncio.Event()
    engine = gate.gateway.generate

    async def wait(request: GenerationRequest) -> Completion:
        nonlocal num_running
        num_running += 1
        is_victim = request.session == gate.victim.id
        (victim_runs if is_victim else attacker_runs).set()
        await finish.wait()
        return await engine(request)

    monkeypatch.setattr(gate.gateway, "generate", wait)
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://x") as http:
        one = replace(gate, http=http)
        text = "a" * 200
        calls = [asyncio.create_task(one.say(gate.attacker, text)) for _ in range(20)]
        await attacker_runs.wait()
        for _ in range(200):
            await asyncio.sleep(0.001)
        assert 1 <= num_running <= 3
        other = asyncio.create_task(one.say(gate.victim, "hi"))
        await victim_runs.wait()
        finish.set()
        answers = await asyncio.gather(*calls, other)
    assert {answer.status_code for answer in answers} == {200}, "all had their turn"
