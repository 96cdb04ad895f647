# SPDX-License-Identifier: Apache-2.0
"""Every value that crosses the wire has bounds, declared on its message type, and what lies outside
is refused at the door."""

from __future__ import annotations

import dataclasses
import math
import os
import stat
import subprocess
import sys
import typing
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from jinja2 import TemplateError
from tests.attacks.in_process import Door, dataflow_door
from tests.contract.postgres_server import running_postgres

from penstock.config import demo_config
from penstock.dataflow.core.messages import (
    ColumnsCompleted,
    GroupEnded,
    NumberedMessage,
    ToCoordinator,
)
from penstock.dataflow.ledger.tables import Tables, open_tables
from penstock.dataflow.records import LeaseRecord
from penstock.dataflow.service.nodes.model_limits import ModelLimits, read_model_limits
from penstock.dataflow.service.nodes.validate import summarise
from penstock.dataflow.service.partitions.messages import PartitionJoin
from penstock.errors import BadRequest
from penstock.fleet.run_folder import RunFolder
from penstock.gateway.template_process import TemplateProcess
from penstock.types import (
    FinishReason,
    GroupId,
    NodeId,
    Outcome,
    OutcomeKind,
    PolicyName,
    RowId,
    RowSummary,
    SamplingSpec,
    Trajectory,
    Turn,
    VersionSpan,
    log_probs,
    token_ids,
)
from penstock.weights.deltas.chain import DeltaChain
from penstock.wire.auth import Role
from penstock.wire.codec import JSON, decode, encode
from penstock.wire.routes import ErrorResponse

POLICY = PolicyName("policy")
LEFT_OUT = {
    "CommitRequest.stats{}": "a trainer's statistics; those that are not finite are dropped",
    "RowResult.columns{}": "a column's value; the message names the column and the cure",
    "PutRow.columns{}": "a column's value; the message names the column and the cure",
}
"""Fields that a handler checks instead, with the reason."""


# --- every message type --------------------------------------------------------------------------


def unbounded(kind: Any, where: str) -> Iterator[str]:
    """Fields below this type that no bound holds."""
    bound, kind = _unwrap(kind)
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    is_number = kind is int or (kind is float and where not in LEFT_OUT)
    is_text = kind in (str, bytes, memoryview)
    has_length = bound.max_length is not None or bound.pattern is not None
    if (is_text and not has_length) or (is_number and not _has_range(bound)):
        yield where
    elif dataclasses.is_dataclass(kind) or _is_struct(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        names = [name for name in hints if typing.get_origin(hints[name]) is not typing.ClassVar]
        for name in names:
            yield from unbounded(hints[name], f"{kind.__name__}.{name}")
    elif origin is tuple and arguments[-1:] == (...,):
        if bound.max_length is None and not where.startswith("RowSummary"):
            yield f"{where} (its length)"
        yield from unbounded(arguments[0], f"{where}[]")
    elif origin is not None and origin not in (typing.Literal,):
        for argument in arguments:
            suffix = "{}" if origin in (dict,) or "Mapping" in str(origin) else ""
            yield from unbounded(argument, where if where.endswith("{}") else where + suffix)


def _unwrap(kind: Any) -> tuple[msgspec.Meta, Any]:
    """(the bound, the type below aliases and annotations)."""
    bounds: dict[str, Any] = {}
    while True:
        kind = getattr(kind, "__supertype__", kind)
        if typing.get_origin(kind) is not typing.Annotated:
            return msgspec.Meta(**bounds), kind
        kind, *metas = typing.get_args(kind)
        for meta in metas:
            names = ("max_length", "pattern", "ge", "gt", "le", "lt")
            bounds |= {n: getattr(meta, n) for n in names if getattr(meta, n) is not None}


def _has_range(bound: msgspec.Meta) -> bool:
    has_low = bound.ge is not None or bound.gt is not None
    return has_low and (bound.le is not None or bound.lt is not None)


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, msgspec.Struct)


