# SPDX-License-Identifier: Apache-2.0
"""A client of a Tinker server, with a key of its own: it neither holds up the others, nor fills the
memory or the disk that they share."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import numpy as np
import pytest
from tests.unit.tinker.tinker_harness import TINY, WAIT_S, Client, make_folder, opened, pass_body

from penstock.dataflow.ledger.sqlite import SqliteDatabase
from penstock.errors import BadRequest, Busy, EngineError, Forbidden, NotFound
from penstock.gateway.generation import Completion, GenerationRequest
from penstock.rollout.decoding.continuous import MAX_ROWS, ContinuousEngine
from penstock.tinker import memory, protocol, samplers, sampling, server, service, serving
from penstock.tinker.effects import CHECKPOINTS, Effect
from penstock.tinker.folder import BASE_ADAPTER
from penstock.tinker.journal import FILE, ROW_BYTES, Change, Kind, Request, Result, sampler_row
from penstock.tinker.lanes import Lane
from penstock.tinker.memory import PassLimit, max_answers, pass_limit
from penstock.tinker.models import AdaptedModel
from penstock.tinker.protocol import (
    MESSAGES,
    CreateModel,
    Floats,
    Sample,
    Sampled,
    read_forward_backward,
)
from penstock.tinker.samplers import Question
from penstock.tinker.service import Limits, TinkerService
from penstock.tinker.serving import app_of
from penstock.trainer.pipeline.pass_memory import ModelShape, PassSpec, pass_memory
from penstock.wire.codec import JSON, decode, encode_json

MANY = 20_000
LINE = ([4, 5], {"target_tokens": [5, 6]})
ROOM = 1 << 20
WHOLE = ("ForwardBackwardRequest", "Datum")


def field(number: int, content: bytes) -> bytes:
    """Of protobuf, on the wire."""
    size, length = len(content), b""
    while size > 127:
        length += bytes([size & 127 | 128])
        size >>= 7
    return bytes([number << 3 | 2]) + length + bytes([size]) + content


def parts(kind: str) -> bytes:
    """A request with far more parts of one kind than any client sends, each of two bytes."""
    head = field(1, b"model") + bytes([2 << 3, 1])
    good = pass_body("model", 1, [LINE])
    many = {
        "chunks": head + field(3, field(1, b"") * MANY),
        "inputs": head + field(3, field(2, b"") * MANY),
        "settings": good + field(5, b"") * MANY,
        "other settings": good + field(7, b"") * MANY,
        "data": head + field(3, b"") * MANY,
    }
    return many[kind]


@pytest.mark.parametrize("kind", ["chunks", "inputs", "settings", "other settings", "data"])
def test_parts_are_counted_before_they_are_read(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a minute, and gigabytes, for one body, while no other client is answered."""
    made = 0

    def counted(message: Any) -> Any:
        def make(*args: Any, **fields: Any) -> Any:
            nonlocal made
            made += 1
            return message(*args, **fields)

        return make

    body = parts(kind)
    # Not the classes with their parts inside: reading one makes all of them.
    counting = {name: counted(MESSAGES[name]) for name in MESSAGES if name not in WHOLE}
    monkeypatch.setattr(protocol, "MESSAGES", {**MESSAGES, **counting})
    with pytest.raises(BadRequest, match=r"up to 64 chunks, inputs or settings|1 to 4096 data"):
        read_forward_backward(body)
    assert made <= 2


@pytest.mark.parametrize(("name", "number"), [("m" * 257, 1), ("", 1), ("m", 0), ("m", -5)])
def test_names_and_numbers_have_bounds(name: str, number: int) -> None:
    """A name of 16 MB stayed in memory for good, by request."""
    with pytest.raises(BadRequest, match="names its model"):
        read_forward_backward(pass_body(name, number, [LINE]))


def test_a_request_of_the_sdk_is_read() -> None:
    found = read_forward_backward(pass_body("m", 3, [LINE], settings={"beta": 0.5}))
    assert (found.model_id, found.number, found.settings) == ("m", 3, {"beta": 0.5})
    assert found.data[0].tokens.tolist() == LINE[0]


