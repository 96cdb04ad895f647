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
from tests.unit.audit.ledgers import Run, small_config
from tests.unit.cli.test_samples import with_tokenizer

from penstock.cli.explain import explain
from penstock.cli.samples import samples
from penstock.config import dump
from penstock.dataflow.core.leasing import Grant
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


async def _lived(folder: Path, canaries: dict[str, tuple[str, str]]) -> str:
    """A run whose nodes deliver canaries; returns what its service answers."""
    texts = itertools.cycle(text for _, text in canaries.values())
    run = Run(folder, small_config(), choose=_fails)
    for node in run.nodes:
        node.explain = lambda grant: f"401: {next(texts)}\x1b]0;owned\x07"
    await run.start()
    for _ in range(4):
        await run.step()
    signer = Signer.create(folder / "keys", run.config.name)
    token = signer.mint(Role.ADMIN, [Audience.DATAFLOW], ttl_s=3600, subject="me")
    app = build_server(
        surface(run.service, run.config, "http://127.0.0.1:1"), signer.verifier(Audience.DATAFLOW)
    )
    transport = httpx2.ASGITransport(app=app)
    shown = ""
    async with httpx2.AsyncClient(transport=transport, base_url="http://x") as http:
        for path in VIEWS:
            answer = await http.get(path, headers={"authorization": f"Bearer {token}"})
            assert answer.status_code == 200
            shown += answer.text
    run.close()
    (folder / "config.yaml").write_text(dump(with_tokenizer(folder, run.config)))
    return shown


async def test_no_view_of_a_run_shows_a_secret_that_a_node_delivered(
    canaries: dict[str, tuple[str, str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Status, report and metrics of the service; `explain`, `samples` and its HTML page."""
    folder, page = tmp_path / "run", tmp_path / "page.html"
    shown = {"service": await _lived(folder, canaries)}
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