async def test_every_field_of_every_request_is_bounded(tmp_path: Path) -> None:
    """A new field without a bound fails here, by its name."""
    async with dataflow_door(tmp_path) as door:
        requests = {e.spec.request for e in endpoints(door) if e.spec.request is not None}
    assert len(requests) >= 15
    found = {where for kind in requests for where in unbounded(kind, kind.__name__)}
    assert found == set()


@pytest.mark.parametrize(
    "kind",
    [Trajectory, DeltaChain, ErrorResponse, NumberedMessage, *typing.get_args(ToCoordinator)],
)
def test_what_a_client_reads_from_others_is_bounded(kind: Any) -> None:
    """A trainer reads trajectories of nodes, a node reads chains of relays, and so on."""
    assert set(unbounded(kind, kind.__name__)) == set()


def test_the_walk_finds_what_is_missing() -> None:
    """The test of the test: a field of each kind without a bound is found."""

    @dataclasses.dataclass
    class Loose:
        text: str
        number: int
        share: float
        blob: bytes
        names: tuple[str, ...]

    Loose.__annotations__ = {
        "text": str, "number": int, "share": float, "blob": bytes, "names": tuple[str, ...],
    }  # fmt: skip
    assert len({*unbounded(Loose, "Loose")}) == 6


def endpoints(door: Door) -> list[Any]:
    apps = [getattr(route, "app", None) for route in door.app.routes]
    return [app for app in apps if hasattr(app, "spec")]


async def test_large_answers_share_the_budget_of_their_credential(tmp_path: Path) -> None:
    """Rows by key are up to 16 MB, for a request of a few bytes."""
    async with dataflow_door(tmp_path) as door:
        shares = {e.spec.path for e in endpoints(door) if e.spec.shares_budget}
        assert {"/v1/spaces/{space}/get", "/v1/trajectories"} <= shares


# --- integers, floats and texts at the door ------------------------------------------------------

NODE: dict[str, Any] = {"node_id": "n", "boot_id": "b", "capacity": 1, "policies": []}
LEASE: dict[str, Any] = {
    "request_id": "r", "node_id": "n", "boot_id": "b", "max_slots": 1, "wait_s": 0.0, "live": [],
}  # fmt: skip
LIVE = {"policy": "p", "incarnation": (1 << 64) - 1, "number": 0}
HUGE = (1 << 64) - 1
BAD_NUMBERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "quota": ("PUT", "/v1/spaces/x", {"quota_bytes": HUGE}),
    "negative quota": ("PUT", "/v1/spaces/x", {"quota_bytes": -1}),
    "slots": ("POST", "/v1/leases", LEASE | {"max_slots": HUGE}),
    "negative slots": ("POST", "/v1/leases", LEASE | {"max_slots": -5}),
    "wait nan": ("POST", "/v1/leases", LEASE | {"wait_s": math.nan}),
    "wait inf": ("POST", "/v1/leases", LEASE | {"wait_s": math.inf}),
    "capacity": ("POST", "/v1/nodes", NODE | {"capacity": HUGE}),
    "live version": (
        "PUT",
        "/v1/nodes/n",
        {"boot_id": "b", "state": "live", "live": [LIVE]},
    ),
    "checkpoints": (
        "PUT",
        "/v1/policies/policy/checkpoints",
        {"incarnation": 1, "retained": [[HUGE, HUGE]]},
    ),
    "batch": (
        "POST",
        "/v1/batches",
        {"consumer": "policy", "seq": HUGE, "incarnation": 1, "wait_s": 0.0},
    ),
    "incarnation": (
        "POST",
        "/v1/policies/policy/incarnations",
        {"request_id": "z", "expected": 1, "number": HUGE, "seq": HUGE},
    ),
    "commit": ("POST", "/v1/batches/policy.1/commit", {"incarnation": HUGE, "number": 1}),
    "partition epoch": (
        "PUT",
        "/v1/partitions/5",
        {"boot": {"epoch": HUGE, "boot_id": "s"}, "url": "http://127.0.0.1:1"},
    ),
    "blob size": (
        "POST",
        "/v1/spaces/x/rows",
        {"rows": [{"key": "k", "columns": {"a": {"digest": "0" * 64, "size": HUGE}}}]},
    ),
    "indexes": ("POST", "/v1/batches/policy.1/rows", {"indexes": [HUGE]}),
    "reader": ("PUT", "/v1/readers/r", {"reads": ["turns"], "max_attempts": HUGE}),
    "claim": (
        "PUT",
        "/v1/readers/r/leases",
        {"claims": [{"row_id": "p0-1.0.1", "arrival": HUGE, "epoch": 1}]},
    ),
}  # fmt: skip