async def test_what_one_client_keeps_on_disk_is_bounded(tmp_path: Path) -> None:
    """Requests that wait for ever, requests that fail, and weights that are overwritten: each
    filled the disk, and the server ended for all."""
    limits = Limits(max_stored_bytes=ROOM)
    async with opened(make_folder(tmp_path), limits=limits) as alice:
        service, bob = alice.service, Client(alice.service, owner="bob")
        with pytest.raises(NotFound):  # it has no such model, and leaves no trace
            await alice.send(Kind.OPTIM, "nobody", 0, b"{}")

        session = await bob.sampling_session(await bob.create("s-b"))
        failed = await bob.sample(session, 0, [1 << 30] * 20_000)
        assert "a prompt has tokens" in await bob.error(failed)
        assert service.journal.stored_bytes("bob") < 400_000, "its body is kept"

        model = await alice.create(rank=1)
        body = pass_body(model, 3, [([4] * 10_000, {"target_tokens": [5] * 10_000})])
        with pytest.raises(Forbidden, match="its limit"):
            for number in range(3, 50):  # 1 never comes
                await alice.send(Kind.FORWARD_BACKWARD, model, number, body)

        carol = Client(service, owner="carol")
        other = await carol.create("s-c", rank=1)
        with pytest.raises(Forbidden, match="its limit"):
            for _ in range(100):
                done = await carol.next(Kind.SAVE, other, path="x", overwrite=True)
                if "its limit" in (await carol.result(done)).content.decode():
                    raise Forbidden("its limit")
        stored = sum(one.stat().st_size for one in (tmp_path / "checkpoints").rglob("state.bin"))
        assert stored < 2 * ROOM
        await bob.create("s-b2")  # another client has all its room


@pytest.mark.parametrize("where", ["loss", "setting", "other setting", "input"])
def test_names_inside_of_a_request_have_bounds(where: str) -> None:
    """Each was repeated in the error, as long as the body."""
    name = "n" * 257
    bodies = {
        "loss": pass_body("m", 1, [LINE], loss=name),
        "setting": pass_body("m", 1, [LINE], settings={name: 1.0}),
        "other setting": pass_body("m", 1, [LINE]) + field(7, field(1, name.encode())),
        "input": pass_body("m", 1, [(LINE[0], {**LINE[1], name: [1.0, 1.0]})]),
    }
    with pytest.raises(BadRequest, match="up to 256 characters") as refused:
        read_forward_backward(bodies[where])
    assert len(str(refused.value)) < 200


def test_the_name_of_an_optimizer_has_bounds() -> None:
    body = create_body("s-1", 1)
    decode(encode_json(body), CreateModel, media_type=JSON)
    body["optimizer_config"] = {"type": "a" * 257}
    with pytest.raises(BadRequest, match="optimizer_config"):
        decode(encode_json(body), CreateModel, media_type=JSON)


def create_body(session: str, number: int, *, rank: int = 1, base: str = TINY) -> dict[str, Any]:
    lora = {"rank": rank, "seed": 1}
    names = {"session_id": session, "model_seq_id": number, "base_model": base}
    return {**names, "lora_config": lora}


async def create(client: Client, number: int, **asked: Any) -> str:
    """What became of the request: "", or the name of the refusal."""
    body = encode_json(create_body("s-0", number, **asked))
    try:
        await client.send(Kind.CREATE, f"s-0:train:{number}", 0, body)
    except (Busy, Forbidden) as error:
        return type(error).__name__
    return ""


@pytest.mark.parametrize("has_looked", [True, False])
async def test_models_asked_for_at_once_are_counted(tmp_path: Path, has_looked: bool) -> None:
    """All that came while one was written, or while the server looked at what the client keeps,
    were accepted: each takes the memory of a model. One that is refused leaves nothing."""
    limits = Limits(max_models=2)
    async with opened(make_folder(tmp_path), limits=limits) as alice:
        if has_looked:
            await alice.create("s-0", rank=1)
        answers = await asyncio.gather(*(create(alice, number) for number in range(1, 25)))
        assert answers.count("") == 2 - has_looked
        lanes = alice.service._lanes  # pyright: ignore[reportPrivateUsage]
        assert len(lanes) == 2
        for number in range(1, 25):
            if not answers[number - 1]:
                await alice.done(f"s-0:train:{number}:0")
        assert sum(lane.model is not None for lane in lanes.values()) == 2


async def test_models_that_cannot_be_made_leave_nothing(tmp_path: Path) -> None:
    """Each request of a model looks at all that the server has in memory."""
    async with opened(make_folder(tmp_path)) as alice:
        for number in range(1, 9):
            assert not await create(alice, number, base="another")
            assert "no model 'another'" in await alice.error(f"s-0:train:{number}:0")
        assert not alice.service._lanes  # pyright: ignore[reportPrivateUsage]


async def test_ranks_of_all_models_are_bounded(tmp_path: Path) -> None:
    """Eight models of the highest rank are as large as hundreds of the usual one."""
    async with opened(make_folder(tmp_path), limits=Limits(max_rank=12)) as alice:
        bob = Client(alice.service, owner="bob")
        assert await create(alice, 1, rank=13) == "Forbidden"
        answers = await asyncio.gather(*(create(alice, number, rank=4) for number in range(2, 7)))
        assert answers == ["", "", "", "Forbidden", "Forbidden"]
        await bob.create("s-b", rank=12)  # its own limit
        model = "s-0:train:2"
        await alice.done(f"{model}:0")
        alice.numbers[model] = 0
        saved = await alice.next(Kind.SAVE, model, path="all")
        assert b"tinker://" in await alice.done(saved)
        asked = {"path": f"tinker://{model}/weights/all", "optimizer": True}
        with pytest.raises(Forbidden, match="rank"):
            await alice.send(Kind.LOAD, "s-0:train:9", 0, encode_json(asked))


