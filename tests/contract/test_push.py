# SPDX-License-Identifier: Apache-2.0
"""`penstock push` against a server that speaks the Hub's API.

`huggingface_hub` reads its variables when it is imported, so the command has its own process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.contract.hub_push_server import TOKEN, push_server
from tests.unit.runs.export.stored_runs import full_run

from penstock.errors import ConfigError
from penstock.runs.export.model import export_model
from penstock.runs.export.push import push


def penstock(*words: str, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    settings = {"HF_HOME": str(home / "hf"), "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    return subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *words],
        env={**os.environ, **settings, **env},
        cwd=home,
        capture_output=True,
        text=True,
    )


def test_an_export_arrives_whole_and_private(tmp_path: Path) -> None:
    run = full_run(tmp_path / "full")
    export_model(run.path, tmp_path / "model")
    wanted = {path.name: path.read_bytes() for path in (tmp_path / "model").iterdir()}
    with push_server() as server:
        known = {"HF_ENDPOINT": server.url, "HF_TOKEN": TOKEN}
        words = ("push", str(tmp_path / "model"), "me/tiny", "--json")
        done = penstock(*words, home=tmp_path, **known)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1])["url"] == f"{server.url}/me/tiny"
        asked = server.created["models/me/tiny"]
        assert asked.get("visibility") == "private" or asked.get("private") is True
        assert server.files["models/me/tiny@main"] == wanted
        assert server.messages == ["Upload model with penstock"]
        again = penstock(*words, "--message", "second", home=tmp_path, **known)
        assert again.returncode == 0, again.stderr
        assert server.messages[1:] == ["second"] and server.num_uploads == 1, "weights went once"
        refused = penstock(*words, home=tmp_path, HF_ENDPOINT=server.url, HF_TOKEN="hf_wrong")
        assert refused.returncode == 1
        assert "me/tiny could not be pushed" in refused.stderr
        assert "hf auth login" in refused.stderr and "Traceback" not in refused.stderr


def test_what_is_no_export_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    (tmp_path / "run" / "keys").mkdir(parents=True)
    with pytest.raises(ConfigError, match="run folder, with the run's keys"):
        push(tmp_path / "run", "me/x")
    (tmp_path / "other").mkdir()
    with pytest.raises(ConfigError, match="does not hold a model"):
        push(tmp_path / "other", "me/x")
    with pytest.raises(ConfigError, match="does not hold trajectories"):
        push(tmp_path / "other", "me/x", dataset=True)
    with pytest.raises(ConfigError, match="is not a folder"):
        push(tmp_path / "missing", "me/x")
    (tmp_path / "other" / "model.safetensors").touch()
    with pytest.raises(ConfigError, match="write OWNER/NAME"):
        push(tmp_path / "other", "x")
