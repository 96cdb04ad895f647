# SPDX-License-Identifier: Apache-2.0
"""An agent that knows nothing of penstock is trained, and every recorded log-prob is true.

The trainer's forward pass, run under the snapshot that each span names, must give what the engine
recorded while it sampled, also where the weights changed in mid-answer.
"""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from tests.e2e.system import PENSTOCK, penstock

from penstock.dataflow.ledger.segments import Location, read
from penstock.fleet.run_folder import RunFolder
from penstock.trainer.actor import Actor
from penstock.trainer.batches import Batch, Roles
from penstock.trainer.inputs import make_inputs
from penstock.trainer.model_folders import init_model, load_model
from penstock.trainer.samples import make_samples
from penstock.types import PolicyName, Trajectory
from penstock.weights.rebuild import rebuild_blob
from penstock.weights.store import DirectoryStore
from penstock.wire.codec import decode

RECIPE = Path(__file__).parents[2] / "recipes" / "openai_agent"
POLICY = PolicyName("policy")
STEPS = 6
DRAFTS = 5
MAX_RUNS = 4
REWARD = """
def reward(completions, **columns):
    return [sum(map(text.count, "abcde")) / (1 + len(text)) for text in completions]
"""
"""Differs between any two long answers, so that no batch is skipped."""


def endless_model(folder: Path) -> Path:
    """A random model that knows no end token, so that every answer is as long as it may be."""
    init_model("builtin:tiny-qwen3", folder, seed=0)
    for name in ("config.json", "generation_config.json"):
        settings = json.loads((folder / name).read_text())
        settings.pop("eos_token_id")
        (folder / name).write_text(json.dumps(settings))
    return folder


def run_agent(folder: Path) -> RunFolder:
    """Long answers and small batches, so that weights change while answers are being written."""
    config = yaml.safe_load((RECIPE / "run.yaml").read_text())
    config["workflow"] = {"command": [sys.executable, str(RECIPE / "agent.py")]}
    config["output_dir"] = str(folder)
    config["sandbox"] = {"workflow": {"env": ["AGENT_MAX_TOKENS", "AGENT_DRAFTS"]}}
    folder.chmod(0o755)  # as root, a sandbox has a user of its own
    config["reward"] = "letters:reward"
    (folder / "letters.py").write_text(REWARD)
    config["models"]["policy"]["init"] = str(endless_model(folder / "endless"))
    config["training"] |= {"groups_per_batch": 1, "steps": STEPS, "max_staleness": 4}
    config["models"]["policy"]["capacity"] = 3  # odd, so that pairs end while others are at work
    config["algorithm"]["num_generations"] = 2
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    done = subprocess.run(
        [*PENSTOCK, "run", "run.yaml", "--headless"],
        cwd=folder,
        env={**os.environ, "AGENT_MAX_TOKENS": "240", "AGENT_DRAFTS": str(DRAFTS)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return RunFolder(folder / "openai-agent")


def trained_trajectories(database: sqlite3.Connection, ledger: Path) -> Iterator[Trajectory]:
    query = (
        "SELECT r.segment, r.offset, r.length FROM rows r JOIN fates f ON f.group_id = r.group_id "
        "WHERE f.state = 'sealed' AND r.reward IS NOT NULL"
    )
    for segment, offset, length in database.execute(query):
        location = Location(segment=segment, offset=offset, length=length)
        yield decode(read(ledger / "segments", location), Trajectory)


def snapshots(database: sqlite3.Connection, weights: Path, to: Path) -> dict[tuple[int, int], Path]:
    """Every version that the store keeps, as an ordinary folder."""
    store = DirectoryStore(weights)
    kept = set(store.manifests())
    folders: dict[tuple[int, int], Path] = {}
    query = "SELECT incarnation, number, manifest_digest FROM versions"
    for incarnation, number, digest in database.execute(query):
        if digest not in kept:
            continue
        folder = to / f"{incarnation}.{number}"
        folder.mkdir(parents=True)
        manifest = json.loads((weights / "manifests" / f"{digest}.json").read_bytes())
        for file in manifest["files"]:
            os.link(rebuild_blob(store, file["blob"]), folder / file["name"])
        folders[incarnation, number] = folder
    return folders


def recomputed(trajectory: Trajectory, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """(the trainer's log-probs, the recorded ones) of all sampled tokens, in order."""
    samples = make_samples([(0, trajectory)], POLICY)
    batch = Batch(
        seq=1,
        trains_from=0,
        samples=samples,
        groups_R=np.zeros(1, np.int64),
        staleness_R=np.zeros(1, np.int64),
        costs_R=np.ones(1),
        row_columns={},
        token_columns={"advantage": np.zeros(samples.ids_T.size)},
        longest_R=np.zeros(1, np.int64),
        roles=Roles.unnamed(1),
    )
    inputs = make_inputs(batch, np.arange(samples.starts_S.size))
    with torch.no_grad():
        return Actor(load_model(folder))(inputs).logprobs_K, inputs.sampling_K


@pytest.mark.slow
def test_a_plain_openai_script_is_trained_token_by_token(tmp_path: Path) -> None:
    """Whether weights change in mid-answer is a matter of timing: after a run that saw none comes
    another."""
    for attempt in range(MAX_RUNS):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        if compared(run_agent(folder), folder / "snapshots"):
            return
    raise AssertionError(f"no weights changed in mid-answer in {MAX_RUNS} runs")


def compared(run: RunFolder, to: Path) -> int:
    """Hold every sampled token of a run against its snapshot; how many trajectories had turns of
    several."""
    audit = penstock("audit", str(run.path), "--json")
    assert audit.returncode == 0, audit.stdout + audit.stderr
    with sqlite3.connect(run.path / "ledger" / "ledger.db") as database:
        folders = snapshots(database, run.path / "weights", to)
        trajectories = list(trained_trajectories(database, run.path / "ledger"))
    assert len(trajectories) == STEPS * 2
    worst, num_tokens, num_mixed = 0.0, 0, 0
    for trajectory in trajectories:
        assert len(trajectory.turns) == DRAFTS + 1
        owners = [
            (span.incarnation, span.number)
            for turn in trajectory.turns
            for span in turn.spans
            for _ in range(span.end - span.start)
        ]
        num_mixed += any(len(turn.spans) > 1 for turn in trajectory.turns)
        for version in set(owners):
            ours, recorded = recomputed(trajectory, folders[version])
            is_its = torch.tensor([owner == version for owner in owners])
            assert ours.numel() == len(owners)
            worst = max(worst, float((ours - recorded)[is_its].abs().max()))
            num_tokens += int(is_its.sum())
    print(f"{num_tokens} tokens, {num_mixed} trajectories across a swap, worst {worst:.2e}")
    assert worst < 1e-4
    assert num_tokens > 1000
    return num_mixed