async def test_weights_that_come_later_are_counted(tmp_path: Path) -> None:
    """Weights that were not there yet had no rank. They were when the request's turn came."""
    async with opened(make_folder(tmp_path), limits=Limits(max_rank=12)) as alice:
        model = await alice.create("s-0", rank=10)
        held = threading.Event()
        alice.service._thread.submit(held.wait, WAIT_S)  # pyright: ignore[reportPrivateUsage]
        await alice.next(Kind.SAVE, model, path="x")
        asked = encode_json({"path": f"tinker://{model}/weights/x", "optimizer": True})
        answers = await asyncio.gather(
            *(alice.send(Kind.LOAD, f"s-1:train:{number}", 0, asked) for number in range(4)),
            return_exceptions=True,
        )
        held.set()
        for one in answers:
            if isinstance(one, str):
                await alice.result(one)
        lanes = alice.service._lanes.values()  # pyright: ignore[reportPrivateUsage]
        assert sum(lane.rank for lane in lanes if lane.model is not None) == 10
        assert {type(one) for one in answers} == {BadRequest}


async def test_requests_of_one_number_are_counted_as_the_largest(tmp_path: Path) -> None:
    """Either may be the one that is accepted."""
    async with opened(make_folder(tmp_path), limits=Limits(max_rank=12)) as alice:
        answers = await asyncio.gather(*(create(alice, 1, rank=rank) for rank in (1, 13)))
        assert answers == ["", "Forbidden"]


async def test_models_that_wait_are_counted_after_a_restart(tmp_path: Path) -> None:
    folder, limits = make_folder(tmp_path), Limits(max_rank=12)
    async with opened(folder, limits=limits) as alice:
        model = await alice.create("s-0", rank=10)
        body = pass_body(model, 3, [LINE])
        await alice.send(Kind.FORWARD_BACKWARD, model, 3, body)  # 1 comes later
    async with opened(folder, limits=limits) as alice:
        assert await create(alice, 1, rank=10) == "Forbidden"


async def test_weights_that_are_gone_after_a_restart_count_as_any(tmp_path: Path) -> None:
    async with opened(make_folder(tmp_path), limits=Limits(max_rank=12)) as alice:
        lost = {"path": "tinker://s-0:train:0/weights/x", "optimizer": True}
        request = Request(id="s-1:0", lane="s-1", number=0, owner="alice", kind=Kind.LOAD)
        journal = alice.service.journal
        await journal.write(journal.accepted(request, encode_json(lost), at=0.0))
        rank = alice.service._rank_of_accepted(request)  # pyright: ignore[reportPrivateUsage]
        assert rank == 12


@pytest.mark.parametrize("shape", [(1 << 32, 1 << 32), (0, 1 << 62)])
def test_the_size_of_a_tensor_does_not_wrap(shape: tuple[int, ...]) -> None:
    """A product of 64 bits is 0 for these, as many numbers as there are."""
    body = MESSAGES["ForwardBackwardRequest"]()
    body.ParseFromString(pass_body("m", 1, [(LINE[0], {"target_tokens": []})]))
    tensor = body.data[0].loss_fn_inputs[0].value
    del tensor.shape[:]
    tensor.shape.extend(shape)
    with pytest.raises(BadRequest, match="0 numbers for shape"):
        read_forward_backward(body.SerializeToString())


async def test_requests_that_arrive_at_once_are_counted(tmp_path: Path) -> None:
    async with opened(make_folder(tmp_path), limits=Limits(max_waiting=3)) as alice:
        sampler = await alice.sampling_session(await alice.create())
        other = Client(alice.service, owner="new")

        async def send(number: int) -> str:
            try:
                await other.send(Kind.SAMPLE, sampler, number, b"{}")
            except Busy:
                return "Busy"
            return ""

        answers = await asyncio.gather(*(send(number) for number in range(20)))
        assert answers.count("") == 3


