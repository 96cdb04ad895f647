# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.weights.snapshot_folders import contents, write_folder

import penstock
from penstock.errors import WeightsError
from penstock.types import PolicyName
from penstock.weights import store as module
from penstock.weights.manifest import digest_of, parse_manifest
from penstock.weights.publish import StoredVersion, put_snapshot
from penstock.weights.store import DirectoryStore

POLICY = PolicyName("policy")
SOURCE = str(Path(penstock.__file__).parents[1])


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def put(root: Path, folder: Path, number: int = 0) -> StoredVersion:
    return put_snapshot(root, folder, policy=POLICY, number=number)


def test_a_snapshot_is_stored_and_read_back(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf")
    version = put(tmp_path / "store", folder)
    store = DirectoryStore(tmp_path / "store")
    manifest = parse_manifest(store.read_manifest(version.manifest_digest))
    assert manifest.weights_digest == version.weights_digest
    found: dict[str, bytes] = {}
    for file in manifest.files:
        with store.open_blob(file.blob) as blob:
            found[file.name] = blob.read()
    assert found == contents(folder)
    assert names(tmp_path / "store" / "incoming") == set()


def test_the_same_weights_are_the_same_version(tmp_path: Path) -> None:
    first = put(tmp_path / "store", write_folder(tmp_path / "a"))
    before = {path: path.stat() for path in (tmp_path / "store").rglob("*") if path.is_file()}
    assert put(tmp_path / "store", write_folder(tmp_path / "b")) == first
    after = {path: path.stat() for path in (tmp_path / "store").rglob("*") if path.is_file()}
    assert {path: (found.st_ino, found.st_mtime_ns) for path, found in before.items()} == {
        path: (found.st_ino, found.st_mtime_ns) for path, found in after.items()
    }
    other = put(tmp_path / "store", write_folder(tmp_path / "c", seed=1))
    assert other.weights_digest != first.weights_digest
    renumbered = put(tmp_path / "store", tmp_path / "a", number=1)
    assert renumbered.weights_digest == first.weights_digest
    assert renumbered.manifest_digest != first.manifest_digest


def test_code_pickles_hidden_files_and_folders_stay_out(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf")
    clean = put(tmp_path / "store", folder)
    for name in ("modeling.py", "pytorch_model.bin", ".secret.json", "README.md"):
        (folder / name).write_text("x")
    (folder / "original").mkdir()
    assert put(tmp_path / "store", folder) == clean


def test_a_link_in_the_folder_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "hf")
    (tmp_path / "outside.json").write_text("secret")
    (folder / "extra.json").symlink_to(tmp_path / "outside.json")
    with pytest.raises(WeightsError, match="replace the link"):
        put(tmp_path / "store", folder)
    assert names(tmp_path / "store" / "manifests") == set()


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match="save the model there first"):
        put(tmp_path / "store", tmp_path)


KILLED = """
import os, signal, sys
from pathlib import Path
from penstock.weights import store
from penstock.weights.publish import put_snapshot
left = int(sys.argv[3])
def die(real):
    def call(*args, **kwargs):
        global left
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left -= 1
        return real(*args, **kwargs)
    return call
for name in ("fsync", "link", "write", "open"):
    setattr(os, name, die(getattr(os, name)))
put_snapshot(Path(sys.argv[1]), Path(sys.argv[2]), policy="policy", number=0)
"""


@pytest.mark.parametrize("num_calls", [0, 3, 7, 12, 20, 26, 29, 31])
def test_a_kill_at_any_moment_leaves_nothing_visible_and_is_repaired(
    tmp_path: Path, num_calls: int
) -> None:
    """Dies before its n-th write, link, fsync or open: then no manifest, or a complete version."""
    folder = write_folder(tmp_path / "hf")
    root = tmp_path / "store"
    command = [sys.executable, "-c", KILLED, str(root), str(folder), str(num_calls)]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": SOURCE}, check=False)
    assert done.returncode == -signal.SIGKILL
    manifests = names(root / "manifests") if (root / "manifests").exists() else set[str]()
    store = DirectoryStore(root)
    for name in manifests:
        for file in parse_manifest(store.read_manifest(name.removesuffix(".json"))).files:
            with store.open_blob(file.blob) as blob:
                assert digest_of(blob.read()) == file.blob
    for path in (root / "blobs").glob("*"):
        assert digest_of(path.read_bytes()) == path.name
    version = put(root, folder)
    assert names(root / "manifests") == {f"{version.manifest_digest}.json"}


