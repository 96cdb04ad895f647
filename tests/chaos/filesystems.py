# SPDX-License-Identifier: Apache-2.0
"""Small file systems of a campaign's own: an ext4 in a file, whose file is what a power cut would
leave, and a tmpfs that can be filled. Needs root; lets everything go again."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest

IMAGE_BYTES = 256 << 20
NO_LUCK = "commit=300,noauto_da_alloc"
"""Neither a timer nor a rename makes ext4 write what the program did not sync."""
MEMORY = Path("/dev/shm")

needs_root = [
    pytest.mark.root,
    pytest.mark.skipif(
        os.geteuid() != 0 or not Path("/dev/loop-control").exists(),
        reason="mounting small file systems needs root and loop devices",
    ),
]


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{' '.join(words)}: {done.stderr.strip()}"
    return done.stdout.strip()


def scratch(tmp_path: Path) -> Path:
    """Where images lie: in memory if there is room, for the host's disk is not under test."""
    return MEMORY if os.access(MEMORY, os.W_OK) else tmp_path


def make_image(path: Path) -> None:
    with path.open("wb") as image:
        image.truncate(IMAGE_BYTES)
    _run(
        "mkfs.ext4",
        "-q",
        "-F",
        "-m",
        "0",
        "-E",
        "lazy_itable_init=0,lazy_journal_init=0",
        str(path),
    )


class LoopDisk:
    """A mounted image. The file behind it holds what reached the device, and no dirty page."""

    def __init__(self, image: Path, point: Path, device: str) -> None:
        self._image = image
        self.point = point
        self._counters = Path(f"/sys/block/{Path(device).name}/stat")

    def sync(self) -> None:
        _run("sync", "--file-system", str(self.point))

    def copy_image(self, target: Path) -> None:
        """The device as it is; taken again when something was written meanwhile."""
        for _ in range(20):
            before = self._writes()
            if before[2] == "0":
                _run("cp", "--sparse=always", str(self._image), str(target))
                if self._writes() == before:
                    return
            time.sleep(0.02)
        raise AssertionError("the device was never quiet")

    def _writes(self) -> tuple[str, str, str]:
        """Writes done, sectors written, requests in flight."""
        values = self._counters.read_text().split()
        return values[4], values[6], values[8]


@contextmanager
def mounted(image: Path, point: Path, options: str = "") -> Generator[LoopDisk]:
    point.mkdir(parents=True, exist_ok=True)
    device = _run("losetup", "--find", "--show", str(image))
    try:
        _run("mount", "-t", "ext4", "-o", options or "defaults", device, str(point))
        try:
            yield LoopDisk(image, point, device)
        finally:
            _unmount(point)
    finally:
        _run("losetup", "--detach", device)


@contextmanager
def memory_disk(point: Path, size_bytes: int) -> Generator[Path]:
    point.mkdir(parents=True, exist_ok=True)
    _run("mount", "-t", "tmpfs", "-o", f"size={size_bytes}", "tmpfs", str(point))
    try:
        yield point
    finally:
        _unmount(point)


def _unmount(point: Path) -> None:
    for _ in range(50):
        if subprocess.run(["umount", str(point)], capture_output=True, timeout=300).returncode == 0:
            return
        time.sleep(0.1)
    _run("umount", "--lazy", str(point))
