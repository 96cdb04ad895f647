# SPDX-License-Identifier: Apache-2.0
"""What a stranger could slip into a build: other files than the pinned ones, or another wheel."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


def build_wheel(source: Path, out: Path) -> str:
    """Build from a copy of the tracked files, with times of their own; the hash of the wheel."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, tracked.split("\0")):
        if name.startswith(("src/", "pyproject", "README", "LICENSE")) and (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    words = ("wheel", "--quiet", "--no-deps", "--no-cache-dir", "--wheel-dir", str(out))
    subprocess.run([sys.executable, "-m", "pip", *words, str(source)], check=True)
    (wheel,) = out.iterdir()
    return hashlib.sha256(wheel.read_bytes()).hexdigest()


def test_two_wheels_built_apart_have_one_hash(tmp_path: Path) -> None:
    """A wheel depends on the sources alone: not on when, where or under which umask it is built."""
    first = build_wheel(tmp_path / "one", tmp_path / "first")
    old = os.umask(0o077)
    try:
        second = build_wheel(tmp_path / "another" / "place", tmp_path / "second")
    finally:
        os.umask(old)
    assert first == second


def test_every_pinned_version_has_a_hash_and_stands_in_the_bill() -> None:
    """A swapped file on the index is noticed by whoever installs with hashes."""
    checked = subprocess.run(
        [sys.executable, "scripts/supply.py", "--check"], cwd=ROOT, capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("change", ["version", "missing hash", "missing part"])
def test_a_changed_pin_without_its_hash_is_refused(tmp_path: Path, change: str) -> None:
    """The check of the line above can fail."""
    shutil.copytree(ROOT / "constraints", tmp_path / "constraints")
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "supply.py", tmp_path / "scripts")
    pins, hashes = tmp_path / "constraints" / "dev.txt", tmp_path / "constraints" / "hashes.txt"
    bill = tmp_path / "constraints" / "sbom.cdx.json"
    if change == "version":
        pins.write_text(re.sub(r"anyio==\S+", "anyio==0.0.1", pins.read_text()))
    elif change == "missing hash":
        hashes.write_text(re.sub(r"anyio==.*\n", "", hashes.read_text()))
    else:
        document = json.loads(bill.read_text())
        document["components"].pop()
        bill.write_text(json.dumps(document))
    checked = subprocess.run(
        [sys.executable, "scripts/supply.py", "--check"], cwd=tmp_path, capture_output=True
    )
    assert checked.returncode == 1


def test_no_file_of_the_build_names_an_address() -> None:
    """Pins, hashes and the bill come from no particular host."""
    for path in (ROOT / "constraints").rglob("*.*"):
        assert not re.search(r"https?://|file://|--index-url|@ ", path.read_text()), path.name
