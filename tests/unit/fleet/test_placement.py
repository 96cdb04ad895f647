# SPDX-License-Identifier: Apache-2.0
"""Where a service may run, by its tags: on Ray's nodes and on the hosts of a run file."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.config import HostConfig, demo_config
from penstock.errors import ConfigError, LaunchError
from penstock.fleet.launchers import ray_cluster
from penstock.fleet.launchers.ray_cluster import selector
from penstock.fleet.launchers.ssh import candidates
from penstock.fleet.run_folder import RunFolder
from penstock.fleet.services import ServiceKind, ServiceSpec, local_services
from penstock.runs.starters import require_place

TWO_HOSTS = (
    "hosts={a: {memory_gb: 4, address: 10.0.0.1}, b: {memory_gb: 4, address: 10.0.0.2}}",
    "training.hosts=[a, b]",
    "training.parallel.dp=2",
)


def service(*tags: str, host: str | None = None) -> ServiceSpec:
    return ServiceSpec(
        name="one", kind=ServiceKind.NODE, command=("true",), build_env=dict, tags=tags, host=host
    )


def host(*tags: str) -> HostConfig:
    return HostConfig(memory_gb=4, tags=tags)


def test_a_service_goes_to_ray_nodes_with_its_tags() -> None:
    labels = [{"train": "true", "ray.io/node-id": "1"}, {"rollout": "true"}, {"h100": "false"}]
    assert selector(("train",), None, labels) == {"train": "true"}
    assert selector(("train",), "a", labels) == {"host": "a"}


def test_a_tag_that_no_ray_node_has_constrains_nothing() -> None:
    assert selector(("train",), None, [{"rollout": "true"}, {"train": "false"}]) == {}


def test_a_service_goes_to_hosts_with_all_its_tags() -> None:
    hosts = {"a": host("train"), "b": host("rollout", "train"), "c": host("rollout", "h100")}
    assert candidates(service("rollout"), hosts, "a") == ("b", "c")
    assert candidates(service("rollout", "h100"), hosts, "a") == ("c",)
    assert candidates(service("train", host="b"), hosts, "a") == ("b",)
    assert candidates(service("judge"), hosts, "a") == ("a", "b", "c"), "no host has this tag"
    assert candidates(service("train", "h100"), hosts, "a") == (), "no host has both"


def test_a_trainer_goes_to_the_best_trainer_and_then_to_the_next() -> None:
    """A host that is lost is replaced by the holder of `train` with the highest priority."""

    def peaks(*tags: str, tflops: float, gb_per_s: float) -> HostConfig:
        return HostConfig(memory_gb=4, tags=tags, tflops=tflops, memory_gb_per_s=gb_per_s)

    hosts = {
        "old": peaks("train", "rollout", tflops=125, gb_per_s=900),
        "big": peaks("train", "rollout", tflops=990, gb_per_s=3350),
        "fat": peaks("train", "rollout", tflops=148, gb_per_s=4000),
        "eu": peaks("rollout", tflops=990, gb_per_s=3350),
    }
    assert candidates(service("train"), hosts, "old") == ("big", "old", "fat")
    assert candidates(service("rollout"), hosts, "old") == ("fat", "old", "big", "eu")


def test_each_service_has_a_selector(tmp_path: Path) -> None:
    selectors = ("training.place=[h100]", "models.policy.place=[eu, cheap]")
    config = demo_config(0, [*selectors])
    services = local_services(config, RunFolder(tmp_path))
    assert {one.kind: one.tags for one in services if one.tags} == {
        ServiceKind.TRAINER: ("train", "h100"),
        ServiceKind.NODE: ("rollout", "eu", "cheap"),
    }
    network = "network={host: 10.0.0.1, tls: {cert: c, key: k}}"
    with pytest.raises(ConfigError, match=r"unknown tag .*h100"):
        demo_config(0, [selectors[0], TWO_HOSTS[0], network, "launcher=ssh"])


@pytest.mark.parametrize("section", ["dataflow", "weights"])
def test_services_with_files_refuse_a_host_without_their_tags(section: str) -> None:
    config = demo_config(0, [f"{section}.place=[disk]"])
    require_place(config, {"disk"}, {"disk", "train"})
    require_place(config, {"train"}, {"train"})  # no host has this tag
    with pytest.raises(LaunchError, match=rf"{section}\.place asks for a host with the tag disk"):
        require_place(config, {"train"}, {"disk", "train"})


def test_services_with_files_stay_beside_the_launcher(tmp_path: Path) -> None:
    hosts = {"a": host("train"), "b": host("rollout")}
    placed = {
        one.name: candidates(one, hosts, "a")
        for one in local_services(demo_config(0), RunFolder(tmp_path))
    }
    assert placed == {
        "dataflow": ("a",),
        "weights": ("a",),
        "trainer-policy": ("a",),
        "node-0": ("b",),
        "node-1": ("b",),
    }


@pytest.mark.parametrize("launcher", ["ray", "ssh"])
def test_a_trainer_on_two_hosts_has_a_part_on_each(tmp_path: Path, launcher: str) -> None:
    network = "network={host: 10.0.0.1, tls: {cert: c, key: k}}"
    config = demo_config(0, [*TWO_HOSTS, network, f"launcher={launcher}"])
    parts = [
        (one.name, one.host, one.all_hosts, one.command[-2:])
        for one in local_services(config, RunFolder(tmp_path))
        if one.kind is ServiceKind.TRAINER
    ]
    assert parts == [
        (f"trainer-policy@{name}", name, ("a", "b"), ("--host", name)) for name in ("a", "b")
    ]


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (TWO_HOSTS, "launcher local starts it on one; use launcher ray or ssh"),
        (("launcher=ssh",), "ssh has no hosts to go to"),
        ((*TWO_HOSTS, "launcher=ssh"), "other hosts cannot reach the services at 127.0.0.1"),
    ],
    ids=["local", "no hosts", "loopback"],
)
def test_hosts_that_a_launcher_cannot_use_are_refused(overrides: tuple[str, ...], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        demo_config(0, overrides)


def test_a_cluster_that_everybody_may_use_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with pytest.raises(LaunchError, match="RAY_AUTH_MODE=token"):
        ray_cluster.connect(None)