def test_blobs_are_synced_before_the_manifest_appears(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    real_fsync, real_link = os.fsync, os.link

    def fsync(descriptor: int) -> None:
        events.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))
        real_fsync(descriptor)

    def link(source: Path, target: Path) -> None:
        assert ("sync", str(source)) in events, "linked before its bytes were on disk"
        events.append(("link", str(target)))
        real_link(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "link", link)
    root = tmp_path / "store"
    version = put(root, write_folder(tmp_path / "hf"))
    manifest_at = events.index(("link", f"{root}/manifests/{version.manifest_digest}.json"))
    blob_links = [at for at, event in enumerate(events) if event[1].startswith(f"{root}/blobs/")]
    synced_at = max(at for at, e in enumerate(events) if e == ("sync", f"{root}/blobs"))
    assert max(blob_links) < synced_at < manifest_at
    assert events[-1] == ("sync", f"{root}/manifests")


TRAVERSAL = [
    "",
    ".",
    "..",
    "../manifests",
    "../../secret",
    "/etc/passwd",
    "a" * 63,
    "a" * 65,
    "A" * 64,
    "a" * 63 + "\n",
    "a" * 62 + "/x",
    "٣" * 64,
    "a" * 64 + "\0",
]


@pytest.mark.parametrize("digest", TRAVERSAL)
def test_only_digests_name_things(tmp_path: Path, digest: str) -> None:
    store = DirectoryStore(tmp_path)
    store.prepare()
    (tmp_path / "secret").write_text("x")
    with pytest.raises(ValueError, match="not a BLAKE3 digest"):
        store.open_blob(digest)
    with pytest.raises(ValueError, match="not a BLAKE3 digest"):
        store.read_manifest(digest)


def test_links_pipes_and_folders_are_not_read(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.prepare()
    (tmp_path / "secret").write_text("x")
    (tmp_path / "blobs" / ("a" * 64)).symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "blobs" / ("b" * 64))
    (tmp_path / "blobs" / ("c" * 64)).mkdir()
    for digit in "abcd":
        with pytest.raises(OSError):
            store.open_blob(digit * 64)


def test_a_damaged_manifest_is_not_read(tmp_path: Path) -> None:
    version = put(tmp_path, write_folder(tmp_path / "hf"))
    path = tmp_path / "manifests" / f"{version.manifest_digest}.json"
    data = path.read_bytes()
    path.unlink()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with pytest.raises(WeightsError, match="damaged"):
            DirectoryStore(tmp_path).read_manifest(version.manifest_digest)


@pytest.mark.parametrize("damaged", [b"123", b"123457"], ids=["cut off", "a bit flipped"])
def test_a_damaged_blob_is_replaced_when_put_again(tmp_path: Path, damaged: bytes) -> None:
    """Every version shares its tokenizer with the previous one: otherwise no node could join."""
    store = DirectoryStore(tmp_path)
    store.prepare()
    blob = store.put_blob(io.BytesIO(b"123456"), "a.json").blob
    path = tmp_path / "blobs" / blob
    path.unlink()
    path.write_bytes(damaged)
    assert store.put_blob(io.BytesIO(b"123456"), "a.json").blob == blob
    assert path.read_bytes() == b"123456"


def test_files_of_dead_writers_are_removed_after_a_day(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.prepare()
    old, new = tmp_path / "incoming" / "old", tmp_path / "incoming" / "new"
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    store.prepare()
    assert names(tmp_path / "incoming") == {"new"}
    assert module.ABANDONED_S > 3600


def test_stored_files_cannot_be_written_by_accident(tmp_path: Path) -> None:
    put(tmp_path, write_folder(tmp_path / "hf"))
    for path in (tmp_path / "blobs").iterdir():
        assert path.stat().st_mode & 0o222 == 0


def test_a_file_that_another_writer_finishes_meanwhile_is_no_failure(tmp_path: Path) -> None:
    store = DirectoryStore(tmp_path)
    store.prepare()
    listed_but_gone = tmp_path / "incoming" / "other"
    listed_but_gone.symlink_to(tmp_path / "nowhere")
    store.prepare()
