# SPDX-License-Identifier: Apache-2.0
"""Canary secrets in a recorded run and its config, looked for behind every door that shows runs to
people and to other programs: dashboard, MCP, exports, trackers, traces; and in a Tinker server."""

from __future__ import annotations

import asyncio
import importlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2
import pytest
import yaml
from tests.attacks.test_canaries import Sink, canaries, configure, leaked
from tests.unit.audit.ledgers import Run, small_config
from tests.unit.cli.test_samples import with_tokenizer
from tests.unit.runs.test_rollouts import Collector, collector
from tests.unit.tinker.tinker_harness import TINY, make_folder

from penstock.bounds import MAX_AGENT_CHARS
from penstock.config import dump
from penstock.dashboard.server import build as build_dashboard
from penstock.dashboard.shown_run import ShownRun
from penstock.dataflow.core.leasing import Grant
from penstock.fleet.run_folder import RunFolder
from penstock.redaction import HIDDEN
from penstock.rollout.tools.arguments import ArgumentCheck
from penstock.rollout.tools.attempt_tools import OfferedTool, Tools
from penstock.rollout.tools.http import HttpServer
from penstock.rollout.tools.types import ToolResult, ToolSpec
from penstock.runs.export.trajectories import export_trajectories
from penstock.runs.history import open_run
from penstock.runs.operator_tools import Caller, call_tool
from penstock.runs.tracking import catch_up
from penstock.tinker.serving import app_of, open_service
from penstock.types import OutcomeKind, ToolUse
from penstock.wire.auth import Audience, Role, Signer

__all__ = ["canaries", "collector"]
Canaries = dict[str, tuple[str, str]]
CALL = '{"q": "weather"}'
NUM_STEPS = 4


def _fails_first(grant: Grant) -> OutcomeKind:
    return OutcomeKind.FAILED if grant.epoch == 1 else OutcomeKind.COMPLETED


@dataclass(slots=True)
class Planted:
    """One canary after another, into each place that a node fills."""

    canaries: Canaries
    places: dict[str, set[str]] = field(default_factory=dict[str, set[str]])
    """What was planted where."""

    def texts(self, place: str) -> Callable[[], str]:
        names: Iterator[str] = itertools.cycle(self.canaries)

        def draw() -> str:
            name = next(names)
            self.places.setdefault(place, set()).add(name)
            return self.canaries[name][1]

        return draw


def _plant(run: Run, planted: Planted) -> None:
    reason, result, name = map(planted.texts, ("errors", "results", "names of tools"))
    arguments, sub_agent = map(planted.texts, ("arguments", "names of sub-agents"))

    def tool_uses(grant: Grant) -> tuple[ToolUse, ...]:
        use = ToolUse(
            turn=0,
            name=name()[:200],
            arguments=json.dumps({"q": arguments()}),
            result=f"401: {result()}",
            is_error=True,
            agent=sub_agent()[:MAX_AGENT_CHARS],
        )
        return (use,)

    for node in run.nodes:
        node.explain = lambda grant: f"the tool answered 401: {reason()}"
        node.tool_uses = tool_uses
        node.agent = lambda: sub_agent()[:MAX_AGENT_CHARS]


