# SPDX-License-Identifier: Apache-2.0
"""A trainer of 2 + 2 ranks on two hosts over TLS, with a node on each: one host is cut off and
brought back, and the weights are those of a run that nobody disturbed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.e2e.network_hosts import HERE, LONG_S, NEEDS_NAMESPACES, THERE, Host, hosts
from tests.e2e.system import penstock, until
from tests.e2e.test_two_hosts import token

from penstock.fleet.run_folder import RunFolder
from penstock.wire.certificates import Authority

__all__ = ["hosts"]
pytestmark = [*NEEDS_NAMESPACES, pytest.mark.slow]
STEPS = 8
COMMON = (
    f"training.steps={STEPS}",
    "training.groups_per_batch=4",
    "training.checkpoint_every=3",
    "training.lr_scheduler_type=constant",
    "training.parallel.dp=4",
    "algorithm.num_generations=4",
    "deterministic=true",
)


def num_steps(folder: RunFolder) -> int:
    return len(folder.metrics.read_text().splitlines()) if folder.metrics.exists() else 0


def final_weights(folder: RunFolder) -> bytes:
    return (folder.path / "checkpoints" / f"step_{STEPS}" / "model.safetensors").read_bytes()


def test_a_host_of_the_trainer_is_cut_off_and_comes_back(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    here, there = hosts
    straight = RunFolder(tmp_path / "straight")
    done = penstock("demo", "--dir", str(straight.path), "--headless", *COMMON)
    assert done.returncode == 0, done.stderr[-2000:]

    folder, authority = RunFolder(tmp_path / "run"), Authority.create(tmp_path / "tls")
    issued = authority.issue("server", [HERE], days=1)
    tls = f"{{cert: {issued.certificate}, key: {issued.key}, ca: {authority.certificate}}}"
    run = (
        *("demo", "--dir", str(folder.path), "--headless", *COMMON),
        f"network={{host: 0.0.0.0, advertise: {HERE}, tls: {tls}}}",
        f"hosts={{a: {{memory_gb: 4, address: {HERE}}}, b: {{memory_gb: 4, address: {THERE}}}}}",
        *("training.hosts=[a, b]", "training.rank_timeout_s=20", "training.external=true"),
    )
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    with here.running(*run) as launcher:
        until(
            lambda: (folder.path / "run" / "endpoints.json").exists(),
            timeout_s=LONG_S,
            what="the services",
        )
        url = folder.endpoints().dataflow
        trainer = ("trainer", "--run-dir", str(folder.path), "--url", url, "--host")
        guest = ("--token-file", token(folder, "rollout", "--name", "guest"))
        join = ("join", url, *guest, "--ca", str(authority.certificate))
        with (
            here.running(*trainer, "a") as first,
            there.running(*trainer, "b") as second,
            there.running(*join, **cache),
        ):
            until(lambda: num_steps(folder) >= 2, timeout_s=LONG_S, what="two steps")
            with there.cut_off():
                until(
                    lambda: "collective failed" in here.log.read_text(),
                    timeout_s=LONG_S,
                    what="the ranks here miss those there",
                )
            assert first.wait(LONG_S) == second.wait(LONG_S) == 0
        assert launcher.wait(LONG_S) == 0
    silent = [line for line in here.log.read_text().splitlines() if "collective failed" in line]
    assert any('"silent": "2, 3 (b)"' in line for line in silent), silent
    assert final_weights(folder) == final_weights(straight)
    audited = penstock("audit", str(folder.path), "--json")
    assert audited.returncode == 0 and json.loads(audited.stdout.splitlines()[-1])
