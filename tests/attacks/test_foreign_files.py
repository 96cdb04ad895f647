# SPDX-License-Identifier: Apache-2.0
"""The payload, weights and records of a run folder of somebody else: reading makes nothing
elsewhere, waits for nobody, and has an end."""

from __future__ import annotations

import ast
import fcntl
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.attacks.test_foreign_folders import foreign_folder

import penstock
from penstock.audit.payloads import SegmentReader as AuditedSegments
from penstock.config import load_stored
from penstock.dataflow.ledger import segments
from penstock.dataflow.ledger.blobs import read_blob
from penstock.dataflow.ledger.segments import Location
from penstock.durable import copy_regular
from penstock.errors import ConfigError, NotFound, StoreError, WeightsError
from penstock.runs import result_files
from penstock.runs.evaluations import read_evaluations
from penstock.runs.result_files import run_results
from penstock.runs.tokens import issued_tokens
from penstock.weights import store as stores
from penstock.weights.catalog import count_changes, deletion_paused, full_file
from penstock.weights.deltas.delta import write_delta
from penstock.weights.store import DirectoryStore
from penstock.weights.tensors import make_layout

DIGEST = "0" * 64
KINDS = {"link": "/dev/zero", "pipe": ""}


def _plant(path: Path, kind: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if KINDS[kind]:
        path.symlink_to(KINDS[kind])
    else:
        os.mkfifo(path)


@pytest.mark.parametrize("kind", KINDS)
def test_payload_is_read_from_files_only(tmp_path: Path, kind: str) -> None:
    place = Location(segment=1, offset=0, length=10)
    _plant(tmp_path / "segments" / "seg-00000001.dat", kind)
    with pytest.raises(OSError, match=r"regular|symbolic|link"):
        segments.read(tmp_path / "segments", place)
    with AuditedSegments(tmp_path / "segments") as audited:
        assert "cannot be opened" in audited.content(1, 0, 10, DIGEST).damage
        _plant(tmp_path / "blobs" / "00" / DIGEST, kind)
        assert "cannot be read" in audited.content(1, 0, 10, DIGEST, DIGEST).damage
    with pytest.raises(OSError, match=r"regular|symbolic|link"):
        read_blob(tmp_path / "blobs", DIGEST)


def test_reading_a_blob_makes_no_folder(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "blobs").symlink_to(home)
    with pytest.raises(NotFound):
        read_blob(tmp_path / "blobs", DIGEST)
    assert not list(home.iterdir())


@pytest.mark.parametrize("length", [-1, 1 << 33, 1 << 60])
def test_a_length_in_the_ledger_takes_no_memory(tmp_path: Path, length: int) -> None:
    path = tmp_path / "seg-00000001.dat"
    path.touch()
    os.truncate(path, 1 << 40)
    with pytest.raises(StoreError, match="is cut off"):
        segments.read(tmp_path, Location(segment=1, offset=0, length=length))
    with AuditedSegments(tmp_path) as audited:
        assert audited.content(1, 0, length, DIGEST).damage


def test_weights_are_read_under_a_lock_that_nobody_planted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    store = DirectoryStore(tmp_path / "weights")
    (tmp_path / "weights").mkdir()
    lock = tmp_path / "weights" / "lock"
    with deletion_paused(store):
        assert not lock.exists()
    lock.symlink_to(home / ".hushlogin")
    with deletion_paused(store):
        assert not list(home.iterdir())
    with pytest.raises(OSError, match=r"symbolic|link"), store.writing():
        pass
    lock.unlink()
    os.mkfifo(lock)
    with deletion_paused(store):
        pass
    lock.unlink()
    monkeypatch.setattr(stores, "READING_WAIT_S", 0.0)
    with lock.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(WeightsError, match="is locked"), deletion_paused(store):
            pass


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_blob_is_a_file(tmp_path: Path, kind: str) -> None:
    store = DirectoryStore(tmp_path / "weights")
    _plant(store.blob_path(DIGEST), kind)
    with pytest.raises(WeightsError, match="is missing"), full_file(store, DIGEST, tmp_path):
        pass
    with pytest.raises(OSError, match=r"regular|symbolic|link"):
        copy_regular(store.blob_path(DIGEST), tmp_path / "out", 1 << 20)
    assert not (tmp_path / "out").exists()


def test_a_copy_is_as_long_as_was_said(tmp_path: Path) -> None:
    (tmp_path / "long").touch()
    os.truncate(tmp_path / "long", 1 << 40)
    copy_regular(tmp_path / "long", tmp_path / "out", 3 << 20)
    assert (tmp_path / "out").stat().st_size == 3 << 20


@pytest.mark.parametrize("kind", KINDS)
def test_records_of_operators_and_configs_are_files(tmp_path: Path, kind: str) -> None:
    folder = foreign_folder(tmp_path / "evil")
    _plant(folder.path / "admin.head", kind)
    assert folder.admin_log.head().number == 0
    _plant(folder.keys / "issued.jsonl", kind)
    with pytest.raises(OSError, match=r"regular|link"):
        issued_tokens(folder)
    _plant(folder.path / "run" / "adopted.yaml", kind)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_stored(folder.path / "run" / "adopted.yaml")


def _evaluations(folder: Path) -> object:
    return [*read_evaluations(folder)]


@pytest.mark.parametrize("read", [run_results, _evaluations])
def test_results_are_bounded_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[[Path], object]
) -> None:
    """Hard links make many long files of one."""
    monkeypatch.setattr(result_files, "MAX_RUN_BYTES", 1000)
    first = tmp_path / "evaluations" / "p@1.json"
    first.parent.mkdir()
    first.write_text(" " * 400 + '{"model": "m", "step": 1, "temperature": 1.0, "suites": []}')
    read(tmp_path)
    for number in (2, 3):
        first.with_name(f"p@{number}.json").hardlink_to(first)
    with pytest.raises(ConfigError, match="move some of the results"):
        read(tmp_path)