@pytest.mark.finding(18)
@pytest.mark.parametrize("name", BAD_NUMBERS)
async def test_a_number_beyond_the_store_is_refused(name: str, tmp_path: Path) -> None:
    """An integer beyond 63 bits, or a float that is none, never reaches the ledger."""
    method, path, body = BAD_NUMBERS[name]
    async with dataflow_door(tmp_path) as door:
        answer = await door.call(method, path, body=body)
        assert answer.status_code == 400, answer.text
        await require_alive(door)


async def require_alive(door: Door) -> None:
    """It still writes."""
    quota = await door.call("PUT", "/v1/spaces/sound", body={"quota_bytes": 5})
    assert quota.status_code == 200, quota.text


LONG: dict[str, dict[str, Any]] = {
    "boot_id": NODE | {"boot_id": "b" * 1_000},
    "policies": NODE | {"policies": ["p" * 100] * 8_000},
    "one policy": NODE | {"policies": ["p" * 100_000]},
    "tags": NODE | {"tags": ["t"] * 10_000},
    "node_id": NODE | {"node_id": "n" * 129},
}


@pytest.mark.parametrize("field", LONG)
async def test_a_registration_has_a_size(field: str, tmp_path: Path) -> None:
    """No part of a registration is kept at the length that a node likes."""
    async with dataflow_door(tmp_path) as door:
        assert (await door.call("POST", "/v1/nodes", body=LONG[field])).status_code == 400


# --- finding 8: NUL and lone surrogates ----------------------------------------------------------

NUL_BODIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "boot_id": ("POST", "/v1/nodes", NODE | {"boot_id": "x\0y"}),
    "tag": ("POST", "/v1/nodes", NODE | {"tags": ["a\0"]}),
    "request_id": ("POST", "/v1/leases", LEASE | {"request_id": "x\0"}),
    "row key": ("POST", "/v1/spaces/x/rows", {"rows": [{"key": "k\0", "columns": {"a": 1.0}}]}),
    "column": ("PUT", "/v1/readers/r", {"reads": ["tu\0rns"]}),
    "worker": ("POST", "/v1/readers/r/leases", {"request_id": "r", "worker": "w\0", "max_rows": 1}),
    "weights_digest": (
        "POST",
        "/v1/policies/policy/versions",
        {"incarnation": 1, "number": 0, "manifest_digest": "0" * 64, "weights_digest": "\0"},
    ),
}


@pytest.mark.finding(8)
@pytest.mark.parametrize("name", NUL_BODIES)
async def test_a_nul_in_an_id_is_refused(name: str, tmp_path: Path) -> None:
    """In msgpack and in JSON, where it is an escape."""
    method, path, body = NUL_BODIES[name]
    async with dataflow_door(tmp_path) as door:
        assert (await door.call(method, path, body=body)).status_code in (400, 404)
        content = msgspec.json.encode(body)
        assert b"\\u0000" in content
        answer = await door.call(method, path, content=content, media_type=JSON)
        assert answer.status_code in (400, 404)
        await require_alive(door)


