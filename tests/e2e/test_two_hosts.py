# SPDX-License-Identifier: Apache-2.0
"""A run on one host, a node, a relay, a gateway and the trainer on another, over TLS from
`penstock tls init`. The hosts are network namespaces with one cable between them."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from tests.e2e.network_hosts import HERE, LONG_S, NEEDS_NAMESPACES, Host, hosts
from tests.e2e.system import PENSTOCK, until

from penstock.fleet.run_folder import RunFolder
from penstock.wire.certificates import Authority

__all__ = ["hosts"]
pytestmark = NEEDS_NAMESPACES


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path / "run")


def settings(authority: Authority, tmp_path: Path) -> list[str]:
    issued = authority.issue("server", [HERE], days=1)
    network = {"host": "0.0.0.0", "advertise": HERE, "tls.ca": authority.certificate}
    network |= {"tls.cert": issued.certificate, "tls.key": issued.key}
    return [
        *(f"network.{key}={value}" for key, value in network.items()),
        "training.steps=100000",
        "training.groups_per_batch=8",
        "training.lr_scheduler_type=constant",
        "algorithm.num_generations=4",
    ]


def token(folder: RunFolder, role: str, *more: str) -> str:
    """A file with a token."""
    file = folder.path.with_name(f"{role}{''.join(more)}.token")
    words = ("token", str(folder.path), "--role", role, "--out", str(file), *more)
    subprocess.run([*PENSTOCK, *words], check=True, capture_output=True)
    return str(file)


def _step(folder: RunFolder) -> int:
    lines = folder.metrics.read_text().splitlines() if folder.metrics.exists() else []
    return len(lines)


def test_a_run_spans_two_hosts_over_tls(
    hosts: tuple[Host, Host], folder: RunFolder, tmp_path: Path
) -> None:
    here, there = hosts
    authority = Authority.create(tmp_path / "tls")
    other = Authority.create(tmp_path / "other")
    ca = ("--ca", str(authority.certificate))
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    demo = ("demo", "--dir", str(folder.path), "--headless", *settings(authority, tmp_path))
    with here.running(*demo):
        until(lambda: _step(folder) >= 1, timeout_s=LONG_S, what="the first step")
        urls = folder.endpoints()
        assert urls.dataflow.startswith(f"https://{HERE}:")

        guest = token(folder, "rollout", "--name", "guest")
        refused = {
            "another authority": (urls.dataflow, ("--ca", str(other.certificate)), "Pass --ca"),
            "no authority": (urls.dataflow, (), "Pass --ca"),
            "plain HTTP": (urls.dataflow.replace("https", "http"), ca, "clear text"),
        }
        for what, (url, options, cure) in refused.items():
            failed = there.run("join", url, "--token-file", guest, *options, **cache)
            assert failed.returncode != 0 and cure in failed.stderr, (what, failed.stderr)

        relay = (
            *("relay", urls.weights, "--public-key", folder.public_key(), "--port", "19001"),
            *("--token-file", token(folder, "relay"), "--cache", str(tmp_path / "relay"), *ca),
        )
        gateway = (
            *("gateway", urls.dataflow, "--public-key", folder.public_key(), "--port", "19002"),
            *("--token-file", token(folder, "gateway"), *ca),
        )
        join = (
            *("join", urls.dataflow, "--token-file", guest, "--relay", "http://127.0.0.1:19001"),
            *("--relay-token-file", token(folder, "rollout", "--for-relay"), *ca),
        )
        with (
            there.running(*relay, **cache),
            there.running(*gateway, **cache),
            there.running(*join, **cache),
        ):
            until(lambda: _delivered(here, folder, "guest"), timeout_s=LONG_S, what="guest works")
            until(lambda: any((tmp_path / "relay").rglob("*")), timeout_s=LONG_S, what="relay used")
    _train_from_there(here, there, folder)
    _refuses_an_expired_certificate(here, there, folder, authority, cache)


def _delivered(here: Host, folder: RunFolder, node: str) -> bool:
    shown = here.run("status", str(folder.path), "--json")
    return shown.returncode == 0 and f'"{node}' in shown.stdout


def _train_from_there(here: Host, there: Host, folder: RunFolder) -> None:
    run, url = ("--run-dir", str(folder.path)), folder.endpoints().dataflow
    before = _step(folder)
    with (
        here.running("dataflow", *run),
        here.running("weights", "serve", *run),
        here.running("rollout", *run, "--name", "node-0"),
        there.running("trainer", *run, "--url", url),
    ):
        until(lambda: _step(folder) > before, timeout_s=LONG_S, what="a step of the far trainer")


def _refuses_an_expired_certificate(
    here: Host, there: Host, folder: RunFolder, authority: Authority, cache: dict[str, str]
) -> None:
    expired = authority.issue("expired", [HERE], days=-0.01)
    files = ("--tls-cert", str(expired.certificate), "--tls-key", str(expired.key))
    url = folder.endpoints().weights
    with here.running("weights", "serve", "--run-dir", str(folder.path), *files):
        words = ("join", url, "--ca", str(authority.certificate))
        failed = there.run(*words, "--token-file", token(folder, "rollout"), **cache)
    assert failed.returncode != 0
    assert "expired" in failed.stderr and "penstock tls init" in failed.stderr