@pytest.fixture(scope="module")
def folder(canaries: Canaries, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run in which every canary was delivered in every place, and is in the config, too."""
    path = tmp_path_factory.mktemp("planted") / "run"
    planted = Planted(canaries)

    async def made() -> None:
        run = Run(path, small_config(), choose=_fails_first)
        _plant(run, planted)
        await run.start()
        for _ in range(NUM_STEPS):
            await run.step()
        run.close()

    asyncio.run(made())
    assert len(canaries) >= 30
    missed = {place: set(canaries) - found for place, found in planted.places.items()}
    assert len(missed) == 5 and not any(missed.values()), missed
    config = yaml.safe_load(dump(with_tokenizer(path, small_config())))
    config["workflow"] = {"command": ["agent", *(text for _, text in canaries.values())]}
    (path / "config.yaml").write_text(yaml.safe_dump(config))
    return RunFolder(path)


def test_the_dashboard_shows_none(canaries: Canaries, folder: RunFolder, tmp_path: Path) -> None:
    """Whatever it answers about any row, group and view."""
    signer = Signer.create(tmp_path, "dashboard")
    headers = {
        "authorization": f"Bearer {signer.mint(Role.READER, [Audience.DASHBOARD], ttl_s=3600)}"
    }
    with open_run(folder.path) as run:
        found = [*run.trajectories()]
    views = ("runs", *(f"runs/run/{name}" for name in VIEWS))
    ids = [f"runs/run/rows/{one.row_id}" for one in found]
    ids += [f"runs/run/groups/{group}" for group in {one.group_id for one in found}]
    ids += [f"runs/run/explain?id={one.row_id}" for one in found]
    app = build_dashboard([ShownRun(folder, "run")], signer.verifier(Audience.DASHBOARD))
    shown: dict[str, str] = {}

    async def ask() -> None:
        transport = httpx2.ASGITransport(app=app)
        async with httpx2.AsyncClient(transport=transport, base_url="http://d") as http:
            for path in (*views, *ids):
                answer = await http.get(f"/api/{path}", headers=headers)
                assert answer.status_code == 200, f"{path}: {answer.text}"
                shown[path] = answer.text

    asyncio.run(ask())
    assert sum(HIDDEN in text for text in shown.values()) > len(canaries)
    assert _leaks(shown, canaries) == {}


VIEWS = (
    "curves?metrics=reward/mean",
    "rows",
    "rows?outcome=failed",
    "rows?text=401",
    "flow",
    "timeline",
    "rules",
    "weights",
    "spend",
    "stalls",
)


def _leaks(shown: dict[str, str], canaries: Canaries) -> dict[str, list[str]]:
    """By the place: as it stands there, and as JSON writes it."""
    found = {place: leaked(text, canaries) for place, text in shown.items()}
    return {place: names for place, names in found.items() if names}


def test_an_agent_that_operates_a_run_reads_none(canaries: Canaries, folder: RunFolder) -> None:
    caller = Caller(name="agent", role=Role.READER)
    with open_run(folder.path) as run:
        ids = [one.row_id for one in run.trajectories()]
    asked: list[tuple[str, dict[str, Any]]] = [
        ("status", {}),
        ("samples", {"count": 20, "failed": True}),
        ("samples", {"count": 20}),
        *(("explain", {"id": id}) for id in ids),
    ]
    shown = {
        f"{tool} {given}": repr(call_tool(folder, caller, tool, given)) for tool, given in asked
    }
    assert sum(HIDDEN in text for text in shown.values()) > len(canaries)
    assert _leaks(shown, canaries) == {}


def test_no_export_has_one(canaries: Canaries, folder: RunFolder, tmp_path: Path) -> None:
    """Neither the rows nor what describes them."""
    shown: dict[str, str] = {}
    export_trajectories(folder.path, tmp_path / "rows.jsonl")
    shown["atif"] = (tmp_path / "rows.jsonl").read_text()
    export_trajectories(folder.path, tmp_path / "dataset")
    shown["card"] = (tmp_path / "dataset" / "README.md").read_text()
    for number, file in enumerate((tmp_path / "dataset").rglob("*.parquet")):
        shown[f"parquet {number}"] = _text_of_parquet(file)
    assert HIDDEN in shown["atif"] and HIDDEN in shown["parquet 0"]
    assert _leaks(shown, canaries) == {}


def _text_of_parquet(file: Path) -> str:
    parquet: Any = importlib.import_module("pyarrow.parquet")  # it has no types
    return repr(parquet.read_table(file).to_pylist())


def test_no_tracker_and_no_collector_gets_one(
    canaries: Canaries, folder: RunFolder, collector: Collector
) -> None:
    """What is sent of the config, of metrics and of every rollout."""
    config = folder.read_config()
    text = json.dumps(config.model_dump(mode="json"))
    assert len(leaked(text, canaries)) >= 30, "the config has them"
    assert catch_up(folder, config, "opentelemetry") > len(canaries)
    before = {*folder.path.rglob("*")}
    catch_up(folder, config, "tensorboard")
    written = [path for path in {*folder.path.rglob("*")} - before if path.is_file()]
    assert written
    shown = {str(path): path.read_bytes().decode(errors="replace") for path in written}
    shown["traces"] = b"\n".join(collector.bodies).decode(errors="replace")
    assert "execute_tool" in shown["traces"]
    assert _leaks(shown, canaries) == {}


async def test_no_answer_of_a_tinker_server_says_one_again(
    canaries: Canaries, tmp_path: Path
) -> None:
    """Names, paths and keys that are refused, at once or as the result of a future."""
    configure(sink := Sink())
    shown: list[str] = []
    folder = make_folder(tmp_path / "server")
    async with open_service(folder) as service:
        transport = httpx2.ASGITransport(app=app_of(folder, service))
        async with httpx2.AsyncClient(transport=transport, base_url="http://t") as http:

            async def ask(path: str, body: Any, key: str) -> Any:
                headers = {"x-api-key": " ".join(key.split())}
                answer = await http.post(f"/api/v1/{path}", json=body, headers=headers)
                shown.append(answer.text)
                return answer.json()

            key = folder.issue_key("alice", ttl_s=3600)
            session = (await ask("create_session", {}, key))["session_id"]
            for number, (secret, text) in enumerate(canaries.values()):
                await ask("create_session", {}, secret)
                named = {"session_id": session, "model_seq_id": number, "base_model": text}
                future = await ask("create_model", named, key)
                await ask("retrieve_future", {"request_id": future.get("request_id", "")}, key)
                await ask("get_info", {"model_id": text}, key)
                await ask("weights_info", {"tinker_path": text}, key)
                await ask("retrieve_future", {"request_id": text}, key)
                sampled = {"session_id": session, "sampling_session_seq_id": 0, "base_model": text}
                await ask("create_sampling_session", sampled, key)
                await ask("telemetry", {"events": [text]}, key)
    assert len(shown) > 8 * len(canaries)
    assert any(TINY in text and HIDDEN in text for text in shown)
    assert _leaks({"answers": "\n".join(shown), "log": sink.getvalue()}, canaries) == {}


class EchoSession:
    """A tool that says what it was given, as one does that shows its settings in an error."""

    def __init__(self, text: str) -> None:
        self.text = text

    async def list(self) -> Sequence[ToolSpec]:
        return ()

    async def call(self, name: str, arguments: Any) -> ToolResult:
        return ToolResult(text=self.text, is_error=True)

    async def recover(self) -> None:
        """Nothing to recover."""

    async def close(self) -> None:
        """Nothing to close."""


async def test_no_model_reads_a_secret_that_a_tool_was_granted(
    canaries: Canaries, tmp_path: Path
) -> None:
    """Values that the node knows do not reach a prompt, and so no stored token. What only has the
    form of a secret stays: a model may have to read it."""
    token = tmp_path / "token"
    token.write_text("opaque-token-of-a-tool-server\n")
    server = HttpServer(url="http://x", hosts=(), timeout_s=1.0, token_file=token)
    server._headers()  # pyright: ignore[reportPrivateUsage]
    known = [canaries[name][0] for name in ("granted secret", "MY_SERVICE_TOKEN", "PGPASSWORD")]
    known.append(token.read_text().strip())
    text = "\n".join(["401: these are wrong", *known, "password=of-a-game-that-is-played"])
    spec = ToolSpec(name="search", description="", parameters={"type": "object"})
    offered = OfferedTool(
        name="search",
        server="web",
        spec=spec,
        check=ArgumentCheck(spec.parameters),
        timeout_s=60.0,
        max_result_chars=10_000,
    )
    tools = Tools([offered], {"web": EchoSession(text)})
    result = await tools.call({"name": "search", "arguments": CALL})
    assert result.text.count(HIDDEN) == len(known)
    assert "of-a-game-that-is-played" in result.text
    assert not any(value in result.text + repr(tools.uses) for value in known)