@pytest.mark.parametrize(
    "path",
    ["/v1/explain/p0%001", "/v1/policies/a%00b", "/v1/sessions/%00", "/v1/readers/r%00",
     "/v1/nodes/n%00?boot_id=x", "/v1/nodes/n?boot_id=x%00", "/v1/turns/p0-1.0.1%00?node_id=n",
     "/v1/explain/%1b%5b2J", "/v1/explain/" + "a" * 10_000],
)  # fmt: skip
async def test_a_parameter_of_a_path_is_printable(path: str, tmp_path: Path) -> None:
    """A NUL or an escape sequence in a path is a 400, before any handler."""
    async with dataflow_door(tmp_path) as door:
        for method in ("GET", "DELETE"):
            assert (await door.call(method, path)).status_code in (400, 405)
        await require_alive(door)


@pytest.mark.parametrize("text", [b'"\\ud800"', b'"\\udc00x"', b'"\xed\xa0\x80"', b'"\xff"'])
async def test_half_a_character_is_refused(text: bytes, tmp_path: Path) -> None:
    """A lone surrogate, as an escape or as bytes, is no text."""
    body = b'{"node_id":"n","boot_id":' + text + b',"capacity":1,"policies":[]}'
    async with dataflow_door(tmp_path) as door:
        answer = await door.call("POST", "/v1/nodes", content=body, media_type=JSON)
        assert answer.status_code == 400


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Generator[Tables]:
    if request.param == "sqlite":
        tables = open_tables(tmp_path)
        yield tables
        tables.close()
        return
    with running_postgres() as url:
        tables = open_tables(tmp_path, url)
        yield tables
        tables.close()


@pytest.mark.finding(8)
def test_a_nul_in_an_error_does_not_end_the_ledger(tables: Tables) -> None:
    """A model's output in a failure's detail is stored, without what no database can hold."""
    detail = "ValueError: bad byte \0 in \ud800 the answer ä"
    ended = LeaseRecord(
        group_id=GroupId("p0-1"),
        slot=0,
        epoch=1,
        attempt=1,
        node_id=NodeId("n"),
        boot_id="b",
        request_id="r",
        granted_at=0.0,
        ended="failed",
        ended_at=1.0,
        detail=detail,
    )
    tables.commit([ended])
    (stored,) = tables.read(LeaseRecord)
    assert stored.detail == "ValueError: bad byte \ufffd in ? the answer ä"
    assert tables.read(LeaseRecord, "detail = :detail", detail="x\0") == []


# --- finding 9: sampling specs and giant rows ----------------------------------------------------


def trajectory(num_prompt: int = 1, first_id: int = 3, **spec: Any) -> Trajectory:
    turn = Turn(
        policy=POLICY,
        parent=-1,
        prompt_ids=token_ids([1] * num_prompt),
        sampled_ids=token_ids([first_id, 3]),
        logprobs=log_probs([-0.5, -0.5]),
        spans=(VersionSpan(start=0, end=2, incarnation=1, number=0),),
        sampling=SamplingSpec(**spec),
        finish=FinishReason.STOP,
    )
    return Trajectory(
        row_id=RowId("p0-1.0.1"),
        group_id=GroupId("p0-1"),
        slot=0,
        epoch=1,
        attempt=1,
        node_id=NodeId("n"),
        turns=(turn,),
        reward=1.0,
        outcome=Outcome(kind=OutcomeKind.COMPLETED),
    )


def refusal(given: Trajectory, limits: ModelLimits | None = None) -> str:
    """Why a node's row is refused, as at the door; empty if it is not."""
    try:
        found = summarise(
            decode(encode(given), Trajectory),
            "d",
            lambda policy, incarnation, number: True,
            limits=limits or read_model_limits({}),
        )
    except BadRequest as error:
        return str(error)
    return found if isinstance(found, str) else ""


