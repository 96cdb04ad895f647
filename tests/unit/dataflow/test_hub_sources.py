# SPDX-License-Identifier: Apache-2.0
"""Data sets of the Hugging Face Hub: downloaded from a stub of it, kept in the cache, and what to
do where there is neither. No test here uses the network."""

from __future__ import annotations

import io
import json
import os
import socket
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from tests.unit.dataflow.data_packages import parquet, pyarrow
from tests.unit.dataflow.hub_stub import COMMIT, hub

REPO = "someone/sums"
CARD = """---
configs:
- {config_name: main, default: true, data_files: [{split: train, path: main/train.parquet},
                                   {split: test, path: main/test.parquet}]}
- {config_name: hard, data_files: [{split: train, path: hard/train.parquet}]}
---
"""
DOWNLOAD = "`hf download someone/sums --repo-type dataset --local-dir sums`"
LOAD = """
import json, sys
from penstock.dataflow.sources import DataSpec, open_source
from penstock.errors import ConfigError
for entry in json.loads(sys.argv[1]):
    try:
        source = open_source("train", DataSpec(**entry))
        print(json.dumps([source.make(0, 0), source.digest(0)]))
    except ConfigError as error:
        print(json.dumps(str(error)))
"""


def load(home: Path, *entries: dict[str, Any], **env: str) -> list[Any]:
    """What comes of each entry, in a process that has this environment from its start."""
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    done = subprocess.run(
        [sys.executable, "-c", LOAD, json.dumps(entries)],
        env={**kept, "HOME": str(home), "HF_HOME": str(home / "hf"), **env},
        cwd=home,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def parquet_of(answer: str) -> bytes:
    buffer = io.BytesIO()
    table = pyarrow.table({"question": [f"is it {answer}?"], "answer": [answer]})
    parquet.write_table(table, buffer)
    return buffer.getvalue()


def test_a_data_set_is_downloaded_and_then_found_in_the_cache(tmp_path: Path) -> None:
    files = {
        "README.md": CARD.encode(),
        "main/train.parquet": parquet_of("a"),
        "main/test.parquet": parquet_of("b"),
        "hard/train.parquet": parquet_of("c"),
    }
    main = {"path": REPO, "name": "main", "columns": {"prompt": "question"}}
    wrong = [{**main, "split": "tset"}, {**main, "name": "hrad"}, {"path": "someone/smus"}]
    with hub(REPO, files) as (url, seen):
        train, test, hard, *errors = load(
            tmp_path,
            main,
            {**main, "split": "test", "revision": COMMIT},
            {**main, "name": "hard"},
            *wrong,
            HF_ENDPOINT=url,
        )
    assert train[0] == {"prompt": "is it a?", "answer": "a"}
    assert [test[0]["answer"], hard[0]["answer"]] == ["b", "c"]
    assert any(path.endswith("hard/train.parquet") for path in seen)
    assert "tset" in errors[0] and "data.split" in errors[0]
    assert "hrad" in errors[1] and "'main', 'hard'" in errors[1]
    assert "smus" in errors[2] and "check the spelling of data.path" in errors[2]
    assert "hf auth login" in errors[2]

    (again,) = load(tmp_path, main, HF_HUB_OFFLINE="1")
    assert again == train


def test_without_a_network_it_says_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "sums" / "main"
    folder.mkdir(parents=True)
    (folder.parent / "README.md").write_text(CARD)
    for name in ("train", "test"):
        (folder / f"{name}.parquet").write_bytes(parquet_of("a"))
    entries = {"path": REPO}, {"path": REPO, "revision": "v2"}, {"path": "./sums"}
    offline, pinned, copied = load(tmp_path, *entries, HF_HUB_OFFLINE="1")
    assert offline == (
        "source 'train': someone/sums: the data set is not in the cache of this machine, and "
        f"HF_HUB_OFFLINE is set; run {DOWNLOAD} on a machine with a network, copy the folder here, "
        "and set data.path: ./sums; or unset HF_HUB_OFFLINE"
    )
    assert "--repo-type dataset --revision v2 --local-dir sums" in pinned
    assert copied[0] == {"question": "is it a?", "answer": "a"}, "after doing as the message says"


@pytest.mark.slow  # the library tries for half a minute
def test_an_unreachable_hub_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
    (unreachable,) = load(tmp_path, {"path": REPO}, HF_ENDPOINT=url)
    assert f"no connection to {url}" in unreachable
    assert DOWNLOAD in unreachable


def test_an_archive_of_the_hub_is_not_unpacked(tmp_path: Path) -> None:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("train.txt"))
    with hub(REPO, {"train.txt": packed.getvalue()}) as (url, _):
        (error,) = load(tmp_path, {"path": REPO}, HF_ENDPOINT=url)
    assert "train.txt is an archive or compressed" in error and "set data.path to" in error
    assert not [*tmp_path.rglob("extracted")]
