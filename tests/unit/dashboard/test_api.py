# SPDX-License-Identifier: Apache-2.0
"""What the dashboard answers: the same counts as the audit, every row on exactly one page, only for
its own token, and nothing that a browser would run."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.unit.audit.ledgers import Run as ServiceRun
from tests.unit.audit.ledgers import small_config
from tests.unit.dashboard.recorded_run import HOSTILE, HOSTILE_TOKEN, NUM_STEPS, record_run

from penstock.audit import audit
from penstock.dashboard import rows, timeline
from penstock.dashboard.server import build
from penstock.dashboard.shown_run import MAX_OPENED, ShownRun, name_runs
from penstock.fleet.run_folder import RunFolder
from penstock.runs.history import open_run
from penstock.runs.token_view import pieces
from penstock.wire.auth import Audience, Role, Signer

Get = Callable[..., Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record_run(tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def ask(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., httpx.Response]:
    """One request to the app, with its token unless another is passed."""
    signer = Signer.create(tmp_path_factory.mktemp("keys"), "dashboard")
    token = signer.mint(Role.READER, [Audience.DASHBOARD], ttl_s=3600)
    app = build([ShownRun(RunFolder(folder), "run")], signer.verifier(Audience.DASHBOARD))

    def request(path: str, token: str = token) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(app)
            async with httpx.AsyncClient(transport=transport, base_url="http://d") as client:
                return await client.get(path, headers={"authorization": f"Bearer {token}"})

        return asyncio.run(send())

    return request


@pytest.fixture
def get(ask: Callable[..., httpx.Response]) -> Get:
    def read(path: str) -> Any:
        answer = ask(path)
        assert answer.status_code == 200, answer.text
        return answer.json()

    return read


def test_counts_are_those_of_the_audit(get: Get, folder: Path) -> None:
    found = audit(folder).summary
    [run] = get("/api/runs")
    assert run["trajectories"] == found.trajectories > 50
    assert [policy["step"] for policy in run["policies"]] == [found.steps] == [NUM_STEPS]
    account = get("/api/runs/run/spend")["tokens"]["policy"]
    assert account["whole"]["sequences"] == found.trajectories


def test_every_token_has_one_fate(get: Get) -> None:
    account = get("/api/runs/run/spend")["tokens"]["policy"]
    parts = {part["fate"]: part for part in account["parts"]}
    assert parts["trained"]["sequences"] == NUM_STEPS * 12
    assert parts["lost: failed"]["sequences"] >= 3
    assert parts["trained"]["sandbox_ms"] > 0
    for unit in ("tokens", "sequences", "sandbox_ms"):
        assert sum(part[unit] for part in parts.values()) == account["whole"][unit]
        assert all(part[unit] >= 0 for part in parts.values())


@pytest.mark.parametrize("filters", ["", "&outcome=failed", "&fate=trained", "&text=zzz"])
def test_pages_hold_each_matching_row_once(
    get: Get, folder: Path, monkeypatch: pytest.MonkeyPatch, filters: str
) -> None:
    monkeypatch.setattr(rows, "PAGE_ROWS", 7)
    monkeypatch.setattr(rows, "READ_ROWS", 5)
    monkeypatch.setattr(rows, "SCAN_ROWS", 11)
    monkeypatch.setattr(rows, "DESCRIBED_ROWS", 9)
    found: list[str] = []
    cursor, num_pages = "", 0
    while cursor or not num_pages:
        page = get(f"/api/runs/run/rows?before={cursor}{filters}")
        assert len(page["rows"]) <= 7
        found += [row["row_id"] for row in page["rows"]]
        cursor, num_pages = page["next"], num_pages + 1
    with open_run(folder) as run:
        delivered = [*run.trajectories(order="newest")]
    matching = [
        one.row_id
        for one in delivered
        if not filters
        or (filters == "&outcome=failed" and one.outcome == "failed")
        or (filters == "&fate=trained" and one.steps)
    ]
    assert sorted(found) == sorted(matching)
    assert num_pages > len(delivered) // 11


def test_a_step_the_best_and_a_search(get: Get, folder: Path) -> None:
    with open_run(folder) as run:
        trained = {one.row_id: one.reward or 0.0 for one in run.trajectories(steps=2)}
    best = get("/api/runs/run/rows?step=2&order=best")["rows"]
    assert {row["row_id"]: row["reward"] for row in best} == trained
    assert [row["reward"] for row in best] == sorted(trained.values(), reverse=True)
    assert all(row["fate"] == "trained" and row["steps"] == [2] for row in best)
    overall = [row["reward"] for row in get("/api/runs/run/rows?order=worst")["rows"]]
    assert overall == sorted(overall) and overall[0] == 0.0
    by_id = get(f"/api/runs/run/rows?text={best[0]['row_id']}")["rows"]
    assert [row["row_id"] for row in by_id] == [best[0]["row_id"]]
    by_text = get("/api/runs/run/rows?text=onmouseover")["rows"]
    assert by_text, "the answers of the model are searched too"


def test_a_trajectory_has_its_tokens_and_its_place_in_the_group(get: Get) -> None:
    row = get("/api/runs/run/rows?step=3&order=best")["rows"][0]
    found = get(f"/api/runs/run/rows/{row['row_id']}")
    turn = found["tokens"][-1]
    assert turn["sampled"][-1] == HOSTILE_TOKEN and turn["prompt"] == ["b", "c", "d", "e"]
    assert [round(one, 2) for one in turn["log_probs"]] == [-0.1, -0.2, -0.3]
    several = next(row for row in get("/api/runs/run/rows")["rows"] if len(row["versions"]) == 2)
    [*_, across] = get(f"/api/runs/run/rows/{several['row_id']}")["tokens"]
    assert len(set(across["versions"])) == 2, "weights changed during the answer"
    group = get(f"/api/runs/run/groups/{row['group_id']}")
    rewards = [one["sample"]["reward"] for one in group["rows"] if one["relative"] is not None]
    assert found["relative"] == pytest.approx(row["reward"] - sum(rewards) / len(rewards))
    assert row["row_id"] in found["siblings"]


def test_tokens_that_make_one_character_show_it_once() -> None:
    parts = {1: b"\xe2", 2: b"\x82", 3: b"\xac", 4: b"a"}

    def decode(ids: Sequence[int]) -> str:
        return b"".join(parts[one] for one in ids).decode(errors="replace")

    assert pieces([4, 1, 2, 3, 4], decode) == ("a", "", "", "€", "a")
    assert pieces([4, 1], decode) == ("a", "\ufffd")


def test_views_answer(get: Get) -> None:
    flow = get("/api/runs/run/flow")
    assert flow["sources"][0]["issued"] > 0 and not flow["is_live"]
    rules = get("/api/runs/run/rules")["policies"]["policy"]
    sealed = [line for line in rules if line["verdict"] == "sealed"]
    assert sum(line["groups"] for line in sealed) == NUM_STEPS * 3
    lanes = get("/api/runs/run/timeline")
    assert {lane["node"] for lane in lanes["nodes"]} == {"node-0", "node-1"}
    assert sum(len(lane["failed"]) for lane in lanes["nodes"]) >= 3
    versions = get("/api/runs/run/weights")["versions"]
    assert [one["number"] for one in versions] == [5, 4, 3, 2, 1, 0]
    assert get("/api/runs/run/stalls")["records"] == []
    story = get("/api/runs/run/explain?id=policy.2")
    assert story["kind"] == "batch" and story["steps"]
    curves = get("/api/runs/run/curves?metrics=reward/mean,loss,seconds%20per%20step")
    series = {one["metric"]: one for one in curves["series"]}
    assert series["reward/mean"]["steps"] == [1, 2, 3, 4, 5]
    assert series["loss"]["steps"] == [1, 3, 4, 5], "NaN has no place on a chart"
    assert len(series["seconds per step"]["values"]) == NUM_STEPS - 1


def test_the_timeline_has_every_attempt_with_and_without_a_result(folder: Path) -> None:
    """A lease with a result has no record of its end: the fleet looked idle, but for failures."""
    recorded = ShownRun(RunFolder(folder), "run").recorded
    values = {"space": "train", "before": rows.NEWEST, "num": timeline.MAX_ROWS}
    leases = recorded.coordinator.rows(timeline.LEASES, **values)
    query = "SELECT arrival FROM rows WHERE space = 'train' ORDER BY arrival DESC"
    assert [arrival for *_, arrival in leases] == [at for (at,) in recorded.coordinator.rows(query)]
    assert {outcome for *_, outcome, _ in leases} >= {"completed", "failed"}


def test_lanes_hold_every_second_of_every_attempt() -> None:
    leases = [("a", 0.0, 100.0, "completed", 1), ("a", 12.3, 12.4, "failed", 2)]
    leases += [("a", 99.0, 100.0, "completed", 3), ("b", 50.0, 75.5, "truncated", 4)]
    lanes = {lane["node"]: lane for lane in timeline.node_lanes(leases, 0.0, 100.0)}
    width_s = 100.0 / timeline.NUM_BUCKETS
    assert sum(lanes["a"]["busy"]) * width_s == pytest.approx(101.1, abs=0.5)
    assert sum(lanes["b"]["busy"]) * width_s == pytest.approx(25.5, abs=0.1)
    assert lanes["a"]["busy"][3] == 1.0 and lanes["a"]["busy"][-1] == 2.0
    assert lanes["b"]["busy"][10] == 0.0 == lanes["b"]["busy"][-1]
    assert lanes["a"]["failed"] == [12.4]


def test_only_its_own_token_opens_it(
    ask: Callable[..., httpx.Response], folder: Path, tmp_path: Path
) -> None:
    other = Signer.create(tmp_path, "dashboard").mint(Role.READER, [Audience.DASHBOARD], ttl_s=60)
    for token in ("", "nonsense", other):
        assert ask("/api/runs", token=token).status_code in (401, 403)
        assert ask("/api/events", token=token).status_code in (401, 403)
    assert ask("/", token="").status_code == 200, "the page itself holds no data"


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("/api/runs/other/rows", "no run 'other'"),
        ("/api/runs/run/rows?outcome=great", "known: completed"),
        ("/api/runs/run/rows?before=x", "numbers"),
        (f"/api/runs/run/rows?before=0:{10**30}", "numbers"),
        (f"/api/runs/run/rows?step={10**19}", "numbers"),
        (f"/api/runs/run/rows?step={'9' * 5000}", "numbers"),
        ("/api/runs/run/rows?step=-1", "numbers"),
        ("/api/runs/run/rows/p0-9999.0.1", "no trajectory"),
        ("/api/runs/run/explain?id=p0-9999", "no such group"),
        ("/api/runs/run/timeline?before=-1", "a number"),
        (f"/api/runs/run/timeline?before={10**18 * 9}", "a number"),
        (f"/api/runs/run/timeline?before={(1 << 63) + 1}", "a number"),
    ],
)
def test_mistakes_are_explained(ask: Callable[..., httpx.Response], path: str, why: str) -> None:
    answer = ask(path)
    assert answer.status_code in (400, 404)
    assert why in answer.json()["error"]["message"]


def test_an_open_page_is_told_that_the_dashboard_ends(folder: Path, tmp_path: Path) -> None:
    signer = Signer.create(tmp_path, "dashboard")
    token = signer.mint(Role.READER, [Audience.DASHBOARD], ttl_s=60)
    answers = iter([False, False, True])
    shown = ShownRun(RunFolder(folder), "run")
    app = build([shown], signer.verifier(Audience.DASHBOARD), lambda: next(answers, True))

    async def read() -> str:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://d") as client:
            headers = {"authorization": f"Bearer {token}"}
            return (await client.get("/api/events", headers=headers)).text

    text = asyncio.run(read())
    assert text.startswith('data: [{"key":"run"')
    assert text.endswith("event: end\ndata:\n\n"), "and no state that is known"


def test_the_page_runs_nothing_but_its_own_files(ask: Callable[..., httpx.Response]) -> None:
    page = ask("/")
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
    assert page.headers["x-content-type-options"] == "nosniff"
    names = set(re.findall(r'"(/[\w./-]+\.(?:js|mjs|css|svg))"', page.text))
    for name in names:
        answer = ask(name)
        assert answer.status_code == 200
        assert answer.headers["content-security-policy"] == policy
    assert ask("/app.js").headers["content-type"].startswith("text/javascript")
    assert ask("/../pyproject.toml").status_code == 404
    assert ask("/server.py").status_code == 404


def test_scripts_put_no_markup_into_the_page() -> None:
    static = Path(rows.__file__).parent / "static"
    for path in static.glob("*.js"):
        text = path.read_text()
        for forbidden in (
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
        ):
            assert forbidden not in text, f"{forbidden} in {path.name}"
        assert "https://" not in text and "http://" not in text
    for name in ("preact", "htm", "uplot"):
        assert (static / "vendor" / f"LICENSE.{name}").stat().st_size > 500


def test_hostile_text_is_data(get: Get) -> None:
    failed = get("/api/runs/run/rows?outcome=failed")["rows"][0]
    found = get(f"/api/runs/run/rows/{failed['row_id']}")
    assert found["sample"]["detail"] == HOSTILE


def test_runs_of_one_name_get_their_own_address(folder: Path, tmp_path: Path) -> None:
    shown = name_runs([RunFolder(folder), RunFolder(folder), RunFolder(folder)])
    name = RunFolder(folder).read_config().name
    assert [one.key for one in shown] == [name, f"{name}-2", f"{name}-3"]


def test_a_ledger_that_changes_all_the_time_is_opened_few_times(tmp_path: Path) -> None:
    """Each look at the run of others kept a connection until the dashboard ended."""
    folder = record_run(tmp_path / "run")
    ledger = (folder / "ledger" / "ledger.db").resolve()
    shown = ShownRun(RunFolder(folder), "run")
    before = shown.open()
    held: list[int] = []
    for second in range(20):
        os.utime(ledger, (second, second))
        now = shown.open()
        assert now is not before and before.num_freed() == now.num_freed() == 0
        before = now
        held.append([one.resolve() for one in Path("/proc/self/fd").iterdir()].count(ledger))
    assert 0 < held[MAX_OPENED] == held[-1]
    shown.close()


def test_a_run_that_goes_on_is_read_again(tmp_path: Path) -> None:
    folder = record_run(tmp_path / "run")
    shown = ShownRun(RunFolder(folder), "run")
    before = shown.summary().progress.trajectories
    assert shown.summary() is shown.summary(), "nothing is read twice"

    async def go_on() -> None:
        run = ServiceRun(folder, small_config())
        run.trainer.incarnation = 1
        await run.trainer.incarnate(NUM_STEPS, NUM_STEPS)
        for node in run.nodes:
            node.boot_id = "again"
            await node.join()
        await run.step()
        run.close()

    asyncio.run(go_on())
    after = shown.summary().progress.trajectories
    assert before is not None and after is not None and after > before
    page = rows.read_page(shown, rows.PageQuery())
    assert page["rows"][0]["arrival"] > before
    shown.close()
