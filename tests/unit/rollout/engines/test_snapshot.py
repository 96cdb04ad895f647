# SPDX-License-Identifier: Apache-2.0
"""Metadata of snapshot folders, valid and damaged."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import EngineError
from penstock.rollout import adapter_info
from penstock.rollout.snapshot import read_snapshot


def write(folder: Path, config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    data = struct.pack("<Q", len(header)) + header + bytes(8)
    (folder / "model.safetensors").write_bytes(data)
    return folder


def test_facts(tmp_path: Path) -> None:
    config = {"eos_token_id": 3, "max_position_embeddings": 9, "vocab_size": 5}
    snapshot = read_snapshot(write(tmp_path, config))
    assert snapshot.stop_ids == {3}
    assert (snapshot.window, snapshot.vocab_size) == (9, 5)
    assert snapshot.tensors == ("w",)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert read_snapshot(tmp_path).stop_ids == {1, 2}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": null}')
    assert read_snapshot(tmp_path).stop_ids == {3}


@pytest.mark.parametrize("num_bytes", [0, 4, 8, 40, -1])
def test_cut_tensor_files_are_refused(tmp_path: Path, num_bytes: int) -> None:
    path = write(tmp_path, {}) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(EngineError, match="damaged"):
        read_snapshot(tmp_path)


@pytest.mark.parametrize("header", [b"\xff" * 8 + b"{}", b"\x02" + bytes(7) + b"[]"])
def test_nonsense_headers_are_refused(tmp_path: Path, header: bytes) -> None:
    (write(tmp_path, {}) / "model.safetensors").write_bytes(header)
    with pytest.raises(EngineError, match="damaged"):
        read_snapshot(tmp_path)


@pytest.mark.parametrize("config", [[], {"vocab_size": 0}, {"max_position_embeddings": "x"}])
def test_unusable_configs_are_refused(tmp_path: Path, config: object) -> None:
    with pytest.raises(EngineError, match=r"config\.json"):
        read_snapshot(write(tmp_path, config))


def test_a_missing_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="cannot read"):
        read_snapshot(tmp_path / "nowhere")


def test_a_base_is_known_by_its_bytes_and_hard_links_are_read_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[Path] = []
    hash_before: Any = adapter_info.blake3

    class Counting:
        def __init__(self, *args: Any, **words: Any) -> None:
            self._inner = hash_before(*args, **words)

        def update_mmap(self, path: Path) -> Any:
            read.append(path)
            return self._inner.update_mmap(path)

        def hexdigest(self) -> str:
            return self._inner.hexdigest()

    monkeypatch.setattr(adapter_info, "blake3", Counting)
    names = ("one", "link", "copy", "other")
    one, link, copy, other = (tmp_path / name for name in names)
    for folder in (one, link, copy, other):
        folder.mkdir()
    path = write(one, {}) / "model.safetensors"
    os.link(path, link / path.name)
    (copy / path.name).write_bytes(path.read_bytes())
    (other / path.name).write_bytes(path.read_bytes()[:-1] + b"x")
    (link / "adapter_model.safetensors").write_bytes(b"not the base's business")
    files = adapter_info.BaseDigests()
    assert files.digest(one) == files.digest(link) == files.digest(copy) != files.digest(other)
    assert [found.parent.name for found in read] == ["one", "copy", "other"]
