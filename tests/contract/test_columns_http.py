# SPDX-License-Identifier: Apache-2.0
"""Columns, readers, spaces and blobs over real HTTP: durable before the response, nothing lost by
crashed workers or a restarted service, nothing done twice."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import sqlite3
from dataclasses import replace
from pathlib import Path

import httpx2
import pytest
from blake3 import blake3
from tests.contract.row_service import (
    RowServiceHost,
    RunningRowService,
    free_port,
    running_row_service,
)

from penstock.dataflow.client.row_stream import RowReader
from penstock.dataflow.client.rows import RowsClient
from penstock.dataflow.columns import column_store
from penstock.dataflow.columns.bundles import INLINE_BYTES
from penstock.dataflow.columns.values import BlobRef
from penstock.dataflow.ledger.segments import segment_path
from penstock.dataflow.service.rows.messages import (
    GetRequest,
    PutAnswer,
    PutRequest,
    PutRow,
)
from penstock.errors import BadRequest, Conflict, Forbidden, NotFound, TooLarge, Unreachable
from penstock.types import RowId
from penstock.wire.auth import Role


async def judge(client: RowsClient, *, ttl_s: float = 12.0, max_attempts: int = 3) -> RowReader:
    return await client.reader(
        "judge",
        reads=["text"],
        writes=["mark"],
        space="eval",
        ttl_s=ttl_s,
        max_attempts=max_attempts,
    )


async def test_rows_by_key(tmp_path: Path) -> None:
    with running_row_service(tmp_path) as running:
        async with running.client() as client:
            rows = {f"k{n}": {"text": b"t%d" % n, "weight": float(n)} for n in range(600)}
            assert await client.put("eval", rows) == []
            assert len(await client.put("eval", rows)) == 1200, "all duplicates"
            found = await client.get("eval", ["k599", "missing", "k3"], ["text"])
            assert {key: row.columns for key, row in found.items()} == {
                "k599": {"text": b"t599"},
                "k3": {"text": b"t3"},
            }
            with pytest.raises(Conflict, match="'text' of row 'k1'"):
                await client.put("eval", {"k1": {"text": b"other", "note": 1.0}})
            row = (await client.get("eval", ["k1"]))["k1"]
            assert row.columns == {"text": b"t1", "weight": 1.0, "note": 1.0}
            await client.put("other", {"k1": {"text": b"mine"}})
            await client.clear("eval")
            assert await client.get("eval", ["k1"]) == {}
            assert (await client.get("other", ["k1"]))["k1"].columns == {"text": b"mine"}


async def test_rows_of_too_many_bundles_are_put_in_several_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(column_store, "LOOKUP_BYTES", 1000)
    with running_row_service(tmp_path) as running:
        async with running.client() as client:
            for n in range(40):
                await client.put("eval", {f"k{n}": {"x": 1.0}})
            added = {f"k{n}": {"y": float(n)} for n in range(40)}
            assert await client.put("eval", added) == []
            found = await client.get("eval", [*added])
            assert {key: row.columns for key, row in found.items()} == {
                key: {"x": 1.0, **row} for key, row in added.items()
            }
            monkeypatch.setattr(column_store, "LOOKUP_BYTES", 10)
            with pytest.raises(TooLarge, match="fewer rows"):
                await client.put("eval", {"k0": {"z": 1.0}})


async def test_a_quota_stops_puts_and_names_the_fix(tmp_path: Path) -> None:
    with running_row_service(tmp_path) as running:
        async with running.client(patience_s=1.5) as client:
            await client.set_quota("eval", 1000)
            await client.put("eval", {"a": {"x": bytes(900)}})
            with pytest.raises(Unreachable, match=r"507.*clear it \(DELETE /v1/spaces/eval\)"):
                await client.put("eval", {"b": {"x": bytes(900)}})
            await client.clear("eval")
            await client.put("eval", {"b": {"x": bytes(900)}})


async def test_a_call_with_a_bad_value_stores_nothing(tmp_path: Path) -> None:
    with running_row_service(tmp_path) as running:
        async with running.client() as client:
            with pytest.raises(BadRequest, match="finite"):
                await client.put("eval", {"a": {"x": 1.0}, "b": {"x": float("nan")}})
            columns = {"x": BlobRef(digest="f" * 64, size=1)}
            body = PutRequest(rows=(PutRow(key=RowId("a"), columns=columns),))
            with pytest.raises(BadRequest, match="first"):
                await client.call("POST", "/v1/spaces/eval/rows", body, PutAnswer)
            with pytest.raises(Forbidden, match="another space"):
                await client.put("train", {"a": {"x": 1.0}})
            assert await client.get("eval", ["a", "b"]) == {}


async def test_stages_stream_rollout_rows_and_overlap(tmp_path: Path) -> None:
    with running_row_service(tmp_path) as running:
        async with running.client() as client:
            scorer = await client.reader("scorer", reads=["turns"], writes=["reward"])
            refer = await client.reader("refer", reads=["turns", "reward"], writes=["reference"])
            for n in range(6):
                running.deliver(f"p0-{n}.0.1", b"turns %d" % n, 0.5 if n == 5 else None)
            order: list[str] = []

            async def score() -> None:
                async for row in scorer.stream(max_rows=2):
                    order.append(f"score {row.key}")
                    turns = row["turns"]
                    assert isinstance(turns, bytes)
                    assert await row.write(reward=float(len(turns)))
                    if row.key == "p0-4.0.1":
                        return

            async def follow() -> None:
                num_seen = 0
                async for row in refer.stream():
                    order.append(f"refer {row.key}")
                    await row.write(reference=b"log-probs")
                    num_seen += 1
                    if num_seen == 6:
                        return

            await asyncio.wait_for(asyncio.gather(score(), follow()), 60)
            assert order.index("refer p0-0.0.1") < order.index("score p0-4.0.1"), "no barrier"
            row = (await client.get("train", ["p0-3.0.1"]))["p0-3.0.1"]
            assert row.columns == {"turns": b"turns 3", "reward": 7.0, "reference": b"log-probs"}


async def test_a_writer_may_store_its_column_by_version_too(tmp_path: Path) -> None:
    """`mark@7` belongs to whoever writes `mark`, and like it is written once, under a lease."""
    with running_row_service(tmp_path) as running:
        async with running.client() as client:
            reader = await judge(client)
            await client.put("eval", {"a": {"text": b"a"}, "b": {"text": b"b"}})
            [first, second] = await reader.lease(2)
            assert await first.write(**{"mark": 1.0, "mark@7": b"of version 7"})
            assert first.is_finished
            with pytest.raises(BadRequest, match="may not write column 'note@7'"):
                await second.write(**{"note@7": 1.0})
            await second.release()
            assert not await second.write(**{"mark@8": 1.0}), "without its lease"
            row = (await client.get("eval", ["a"]))["a"]
            assert row.columns == {"text": b"a", "mark": 1.0, "mark@7": b"of version 7"}


async def test_rows_of_a_crashed_worker_are_redelivered_and_each_is_done_once(
    tmp_path: Path,
) -> None:
    with running_row_service(tmp_path) as running:
        async with running.client() as client:
            rows = {f"k{n:02}": {"text": b"t"} for n in range(20)}
            await client.put("eval", rows)
            dying = running.client()
            first = await judge(dying, ttl_s=1.0)
            stream = first.stream(max_rows=8)
            row = await anext(stream)
            await row.write(mark=1.0)
            await anext(stream)
            await dying._caller.close()  # pyright: ignore[reportPrivateUsage]
            # as a kill would: no acknowledgement, renewal or release
            second = await judge(client, ttl_s=1.0)
            marked = 1
            async with contextlib.aclosing(second.stream(max_rows=8)) as rest:
                async for again in rest:
                    assert again.key != row.key, "its column exists"
                    assert await again.write(mark=2.0)
                    marked += 1
                    if marked == 20:
                        break
            found = await client.get("eval", [*rows], ["mark"])
            assert [r.columns["mark"] for r in found.values()] == [1.0] + [2.0] * 19
            with contextlib.suppress(Exception):
                await stream.aclose()


async def test_readers_continue_across_a_restart_of_the_service(tmp_path: Path) -> None:
    port = free_port()
    with running_row_service(tmp_path, port) as running:
        client = running.client()
        await client.put("eval", {f"k{n:02}": {"text": b"t"} for n in range(10)})
        reader = await client.reader("export", reads=["text"], space="eval")
        stream = reader.stream(max_rows=4)
        seen = [(await anext(stream)).key for _ in range(3)]
    with running_row_service(tmp_path, port, now=2000.0):
        async with contextlib.aclosing(stream) as rest:
            while len(seen) < 10:
                seen.append((await asyncio.wait_for(anext(rest), 60)).key)
    await client.close()
    assert seen == [f"k{n:02}" for n in range(10)], "each once, in order"


async def test_long_work_keeps_its_row(tmp_path: Path) -> None:
    with running_row_service(tmp_path) as running:
        async with running.client() as client:
            await client.put("eval", {"a": {"text": b"t"}})
            reader = await judge(client, ttl_s=1.5)
            async for row in reader.stream():
                await asyncio.sleep(4.0)
                assert await row.write(mark=1.0), "longer than its ttl, and still its own"
                break
            mark = (await client.get("eval", ["a"], ["mark"]))["a"]
            assert mark.columns == {"mark": 1.0}


@pytest.mark.parametrize("writes", [True, False])
async def test_leaving_the_loop_reports_nothing_and_returns_the_rows(
    tmp_path: Path, writes: bool
) -> None:
    """The documented loop with `break` in it: the stream ends with the client, at the latest."""
    reports: list[str] = []
    asyncio.get_running_loop().set_exception_handler(
        lambda loop, context: reports.append(f"{context['message']}: {context.get('exception')}")
    )
    with running_row_service(tmp_path) as running:
        async with running.client() as client:
            await client.put("eval", {f"k{n}": {"text": b"t"} for n in range(4)})
            async for row in (await judge(client)).stream():
                if writes:
                    await row.write(mark=1.0)
                break
        gc.collect()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait([task])
        gc.collect()
        assert reports == []
        assert running.host.rows.state("judge").num_leased == 0, "nobody waits for a ttl"


async def test_a_large_freed_row_waits_for_its_stage_and_then_goes(tmp_path: Path) -> None:
    """Its payload is a blob, which sweeping removes once neither training nor a stage needs it."""
    data = bytes(2 << 20)
    digest = blake3(data).hexdigest()
    with running_row_service(tmp_path, stages=["export"]) as running:
        async with running.client() as client:
            exporter = await client.reader("export", reads=["turns"])
            await client.put_blob(data)
            running.call(running.host.deliver_blob("p0-1.0.1", digest, len(data)))
            running.call(running.host.free("p0-1"))
            path = running.host.rows.blobs.path(digest)
            os.utime(path, (0, 0))
            running.call(running.host.rows.sweep_blobs())
            assert path.exists(), "the stage has not finished it"
            async with contextlib.aclosing(exporter.stream()) as stream:
                row = await anext(stream)
                assert row["turns"] == data
                await row.done()
            running.call(running.host.rows.tick())
            os.utime(path, (0, 0))
            running.call(running.host.rows.sweep_blobs())
            assert not path.exists()


async def test_a_row_that_crashes_its_workers_fails_after_max_attempts(tmp_path: Path) -> None:
    with running_row_service(tmp_path) as running:
        async with running.client() as client:
            await client.put("eval", {"a": {"text": b"t"}})
            for _ in range(2):
                reader = await judge(client, max_attempts=2)
                with pytest.raises(ZeroDivisionError):
                    async with contextlib.aclosing(reader.stream()) as rows:
                        async for row in rows:
                            await row.write(mark=1 / (len(row.columns) - 1))
            failed = (await client.get("eval", ["a"]))["a"].failed["mark"]
            assert failed.kind == "attempts" and "left the loop" in failed.detail


async def test_leaving_a_row_without_its_columns_is_an_error(tmp_path: Path) -> None:
    with running_row_service(tmp_path) as running:
        async with running.client() as client:
            await client.put("eval", {"a": {"text": b"t"}, "b": {"text": b"t"}})
            reader = await judge(client)
            with pytest.raises(BadRequest, match=r"left without \['mark'\]"):
                async for _ in reader.stream():
                    pass


async def test_long_values_are_uploaded_as_blobs(tmp_path: Path) -> None:
    data = random.Random(0).randbytes(5_000_000)
    with running_row_service(tmp_path) as running:
        async with running.client() as client:
            await client.put("eval", {"a": {"text": data}})
            assert (await client.get("eval", ["a"]))["a"].columns == {"text": data}
            await _resume(running, client, data[::-1])
    segments = sum(path.stat().st_size for path in (tmp_path / "ledger" / "segments").iterdir())
    assert segments < 1_000_000, "the payload store never saw it"


@pytest.mark.parametrize("end", [b"!", b"!!"], ids=["damaged", "grown"])
async def test_a_row_with_a_damaged_blob_fails_alone(tmp_path: Path, end: bytes) -> None:
    """It ended the reader, again after each restart, and cost the rows beside it their attempts."""
    data = random.Random(1).randbytes(2_000_000)
    with running_row_service(tmp_path) as running:
        async with running.client() as client:
            await client.put("eval", {"a": {"text": data + b"."}, "b": {"text": b"t"}})
            path = running.host.rows.blobs.path(blake3(data + b".").hexdigest())
            path.chmod(0o600)
            path.write_bytes(data + end)
            reader = await judge(client, max_attempts=1)
            async with contextlib.aclosing(reader.stream()) as rows:
                row = await anext(rows)
                assert row["text"] == b"t"
                await row.write(mark=1.0)
            found = await client.get("eval", ["a", "b"])
            assert found["b"].columns["mark"] == 1.0
            assert "cannot be read" in found["a"].failed["mark"].detail
            assert found["a"].failed["text"].kind == "damaged"


async def _resume(running: RunningRowService, client: RowsClient, data: bytes) -> None:
    digest = blake3(data).hexdigest()
    url = f"{running.url}/v1/blobs/{digest}"
    headers = {"authorization": f"Bearer {running.token(Role.ROLLOUT)}"}
    async with httpx2.AsyncClient(headers=headers, timeout=60) as http:
        answer = await http.put(f"{url}?offset=0&size={len(data)}", content=data[:2_000_000])
        assert answer.json() == {"held_bytes": 2_000_000, "complete": False}
        assert (await http.get(url)).status_code == 404, "not before it is complete"
        hole = await http.put(f"{url}?offset=3000000&size={len(data)}", content=b"x")
        assert hole.status_code == 409
        more = await http.put(f"{url}?offset=2000000&size={len(data)}", content=data)
        assert more.status_code == 413
        assert (await client.put_blob(data)).size == len(data)
        part = await http.get(url, headers={"range": "bytes=100-199"})
        assert (part.status_code, part.content) == (206, data[100:200])
        again = await http.put(f"{url}?offset=0&size={len(data)}", content=data)
        assert again.json() == {"held_bytes": len(data), "complete": True}


async def test_roles(tmp_path: Path) -> None:
    with running_row_service(tmp_path) as running:
        async with running.client(Role.STAGE) as stage, running.client(Role.READER) as reader:
            await stage.put("eval", {"a": {"text": b"t"}})
            stages = await judge(stage)
            with pytest.raises(Forbidden):
                await reader.put("eval", {"b": {"text": b"t"}})
            with pytest.raises(Forbidden, match="may not act for 'mine'"):
                await reader.reader("mine", reads=["text"], writes=["x"], space="eval")
            with pytest.raises(Forbidden, match="may not act for 'judge'"):
                await RowReader(reader, stages.state).lease(1)
            exporter = await reader.reader("export", reads=["text"], space="eval")
            assert [row.key for row in await exporter.lease(1)] == ["a"]
            with pytest.raises(BadRequest, match="a column may appear only once"):
                await stage.reader("loop", reads=["x"], writes=["x"])
            unknown = RowReader(reader, replace(exporter.state, name="unknown"))
            with pytest.raises(NotFound, match="declare it"):
                await unknown.lease(1)


async def test_damage_is_contained_to_the_rows_put_together(tmp_path: Path) -> None:
    long = bytes(INLINE_BYTES)
    with running_row_service(tmp_path) as running:
        async with running.client() as client:
            await client.put("eval", {"a": {"x": long}, "b": {"x": long}})
            await client.put("eval", {"c": {"x": long + b"c"}, "d": {"y": 1.0}})
            segment = segment_path(tmp_path / "ledger" / "segments", 1)
            with segment.open("r+b") as file:
                file.seek(100)
                file.write(b"!")
            found = await client.get("eval", ["a", "b", "c", "d"])
            assert [found[key].failed["x"].kind for key in "ab"] == ["damaged"] * 2
            assert found["c"].columns == {"x": long + b"c"} and not found["c"].failed
            assert found["d"].columns == {"y": 1.0}
            database = tmp_path / "ledger" / "ledger.db"
            with contextlib.closing(sqlite3.connect(database)) as other:
                other.execute("UPDATE items SET arrival = arrival + 9 WHERE row_id = 'd'")
                other.commit()
            found = await client.get("eval", ["d"])
            assert "of its bundle does not hold this row" in found["d"].failed["y"].detail


async def test_acknowledged_writes_are_on_disk(tmp_path: Path) -> None:
    host = RowServiceHost(tmp_path)
    body = PutRequest(rows=(PutRow(key=RowId("a"), columns={"x": 1.0}),))
    for n in range(20):
        await host.rows.put(f"s{n}", body, "user")
        with contextlib.closing(sqlite3.connect(tmp_path / "ledger.db")) as other:
            found = other.execute("SELECT count(*) FROM bundles WHERE space = ?", (f"s{n}",))
            assert found.fetchone() == (1,)
    host.ledger.close()


async def test_a_put_after_a_clear_stays(tmp_path: Path) -> None:
    """A group commit runs deletions after writes, so both must not be in the same one."""
    host = RowServiceHost(tmp_path)
    first = PutRequest(rows=(PutRow(key=RowId("a"), columns={"x": 1.0}),))
    second = PutRequest(rows=(PutRow(key=RowId("a"), columns={"y": 2.0}),))
    for _ in range(10):
        await host.rows.put("eval", first, "user")
        clearing = asyncio.create_task(host.rows.clear("eval"))
        await asyncio.sleep(0)
        putting = asyncio.create_task(host.rows.put("eval", second, "user"))
        await asyncio.gather(clearing, putting)
        (row,) = (await host.rows.get("eval", GetRequest(keys=(RowId("a"),)))).rows
        assert row.exists and row.columns == {"y": 2.0}
        await host.rows.clear("eval")
    host.ledger.close()


@pytest.mark.parametrize("seed", range(3))
async def test_against_a_dictionary_with_restarts(tmp_path: Path, seed: int) -> None:
    """Any order of puts, gets, clears and restarts behaves like a dictionary."""
    rng = random.Random(seed)
    port = free_port()
    truth: dict[tuple[str, str], dict[str, float]] = {}
    client: RowsClient | None = None
    for boot in range(3):
        with running_row_service(tmp_path, port, now=1000.0 * (boot + 1)) as running:
            client = client or running.client()
            for _ in range(25):
                space, key = rng.choice(["eval", "probe"]), rng.choice("abcd")
                name, value = rng.choice("xyz"), float(rng.randrange(2))
                if rng.random() < 0.1:
                    with contextlib.suppress(NotFound):
                        await client.clear(space)
                    truth = {where: row for where, row in truth.items() if where[0] != space}
                elif rng.random() < 0.5:
                    existing = truth.setdefault((space, key), {}).setdefault(name, value)
                    if existing == value:
                        await client.put(space, {key: {name: value}})
                    else:
                        with pytest.raises(Conflict):
                            await client.put(space, {key: {name: value}})
                found = await client.get(space, list("abcd"))
                expected = {k: row for (s, k), row in truth.items() if s == space}
                assert {k: row.columns for k, row in found.items()} == expected
    assert client is not None
    await client.close()