async def test_clients_take_turns_at_sampling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One client's line of thousands was answered before anybody else's first question."""
    monkeypatch.setattr(sampling, "MAX_SAMPLING", 4)
    started: asyncio.Queue[tuple[str, asyncio.Event]] = asyncio.Queue()

    async def sample(id: str, owner: str, folder: Path, asked: Question) -> list[Sampled]:
        await started.put((id, done := asyncio.Event()))
        await asyncio.wait_for(done.wait(), WAIT_S)
        return []

    async with opened(make_folder(tmp_path)) as alice:
        bob = Client(alice.service, owner="bob")
        first, second = [
            await client.sampling_session(await client.create(session, rank=1))
            for client, session in ((alice, "s-a"), (bob, "s-b"))
        ]
        samples = alice.service.sampling._samplers  # pyright: ignore[reportPrivateUsage]
        monkeypatch.setattr(samples, "sample", sample)
        for number in range(40):
            await alice.sample(first, number, [4])
        running = [await asyncio.wait_for(started.get(), WAIT_S) for _ in range(4)]
        await bob.sample(second, 0, [4])
        running[0][1].set()
        id, _ = await asyncio.wait_for(started.get(), WAIT_S)
        assert id.startswith(second)


async def test_sessions_count_in_what_a_client_keeps(tmp_path: Path) -> None:
    """They were rows without end, which nobody counted."""
    limits = Limits(max_stored_bytes=20 * ROW_BYTES)
    folder = make_folder(tmp_path)
    async with opened(folder, limits=limits) as alice:
        headers = {"X-API-Key": folder.issue_key("alice", ttl_s=600.0)}
        app = app_of(folder, alice.service)
        async with httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app=app), base_url="http://tinker/api/v1"
        ) as http:
            made = [await http.post("/create_session", json={}, headers=headers) for _ in range(10)]
            asked = {
                "session_id": made[0].json()["session_id"],
                "base_model": alice.service.model_name,
            }
            made += [
                await http.post(
                    "/create_sampling_session",
                    json={**asked, "sampling_session_seq_id": number},
                    headers=headers,
                )
                for number in range(15)
            ]
            other = {"X-API-Key": folder.issue_key("bob", ttl_s=600.0)}
            assert (await http.post("/create_session", json={}, headers=other)).status_code == 200
        assert [one.status_code for one in made] == [200] * 20 + [403] * 5
        assert alice.service.journal.stored_bytes("alice") == 20 * ROW_BYTES


async def test_answers_grow_in_a_bounded_part_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request of 800 bytes asks for 1,024 answers, whose keys and values ended the server, and
    again after each restart. Adapters that answer are bounded, too."""
    assert (max_answers(1), max_answers(1 << 60)) == (MAX_ROWS, 1)
    monkeypatch.setattr(serving, "max_answers", lambda num_bytes: 3)  # pyright: ignore
    monkeypatch.setattr(samplers, "MAX_LOADED", 1)
    running: list[ContinuousEngine] = []
    most = (0, 0)
    generate = ContinuousEngine.__call__

    async def counted(engine: ContinuousEngine, request: GenerationRequest) -> Completion:
        nonlocal most
        running.append(engine)
        most = max(most[0], len(running)), max(most[1], len(set(running)))
        try:
            return await generate(engine, request)
        finally:
            running.remove(engine)

    monkeypatch.setattr(ContinuousEngine, "__call__", counted)
    async with opened(make_folder(tmp_path)) as client:
        sessions = [
            await client.sampling_session(await client.create(f"s-{name}", rank=1)) for name in "ab"
        ]
        ids = [await client.sample(one, 0, [4], num_samples=10) for one in sessions]
        for id in ids:
            assert await client.done(id)
    assert most == (3, 1)


async def test_weights_that_are_renamed_while_others_are_deleted(tmp_path: Path) -> None:
    """A client that saves all the time ended the server."""
    async with opened(make_folder(tmp_path)) as client:
        gone = client.service.folder / CHECKPOINTS / ".new-x"
        gone.symlink_to("nowhere")  # listed, but not there when it is looked at
        await client.service.prune()
        assert gone.is_symlink()