# --- how files are opened -------------------------------------------------------------------------

READERS = ("audit", "dashboard", "runs", "evals", "weights/*.py", "dataflow/ledger/recorded.py")
UNSAFE = frozenset({"open", "read_bytes", "read_text", "copyfile", "copytree", "copy", "connect"})
"""They follow links, wait for pipes, and read what has no end."""
OTHERS = {
    "dashboard/server.py": "pages of this package",
    "evals/recording.py": "the run's own process",
    "runs/check_problem.py": "a config that was just read",
    "runs/export/merged_model.py": "a copy that was just made",
    "runs/export/model.py": "a copy that was just made",
    "runs/export/tensor_files.py": "a copy that was just made",
    "runs/export/trajectories.py": "a file of an export",
    "runs/machine_limits.py": "files of the kernel",
    "runs/mcp_server.py": "a page of this package",
    "runs/plots.py": "a file that it writes",
    "runs/simulate.py": "a file that the user names",
    "runs/stall_guard.py": "the launcher's own log",
    "runs/user_code.py": "the code of a run that starts",
    "weights/patches.py": "a file that it writes",
    "weights/store.py": "a file that it writes",
}
NO_FILES = ("run", "self", "chosen")
"""They have a method `open` of another meaning."""


def _unsafe(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call):
            continue
        match node.func:
            case ast.Attribute(value=ast.Name(id=owner), attr="open") if owner in NO_FILES:
                continue
            case ast.Attribute(attr=name) if name in UNSAFE:
                yield ast.unparse(node)
            case ast.Name(id="open" | "copyfile" | "copytree"):
                yield ast.unparse(node)
            case _:
                continue


def test_files_of_run_folders_are_opened_by_safe_means() -> None:
    source = Path(penstock.__file__).parent
    found: dict[str, list[str]] = {}
    for reader in READERS:
        paths = source.glob(reader if reader.endswith(".py") else f"{reader}/**/*.py")
        for path in paths:
            if unsafe := [*_unsafe(path)]:
                found[str(path.relative_to(source))] = unsafe
    unknown = {name: calls for name, calls in found.items() if name not in OTHERS}
    assert not unknown, "use penstock.durable or penstock.foreign_ledger, or say whose file it is"
    assert not OTHERS.keys() - found.keys(), "these open nothing any more"


def test_a_foreign_delta_does_not_end_the_listing_of_weights(tmp_path: Path) -> None:
    """Its changed elements were counted in items of the size that it names."""
    layout = make_layout({"t": ("BF16", (1000,))})
    store = DirectoryStore(tmp_path)
    store.prepare()
    full = store.put_blob(io.BytesIO(layout.head + bytes(2000)), "model.safetensors").blob
    tensor = ("t", 0, None, memoryview(bytes(2000)))
    step = store.put_delta(full, DIGEST, lambda out: write_delta(out, full, DIGEST, [tensor]))
    assert count_changes(store, step, [full]) == (1000, 1000)
