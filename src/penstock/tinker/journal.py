# SPDX-License-Identifier: Apache-2.0
"""The durable rows of a Tinker server: sessions, models, requests with their results, checkpoints.

One SQLite database as a ledger's, written in group commits. A request is a row before it is
accepted, and its result is in that row before anybody gets it. Owns the tables and their meaning;
decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from blake3 import blake3

from penstock.dataflow.ledger.sqlite import DURABLE, SqliteDatabase
from penstock.errors import NotFound, StoreError

FORMAT = "2"
FILE = "journal.sqlite"
ROW_BYTES = 2048
"""What a session's row takes on disk, from above."""


class Kind(StrEnum):
    """What a request asks for."""

    CREATE = "create_model"
    LOAD = "load_weights"
    FORWARD = "forward"
    FORWARD_BACKWARD = "forward_backward"
    OPTIM = "optim_step"
    SAVE = "save_weights"
    SAVE_SAMPLER = "save_weights_for_sampler"
    SAMPLE = "sample"


class State(StrEnum):
    WAITING = "waiting"
    DONE = "done"
    FAILED = "failed"
    """It changed nothing; its result is an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    id: str
    lane: str
    """The model, or the sampling session."""
    number: int
    """Its place in the lane; requests of a model take effect in this order."""
    owner: str
    kind: Kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    state: State
    content: bytes
    media_type: str


class Change(NamedTuple):
    """One statement of a transaction."""

    statement: str
    values: Mapping[str, Any]


_TABLES = (
    "CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS sessions (id TEXT PRIMARY KEY, owner TEXT NOT NULL, at FLOAT)",
    "CREATE TABLE IF NOT EXISTS models (id TEXT PRIMARY KEY, owner TEXT NOT NULL, "
    "config TEXT NOT NULL, snapshot BIGINT NOT NULL, digest TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS requests (id TEXT PRIMARY KEY, lane TEXT NOT NULL, "
    "number BIGINT NOT NULL, owner TEXT NOT NULL, kind TEXT NOT NULL, digest TEXT NOT NULL, "
    "tries BIGINT NOT NULL DEFAULT 0, body BLOB, state TEXT NOT NULL, content BLOB, "
    "media_type TEXT, at FLOAT)",
    "CREATE INDEX IF NOT EXISTS requests_by_lane ON requests (lane, number)",
    "CREATE INDEX IF NOT EXISTS requests_by_state ON requests (state)",
    "CREATE INDEX IF NOT EXISTS requests_finished ON requests (at) WHERE state != 'waiting'",
    "CREATE INDEX IF NOT EXISTS requests_finished_by_lane ON requests (lane, number) "
    "WHERE state != 'waiting'",
    "CREATE TABLE IF NOT EXISTS samplers (id TEXT PRIMARY KEY, owner TEXT NOT NULL, "
    "path TEXT NOT NULL, folder TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS checkpoints (path TEXT PRIMARY KEY, owner TEXT NOT NULL, "
    "folder TEXT NOT NULL, config TEXT NOT NULL, num_bytes BIGINT NOT NULL, ends_at FLOAT)",
)
"""To see the state of a row, SQLite reads all of its body, which comes first; so what is asked of
finished requests is asked of the last two indices, which leave out those that wait."""
_REQUEST = "SELECT id, lane, number, owner, kind FROM requests"


def digest_of(content: bytes) -> str:
    return blake3(content).hexdigest()


def sampler_row(id: str, owner: str, path: str, folder: str) -> Change:
    """Of a sampling session; path: of saved weights, if it has any."""
    values = {"id": id, "owner": owner, "path": path, "folder": folder}
    statement = "INSERT INTO samplers VALUES (:id, :owner, :path, :folder) ON CONFLICT DO NOTHING"
    return Change(statement, values)


class Journal:
    """Written by one event loop, read from any thread."""

    def __init__(self, folder: Path) -> None:
        self._database = SqliteDatabase((folder / FILE).absolute().as_uri(), DURABLE)
        self._unwritten: list[tuple[tuple[Change, ...], asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None
        with self._database.begin():
            for statement in _TABLES:
                self._database.execute(statement, {})
            first = "INSERT INTO meta VALUES ('format', :format) ON CONFLICT DO NOTHING"
            self._database.execute(first, {"format": FORMAT})
        found = self._database.read("SELECT value FROM meta WHERE key = 'format'", {})
        if found != [(FORMAT,)]:
            raise StoreError(
                f"{folder / FILE} has format {found[0][0]}, this penstock reads {FORMAT}; serve it "
                "with the penstock that wrote it"
            )

    async def close(self) -> None:
        if self._writer is not None:
            await self._writer  # a thread uses the database
        self._database.close()

    async def write(self, *changes: Change) -> None:
        """All of them or none, durable when this returns; what many callers write meanwhile is one
        transaction."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._unwritten.append((changes, done))
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._drain())
        await done

    async def _drain(self) -> None:
        while self._unwritten:
            batch, self._unwritten = self._unwritten, []
            try:
                await asyncio.to_thread(self._commit, [one for each, _ in batch for one in each])
            except Exception as error:  # a full disk, say: every writer hears it
                for _, done in batch:
                    if not done.done():
                        done.set_exception(error)
            else:
                for _, done in batch:
                    if not done.done():
                        done.set_result(None)

    def _commit(self, changes: list[Change]) -> None:
        with self._database.begin():
            for statement, values in changes:
                self._database.execute(statement, values)

    def rows(self, query: str, **values: Any) -> list[tuple[Any, ...]]:
        return self._database.read(query, values)

    # --- requests --------------------

    def accepted(self, request: Request, body: bytes, at: float) -> Change:
        """The same request again changes nothing."""
        return Change(
            "INSERT INTO requests (id, lane, number, owner, kind, digest, body, state, at) VALUES "
            "(:id, :lane, :number, :owner, :kind, :digest, :body, 'waiting', :at) "
            "ON CONFLICT DO NOTHING",
            {
                "id": request.id,
                "lane": request.lane,
                "number": request.number,
                "owner": request.owner,
                "kind": request.kind.value,
                "digest": digest_of(body),
                "body": body,
                "at": at,
            },
        )

    def tried(self, request: Request) -> Change:
        """Its computation begins once more."""
        statement = "UPDATE requests SET tries = tries + 1 WHERE id = :id"
        return Change(statement, {"id": request.id})

    def num_tries(self, request: Request) -> int:
        [(number,)] = self.rows("SELECT tries FROM requests WHERE id = :id", id=request.id)
        return number

    def finished(self, request: Request, result: Result, at: float, *, keeps_body: bool) -> Change:
        """A result is final: a second one changes nothing. `keeps_body`: it is applied again after
        a crash."""
        return Change(
            "UPDATE requests SET state = :state, content = :content, media_type = :media_type, "
            "at = :at, body = CASE WHEN :keeps_body THEN body END "
            "WHERE id = :id AND state = 'waiting'",
            {
                "id": request.id,
                "keeps_body": keeps_body,
                "state": result.state.value,
                "content": result.content,
                "media_type": result.media_type,
                "at": at,
            },
        )

    def stored_bytes(self, owner: str) -> int:
        """Of requests, results, sessions and saved weights of this owner."""
        queries = (
            "SELECT SUM(COALESCE(LENGTH(body), 0) + COALESCE(LENGTH(content), 0)) FROM requests "
            "WHERE owner = :owner",
            "SELECT SUM(num_bytes) FROM checkpoints WHERE owner = :owner",
            f"SELECT {ROW_BYTES} * COUNT(*) FROM sessions WHERE owner = :owner",
            f"SELECT {ROW_BYTES} * COUNT(*) FROM samplers WHERE owner = :owner",
        )
        return sum(int(self.rows(query, owner=owner)[0][0] or 0) for query in queries)

    def result_bytes(self, id: str, owner: str) -> int | None:
        """How large a result is, None while there is none; raises NotFound. Reads neither it nor
        the request, however large."""
        query = "SELECT LENGTH(content) FROM requests WHERE id = :id AND owner = :owner"
        found = self.rows(query, id=id, owner=owner)
        if not found:
            raise NotFound(f"no request {id} of this credential")
        return found[0][0]

    def owner_and_digest(self, id: str) -> tuple[str, str] | None:
        found = self.rows("SELECT owner, digest FROM requests WHERE id = :id", id=id)
        return None if not found else (found[0][0], found[0][1])

    def result(self, id: str) -> Result:
        """One that has been written; raises NotFound."""
        query = (
            "SELECT state, content, media_type FROM requests WHERE id = :id AND state != 'waiting'"
        )
        found = self.rows(query, id=id)
        if not found:
            raise NotFound(f"the result of {id} is no longer kept")
        state, content, media_type = found[0]
        return Result(state=State(state), content=content, media_type=media_type)

    def body(self, request: Request) -> bytes:
        """As it was received, or StoreError."""
        query = "SELECT body, digest FROM requests WHERE id = :id"
        [(body, digest)] = self.rows(query, id=request.id)
        if body is None or digest_of(body) != digest:
            raise StoreError(
                f"the body of request {request.id} is damaged; restore {FILE} from a backup"
            )
        return body

    def waiting(self) -> list[Request]:
        return self._requests(f"{_REQUEST} WHERE state = 'waiting' ORDER BY lane, number")

    def next_number(self, lane: str) -> int:
        """Of the request that takes effect next in a lane."""
        query = "SELECT MAX(number) FROM requests WHERE lane = :lane AND state != 'waiting'"
        [(newest,)] = self.rows(query, lane=lane)
        return 0 if newest is None else int(newest) + 1

    def done_after(self, lane: str, number: int) -> list[Request]:
        """What took effect after a snapshot, in order."""
        where = "lane = :lane AND number > :number AND state != 'waiting' AND state = 'done'"
        query = f"{_REQUEST} WHERE {where} ORDER BY number"
        return self._requests(query, lane=lane, number=number)

    def outdated(self, before: float) -> Change:
        """Delete results from before this time. One whose request may still be applied again stays:
        its body is needed."""
        return Change(
            "DELETE FROM requests WHERE state != 'waiting' AND at < :before AND "
            "(kind = 'sample' OR (body IS NULL AND number < (SELECT MAX(r.number) FROM "
            "requests r WHERE r.lane = requests.lane AND r.state != 'waiting')))",
            {"before": before},
        )

    def _requests(self, query: str, **values: Any) -> list[Request]:
        return [
            Request(id=id, lane=lane, number=number, owner=owner, kind=Kind(kind))
            for id, lane, number, owner, kind in self.rows(query, **values)
        ]
