# SPDX-License-Identifier: Apache-2.0
"""A node and a trainer that know nothing of penstock take part in a real run of real services; and
the real trainer is examined like a foreign one."""

from __future__ import annotations

import os
import random
import secrets
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.e2e.system import PENSTOCK, penstock, until
from transformers import AutoModelForCausalLM

from penstock.config import (
    AlgorithmConfig,
    ModelConfig,
    RunConfig,
    SamplingConfig,
    SourceConfig,
    TrainingConfig,
)
from penstock.conformance import examine_trainer
from penstock.conformance.dataflow_double import JoinInfo, run_config
from penstock.conformance.tiny_snapshot import write_snapshot
from penstock.conformance.verdicts import Verdict
from penstock.dataflow.client.dataflow import StatusClient
from penstock.dataflow.service.operators.messages import Status
from penstock.fleet.run_folder import Endpoints, RunFolder
from penstock.trainer.model_folders import TINY_QWEN3, init_model
from penstock.wire.auth import Role, Signer
from penstock.wire.codec import encode_json

RECIPES = Path(__file__).parents[2] / "recipes"
FOREIGN = RECIPES / "foreign"
PLAIN = RECIPES / "plain_trainer" / "trainer.py"
STEPS = 60


def config() -> RunConfig:
    return RunConfig(
        name="foreign",
        models={"policy": ModelConfig(init="builtin:tiny-qwen3", engine="scripted")},
        sources=(SourceConfig(name="train", task="penstock.tasks.reverse"),),
        reward="penstock.tasks.reverse:reward",
        sampling=SamplingConfig(max_tokens=3),
        algorithm=AlgorithmConfig(num_generations=4),
        training=TrainingConfig(steps=STEPS, groups_per_batch=4, max_staleness=1),
    )


def token_env(folder: Path, token: str) -> dict[str, str]:
    """The variable that names a file with this token."""
    file = folder / f"token-{secrets.token_hex(4)}"
    file.write_text(token)
    return {"PENSTOCK_TOKEN_FILE": str(file)}


class Run:
    """A run folder whose services are started one by one, without a launcher."""

    def __init__(self, path: Path) -> None:
        self.folder = RunFolder(path)
        self.path = path
        path.mkdir()
        self.folder.write_config(config())
        Signer.create(self.folder.keys, config().name)
        self.endpoints = self.folder.allocate_endpoints(path, ())
        self.processes: list[subprocess.Popen[bytes]] = []

    def start(self, role: Role | None, *words: str, subject: str = "") -> subprocess.Popen[bytes]:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if role is not None:
            env |= token_env(
                self.path, self.folder.token(config().name, role, ttl_s=600.0, subject=subject)
            )
        log = self.path / f"{len(self.processes)}.log"
        with log.open("wb") as out:
            process = subprocess.Popen(words, env=env, stdout=out, stderr=out)
        self.processes.append(process)
        return process

    def service(self, *words: str) -> subprocess.Popen[bytes]:
        return self.start(None, *PENSTOCK, *words, "--run-dir", str(self.path))

    def node(self, name: str) -> subprocess.Popen[bytes]:
        script = str(FOREIGN / "rollout.py")
        url = self.endpoints.dataflow
        return self.start(Role.ROLLOUT, sys.executable, script, url, subject=name)

    def trainer(self, init: Path) -> subprocess.Popen[bytes]:
        words = ["--store", str(self.folder.weights), "--init", str(init)]
        script = str(FOREIGN / "trainer.py")
        return self.start(Role.TRAINER, sys.executable, script, self.endpoints.dataflow, *words)

    def status(self) -> Status:
        token = self.folder.token(config().name, Role.READER, ttl_s=60.0)
        reader = StatusClient(self.endpoints.dataflow, token, patience_s=120.0)
        try:
            return reader.status()
        finally:
            reader.close()

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "run")
    made.service("dataflow")
    made.service("weights", "serve")
    yield made
    made.close()


@pytest.fixture
def init(tmp_path: Path) -> Path:
    folder = tmp_path / "init"
    write_snapshot(folder, random.Random(0))
    return folder