SPECS: dict[str, dict[str, Any]] = {
    "temperature 1e-39": {"temperature": 1e-39},
    "temperature 1e-30": {"temperature": 1e-30},
    "temperature nan": {"temperature": math.nan},
    "temperature inf": {"temperature": math.inf},
    "temperature -1": {"temperature": -1.0},
    "temperature 1e9": {"temperature": 1e9},
    "top_p nan": {"top_p": math.nan},
    "top_p 0": {"top_p": 0.0},
    "top_p 2": {"top_p": 2.0},
    "min_p nan": {"min_p": math.nan},
    "min_p 1": {"min_p": 1.0},
    "top_k -5": {"top_k": -5},
    "top_k 2^62": {"top_k": 1 << 62},
    "max_tokens 2^62": {"max_tokens": 1 << 62},
    "seed 2^64": {"seed": HUGE},
    "many stops": {"stop": ("x",) * 1_000},
    "long stop": {"stop": ("x" * 100_000,)},
    "long schema": {"json_schema": "x" * 1_000_000},
}


@pytest.mark.finding(9)
@pytest.mark.parametrize("name", SPECS)
def test_a_sampling_spec_without_a_gradient_is_refused(name: str) -> None:
    """Specs under which log-probs or gradients are not finite never reach a trainer."""
    assert refusal(trajectory(temperature=0.5, top_p=0.9, top_k=5)) == ""
    assert refusal(trajectory(**SPECS[name]))


@pytest.mark.finding(9)
def test_a_row_longer_than_the_window_is_refused() -> None:
    """A row that no model of the run can hold would end its trainer again and again."""
    limits = ModelLimits(windows={POLICY: 512})
    assert refusal(trajectory(num_prompt=510), limits) == ""
    assert "the window of policy has 512" in refusal(trajectory(num_prompt=511), limits)
    assert "the window of policy" in refusal(trajectory(num_prompt=3_900_000))


@pytest.mark.finding(9)
def test_the_demo_knows_its_window() -> None:
    """The built-in model's window is known without its files."""
    models = {name: model.init for name, model in demo_config(0).models.items()}
    assert [*read_model_limits(models).windows.values()] == [512]


def test_a_token_that_is_not_in_the_vocabulary_is_refused() -> None:
    """An id beyond the embedding would end the trainer, or poison a longer vocabulary."""
    limits = ModelLimits(max_id=15)
    assert refusal(trajectory(first_id=15), limits) == ""
    assert "not in the vocabulary" in refusal(trajectory(first_id=16), limits)
    assert "negative" in refusal(trajectory(first_id=-1), limits)


@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf, 1e10, -1e300])
def test_a_reward_that_is_no_number_is_refused(reward: float) -> None:
    """Whatever its node computed: it would spoil the advantages of its group."""
    assert refusal(dataclasses.replace(trajectory(), reward=reward))


# --- finding 16: partitions are pinned -----------------------------------------------------------


def summary_of(row_id: str) -> RowSummary:
    return RowSummary(
        row_id=RowId(row_id),
        digest="0" * 64,
        reward=1.0,
        outcome=OutcomeKind.COMPLETED,
        sampled={POLICY: 1},
        versions={POLICY: ((1, 0),)},
    )


JOIN: dict[str, Any] = {"boot": {"epoch": 1, "boot_id": "s"}, "url": "http://127.0.0.1:7001"}


async def join(door: Door, index: int, subject: str, **changes: Any) -> int:
    token = door.signer.mint(Role.PARTITION, [door.audience], ttl_s=60, subject=subject)
    headers = {"authorization": f"Bearer {token}", "content-type": "application/msgpack"}
    answer = await door.http.put(
        f"/v1/partitions/{index}", headers=headers, content=encode(JOIN | changes)
    )
    return answer.status_code