async def test_bodies_that_wait_are_not_read_to_find_what_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of a row comes after its body. A thousand requests of 16 MB, the first of which
    never came, were read for each request that was over, while nothing else could be written."""
    asked: dict[str, Mapping[str, Any]] = {}
    read, execute = SqliteDatabase.read, SqliteDatabase.execute

    def read_noted(own: SqliteDatabase, query: str, values: Mapping[str, Any]) -> Any:
        asked[query] = values
        return read(own, query, values)

    def execute_noted(own: SqliteDatabase, query: str, values: Mapping[str, Any]) -> None:
        asked[query] = values
        execute(own, query, values)

    async with opened(make_folder(tmp_path)) as client:
        model = await client.create("s-1", rank=1)
        monkeypatch.setattr(SqliteDatabase, "read", read_noted)
        monkeypatch.setattr(SqliteDatabase, "execute", execute_noted)
        await client.service.prune()
        client.service.journal.next_number(model)
        client.service.journal.done_after(model, 0)
        file = client.service.folder / FILE
        with closing(sqlite3.connect(file)) as database:
            plans = {
                query: [one[3] for one in database.execute(f"EXPLAIN QUERY PLAN {query}", values)]
                for query, values in asked.items()
                if "requests" in query
            }
    assert len(plans) == 3
    for query, plan in plans.items():
        found = [line for line in plan if line.startswith(("SCAN", "SEARCH"))]
        assert found and all("INDEX requests_finished" in line for line in found), (query, plan)


async def sampling_sessions(client: Client, *names: str) -> list[str]:
    return [
        await client.sampling_session(await client.create(f"s-{name}", rank=1)) for name in names
    ]


async def base_session(client: Client) -> str:
    id = f"base of {client.owner}"
    row = sampler_row(id, client.owner, "", BASE_ADAPTER)
    await client.service.keep_row(client.owner, row)
    return id


async def test_nobody_waits_for_the_turn_of_another_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who asked first for the base model had the others wait until it was its turn; with adapters
    of its own in all its places, that was never."""
    monkeypatch.setattr(samplers, "MAX_LOADED", 4)
    generate, may_answer = ContinuousEngine.__call__, asyncio.Event()
    has_begun: asyncio.Queue[str] = asyncio.Queue()

    async def gated(engine: ContinuousEngine, request: GenerationRequest) -> Completion:
        if request.session.startswith("s-a"):
            has_begun.put_nowait(request.session)
            await asyncio.wait_for(may_answer.wait(), WAIT_S)
        return await generate(engine, request)

    monkeypatch.setattr(ContinuousEngine, "__call__", gated)
    async with opened(make_folder(tmp_path)) as alice:
        bob = Client(alice.service, owner="bob")
        own = await sampling_sessions(alice, "a0", "a1", "a2")
        (other,) = await sampling_sessions(bob, "b")
        await bob.done(await bob.sample(other, 0, [4]))  # so alice is not alone
        flood = [await alice.sample(session, 0, [4]) for session in own]
        for _ in range(2):  # the third waits
            await asyncio.wait_for(has_begun.get(), WAIT_S)
        flood.append(await alice.sample(await base_session(alice), 0, [4]))
        asked = await bob.sample(await base_session(bob), 0, [4])
        assert await alice.service.await_result(asked, "bob", 20.0) is not None
        assert has_begun.empty()
        may_answer.set()
        for id in flood:
            await alice.done(id)


QWEN3_600M = {
    "model_type": "qwen3",
    "num_hidden_layers": 28,
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}


def test_a_pass_has_a_bounded_part_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half a megabyte of tokens asked for 265 GB of activations, again after each restart."""
    monkeypatch.setattr(memory, "memory_bytes", lambda: 24 << 30)
    found = pass_limit(QWEN3_600M, 596_000_000, 40_960)
    assert found.recompute == "layer" and 4096 < found.max_tokens < 40_960
    shape = ModelShape.read(QWEN3_600M)
    assert shape is not None
    spec = PassSpec(num_tokens=found.max_tokens, recompute="layer")
    assert pass_memory(shape, 596_000_000, spec).total_bytes <= 6 << 30
    monkeypatch.setattr(memory, "memory_bytes", lambda: 1 << 40)
    assert pass_limit(QWEN3_600M, 596_000_000, 40_960).recompute == "none"
    assert pass_limit({}, 1, 40_960).max_tokens == memory.MICRO_BATCH_TOKENS


async def test_a_datum_beyond_memory_is_refused(tmp_path: Path) -> None:
    async with opened(make_folder(tmp_path)) as alice:
        model = await alice.create()
        alice.service.base.limit = PassLimit(max_tokens=2, recompute="none")
        long = ([4, 5, 6], {"target_tokens": [5, 6, 7]})
        for number, (line, is_forward_only) in enumerate([(LINE, False), (long, True)], 1):
            body = pass_body(model, number, [line], is_forward_only=is_forward_only)
            kind = Kind.FORWARD if is_forward_only else Kind.FORWARD_BACKWARD
            await alice.done(await alice.send(kind, model, number, body))
        asked = await alice.send(Kind.FORWARD_BACKWARD, model, 3, pass_body(model, 3, [long]))
        assert "memory to train on 2" in await alice.error(asked)


async def test_a_request_with_which_servers_end_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was tried again at every start, before all that waited behind it. Those that only waited
    meanwhile are not given up with it."""
    monkeypatch.setattr(service, "MAX_TRIES", 2)
    folder, has_begun = make_folder(tmp_path), asyncio.Event()
    async with opened(folder) as alice:
        bob = Client(alice.service, owner="bob")
        model, other = await alice.create(), await bob.create("s-b")

    async def hang(self: TinkerService, work: Any) -> None:
        has_begun.set()
        await asyncio.Event().wait()  # the server is killed meanwhile

    body = {number: pass_body(model, number, [LINE]) for number in (1, 2)}
    with monkeypatch.context() as patch:
        patch.setattr(TinkerService, "_run", hang)
        async with opened(folder) as alice:
            asked = [await alice.send(Kind.FORWARD_BACKWARD, model, at, body[at]) for at in (1, 2)]
            await asyncio.wait_for(has_begun.wait(), WAIT_S)
            bob = Client(alice.service, owner="bob")
            innocent = await bob.send(Kind.FORWARD, other, 1, pass_body(other, 1, [LINE]))
        for _ in range(2):
            has_begun.clear()
            async with opened(folder):
                await asyncio.wait_for(has_begun.wait(), WAIT_S)
    async with opened(folder) as alice:
        bob = Client(alice.service, owner="bob")
        assert "times while it computed" in await alice.error(asked[0])
        assert await alice.done(asked[1])
        assert await bob.done(innocent)


