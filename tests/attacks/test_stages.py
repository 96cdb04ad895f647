# SPDX-License-Identifier: Apache-2.0
"""What the token of a stage, and of a reader, cannot do: write rewards that are not its own, act
for another stage, fill the service with readers."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.attacks.in_process import Door, dataflow_door
from tests.contract.dataflow_server import small_config

from penstock.config import RunConfig
from penstock.dataflow.service.rows import reader_rights
from penstock.wire.auth import Role
from penstock.wire.codec import JSON, encode_json

STAGES = [
    {"name": "judge", "reads": ["turns"], "writes": ["reward"]},
    {"name": "prm", "reads": ["turns"], "writes": ["steps"]},
]


def config() -> RunConfig:
    values = small_config().model_dump() | {"reward": None}
    return RunConfig.model_validate(values | {"dataflow": {"stages": STAGES}})


async def call(
    door: Door, method: str, path: str, body: object, role: Role, subject: str
) -> tuple[int, str]:
    token = door.token(role, subject)
    headers = {"authorization": f"Bearer {token}", "content-type": JSON}
    answer = await door.http.request(method, path, headers=headers, content=encode_json(body))
    return answer.status_code, answer.text


ASK = {"request_id": "r", "worker": "w", "max_rows": 1, "wait_s": 0.0}
RESULTS = {"reader": "judge", "worker": "w", "results": list[str]()}
ATTACKS: dict[str, tuple[str, str, object]] = {
    "lease its rows": ("POST", "/v1/readers/judge/leases", ASK),
    "keep its rows": ("PUT", "/v1/readers/judge/leases", {"claims": []}),
    "write its columns": ("PUT", "/v1/rows/columns", RESULTS),
    "remove it": ("DELETE", "/v1/readers/judge", None),
    "declare it": ("PUT", "/v1/readers/judge", {"reads": ["turns"], "writes": ["reward"]}),
}


@pytest.mark.parametrize("subject", ["stage-prm", "judge", "stage-judge2", ""])
@pytest.mark.parametrize("what", ATTACKS)
async def test_a_stage_does_not_act_for_another(what: str, subject: str, tmp_path: Path) -> None:
    """The token of one stage, of a name that is nearly right, and of nobody."""
    async with dataflow_door(tmp_path, config()) as door:
        status, text = await call(door, *ATTACKS[what], Role.STAGE, subject)
        assert status == 403 and "--name stage-judge" in text, text
        if what != "remove it":
            status, text = await call(door, *ATTACKS[what], Role.STAGE, "stage-judge")
            assert status == 200, text


@pytest.mark.parametrize("column", ["reward", "steps"])
@pytest.mark.parametrize("role", [Role.STAGE, Role.TRAINER])
async def test_a_reader_of_its_own_writes_no_column_of_a_stage(
    role: Role, column: str, tmp_path: Path
) -> None:
    """Under another name, a token would give the rewards that the run trains on."""
    async with dataflow_door(tmp_path, config()) as door:
        body = {"reads": ["turns"], "writes": [column]}
        status, text = await call(door, "PUT", "/v1/readers/mine", body, role, "stage-prm")
        assert status == 403 and "only stages of the run file" in text, text
        other = body | {"writes": ["notes"]}
        assert (await call(door, "PUT", "/v1/readers/mine", other, role, "stage-prm"))[0] == 200


async def test_a_stage_declares_no_column_of_another(tmp_path: Path) -> None:
    """A stage declares itself again, with the reward among its columns."""
    async with dataflow_door(tmp_path, config()) as door:
        me = (Role.STAGE, "stage-prm")
        assert (await call(door, "DELETE", "/v1/readers/prm", None, *me))[0] == 200
        for writes in (["reward"], ["steps", "reward"], ["reward@7"]):
            body = {"reads": ["turns"], "writes": writes}
            status, text = await call(door, "PUT", "/v1/readers/prm", body, *me)
            assert status == 403 and "reward" in text, text
        for writes in (["steps"], ["steps@7", "notes"]):
            body = {"reads": ["turns"], "writes": writes}
            await call(door, "DELETE", "/v1/readers/prm", None, *me)
            status, text = await call(door, "PUT", "/v1/readers/prm", body, *me)
            assert status == 200, text


async def test_a_column_with_a_version_belongs_to_its_stage(tmp_path: Path) -> None:
    """Who writes `kl` also writes its versions, so `kl` is taken where a stage writes `kl@ref`."""
    stages = [{"name": "judge", "reads": ["turns"], "writes": ["reward"]}]
    stages.append({"name": "ref", "reads": ["turns"], "writes": ["kl@ref"]})
    values = small_config().model_dump() | {"reward": None}
    run = RunConfig.model_validate(values | {"dataflow": {"stages": stages}})
    async with dataflow_door(tmp_path, run) as door:
        for column in ("kl", "kl@ref", "kl@7"):
            body = {"reads": ["turns"], "writes": [column]}
            me = (Role.STAGE, "stage-judge")
            status, text = await call(door, "PUT", "/v1/readers/mine", body, *me)
            assert status == 403 and "kl" in text, text
        body = {"reads": ["turns"], "writes": ["kl@ref"]}
        stage = (Role.STAGE, "stage-ref")
        assert (await call(door, "PUT", "/v1/readers/ref", body, *stage))[0] == 200


async def test_a_reader_does_not_take_the_name_of_a_stage(tmp_path: Path) -> None:
    """While the stage is gone, a reader of its name that writes nothing would keep it out, and the
    run waits for its columns for ever."""
    async with dataflow_door(tmp_path, config()) as door:
        stage, reader = (Role.STAGE, "stage-prm"), (Role.READER, "me")
        assert (await call(door, "DELETE", "/v1/readers/prm", None, *stage))[0] == 200
        body = {"reads": ["turns"]}
        status, text = await call(door, "PUT", "/v1/readers/prm", body, *reader)
        assert status == 403 and "stage of the run file" in text, text
        body = {"reads": ["turns"], "writes": ["steps"]}
        assert (await call(door, "PUT", "/v1/readers/prm", body, *stage))[0] == 200


async def test_a_stage_does_not_act_for_the_reader_of_an_operator(tmp_path: Path) -> None:
    """An operator may declare a reader that writes rewards; no stage answers for it."""
    async with dataflow_door(tmp_path, config()) as door:
        body = {"reads": ["turns"], "writes": ["reward"]}
        assert (await call(door, "PUT", "/v1/readers/repair", body, Role.ADMIN, "op"))[0] == 200
        path = "/v1/readers/repair/leases"
        status, text = await call(door, "POST", path, ASK, Role.STAGE, "stage-prm")
        assert status == 403 and "reward" in text, text
        assert (await call(door, "POST", path, ASK, Role.ADMIN, "op"))[0] == 200


async def test_readers_have_a_quota_per_credential(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reader keeps rows in memory: a token that may only read cannot declare them without
    end, and others still can."""
    monkeypatch.setattr(reader_rights, "MAX_READERS", 3)
    async with dataflow_door(tmp_path, config()) as door:

        async def declare(name: str, subject: str) -> int:
            path, body = f"/v1/readers/{name}", {"reads": ["turns"]}
            return (await call(door, "PUT", path, body, Role.READER, subject))[0]

        made = [await declare(f"r{number}", "greedy") for number in range(5)]
        assert made == [200, 200, 200, 429, 429]
        assert await declare("r0", "greedy") == 200, "a known one continues"
        assert await declare("other", "modest") == 200
        removed = await call(door, "DELETE", "/v1/readers/r0", None, Role.READER, "greedy")
        assert removed[0] == 200 and await declare("r9", "greedy") == 200
        monkeypatch.setattr(reader_rights, "MAX_ALL_READERS", 6)
        assert await declare("late", "third") == 429, "all together have one, too"
