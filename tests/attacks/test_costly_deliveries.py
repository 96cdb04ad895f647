# SPDX-License-Identifier: Apache-2.0
"""A small request never makes the dataflow read or decode a large row for nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from blake3 import blake3
from tests.attacks.in_process import dataflow_door
from tests.contract.dataflow_server import small_config, trajectory
from tests.contract.test_dataflow_service import LIVE, NODE, lease, start
from tests.unit.rollout.test_delivery_queue import Dataflow

from penstock.dataflow.core.leasing import DeliveryStatus, Grant
from penstock.dataflow.service.build import build
from penstock.dataflow.service.coordinator import DataflowService
from penstock.dataflow.service.nodes import handlers, intake, outline
from penstock.dataflow.service.nodes.messages import Delivery, DeliveryAnswer, DeliveryRequest
from penstock.dataflow.service.nodes.outline import parts_bytes
from penstock.dataflow.service.rows import messages as row_messages
from penstock.errors import BadRequest
from penstock.rollout.delivery_queue import AckLog, DeliveryQueue
from penstock.rollout.membership import Membership, NodeOrders
from penstock.types import RowId, Trajectory
from penstock.wire import server as wire_server
from penstock.wire.auth import Role
from penstock.wire.call_budget import MAX_BYTES
from penstock.wire.codec import decode, decode_zero_copy, encode

STORED, DUPLICATE, CONFLICT, FENCED, INVALID = (
    DeliveryStatus.STORED,
    DeliveryStatus.DUPLICATE,
    DeliveryStatus.CONFLICT,
    DeliveryStatus.FENCED,
    DeliveryStatus.INVALID,
)


@dataclass
class Work:
    """What deliveries cost, and rows in uploaded blobs."""

    service: DataflowService
    grants: tuple[Grant, ...]
    num_decoded: int = 0
    num_read: int = 0
    num_reading: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def row(self, index: int, reward: float = 0.5) -> Delivery:
        return trajectory(self.grants[index], NODE, LIVE, reward=reward)

    def uploaded(self, row: Delivery) -> Delivery:
        data = bytes(row.payload)
        digest = blake3(data).hexdigest()
        path = self.service.rows.blobs.path(digest)
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)
        return replace(row, payload=memoryview(b""), blob=digest)

    async def answer(self, *rows: Delivery) -> DeliveryAnswer:
        body = DeliveryRequest(node_id=NODE, boot_id="s", deliveries=rows)
        return await self.service.nodes.deliver(body)

    async def deliver(self, *rows: Delivery) -> list[DeliveryStatus]:
        return [result.status for result in (await self.answer(*rows)).results]


@asynccontextmanager
async def working(folder: Path, patch: pytest.MonkeyPatch) -> AsyncGenerator[Work]:
    service = build(small_config(groups_per_batch=8, steps=9), folder)
    await start(service)
    work = Work(service, (await service.nodes.lease(lease("a"))).grants)
    blobs = service.rows.blobs
    read = blobs.read

    def counted_read(digest: str) -> bytes:
        with work.lock:
            work.num_read += 1
            work.num_reading += 1
            work.most_at_once = max(work.most_at_once, work.num_reading)
        try:
            return read(digest)
        finally:
            with work.lock:
                work.num_reading -= 1

    def counted_decode(data: memoryview, kind: type[Trajectory]) -> Trajectory:
        work.num_decoded += kind is Trajectory
        return decode_zero_copy(data, kind)

    patch.setattr(blobs, "read", counted_read)
    patch.setattr(intake, "decode_zero_copy", counted_decode)
    yield work
    service.close()


@pytest.mark.parametrize("is_blob", [False, True])
async def test_a_row_without_a_lease_is_neither_read_nor_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_blob: bool
) -> None:
    """A lease that ended, or never was: the secret is valid for ever, and the answer costs a look
    at the ledger. A delivery repeated after a lost answer is a duplicate as before."""
    async with working(tmp_path, monkeypatch) as work:
        row, other = work.row(0), work.row(0, reward=0.25)
        never = replace(work.row(1), row_id=work.row(1).row_id + "9")
        if is_blob:
            row, other, never = (work.uploaded(one) for one in (row, other, never))
        assert await work.deliver(row) == [STORED]
        cost = (work.num_read, work.num_decoded)
        assert cost == (int(is_blob), 1)
        first = await work.answer(row)
        assert [one.status for one in first.results] == [DUPLICATE]
        assert encode(await work.answer(row)) == encode(first)
        assert await work.deliver(other, never) == [CONFLICT, FENCED]
        bad = replace(row, row_id=RowId("no-row"))
        assert await work.deliver(bad) == [INVALID]
        assert (work.num_read, work.num_decoded) == cost


@pytest.mark.parametrize("is_blob", [False, True])
async def test_a_row_named_many_times_is_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_blob: bool
) -> None:
    """10,000 entries of one call may name one row."""
    num_hashed = 0

    def counted(data: Any) -> Any:
        nonlocal num_hashed
        num_hashed += 1
        return blake3(data)

    async with working(tmp_path, monkeypatch) as work:
        row = work.uploaded(work.row(0)) if is_blob else work.row(0)
        monkeypatch.setattr(intake, "blake3", counted)
        assert await work.deliver(*[row] * 50) == [STORED] + [DUPLICATE] * 49
        assert (work.num_read, work.num_decoded) == (int(is_blob), 1)
        assert num_hashed <= 2


async def test_rows_in_blobs_are_read_within_the_budget_of_their_credential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many small requests that name large blobs wait in line, whatever their bodies declare; who
    finds its row stored when its turn comes reads nothing."""
    async with working(tmp_path, monkeypatch) as work:
        rows = [work.uploaded(work.row(index)) for index in range(4)]

        def claim(digest: str) -> int:
            return MAX_BYTES

        monkeypatch.setattr(work.service.rows.blobs, "claim", claim)
        answers = await asyncio.gather(*[work.deliver(row) for row in rows * 4])
        assert work.most_at_once == 1
        assert work.num_read == work.num_decoded == 4
        assert sorted(answers) == [[DUPLICATE]] * 12 + [[STORED]] * 4
        assert work.most_at_once == 1 and await work.deliver(*rows[:1]) == [DUPLICATE]