@pytest.mark.finding(16)
async def test_a_partition_token_is_for_one_partition(tmp_path: Path) -> None:
    """The token of partition 1, or of nobody, registers no other partition."""
    async with dataflow_door(tmp_path) as door:
        assert await join(door, 2, "partition-1") == 403
        assert await join(door, 1, "") == 403
        assert await join(door, 1, "partition-1") == 200
        for call in ("messages", "orders"):
            token = door.signer.mint(
                Role.PARTITION, [door.audience], ttl_s=60, subject="partition-2"
            )
            body: dict[str, Any] = {"boot": JOIN["boot"], "messages": [], "figures": {}}
            body |= {"received": 0, "wait_s": 0}
            answer = await door.http.post(
                f"/v1/partitions/1/{call}",
                headers={"authorization": f"Bearer {token}"},
                content=encode(body),
            )
            assert answer.status_code == 403


@pytest.mark.finding(16)
async def test_a_partition_cannot_lead_nodes_elsewhere(tmp_path: Path) -> None:
    """A known partition's token does not move it: nodes would send their tokens there."""
    async with dataflow_door(tmp_path) as door:
        assert await join(door, 1, "partition-1") == 200
        newer = {"epoch": 2, "boot_id": "evil"}
        assert await join(door, 1, "partition-1", boot=newer, url="https://evil.example:443") == 403
        status = (await door.call("GET", "/v1/status")).json()
        assert [one["url"] for one in status["partitions"]] == [JOIN["url"]]
        moved = await door.call(
            "PUT", "/v1/partitions/1", body={"boot": newer, "url": "https://new.example:80"}
        )
        assert moved.status_code == 200, "an operator may move it"


@pytest.mark.parametrize(
    "url", ["", "evil", "file:///etc/passwd", "http://", "javascript:x", "http://a b", "ftp://x/",
            "http://x\n", "http://\0", "gopher://x", "http://" + "a" * 3_000],
)  # fmt: skip
def test_the_address_of_a_partition_is_an_http_url(url: str) -> None:
    """Whatever a node would do with another one."""
    with pytest.raises(BadRequest):
        decode(encode(JOIN | {"url": url}), PartitionJoin)


@pytest.mark.finding(16)
async def test_a_damaged_message_of_a_partition_is_refused_and_not_counted(tmp_path: Path) -> None:
    """Not an internal error, and the next sound message has its number."""
    async with dataflow_door(tmp_path) as door:
        assert await join(door, 1, "partition-1") == 200
        body: dict[str, Any] = {"boot": JOIN["boot"], "figures": {}}
        body["messages"] = [{"number": 1, "body": b"\xc1"}]
        answer = await door.call("POST", "/v1/partitions/1/messages", body=body)
        assert answer.status_code == 400
        sound: dict[str, Any] = {**body, "messages": []}
        answer = await door.call("POST", "/v1/partitions/1/messages", body=sound)
        assert answer.json()["received"] == 0


FOREIGN: dict[str, GroupEnded | ColumnsCompleted] = {
    "a group of another partition": GroupEnded(group_id=GroupId("p0-1"), policies=(), rows=()),
    "a group that names no partition": GroupEnded(group_id=GroupId("x"), policies=(), rows=()),
    "a row of another partition": GroupEnded(
        group_id=GroupId("p1-1"), policies=(), rows=(summary_of("p0-1.0.1"),)
    ),
    "a row that names no partition": GroupEnded(
        group_id=GroupId("p1-1"), policies=(), rows=(summary_of("x"),)
    ),
    "columns of another partition": ColumnsCompleted(
        group_id=GroupId("p11-1"), policy=POLICY, rows=()
    ),
    "an unknown policy": ColumnsCompleted(
        group_id=GroupId("p1-1"), policy=PolicyName("none"), rows=()
    ),
}


