# SPDX-License-Identifier: Apache-2.0
"""Which processes a run has."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import RunConfig, demo_config
from penstock.config.store_password import PASSWORD_ENV
from penstock.fleet.run_folder import RunFolder
from penstock.fleet.service_tokens import TOKEN_FILE_ENV
from penstock.fleet.services import ServiceKind, local_services
from penstock.wire.auth import PREFIX, Audience, Role, Signer


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder(tmp_path)
    Signer.create(folder.keys, "reverse")
    return folder


def test_the_demo_has_two_servers_a_trainer_and_two_nodes(folder: RunFolder) -> None:
    services = local_services(demo_config(0), folder)
    assert [(service.name, service.kind) for service in services] == [
        ("dataflow", ServiceKind.SERVER),
        ("weights", ServiceKind.SERVER),
        ("trainer-policy", ServiceKind.TRAINER),
        ("node-0", ServiceKind.NODE),
        ("node-1", ServiceKind.NODE),
    ]


def test_every_policy_has_its_own_trainer_and_nodes(folder: RunFolder) -> None:
    config = demo_config(0)
    model = config.models["policy"]
    two = RunConfig.model_validate(
        {**config.model_dump(), "models": {"a": model.model_dump(), "b": model.model_dump()}}
    )
    names = [service.name for service in local_services(two, folder)]
    assert names[2:] == ["trainer-a", "a-node-0", "a-node-1", "trainer-b", "b-node-0", "b-node-1"]


def test_a_frozen_policy_has_a_publisher_instead_of_a_trainer(folder: RunFolder) -> None:
    config = demo_config(0)
    model = config.models["policy"]
    judge = model.model_copy(update={"frozen": True, "replicas": 0})
    config = config.model_copy(update={"models": {"policy": model, "judge": judge}})
    kinds = {service.name: service.kind for service in local_services(config, folder)}
    assert kinds["publisher-judge"] is kinds["trainer-policy"] is ServiceKind.TRAINER
    assert "trainer-judge" not in kinds and "judge-node-0" not in kinds


def test_tokens_are_in_private_files_and_never_in_commands_or_environments(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(TOKEN_FILE_ENV, "the user's own")
    monkeypatch.setenv("PENSTOCK_TOKEN", "the user's own")
    verifier = Signer.read(folder.keys, "reverse").verifier(Audience.DATAFLOW)
    roles: dict[str, Role | None] = {}
    for service in local_services(demo_config(0), folder):
        env = service.build_env()
        assert not any(PREFIX in word for word in (*service.command, *env.values()))
        assert "PENSTOCK_TOKEN" not in env and env["OMP_NUM_THREADS"] == "1"
        roles[service.name] = None
        if TOKEN_FILE_ENV in env:
            path = Path(env[TOKEN_FILE_ENV])
            credential = verifier.verify(path.read_text().strip())
            assert credential.subject == service.name
            assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (
                0o600,
                0o700,
            )
            roles[service.name] = credential.role
    assert roles == {
        "dataflow": None,
        "weights": None,
        "trainer-policy": Role.TRAINER,
        "node-0": Role.ROLLOUT,
        "node-1": Role.ROLLOUT,
    }


def test_only_services_with_a_ledger_get_the_password_of_the_store(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(PASSWORD_ENV, raising=False)
    config = demo_config(0)
    flow = config.dataflow.model_copy(
        update={"store": "postgresql://me:hunter2@127.0.0.1/runs", "partitions": 2}
    )
    config = config.model_copy(update={"dataflow": flow})
    folder.write_config(config)
    assert "hunter2" not in folder.config_file.read_text()
    services = local_services(folder.read_config(), folder), local_services(config, folder)
    with_password = [
        {service.name for service in found if service.build_env().get(PASSWORD_ENV) == "hunter2"}
        for found in services
    ]
    assert with_password == [set(), {"dataflow", "partition-1"}]
    assert not any("hunter2" in word for found in services for s in found for word in s.command)


@pytest.mark.parametrize("store", ["sqlite", "postgresql://me@127.0.0.1/runs"])
def test_a_password_in_the_environment_reaches_services_with_a_ledger_only(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    """As the guide says to pass it. Nodes run workflows and engines of others."""
    monkeypatch.setenv(PASSWORD_ENV, "hunter2")
    config = demo_config(0)
    flow = config.dataflow.model_copy(update={"store": store, "partitions": 2})
    services = local_services(config.model_copy(update={"dataflow": flow}), folder)
    found = {service.name for service in services if "hunter2" in service.build_env().values()}
    assert found == {"dataflow", "partition-1"}
