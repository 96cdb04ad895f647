# SPDX-License-Identifier: Apache-2.0
"""Canary secrets in the failures that a node of strangers delivers: such a node hides nothing, so
the trusted side does, in every view of a run."""

from __future__ import annotations

import itertools
from html import escape
from pathlib import Path

import httpx2
import pytest
from tests.attacks.test_canaries import canaries, leaked
from tests.unit.audit.ledgers import Run, always_completed, small_config
from tests.unit.cli.test_samples import with_tokenizer
from tests.unit.dataflow.service.test_validate import turn

from penstock.bounds import MAX_ROLE_CHARS, OTHER_ROLES
from penstock.cli.explain import explain
from penstock.cli.samples import samples
from penstock.config import dump
from penstock.dataflow.core.leasing import Grant
from penstock.dataflow.service.nodes.validate import check_turn
from penstock.dataflow.service.server import build_server, surface
from penstock.redaction import HIDDEN
from penstock.runs.history import open_run
from penstock.runs.samples import choose
from penstock.types import OutcomeKind
from penstock.wire.auth import Audience, Role, Signer

__all__ = ["canaries"]
VIEWS = ("/v1/status", "/v1/report", "/metrics")


def _fails(grant: Grant) -> OutcomeKind:
    """Every slot of a group fails for good, so that status says why; others once."""
    is_lost = grant.group_id == "p0-2" or grant.epoch == 1
    return OutcomeKind.FAILED if is_lost else OutcomeKind.COMPLETED


async def _lived(folder: Path, canaries: dict[str, tuple[str, str]]) -> None:
    """A run whose nodes deliver canaries."""
    texts = itertools.cycle(text for _, text in canaries.values())
    run = Run(folder, small_config(), choose=_fails)
    for node in run.nodes:
        node.explain = lambda grant: f"401: {next(texts)}\x1b]0;owned\x07"
    await run.start()
    for _ in range(4):
        await run.step()
    run.close()
    (folder / "config.yaml").write_text(dump(with_tokenizer(folder, run.config)))


async def _views(run: Run) -> dict[str, str]:
    """What the service of a run answers."""
    signer = Signer.create(run.run_dir / "keys", run.config.name)
    token = signer.mint(Role.ADMIN, [Audience.DATAFLOW], ttl_s=3600, subject="me")
    app = build_server(
        surface(run.service, run.config, "http://127.0.0.1:1"), signer.verifier(Audience.DATAFLOW)
    )
    transport = httpx2.ASGITransport(app=app)
    shown: dict[str, str] = {}
    async with httpx2.AsyncClient(transport=transport, base_url="http://x") as http:
        for path in VIEWS:
            answer = await http.get(path, headers={"authorization": f"Bearer {token}"})
            assert answer.status_code == 200
            shown[path] = answer.text
    return shown


ERROR = "the judge answered 401"
CANARIES = ("MY_SERVICE_TOKEN", "granted secret", "password of a URL")


@pytest.mark.parametrize("name", CANARIES)
async def test_no_view_of_a_service_shows_a_secret_that_a_node_delivered(
    canaries: dict[str, tuple[str, str]], tmp_path: Path, name: str
) -> None:
    """Status says why all groups of a run fail, in the words of its nodes. Their tags count in the
    report, their roles in status and metrics."""
    text = canaries[name][1]
    run = Run(tmp_path / "run", small_config(), choose=lambda grant: OutcomeKind.FAILED)
    node, other = run.nodes
    node.explain = lambda grant: f"{ERROR}: {text} \x1b]0;owned\x07"
    node.tags, other.tags = (f"cost={text}", text), ("cost=2",)
    other.role, other.choose = lambda: text[:MAX_ROLE_CHARS], always_completed
    await run.start()
    assert await other.work(1) == 0, "a role that has a secret in it is refused"
    await run.service.tick()  # the report learns of the nodes
    while "every group failed" not in (shown := await _views(run))["/v1/status"]:
        assert await node.work()
    run.close()
    assert f"{ERROR}: " in shown["/v1/status"] and HIDDEN in shown["/v1/status"]
    print("NODES", shown["/v1/report"][shown["/v1/report"].index('"nodes"') :][:900])
    assert "penstock_wasted_tokens" in shown["/metrics"]
    found = {path: leaked(text, canaries) for path, text in shown.items()}
    assert not any(found.values()), found
    assert not any("\x1b" in text or "\\u001b" in text for text in shown.values())


async def test_roles_of_nodes_do_not_fill_status_and_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A role is any text of a node; each has its line in status and its series in Prometheus."""
    monkeypatch.setattr("penstock.dataflow.core.closed_groups.MAX_SHOWN_ROLES", 8)
    run = Run(tmp_path / "run", small_config(), choose=always_completed)
    numbers = itertools.count()
    for node in run.nodes:
        node.role = lambda: f"role-{next(numbers)}"
    await run.start()
    await run.step()
    shown = await _views(run)
    run.close()
    assert next(numbers) > 12
    assert shown["/metrics"].count("penstock_role_tokens{") == 9
    assert OTHER_ROLES in shown["/v1/status"]


@pytest.mark.parametrize("role", ["a\x1b[2J", "a\nb", "\u202e", f"sk-proj-{'0' * 40}"])
def test_a_role_is_a_plain_word(role: str) -> None:
    assert "its role" in check_turn(turn(role=role), 0)
    assert check_turn(turn(role="solver of riddles"), 0) == ""


async def test_no_command_shows_a_secret_that_a_node_delivered(
    canaries: dict[str, tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`explain`, `samples` and its HTML page."""
    folder, page = tmp_path / "run", tmp_path / "page.html"
    shown: dict[str, str] = {}
    await _lived(folder, canaries)
    with open_run(folder) as run:
        groups = {one.group_id for one in run.trajectories()}
    for group_id in sorted(groups):
        assert explain(folder, group_id) == explain(folder, group_id, json=True) == 0
    shown["explain"] = capsys.readouterr().out
    samples(folder, failed=True, number=1000)
    samples(folder, failed=True, number=1000, json=True)
    shown["samples"] = capsys.readouterr().out
    samples(folder, failed=True, number=1000, html=page)
    shown["page"] = page.read_text()
    with open_run(folder) as run:
        shown["library"] = repr(choose(run, count=1000, outcome=OutcomeKind.FAILED))
    found = {name: leaked(text, canaries) for name, text in shown.items()}
    assert not any(found.values()), found
    assert HIDDEN in shown["explain"] and HIDDEN in shown["library"]
    assert escape(HIDDEN) in shown["page"]
    assert not any("\x1b" in text for text in shown.values())