async def test_bodies_are_read_in_turns_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quarter of a megabyte of small parts took most of a second, while nobody was answered."""
    many = field(1, field(1, b"")) * 60
    body = field(1, b"model") + bytes([2 << 3, 1]) + field(3, many) * 600
    with pytest.raises(BadRequest, match="chunks and inputs together"):
        read_forward_backward(body)
    threads: set[str] = set()

    def read(content: bytes) -> Any:
        threads.add(threading.current_thread().name)
        return read_forward_backward(content)

    monkeypatch.setattr(server, "read_forward_backward", read)
    folder = make_folder(tmp_path)
    async with opened(folder) as alice:
        headers = {"X-API-Key": folder.issue_key("alice", ttl_s=600.0)}
        transport = httpx2.ASGITransport(app=app_of(folder, alice.service))
        async with httpx2.AsyncClient(transport=transport, base_url="http://tinker") as http:
            sent = [
                http.post("/api/v1/forward_backward", content=body, headers=headers)
                for _ in range(3)
            ]
            found = await asyncio.gather(*sent)
    assert [one.status_code for one in found] == [400] * 3
    assert threads == {"tinker-bodies_0"}


async def test_weights_that_are_put_aside_leave_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each left an entry that every decoding step looked at."""
    monkeypatch.setattr(samplers, "MAX_LOADED", 1)
    async with opened(make_folder(tmp_path)) as alice:
        own = await sampling_sessions(alice, "a", "b", "c", "d")
        for number in range(2):
            for session in own:
                await alice.done(await alice.sample(session, number, [4]))
        root = alice.service.sampling._samplers._root  # pyright: ignore[reportPrivateUsage]
        lanes = root._thread._lanes  # pyright: ignore
        assert len(lanes) <= 3, "the root's, the one that answers, and one more"


async def test_who_samples_all_the_time_has_turns_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client whose next question came before the last answer ended kept its place for ever."""
    monkeypatch.setattr(samplers, "MAX_LOADED", 1)
    monkeypatch.setattr(samplers, "TURN_S", 0.0)
    generate = ContinuousEngine.__call__
    has_begun: asyncio.Queue[tuple[str, asyncio.Event]] = asyncio.Queue()

    async def gated(engine: ContinuousEngine, request: GenerationRequest) -> Completion:
        may_answer = asyncio.Event()
        has_begun.put_nowait((request.session, may_answer))
        await asyncio.wait_for(may_answer.wait(), WAIT_S)
        return await generate(engine, request)

    monkeypatch.setattr(ContinuousEngine, "__call__", gated)
    async with opened(make_folder(tmp_path)) as alice:
        bob = Client(alice.service, owner="bob")
        (own,), (other,) = (
            await sampling_sessions(alice, "a"),
            await sampling_sessions(bob, "b"),
        )
        places = alice.service.sampling._samplers._places  # pyright: ignore[reportPrivateUsage]
        asked = [await alice.sample(own, 0, [4])]
        _, first_may_answer = await asyncio.wait_for(has_begun.get(), WAIT_S)
        asked.append(await bob.sample(other, 0, [4]))
        while not places.num_waiting:  # noqa: ASYNC110 (places have no event)
            await asyncio.sleep(0.01)
        asked.append(await alice.sample(own, 1, [4]))
        first_may_answer.set()
        for expected in (other, own):
            id, may_answer = await asyncio.wait_for(has_begun.get(), WAIT_S)
            assert id.startswith(expected)
            may_answer.set()
        for client, id in zip((alice, bob, alice), asked, strict=True):
            await client.done(id)


async def test_a_large_result_is_read_once_and_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each question for it read all of it, before any limit, while no other client was answered."""
    folder = make_folder(tmp_path)
    async with opened(folder) as alice:
        service = alice.service
        model = await alice.create()
        id = await alice.send(Kind.FORWARD, model, 1, pass_body(model, 1, [LINE]))
        large = b"x" * ROOM
        values = {"id": id, "content": large}
        await alice.done(id)
        await service.journal.write(
            Change("UPDATE requests SET content = :content WHERE id = :id", values)
        )
        readers: list[threading.Thread] = []
        read = service.journal.result

        def watched(id: str) -> Result:
            readers.append(threading.current_thread())
            return read(id)

        monkeypatch.setattr(service.journal, "result", watched)
        assert await service.await_result(id, "alice", 0.0) == len(large)
        assert readers == []
        transport = httpx2.ASGITransport(app=app_of(folder, service))
        headers = {"X-API-Key": folder.issue_key("alice", ttl_s=600.0)}
        async with httpx2.AsyncClient(transport=transport, base_url="http://tinker") as http:
            found = await http.post(
                "/api/v1/retrieve_future", json={"request_id": id}, headers=headers
            )
        assert found.content == large
        assert len(readers) == 1 and readers[0] is not threading.main_thread()


