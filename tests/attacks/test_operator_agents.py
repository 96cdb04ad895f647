# SPDX-License-Identifier: Apache-2.0
"""An agent with an operator's token acts on the run, by `penstock mcp` or at the service, and gets
nothing else of the process that serves it. What it reads in a run may tell it what to do."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from tests.attacks.test_foreign_folders import foreign_folder
from tests.contract.test_resource_sharing import SHARED, make_scene

from penstock.errors import BadRequest, ConfigError
from penstock.runs import mcp_server
from penstock.runs.operator_tools import Caller, call_tool
from penstock.types import EVALUATION_TAG, SESSION_TAG, UNTRUSTED_TAG
from penstock.wire.auth import Role

SECRET = "hf_of_who_serves_it"
AGENT = Caller(name="agent-7", role=Role.ADMIN)


@pytest.mark.parametrize(
    "arguments",
    [
        {"name": "${oc.env:RED_SECRET}"},
        {"overrides": ["name=a-${oc.env:RED_SECRET}"]},
        {"overrides": ["workflow=${oc.env:RED_SECRET}"]},
        {"overrides": ["output_dir=oc.env", "name=${${output_dir}:RED_SECRET}"]},
    ],
    ids=str,
)
def test_a_fork_takes_nothing_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]
) -> None:
    """The name of the new folder is in the answer, its config in the log of actions."""
    monkeypatch.setenv("RED_SECRET", SECRET)
    folder = foreign_folder(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"\$\{\} is for run files") as refused:
        call_tool(folder, AGENT, "fork", {"step": 1, "reason": "because it is", **arguments})
    assert SECRET not in str(refused.value)


async def test_requests_of_one_caller_are_read_within_its_budget() -> None:
    """Each may have 4 MB, and an agent may send them by the thousand."""
    num_running, finish = 0, asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal num_running
        num_running += 1
        await finish.wait()

    def caller_of(token: str) -> Caller:
        return Caller(name=token, role=Role.READER)

    checked = mcp_server._TokenCheck(app, caller_of)  # pyright: ignore[reportPrivateUsage]

    def ask(token: str) -> asyncio.Task[None]:
        headers = [(b"authorization", f"Bearer {token}".encode())]
        nothing: Any = None
        return asyncio.ensure_future(
            checked({"type": "http", "headers": headers}, nothing, nothing)
        )

    calls = [ask("greedy") for _ in range(100)]
    await asyncio.sleep(0)
    assert 0 < num_running < 20
    before = num_running
    calls.append(ask("other"))
    await asyncio.sleep(0)
    assert num_running == before + 1
    finish.set()
    await asyncio.gather(*calls)
    assert num_running == 101


@pytest.mark.parametrize("change", ["add", "remove"])
@pytest.mark.parametrize("tag", [UNTRUSTED_TAG, SESSION_TAG, EVALUATION_TAG])
async def test_a_tag_that_a_token_gave_is_not_taken_away(
    tmp_path: Path, tag: str, change: str
) -> None:
    """Without `untrusted`, the rewards of a stranger would count unchecked."""
    scene = await make_scene(tmp_path)
    try:
        await scene.join(SHARED, tag if change == "remove" else "spot")
        node = scene.service.partition.nodes[SHARED]
        before = node.record.tags
        asked = {"add": [], "remove": []} | {change: [tag]}
        with pytest.raises(BadRequest, match=rf"tag {tag} says what the token of shared is for"):
            scene.service.sharing.retag(SHARED, **asked)
        assert node.record.tags == before
    finally:
        scene.service.close()
