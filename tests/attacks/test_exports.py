# SPDX-License-Identifier: Apache-2.0
"""Nothing leaves a machine by an export or a push that its owner did not mean to publish, and what
leaves is what the ledger says."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from tests.unit.runs.export.stored_runs import NUM_VERSIONS, POLICY, full_run, tiny_model

from penstock.errors import ConfigError, WeightsError
from penstock.fleet.run_folder import RunFolder
from penstock.runs.export.gguf_file import write_gguf
from penstock.runs.export.model import export_model
from penstock.runs.export.push import push
from penstock.runs.stored_versions import stored_versions


def _blob(run: RunFolder, name: str) -> Path:
    [entry] = [
        kept.entry for kept in stored_versions(run, POLICY)[-1].files if kept.entry.name == name
    ]
    [path] = [path for path in run.weights.rglob(f"*{entry.blob}*") if path.is_file()]
    return path


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_an_export_is_what_was_published(tmp_path: Path, name: str) -> None:
    """A byte of the store changed since: nothing is exported, and no part of it stays."""
    run = full_run(tmp_path / "run")
    assert len(stored_versions(run, POLICY)) == NUM_VERSIONS
    blob = _blob(run, name)
    blob.chmod(0o600)
    data = bytearray(blob.read_bytes())
    data[-2] ^= 1
    blob.write_bytes(data)
    with pytest.raises(ConfigError, match=rf"{name} of policy@.* is damaged; .*weights verify"):
        export_model(run.path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def _exported(folder: Path) -> Path:
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"x")
    return folder


@pytest.mark.parametrize("place", ["link", "sub/folder/link"])
@pytest.mark.parametrize("target", ["/etc/passwd", "/etc", "nothing"])
def test_a_push_follows_no_link(tmp_path: Path, place: str, target: str) -> None:
    """The library that uploads would read what a link leads to."""
    folder = _exported(tmp_path / "out")
    link = folder / place
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)
    with pytest.raises(ConfigError, match="link is a link, whose target would be uploaded"):
        push(folder, "me/model")


@pytest.mark.parametrize("place", ["keys", "run/keys", "a/b/run/ledger"])
def test_a_folder_that_holds_a_run_is_not_pushed(tmp_path: Path, place: str) -> None:
    """Keys would be published: of the folder itself, and of runs anywhere below it."""
    folder = _exported(tmp_path / "out")
    (folder / place).mkdir(parents=True)
    with pytest.raises(ConfigError, match="is or holds a run folder, with the run's keys"):
        push(folder, "me/model")
    with pytest.raises(ConfigError, match="is or holds a run folder"):
        push(folder, "me/data", dataset=True)


def test_an_export_does_not_follow_a_link_that_stands_in_its_place(tmp_path: Path) -> None:
    run = full_run(tmp_path / "run")
    victim = tmp_path / "victim"
    victim.mkdir()
    os.symlink(victim, tmp_path / "out")
    with pytest.raises(ConfigError, match="out"):
        export_model(run.path, tmp_path / "out")
    assert not list(victim.iterdir())


@pytest.mark.parametrize(
    ("key", "size"), [("num_hidden_layers", 2_000), ("num_hidden_layers", 0.5), ("head_dim", 1e11)]
)
def test_sizes_that_a_model_claims_and_does_not_have_are_refused(
    tmp_path: Path, key: str, size: float
) -> None:
    """A hundred thousand layers were 5 GB of names, and more than a minute."""
    folder = tiny_model(tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: size}))
    with pytest.raises(WeightsError, match=f"{key} is .* and this model has"):
        write_gguf(folder, tmp_path / "x.gguf", name="tiny", precision=None, lineage={})