async def require_refused(report: object, tmp_path: Path) -> None:
    """A partition sends this report, and it is refused and not received."""
    async with dataflow_door(tmp_path) as door:
        assert await join(door, 1, "partition-1") == 200
        forged = {"number": 1, "body": msgspec.msgpack.encode(report)}
        body: dict[str, Any] = {"boot": JOIN["boot"], "figures": {}, "messages": [forged]}
        answer = await door.call("POST", "/v1/partitions/1/messages", body=body)
        assert answer.status_code == 400, answer.text
        body["messages"] = []
        answer = await door.call("POST", "/v1/partitions/1/messages", body=body)
        assert answer.json()["received"] == 0


@pytest.mark.finding(16)
@pytest.mark.parametrize("what", FOREIGN)
async def test_a_partition_reports_only_its_own_groups(what: str, tmp_path: Path) -> None:
    """Else one partition ends the groups of all others, with rows and rewards that it made up."""
    await require_refused(FOREIGN[what], tmp_path)


NUMBERS: dict[str, dict[str, Any]] = {
    "sampled tokens": {"sampled": {POLICY: 1 << 62}},
    "tokens of a role": {"roles": {POLICY: {"": 1 << 62}}},
    "lengths of samples": {"compute_cost": {POLICY: (1 << 62, 1)}},
    "squares of lengths": {"compute_cost": {POLICY: (1, 1 << 62)}},
    "rewards": {"values": {"reward.a": 1.7e308, "reward.b": 1.7e308}},
}


@pytest.mark.finding(16)
@pytest.mark.parametrize("what", NUMBERS)
async def test_no_row_of_a_partition_has_numbers_whose_sum_cannot_be_stored(
    what: str, tmp_path: Path
) -> None:
    """Each is one that a ledger stores, and their sum is none: it ended the service, or, a mean
    that is no number, each start after it."""
    row = msgspec.structs.replace(summary_of("p1-1.0.1"), **NUMBERS[what])
    report = GroupEnded(group_id=GroupId("p1-1"), policies=(), rows=(row,))
    await require_refused(report, tmp_path)


@pytest.mark.parametrize("value", [1.7e308, -1.7e308])
async def test_a_stage_writes_no_number_whose_sum_cannot_be_stored(
    value: float, tmp_path: Path
) -> None:
    """The honest partition would pass it on."""
    async with dataflow_door(tmp_path) as door:
        terms = {"reads": ["turns"], "writes": ["x"]}
        assert (await door.call("PUT", "/v1/readers/mine", Role.STAGE, body=terms)).is_success
        result = {"claim": {"row_id": "k", "arrival": 1, "epoch": 1}, "columns": {"x": value}}
        body = {"reader": "mine", "worker": "w", "results": [result]}
        answer = await door.call("PUT", "/v1/rows/columns", Role.STAGE, body=body)
        assert answer.status_code == 400 and "finite number" in answer.text


@pytest.mark.finding(16)
async def test_a_partition_acknowledges_no_order_that_was_not_sent(tmp_path: Path) -> None:
    """Its number is stored; the next start would count on from it, beyond what a ledger stores."""
    async with dataflow_door(tmp_path) as door:
        assert await join(door, 1, "partition-1") == 200
        body: dict[str, Any] = {"boot": JOIN["boot"], "received": 0, "wait_s": 0}
        sent = (await door.call("POST", "/v1/partitions/1/orders", body=body)).json()["messages"]
        num_sent = sent[-1]["number"]
        for ahead in (num_sent + 10_000, (1 << 63) - 1):
            body["received"] = ahead
            answer = await door.call("POST", "/v1/partitions/1/orders", body=body)
            assert answer.status_code == 400, answer.text
        body["received"] = num_sent
        answer = await door.call("POST", "/v1/partitions/1/orders", body=body)
        assert answer.status_code == 200, answer.text


# --- finding 18: files and templates -------------------------------------------------------------