def spans(num: int) -> list[dict[str, int]]:
    return [{"start": n, "end": n + 1, "incarnation": 1, "number": 0} for n in range(num)]


def with_turns(row: Delivery, num: int, **changes: Any) -> Delivery:
    """The same row with this many copies of its turn."""
    record = msgspec.msgpack.decode(row.payload)
    turn = {**record["turns"][0], **changes}
    record["turns"] = [{**turn, "parent": n - 1} for n in range(num)]
    return replace(row, payload=memoryview(encode(record)))


def twice(row: Delivery, key: str, value: object, num: int) -> Delivery:
    """The same row with a field that stands in it again and again."""
    record = msgspec.msgpack.decode(row.payload)
    parts = [(name, one) for name, one in record.items()] + [(key, value)] * num
    data = b"\xdf" + len(parts).to_bytes(4, "big")
    again = encode(key) + encode(value)
    data += b"".join(encode(name) + encode(one) for name, one in record.items()) + again * num
    return replace(row, payload=memoryview(data))


@pytest.mark.parametrize("kind", ["spans", "repeated fields", "unknown fields", "expert fields"])
async def test_a_row_of_millions_of_small_parts_is_refused_before_they_are_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Each part would become an object while no other call is answered."""
    monkeypatch.setattr(intake, "MAX_PARTS_BYTES", 50_000)
    async with working(tmp_path, monkeypatch) as work:
        row = work.row(0)
        use = {"turn": -1, "name": "n", "arguments": "", "result": ""}
        large = {
            "spans": lambda: with_turns(row, 40, spans=spans(100)),
            "repeated fields": lambda: twice(row, "tool_uses", [use] * 100, 100),
            "unknown fields": lambda: twice(row, "unknown", [0] * 1_000, 100),
            "expert fields": lambda: with_turns(
                row, 10, experts={"choices": b""} | {f"x{n}": 0 for n in range(2_000)}
            ),
        }[kind]()
        answer = await work.answer(large)
        assert [one.status for one in answer.results] == [INVALID]
        assert "bytes beside" in answer.results[0].detail
        assert work.num_decoded == 0


async def test_long_rows_and_long_texts_are_within_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens, log-probs, experts, texts of tools and schemas are bulk: they count for nothing."""
    monkeypatch.setattr(intake, "MAX_PARTS_BYTES", 50_000)
    async with working(tmp_path, monkeypatch) as work:
        record = decode(work.row(0).payload, Trajectory)
        ids, schema = b"\1\0\0\0" * 8_000, '{"type": "object"}' + " " * 30_000
        uses = [
            {"turn": 0, "name": "n", "arguments": "a" * 9_000, "result": "é" * 8_000},
        ] * 10
        turn = {
            **msgspec.to_builtins(record.turns[0]),
            "prompt_ids": ids,
            "sampled_ids": ids,
            "logprobs": b"\0" * len(ids),
            "spans": [{"start": 0, "end": 8_000, "incarnation": 1, "number": 0}],
            "sampling": {"json_schema": schema},
            "experts": {
                "num_layers": 2,
                "num_chosen": 2,
                "num_experts": 8,
                "choices": b"\0" * (16_000 * 4),
            },
        }
        whole = {**msgspec.to_builtins(record), "turns": [turn], "tool_uses": uses}
        row = replace(work.row(0), payload=memoryview(encode(whole)))
        assert len(row.payload) > 8 * 50_000 // 2
        assert parts_bytes(row.payload) < 2_000
        assert (await work.answer(row)).results[0].detail.find("bytes beside") < 0
        assert work.num_decoded == 1