def assert_trained(run: Run, processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Everybody left by itself, and an independent reader finds the ledger sound."""
    codes = [process.wait(timeout=300.0) for process in processes]
    assert codes == [0] * len(processes)
    audit = penstock("audit", str(run.path))
    assert audit.returncode == 0, audit.stdout + audit.stderr


def test_foreign_node_and_trainer_finish_a_run_beside_a_real_node(run: Run, init: Path) -> None:
    """The trainer is killed in the middle; another resumes under a new incarnation."""
    trainer, node = run.trainer(init), run.node("foreign")
    real = run.start(None, *PENSTOCK, "rollout", "--run-dir", str(run.path))
    until(lambda: run.status().policies[0].number >= 3, timeout_s=300.0, what="step 3")
    trainer.kill()
    trainer.wait()
    number = run.status().policies[0].number
    second = run.trainer(init)
    until(lambda: run.status().finished, timeout_s=300.0, what="last step")
    policy = run.status().policies[0]
    assert (policy.incarnation, policy.number) == (2, STEPS)
    assert policy.staleness_max is not None and policy.staleness_max <= 1
    assert number < STEPS, "it was killed before the end"
    assert_trained(run, [second, node, real])


# --- the real trainer, examined ------------------------------------------------------------------


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    processes: list[subprocess.Popen[bytes]] = []
    yield processes
    for process in processes:
        process.kill()
        process.wait()


async def test_real_trainer_keeps_every_rule_and_fails_when_fenced(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.write_config(run_config())

    def invite(got: JoinInfo) -> None:
        endpoints = Endpoints(dataflow=got.url, weights=got.url, work_dir=str(tmp_path))
        (folder.path / "run").mkdir()
        (folder.path / "run" / "endpoints.json").write_bytes(encode_json(endpoints))
        folder.weights.symlink_to(got.store)
        env = {**os.environ, **token_env(tmp_path, got.token), "OMP_NUM_THREADS": "1"}
        words = [*PENSTOCK, "trainer", "--run-dir", str(folder.path)]
        with (tmp_path / "trainer.log").open("wb") as out:
            started.append(subprocess.Popen(words, env=env, stdout=out, stderr=out))

    findings = await examine_trainer(host="127.0.0.1", port=0, on_ready=invite, timeout_s=300.0)
    log = (tmp_path / "trainer.log").read_text()
    not_kept = [str(finding) for finding in findings if finding.verdict is not Verdict.OK]
    assert not_kept == [], log
    assert started[0].wait(timeout=300.0) > 0


async def test_a_plain_loop_keeps_every_rule_and_fails_when_fenced(
    tmp_path: Path, started: list[subprocess.Popen[bytes]]
) -> None:
    init = tmp_path / "init"
    init_model(TINY_QWEN3, init, seed=0)

    def invite(got: JoinInfo) -> None:
        env = {**os.environ, **token_env(tmp_path, got.token), "OMP_NUM_THREADS": "1"}
        words = [str(PLAIN), got.url, "--store", str(got.store), "--init", str(init)]
        words += ["--state", str(tmp_path / "state")]
        with (tmp_path / "trainer.log").open("wb") as out:
            started.append(
                subprocess.Popen([sys.executable, *words], env=env, stdout=out, stderr=out)
            )

    findings = await examine_trainer(host="127.0.0.1", port=0, on_ready=invite, timeout_s=300.0)
    log = (tmp_path / "trainer.log").read_text()
    not_kept = [str(finding) for finding in findings if finding.verdict is not Verdict.OK]
    assert not_kept == [], log
    assert started[0].wait(timeout=300.0) > 0 and "Fenced" in (tmp_path / "trainer.log").read_text()
    (kept,) = (tmp_path / "state").glob("step_*")
    AutoModelForCausalLM.from_pretrained(kept)


def test_a_plain_loop_joins_in_thirty_lines() -> None:
    lines = PLAIN.read_text().split("def train(")[1].split("\n\n\n")[0].splitlines()[1:]
    assert len([line for line in lines if line.strip()]) <= 30