async def test_adapters_that_are_put_aside_are_not_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While one was closed, the next had found a use; it was closed all the same."""
    close, generate = ContinuousEngine.close, ContinuousEngine.__call__
    is_closing, may_close, has_begun = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def gated_close(engine: ContinuousEngine) -> None:
        is_closing.set()
        await asyncio.wait_for(may_close.wait(), WAIT_S)
        await close(engine)

    async def gated(engine: ContinuousEngine, request: GenerationRequest) -> Completion:
        if is_closing.is_set():
            has_begun.set()
            await asyncio.wait_for(may_close.wait(), WAIT_S)
            await asyncio.sleep(0.2)  # the others are closed meanwhile
        return await generate(engine, request)

    async with opened(make_folder(tmp_path)) as client:
        sessions = await sampling_sessions(client, "a", "b", "c", "d")
        for session in sessions[:3]:
            await client.done(await client.sample(session, 0, [4]))
        monkeypatch.setattr(samplers, "MAX_LOADED", 1)
        monkeypatch.setattr(ContinuousEngine, "close", gated_close)
        monkeypatch.setattr(ContinuousEngine, "__call__", gated)
        last = await client.sample(sessions[3], 1, [4])
        await asyncio.wait_for(is_closing.wait(), WAIT_S)
        again = await client.sample(sessions[1], 1, [4])
        await asyncio.wait_for(has_begun.wait(), WAIT_S)
        may_close.set()
        assert await client.done(last)
        assert await client.done(again)


def sample_body(session: str = "s", **params: Any) -> dict[str, Any]:
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [4, 5]}]}
    return {
        "sampling_session_id": session,
        "seq_id": 0,
        "num_samples": 1,
        "prompt": prompt,
        "sampling_params": {"max_tokens": 2, **params},
    }


def chunks(count: int) -> dict[str, Any]:
    return {"prompt": {"chunks": [{"tokens": [4]}] * count}}


@pytest.mark.parametrize("temperature", [1e-310, 1e-30, 1e30, float("inf")])
def test_temperatures_that_no_engine_has(temperature: float) -> None:
    """Its log-probs were NaN, which failed the answers of all that were decoded with it."""
    body = decode(encode_json(sample_body()), Sample, media_type=JSON)
    params = msgspec.structs.replace(body.sampling_params, temperature=temperature)
    with pytest.raises(BadRequest, match="temperature"):
        samplers.question_of(msgspec.structs.replace(body, sampling_params=params), 32, 32)


TOO_MANY: dict[str, dict[str, Any]] = {
    "chunks": chunks(4097),
    "type": {"prompt": {"chunks": [{"tokens": [4], "type": "t" * 257}]}},
    "tokens": {"prompt": {"chunks": [{"tokens": [4] * ((4 << 20) + 1)}]}},
    "stop tokens": {"sampling_params": {"stop": [4] * 65}},
    "stop": {"sampling_params": {"stop": "s" * 257}},
    "stops": {"sampling_params": {"stop": ["s" * 257]}},
}


@pytest.mark.parametrize("part", TOO_MANY)
def test_parts_of_a_sampling_request_have_bounds(part: str) -> None:
    """600,000 chunks of 14 bytes took half a second, and a hundred bytes of memory each."""
    decode(encode_json(sample_body() | chunks(4096)), Sample, media_type=JSON)
    with pytest.raises(BadRequest, match="invalid Sample"):
        decode(encode_json(sample_body() | TOO_MANY[part]), Sample, media_type=JSON)


@pytest.mark.parametrize(
    "why",
    [
        "fills the model's window",
        "up to 8192 objects",
        "is too long for the model's window",
        "answers of up to",
        "a prompt has tokens",
        "no top-k",
    ],
)
async def test_sampling_requests_that_no_model_can_answer_are_not_accepted(
    tmp_path: Path, why: str
) -> None:
    """They were stored, and their bodies were in memory when their turn came. What an older server
    has accepted has a result all the same."""
    folder = make_folder(tmp_path)
    async with opened(folder) as alice:
        session, service = await base_session(alice), alice.service
        window, vocab_size = service.base.window, service.base.vocab_size
        refused: dict[str, dict[str, Any]] = {
            "fills the model's window": {"prompt": {"chunks": [{"tokens": [4] * window}]}},
            "up to 8192 objects": chunks(8192),
            "is too long for the model's window": {
                "prompt": {"chunks": [{"tokens": [4] * (window + (1 << 17))}]}
            },
            "answers of up to": {"num_samples": 1024, "sampling_params": {}},
            "a prompt has tokens": {"prompt": {"chunks": [{"tokens": [vocab_size]}]}},
            "no top-k": {"topk_sample_logprobs": 1},
        }
        if why == "answers of up to":
            service.base.window = 1 << 17
        body = encode_json(sample_body(session) | refused[why])
        headers = {"X-API-Key": folder.issue_key("alice", ttl_s=600.0)}
        app = app_of(folder, service)
        async with httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app=app), base_url="http://tinker/api/v1"
        ) as http:
            found = await http.post("/asample", content=body, headers=headers)
        assert found.status_code == 400 and why in found.text, found.text
        assert service.journal.owner_and_digest(f"{session}:0") is None
        old = await alice.send(Kind.SAMPLE, session, 0, body)
        assert why in await alice.error(old)


async def test_answers_that_wait_for_their_turn_are_not_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of 256 requests had a thousand calls and tasks that waited: a gigabyte."""
    monkeypatch.setattr(serving, "max_answers", lambda num_bytes: 3)  # pyright: ignore
    generate, made, most = ContinuousEngine.__call__, 0, 0

    def counted(*args: Any, **fields: Any) -> GenerationRequest:
        nonlocal made, most
        made += 1
        most = max(most, made)
        return GenerationRequest(*args, **fields)

    async def answered(engine: ContinuousEngine, request: GenerationRequest) -> Completion:
        nonlocal made
        try:
            return await generate(engine, request)
        finally:
            made -= 1

    monkeypatch.setattr(samplers, "GenerationRequest", counted)
    monkeypatch.setattr(ContinuousEngine, "__call__", answered)
    async with opened(make_folder(tmp_path)) as client:
        session = await base_session(client)
        ids = [await client.sample(session, number, [4], num_samples=9) for number in range(4)]
        for id in ids:
            found = MESSAGES["SampleResponse"]()
            found.ParseFromString(await client.done(id))
            assert len(found.sequences) == 9
    assert most == 3