async def test_a_row_that_is_too_large_ends_neither_its_node_nor_other_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent's long session made the whole call fail, its node end, and the next node, too."""
    monkeypatch.setattr(handlers, "MAX_ROW_BYTES", 50_000)
    async with working(tmp_path, monkeypatch) as work:
        membership = Membership(
            Dataflow(lambda body: None), NodeOrders(), node_id=NODE, capacity=8, boot_id="s"
        )
        acks = AckLog(tmp_path / "acks")
        queue = DeliveryQueue(work.service.nodes, membership, acks)
        large = with_turns(work.row(1), 40, sampling={"json_schema": "x" * 2_000})
        for row in (work.row(0), large, work.row(2)):
            queue.put(decode(row.payload, Trajectory), row.secret)
        delivering = asyncio.create_task(queue.deliver())
        emptied = asyncio.create_task(queue.wait_until_at_most(0))
        await asyncio.wait({delivering, emptied}, return_when=asyncio.FIRST_COMPLETED)
        assert not delivering.done(), "the node ended"
        delivering.cancel()
        acks.close()
        assert len((tmp_path / "acks").read_text().split()) == 3
        grant, nodes = work.grants[1], work.service.nodes
        slot = nodes.partition.groups[grant.group_id].slot(grant.slot)
        assert nodes.trajectories == 3 and slot.attempt == 1
        assert "50000" in slot.reasons[0]


async def test_turns_of_very_many_spans_are_refused_before_they_are_built(tmp_path: Path) -> None:
    """63 MB of them took more than two seconds, in which the dataflow answered nobody. Whoever has
    a node's token could send them, an untrusted one and without a lease."""
    span = {"start": 0, "end": 1, "incarnation": 0, "number": 0}
    empty = dict.fromkeys(("prompt_ids", "sampled_ids", "logprobs"), b"")
    turn: dict[str, Any] = {**empty, "policy": "p", "parent": -1, "sampling": {}, "finish": "stop"}
    sent: dict[str, Any] = {
        "row_id": "p0-1.0.1",
        "index": 0,
        "turn": {**turn, "spans": [span] * 4096},
    }
    async with dataflow_door(tmp_path) as door:
        for num, status in ((20, 400), (1, 200)):
            body: dict[str, Any] = {"node_id": "n", "turns": [sent] * num}
            answer = await door.call("POST", "/v1/turns", Role.ROLLOUT, body=body)
            assert answer.status_code == status, answer.text
            assert ("beside tokens" in answer.text) == (status == 400)
        bulk: dict[str, Any] = {**sent, "turn": {**turn, "spans": [], "logprobs": b"0" * (4 << 20)}}
        body = {"node_id": "n", "turns": [bulk]}
        answer = await door.call("POST", "/v1/turns", Role.ROLLOUT, body=body)
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("field", ["deliveries", "released"])
def test_a_call_with_very_many_rows_is_refused_before_they_are_built(field: str) -> None:
    """2.7 MB of short rows took a third of a second; the type allowed ten times what its handler
    accepts."""
    body: dict[str, Any] = {"node_id": "n", "boot_id": "b", "deliveries": []}
    rows = {f"p0-{number}.0.1": "" for number in range(10_001)}
    named = [{"row_id": name, "payload": b""} for name in rows]
    body |= {"deliveries": named} if field == "deliveries" else {"released": rows}
    with pytest.raises(BadRequest, match="length <= 10000"):
        decode(encode(body), DeliveryRequest)


