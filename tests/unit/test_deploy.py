# SPDX-License-Identifier: Apache-2.0
"""The files in deploy/: commands that exist, references that resolve, shells that parse."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.cli.main import build
from penstock.config import demo_config
from penstock.config.network import NetworkConfig
from penstock.fleet.launchers.ray_cluster import selector
from penstock.fleet.run_folder import RunFolder
from penstock.fleet.services import local_services
from penstock.rollout.environments.environments import environment_python

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
MADE_BY_HAND = {"penstock-config", "penstock-tls", "penstock-ca", "penstock-node-token"}
"""The guide has the commands for these."""
PORT = 18500


def documents() -> Iterator[dict[str, Any]]:
    for path in MANIFESTS:
        yield from yaml.safe_load_all(path.read_text())


def ray_job() -> dict[str, Any]:
    return [*yaml.safe_load_all((DEPLOY / "kuberay.yaml").read_text())][1]


def pod_specs() -> Iterator[dict[str, Any]]:
    for document in documents():
        if template := document["spec"].get("template"):
            yield template["spec"]


def ray_pod_specs() -> Iterator[dict[str, Any]]:
    cluster = ray_job()["spec"]["rayClusterSpec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield group["template"]["spec"]


def commands() -> Iterator[tuple[str, list[str]]]:
    """Every call of penstock in these files, without the program's name."""
    for spec in pod_specs():
        for container in spec["containers"]:
            yield container["name"], container["args"]
    for name, service in yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"].items():
        yield f"compose {name}", service["command"]
    scripts = [path.read_text() for path in sorted((DEPLOY / "slurm").iterdir())]
    scripts.append(yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())["run"])
    scripts.append(ray_job()["spec"]["entrypoint"])
    for script in scripts:
        for line in script.replace("\\\n", " ").splitlines():
            code = line.partition(" # ")[0]
            if found := re.search(r"^\s*(?:until |srun |exec )*(?:\S*/)?penstock (.+)", code):
                words = shlex.split(re.split(r" &$| 2>|; do", found[1])[0])
                yield f"script: penstock {words[0]}", words


@pytest.mark.parametrize(("where", "words"), [*commands()])
def test_every_command_exists_with_its_options(where: str, words: list[str]) -> None:
    """No file calls a command or an option that was renamed."""
    filled = [re.sub(r"\$\([^)]*\)|\$\{[^}]*\}|\$\w+", "1", word) for word in words]
    build().parse_args(filled, exit_on_error=False, print_error=False)


def test_there_are_commands_to_check() -> None:
    assert {words[0] for _, words in commands()} == {"run", "join", "trainer", "tls", "token"}


def test_what_pods_mount_is_there() -> None:
    """Volumes, claims, secrets, config maps: declared here, or made by a command of the guide."""
    claims = {one["metadata"]["name"] for one in documents() if "Claim" in one["kind"]}
    for spec in (*pod_specs(), *ray_pod_specs()):
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for container in (*spec["containers"], *spec.get("initContainers", [])):
            assert {mount["name"] for mount in container["volumeMounts"]} <= set(volumes)
        for volume in volumes.values():
            if claim := volume.get("persistentVolumeClaim"):
                assert claim["claimName"] in claims
            for kind, key in (("secret", "secretName"), ("configMap", "name")):
                if kind in volume:
                    assert volume[kind][key] in MADE_BY_HAND
    guide = (DEPLOY.parent / "docs" / "how-to" / "deploy.md").read_text()
    assert all(name in guide for name in MADE_BY_HAND)


def test_a_ray_cluster_has_authentication_and_the_tags_of_our_services() -> None:
    cluster = ray_job()["spec"]["rayClusterSpec"]
    assert cluster["authOptions"] == {"mode": "token"}
    labels = [group["labels"] for group in cluster["workerGroupSpecs"]]
    tags = {tag for one in local_services(demo_config(0), RunFolder(Path())) for tag in one.tags}
    assert tags == {"train", "rollout"}
    assert all(any(selector((tag,), None, [one]) for one in labels) for tag in tags)


def test_services_find_their_pods_on_the_ports_of_the_run() -> None:
    labels = [
        one["spec"]["template"]["metadata"]["labels"]
        for one in documents()
        if "template" in one["spec"]
    ]
    for document in documents():
        if document["kind"] == "Service":
            assert document["spec"]["selector"] in labels
        if document["kind"] == "Deployment":
            assert document["spec"]["selector"]["matchLabels"] in labels
    (service,) = [one for one in documents() if one["metadata"]["name"] == "penstock"]
    assert [port["port"] for port in service["spec"]["ports"]] == [PORT, PORT + 1]
    assert NetworkConfig(port=PORT).port == PORT


def test_nodes_get_no_key_that_signs() -> None:
    """A node's machine may be anybody's: neither the run folder with the keys of tokens, nor the
    key of the authority reaches it."""
    node = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["node"]
    targets = {volume.split("}", 1)[1].split(":", 1)[1] for volume in node["volumes"]}
    assert targets == {"/data:ro", "/join"} and node["tmpfs"] == ["/data/outputs"]
    spot = yaml.safe_load((DEPLOY / "skypilot.yaml").read_text())
    assert "workdir" not in spot
    sources = {Path(source) for source in spot["file_mounts"].values()}
    allowed = {"node.token", "tls/ca.pem", "pyproject.toml", "README.md", "LICENSE", "src"}
    assert sources == {Path(name) for name in allowed}
    for spec in pod_specs():
        mounted = {volume["name"] for volume in spec["volumes"]}
        args = spec["containers"][0]["args"]
        assert args[0] != "join" or "work" not in mounted


@pytest.mark.parametrize("script", sorted((DEPLOY / "slurm").iterdir()), ids=lambda path: path.name)
def test_scripts_parse(script: Path) -> None:
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.envs
def test_kubernetes_accepts_the_manifests() -> None:
    """By its own schemas, unknown fields refused."""
    program = environment_python("kubernetes").with_name("kubernetes-validate")
    done = subprocess.run([program, "--strict", *MANIFESTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("passed") + done.stderr.count("passed") == len([*documents()])
