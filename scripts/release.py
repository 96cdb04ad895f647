# SPDX-License-Identifier: Apache-2.0
"""Builds the wheel and the source archive of the last commit into dist/, twice, in different
folders; different bytes are an error. Uploads nothing.

Usage: python scripts/release.py"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILDER = "hatchling==1.31.0"
"""Exactly one: another may order or compress files otherwise."""


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="penstock-release-") as name:
        folder = Path(name)
        python = make_builder(folder / "builder")
        first, second = (build(python, folder / place) for place in ("a", "somewhere/else"))
        different = [path for path in first if first[path] != second.get(path)]
        if different or set(first) != set(second):
            print(f"release: two builds differ in {', '.join(different) or 'their files'}")
            return 1
        shutil.rmtree(ROOT / "dist", ignore_errors=True)
        shutil.copytree(folder / "a" / "dist", ROOT / "dist")
    for file, digest in sorted(first.items()):
        print(f"release: {digest}  dist/{file}")
    return 0


def make_builder(folder: Path) -> Path:
    venv.create(folder, with_pip=True)
    python = folder / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", BUILDER], check=True, timeout=600)
    return python


def build(python: Path, folder: Path) -> dict[str, str]:
    """SHA-256 of each file that was built there."""
    folder.mkdir(parents=True)
    archive = folder / "head.tar"
    with archive.open("wb") as out:
        subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, stdout=out, check=True, timeout=60)
    source = folder / "source"
    with tarfile.open(archive) as opened:
        opened.extractall(source, filter="data")
    dist = folder / "dist"
    command = [python, "-m", "hatchling", "build", "-d", dist]
    subprocess.run(command, cwd=source, check=True, stdout=subprocess.DEVNULL, timeout=600)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in dist.iterdir()}


if __name__ == "__main__":
    sys.exit(main())