ROW = {"row_id": "", "payload": b""}
EMPTY_TURN: dict[str, Any] = dict.fromkeys(("prompt_ids", "sampled_ids", "logprobs"), b"")
MANY: dict[str, tuple[str, Role, dict[str, Any], str, Any]] = {
    "rows": ("POST /v1/trajectories", Role.ROLLOUT, {"boot_id": "b"}, "deliveries", [ROW] * 100),
    "releases": (
        "POST /v1/trajectories",
        Role.ROLLOUT,
        {"boot_id": "b", "deliveries": []},
        "released",
        {f"{number}": "" for number in range(100)},
    ),
    "turns": ("POST /v1/turns", Role.ROLLOUT, {}, "turns", [{"turn": EMPTY_TURN}] * 100),
    "results": ("PUT /v1/rows/columns", Role.STAGE, {"reader": "r"}, "results", [{}] * 100),
    "put rows": ("POST /v1/spaces/s/rows", Role.STAGE, {}, "rows", [{}] * 100),
}


def again_and_again(fields: dict[str, Any], name: str, value: object, num_bytes: int) -> bytes:
    """A body in which a field stands until it is so long."""
    one = encode(name) + encode(value)
    times = num_bytes // len(one)
    head = b"\xdf" + (len(fields) + times).to_bytes(4, "big")
    return head + b"".join(encode(key) + encode(of) for key, of in fields.items()) + one * times


@pytest.mark.parametrize("kind", MANY)
async def test_a_list_that_stands_in_a_call_again_and_again_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Only its last copy counts, and all were built: 64 MB of them from an untrusted node without a
    lease held the dataflow for ten seconds, 32 MB of empty rows for four in what counts columns."""
    read: list[Any] = []

    def counted(data: memoryview, of: Any, **named: Any) -> Any:
        read.append(of)
        return decode(data, of, **named)

    for module in (outline, row_messages, wire_server):
        monkeypatch.setattr(module, "decode", counted)
    call, role, fields, name, value = MANY[kind]
    method, path = call.split()
    async with dataflow_door(tmp_path) as door:
        named = {"node_id": "n"} if role is Role.ROLLOUT else {"worker": "w"}
        body = again_and_again({**named, **fields}, name, value, 3 << 20)
        answer = await door.call(method, path, role, content=body)
        assert answer.status_code == 400 and "at most 2097152" in answer.text, answer.text
        [looked] = read
        assert {field.type for field in msgspec.structs.fields(looked)} == {msgspec.Raw}


def test_a_row_whose_turns_stand_there_again_and_again_is_not_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(outline, "MAX_PARTS_BYTES", 50_000)
    monkeypatch.setattr(outline, "_Turns", None)
    turn: dict[str, Any] = {**EMPTY_TURN, "sampling": {}}
    payload = again_and_again({}, "turns", [turn] * 10, 100_000)
    assert parts_bytes(memoryview(payload)) > 50_000


async def test_every_long_body_is_counted_before_it_is_read(tmp_path: Path) -> None:
    """But a partition's: it is a service of the run itself."""
    async with dataflow_door(tmp_path) as door:
        table = cast(Any, door.app).route_table
        parametric = [one for some in table._parametric.values() for _, one in some]
        routes = [endpoint.spec for endpoint in (*table._static.values(), *parametric)]
        long = {
            route.path
            for route in routes
            if route.has_body and route.max_body_bytes > wire_server.MAX_JSON_BYTES
        }
        counted = {route.path for route in routes if route.check_parts is not None}
        assert len(counted) == 4
        assert long - counted == {"/v1/partitions/{index}/messages"}
