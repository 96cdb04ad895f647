# SPDX-License-Identifier: Apache-2.0
"""Nobody rewrites what operators did: a line of the log of actions that was changed, removed, added
or cut off is found (C12), and no action is left out."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.attacks.in_process import small_config
from tests.attacks.test_untrusted import DIFFERS

from penstock.audit.admin_log import check_admin_log
from penstock.audit.ledger import open_ledger
from penstock.dataflow.service.build import build
from penstock.dataflow.service.server import build_server, surface
from penstock.errors import ConfigError
from penstock.fleet.run_folder import LockHolder, RunFolder
from penstock.observe.admin_log import HEAD, LOG, AdminAction, AdminLog
from penstock.runs import tokens
from penstock.wire.auth import Audience, Role, Signer


def written(folder: Path, num: int = 5) -> AdminLog:
    log = AdminLog(folder)
    for number in range(num):
        log.append(AdminAction.TOKEN_ISSUED, who="operator", id=f"token-{number}")
    return log


def lines(folder: Path) -> list[bytes]:
    return (folder / LOG).read_bytes().splitlines(keepends=True)


def violations(folder: Path, anchor: str = "") -> int:
    return check_admin_log(folder, anchor).num_violations


def edit(folder: Path) -> None:
    found = lines(folder)
    found[2] = found[2].replace(b"token-2", b"token-9")
    (folder / LOG).write_bytes(b"".join(found))


def edit_the_last(folder: Path) -> None:
    found = lines(folder)
    (folder / LOG).write_bytes(b"".join([*found[:-1], found[-1].replace(b"operator", b"nobody")]))


def remove(folder: Path) -> None:
    found = lines(folder)
    (folder / LOG).write_bytes(b"".join(found[:2] + found[3:]))


def remove_the_first(folder: Path) -> None:
    (folder / LOG).write_bytes(b"".join(lines(folder)[1:]))


def swap(folder: Path) -> None:
    found = lines(folder)
    found[1], found[2] = found[2], found[1]
    (folder / LOG).write_bytes(b"".join(found))


def insert(folder: Path) -> None:
    found = lines(folder)
    (folder / LOG).write_bytes(b"".join([*found[:2], found[1], *found[2:]]))


def cut(folder: Path) -> None:
    (folder / LOG).write_bytes(b"".join(lines(folder)[:-1]))


def cut_half_a_line(folder: Path) -> None:
    data = (folder / LOG).read_bytes()
    (folder / LOG).write_bytes(data[:-20])


def delete_the_log(folder: Path) -> None:
    (folder / LOG).unlink()


def delete_the_head(folder: Path) -> None:
    (folder / HEAD).unlink()


def cut_and_forge_the_head(folder: Path) -> None:
    """As if the last line had never been: only the ledger knows better."""
    (folder / LOG).unlink()
    (folder / HEAD).unlink()
    written(folder, 4)


FORGERIES = [
    edit,
    edit_the_last,
    remove,
    remove_the_first,
    swap,
    insert,
    cut,
    cut_half_a_line,
    delete_the_log,
    delete_the_head,
    cut_and_forge_the_head,
]


@pytest.mark.parametrize("forge", FORGERIES, ids=lambda forge: forge.__name__)
@pytest.mark.parametrize("is_used_after", [False, True])
def test_a_forged_log_is_found(
    forge: Callable[[Path], None], is_used_after: bool, tmp_path: Path
) -> None:
    """At once, and still after honest processes have written more."""
    anchor = str(written(tmp_path).head())
    assert violations(tmp_path, anchor) == 0
    forge(tmp_path)
    if is_used_after:
        written(tmp_path, 3)
    assert violations(tmp_path, anchor) > 0


def test_processes_that_append_at_once_make_one_chain(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(written, [tmp_path] * 8))
    check = check_admin_log(tmp_path, "")
    assert (check.num_examined, check.num_violations) == (40, 0)


@pytest.mark.parametrize("is_torn", [True, False])
def test_a_killed_process_leaves_a_good_log(is_torn: bool, tmp_path: Path) -> None:
    """Killed in the middle of a line, or between the line and the head."""
    written(tmp_path, 3)
    head = (tmp_path / HEAD).read_bytes()
    written(tmp_path, 1)
    (tmp_path / HEAD).write_bytes(head)
    if is_torn:
        (tmp_path / LOG).write_bytes((tmp_path / LOG).read_bytes()[:-9])
    assert violations(tmp_path) == 0
    written(tmp_path, 2)
    assert violations(tmp_path) == 0
    assert len(lines(tmp_path)) == 5 + (not is_torn)


def test_a_log_that_is_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / LOG).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError):
        written(tmp_path)
    assert not (tmp_path / "elsewhere").exists()


# --- every action is there ------------------------------------------------------------------------


def actions(folder: Path) -> list[tuple[str, str]]:
    found = [json.loads(line) for line in lines(folder)]
    return [(one["action"], one["details"].get("name", "")) for one in found]


def test_commands_about_tokens_are_logged_without_the_tokens(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    config = small_config()
    folder.write_config(config)
    Signer.create(folder.keys, config.name)
    token, credential = tokens.issue(folder, Role.ROLLOUT, name="laptop", ttl_s=60)
    tokens.revoke(folder, id=credential.id)
    tokens.revoke(folder, name="laptop")
    tokens.rotate(folder, now=True)
    with pytest.raises(ConfigError):
        tokens.issue(folder, Role.ROLLOUT, name="laptop", ttl_s=60)
    assert actions(folder.path) == [
        ("token_issued", "laptop"),
        ("token_revoked", "laptop"),
        ("name_revoked", "laptop"),
        ("key_rotated", ""),
    ]
    text = (folder.path / LOG).read_text()
    assert not any(part in text for part in token.split(".")[2:])
    assert (folder.path / LOG).stat().st_mode & 0o077 == 0


async def test_calls_of_operators_and_quarantines_are_logged_and_anchored(tmp_path: Path) -> None:
    """Through the service: with the role and name of the token; the ledger has the last line."""
    import httpx2

    config = small_config()
    signer = Signer.create(tmp_path / "keys", config.name)
    service = build(config, tmp_path / "ledger")
    app = build_server(
        surface(service, config, "http://127.0.0.1:1"),
        signer.verifier(Audience.DATAFLOW),
        admin_log=AdminLog(tmp_path),
    )
    token = signer.mint(Role.ADMIN, [Audience.DATAFLOW], ttl_s=60, subject="alice")
    transport = httpx2.ASGITransport(app=app)
    headers = {"authorization": f"Bearer {token}"}
    async with (
        app.router.lifespan_context(app),
        httpx2.AsyncClient(transport=transport, base_url="http://x", headers=headers) as http,
    ):
        done = await http.put("/v1/spaces/mine", json={"quota_bytes": 5})
        assert done.status_code == 200, done.text
        refused = await http.post("/v1/partitions/7/drain")
        assert refused.status_code >= 400, "what failed is not an action"
        for _ in range(20):
            await service.trainers.record_check("evil", DIFFERS)
        await service.trainers.record_check("evil", DIFFERS)
    found = [json.loads(line) for line in lines(tmp_path)]
    assert [(one["action"], one["who"]) for one in found] == [
        ("quota_set", "admin alice"),
        ("quarantined", "spot checks"),
    ]
    with open_ledger(tmp_path / "ledger") as ledger:
        anchor = ledger.meta("admin_log")
    assert anchor == str(AdminLog(tmp_path).head())
    assert violations(tmp_path, anchor) == 0


def test_stopping_a_run_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.runs.control import stop_run

    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    holders = iter([LockHolder(os.getpid(), os.getuid()), None])
    sent: list[int] = []
    monkeypatch.setattr(RunFolder, "lock_holder", lambda _: next(holders))  # pyright: ignore
    monkeypatch.setattr(os, "kill", lambda _, number: sent.append(number))  # pyright: ignore
    assert stop_run(folder, timeout_s=120.0)
    assert sent == [signal.SIGTERM]
    assert actions(folder.path) == [("run_stopped", "")]