async def test_an_answer_that_fails_gives_back_every_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "max_answers", lambda num_bytes: 2)  # pyright: ignore
    generate = ContinuousEngine.__call__

    async def failing(engine: ContinuousEngine, request: GenerationRequest) -> Completion:
        if request.session.endswith(":0"):
            raise EngineError("no")
        return await generate(engine, request)

    monkeypatch.setattr(ContinuousEngine, "__call__", failing)
    async with opened(make_folder(tmp_path)) as client:
        session = await base_session(client)
        assert "EngineError" in await client.error(
            await client.sample(session, 0, [4], num_samples=5)
        )
        assert await client.done(await client.sample(session, 1, [4], num_samples=5))


async def test_clients_take_turns_at_the_models_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that one client wanted to have scored was scored before another's training went on."""
    may_score, num_scored = threading.Event(), 0
    sampled: asyncio.Queue[object] = asyncio.Queue()
    scored_before: list[int] = []

    async def sample(*asked: object) -> list[Sampled]:
        sampled.put_nowait(asked)
        return []

    def score(model: AdaptedModel, ids: list[int]) -> Floats:
        nonlocal num_scored
        assert may_score.wait(WAIT_S)
        num_scored += 1
        return np.zeros(len(ids), np.float32)

    monkeypatch.setattr(AdaptedModel, "prompt_logprobs", score)
    async with opened(make_folder(tmp_path)) as alice:
        bob = Client(alice.service, owner="bob")
        (session,) = await sampling_sessions(alice, "a")
        model, effects = await bob.create("s-b", rank=1), alice.service.effects
        apply = effects.apply

        def noted(lane: Lane, request: Request) -> Effect:
            scored_before.append(num_scored)
            return apply(lane, request)

        monkeypatch.setattr(effects, "apply", noted)
        monkeypatch.setattr(alice.service.sampling._samplers, "sample", sample)  # pyright: ignore
        flood = [
            await alice.sample(session, number, [4, 5], prompt_logprobs=True)
            for number in range(30)
        ]
        for _ in flood:
            await asyncio.wait_for(sampled.get(), WAIT_S)
        trained = await bob.train(model, 0)
        await asyncio.sleep(0.1)  # its first pass waits for its turn
        may_score.set()
        for id in trained:
            await bob.done(id)
        for id in flood:
            await alice.done(id)
    assert scored_before[0] <= 2