@pytest.mark.finding(18)
def test_what_a_service_writes_is_for_its_owner_alone(tmp_path: Path) -> None:
    """Files and folders that a service makes: no other user of the machine reads them."""
    folder = RunFolder(tmp_path / "outputs" / "run")
    folder.write_config(demo_config(0))
    folder.allocate_endpoints(tmp_path, ())
    code = (
        "import sys, pathlib; from penstock.runs.service_process import enter_run; "
        "enter_run(pathlib.Path(sys.argv[1]), 'dataflow'); "
        "pathlib.Path(sys.argv[1], 'made').mkdir(); pathlib.Path(sys.argv[1], 'made/x').touch()"
    )
    old = os.umask(0o022)
    try:
        subprocess.run([sys.executable, "-c", code, str(folder.path)], check=True, timeout=500)
    finally:
        os.umask(old)
    assert mode(folder.path / "made") == 0o700
    assert mode(folder.path / "made" / "x") == 0o600


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.finding(18)
def test_the_run_folder_and_the_ledger_are_for_their_owner_alone(tmp_path: Path) -> None:
    """Whatever the umask of whoever starts the run."""
    old = os.umask(0)
    try:
        folder = RunFolder(tmp_path / "outputs" / "run")
        folder.write_config(demo_config(0))
        tables = open_tables(tmp_path)
    finally:
        os.umask(old)
    tables.close()
    assert mode(folder.path) == 0o700
    assert mode(tmp_path / "ledger.db") == 0o600


LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = {
    "nested loops": LOOPS,
    "a macro that calls itself twice": (
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}"
    ),
    "a loop over a loop": ("{% for i in range(99999) %}{{ range(99999)|sort|length }}{% endfor %}"),
    "a block that calls": (
        "{% macro twice() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        "{% for i in range(99999) %}{% call twice() %}{% for j in range(9999) %}{% endfor %}"
        "{% endcall %}{% endfor %}"
    ),
    "the check under another name": (
        "{% set check_deadline = 1 %}{% set environment = 1 %}" + LOOPS
    ),
}


@pytest.mark.finding(18)
@pytest.mark.parametrize("name", ENDLESS)
def test_a_template_has_a_deadline(name: str) -> None:
    """A model's chat template is stopped, by the CPU time of its own process."""
    template = TemplateProcess(ENDLESS[name], max_s=0.3)
    with pytest.raises(TemplateError, match="ran for more than"):
        template.render(messages=[])


BLOWN_UP = {
    "a text": "{{ ('a' * 10000000000)|length }}",
    "a list": "{{ ([1] * 10000000000)|length }}",
    "the other way round": "{{ (10000000000 * 'a')|length }}",
    "a power": "{{ (9 ** (9 ** 9))|string|length }}",
    "a power of a power": "{{ 2 ** 100000000000 }}",
}


@pytest.mark.finding(18)
@pytest.mark.parametrize("name", BLOWN_UP)
def test_a_template_cannot_multiply_without_end(name: str) -> None:
    """One operation, which Python does not interrupt, has a size and an end."""
    template = TemplateProcess(BLOWN_UP[name], max_s=0.3)
    with pytest.raises(TemplateError, match="more than"):
        template.render(messages=[])
    template.close()


def test_a_sound_template_renders_as_before() -> None:
    """Loops, macros, `loop`, products and errors work."""
    source = (
        "{% macro tag(m) %}<{{ m.role }}>{% endmacro %}"
        "{% for m in messages %}"
        "{{ tag(m) }}{{ m.content }}{{ '-' * 3 }}{{ loop.index }}"
        "{% endfor %}"
    )
    messages = [{"role": "user", "content": "hi"}, {"role": "tool", "content": "yo"}]
    assert TemplateProcess(source).render(messages=messages) == "<user>hi---1<tool>yo---2"
    assert TemplateProcess("{{ 2 * 3 }}{{ 2 ** 3 }}{{ 1.5 * 2 }}").render() == "683.0"
