# SPDX-License-Identifier: Apache-2.0
"""The web server of the dashboard: files of the page for anybody, data of runs for its token.

Owns the addresses, the headers that keep a page with hostile text harmless, and the stream of
changes. Every route only reads. Reading happens in threads, a few at a time, so that a slow disk
holds up neither the page nor the run.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import mimetypes
import re
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from importlib import resources
from importlib.resources.abc import Traversable
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route as StarletteRoute

from penstock.dashboard import decisions, flow, overview, rows, spend, timeline, versions
from penstock.dashboard.shown_run import ShownRun
from penstock.dataflow.explain.explain import explain
from penstock.errors import BadRequest, NotFound, PenstockError, WireError
from penstock.wire.auth import Role, Verifier
from penstock.wire.codec import JSON, encode_json
from penstock.wire.routes import Call, RawResponse, route, routes_of
from penstock.wire.server import build_app

READERS = frozenset({Role.READER, Role.ADMIN})
NUM_THREADS = 4
"""Queries at a time."""
EVENTS_S = 1.0
TURNS = 5
"""How often between two states a stream looks whether the dashboard ends."""
KEEP_ALIVE_S = 15.0
MAX_METRICS = 24
IMPORT_MAP = re.compile(r'<script type="importmap">(.*?)</script>', re.DOTALL)


def build(
    runs: Sequence[ShownRun], verifier: Verifier, is_ending: Callable[[], bool] = lambda: False
) -> Starlette:
    """The app; it closes the runs when it ends. Once `is_ending`, open pages are notified."""

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncGenerator[None]:
        yield
        for run in runs:
            run.close()

    app = build_app(
        routes_of(Dashboard(runs, is_ending)),
        verifier,
        title="penstock dashboard",
        lifespan=lifespan,
    )
    app.router.routes.extend(page_routes())
    return app


class Dashboard:
    def __init__(self, runs: Sequence[ShownRun], is_ending: Callable[[], bool]) -> None:
        self._runs = {run.key: run for run in runs}
        self._is_ending = is_ending
        self._room = asyncio.Semaphore(NUM_THREADS)

    @route("GET", "/api/runs", READERS, response=None)
    async def runs(self, call: Call) -> RawResponse:
        """State, progress and health of each run."""
        return await self._read(self._summaries)

    def _summaries(self) -> list[dict[str, Any]]:
        return [overview.summarise(run) for run in self._runs.values()]

    @route("GET", "/api/runs/{run}/curves", READERS, response=None, query=("metrics",))
    async def curves(self, call: Call) -> RawResponse:
        """Metrics by step, and scores of evaluations."""
        metrics = call.query.get("metrics", "").split(",")[:MAX_METRICS]
        return await self._of_run(call, lambda run: overview.curves(run, metrics))

    @route("GET", "/api/runs/{run}/rows", READERS, response=None, query=("before",))
    async def rows(self, call: Call) -> RawResponse:
        """One page of trajectories; filters are in the query."""
        query = rows.PageQuery.parse(call.query)
        return await self._of_run(call, lambda run: rows.read_page(run, query))

    @route("GET", "/api/runs/{run}/rows/{id}", READERS, response=None)
    async def row(self, call: Call) -> RawResponse:
        """One trajectory with its text and tokens."""
        return await self._of_run(call, lambda run: rows.read_trajectory(run, call.path["id"]))

    @route("GET", "/api/runs/{run}/groups/{id}", READERS, response=None)
    async def group(self, call: Call) -> RawResponse:
        """All attempts of one group."""
        return await self._of_run(call, lambda run: rows.read_group(run, call.path["id"]))

    @route("GET", "/api/runs/{run}/explain", READERS, response=None, query=("id",))
    async def explain(self, call: Call) -> RawResponse:
        """What happened to an id, and why."""
        id = call.query.get("id", "").strip()
        if not id:
            raise BadRequest("pass the id of a task, group, row, batch or version")
        return await self._of_run(call, lambda run: explain(run.recorded, id))

    @route("GET", "/api/runs/{run}/flow", READERS, response=None)
    async def flow(self, call: Call) -> RawResponse:
        """What is at each place between sources and weights."""
        return await self._of_run(call, flow.read_flow)

    @route("GET", "/api/runs/{run}/timeline", READERS, response=None, query=("before",))
    async def timeline(self, call: Call) -> RawResponse:
        """What nodes and trainers did over time."""
        text = call.query.get("before", "") or str(rows.NEWEST)
        if not text.isdecimal() or len(text) > 19 or int(text) > rows.NEWEST:
            raise BadRequest("before is the arrival of a row, a number")
        return await self._of_run(call, lambda run: timeline.read_timeline(run, int(text)))

    @route("GET", "/api/runs/{run}/rules", READERS, response=None)
    async def rules(self, call: Call) -> RawResponse:
        """What the data rules decided."""
        return await self._of_run(call, decisions.read_decisions)

    @route("GET", "/api/runs/{run}/weights", READERS, response=None)
    async def weights(self, call: Call) -> RawResponse:
        """Published versions and how they are stored."""
        return await self._of_run(call, versions.read_versions)

    @route("GET", "/api/runs/{run}/spend", READERS, response=None)
    async def spend(self, call: Call) -> RawResponse:
        """Tokens by fate and seconds by activity."""
        return await self._of_run(call, spend.read_spend)

    @route("GET", "/api/runs/{run}/stalls", READERS, response=None)
    async def stalls(self, call: Call) -> RawResponse:
        """Who waits for whom, and recorded stalls."""
        return await self._of_run(call, flow.read_stalls)

    @route("GET", "/api/events", READERS, response=None)
    async def events(self, call: Call) -> Response:
        """Server-sent events: the state of the runs whenever it has changed."""
        return StreamingResponse(self._changes(), media_type="text/event-stream")

    # --- reading ------------------------------------------------------------------------------

    async def _changes(self) -> AsyncIterator[bytes]:
        """A slow reader gets fewer states, never a queue of them. `end` comes before the last
        state: a page without it has lost the connection, and asks again."""
        sent, silent_s, is_last = "", 0.0, False
        while not is_last:
            if is_last := self._is_ending():
                yield b"event: end\ndata:\n\n"
            found = await self._read(self._summaries)
            state = re.sub(rb'"at":[0-9.e+]+,', b"", found.body)
            if (digest := hashlib.sha256(state).hexdigest()) != sent:
                sent, silent_s = digest, 0.0
                yield b"data: " + found.body + b"\n\n"
            elif silent_s >= KEEP_ALIVE_S:
                silent_s = 0.0
                yield b": alive\n\n"
            for _ in range(0 if is_last else TURNS):
                if not self._is_ending():
                    await asyncio.sleep(EVENTS_S / TURNS)
            silent_s += EVENTS_S

    async def _of_run(self, call: Call, read: Callable[[ShownRun], Any]) -> RawResponse:
        run = self._runs.get(call.path["run"])
        if run is None:
            raise NotFound(
                f"no run {call.path['run'][:80]!r} here; it shows {', '.join(self._runs)}"
            )
        return await self._read(lambda: read(run))

    async def _read(self, read: Callable[[], Any]) -> RawResponse:
        def read_and_encode() -> bytes:
            return encode_json(read())

        async with self._room:
            try:
                return RawResponse(await asyncio.to_thread(read_and_encode), JSON)
            except WireError:
                raise
            except PenstockError as error:  # the run's files say so: an answer, not a fault
                raise BadRequest(str(error)) from error


# --- the page ---------------------------------------------------------------------------------


def page_routes() -> list[StarletteRoute]:
    """The page and its files, from memory; they hold no data and need no token."""
    files = dict(_files(resources.files("penstock.dashboard") / "static", ""))
    headers = _headers(files["/index.html"].decode())
    files["/"] = files["/index.html"]
    return [StarletteRoute(path, _page(path, data, headers)) for path, data in files.items()]


def _files(folder: Traversable, at: str) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    for entry in folder.iterdir():
        path = f"{at}/{entry.name}"
        found += _files(entry, path) if entry.is_dir() else [(path, entry.read_bytes())]
    return found


def _headers(page: str) -> dict[str, str]:
    """Nothing runs or loads but our own files: no inline script besides the import map, no other
    host, no frame."""
    inline = IMPORT_MAP.search(page)
    assert inline is not None, "index.html has an import map"
    digest = base64.b64encode(hashlib.sha256(inline[1].encode()).digest()).decode()
    policy = (
        f"default-src 'none'; script-src 'self' 'sha256-{digest}'; style-src 'self'; "
        "connect-src 'self'; img-src 'self' data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    )
    return {
        "content-security-policy": policy,
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "cache-control": "no-cache",
    }


def _page(path: str, data: bytes, headers: dict[str, str]) -> Callable[[Request], Any]:
    kind = "text/javascript" if path.endswith((".mjs", ".js")) else mimetypes.guess_type(path)[0]
    media_type = "text/html" if path == "/" else kind or "text/plain"
    tag = f'"{hashlib.sha256(data).hexdigest()[:32]}"'

    async def respond(request: Request) -> Response:
        own = {**headers, "etag": tag}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=own)
        return Response(data, media_type=media_type, headers=own)

    return respond
