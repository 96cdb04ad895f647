# SPDX-License-Identifier: Apache-2.0
"""The GPUs of this machine, as `nvidia-smi` reports them; nowhere else are they counted.

Owns what "on CUDA" means outside of torch: at least one GPU that CUDA_VISIBLE_DEVICES does not
hide. Imports no torch and changes nothing. Tests put a program called `nvidia-smi` first in PATH.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

VISIBLE_ENV = "CUDA_VISIBLE_DEVICES"
"""The GPUs that a process may use, by index or UUID, in the order in which it counts them."""
TIMEOUT_S = 60.0
_FIELDS = ("index", "uuid", "name", "memory.total", "memory.free", "driver_version")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One GPU."""

    id: str
    """What CUDA_VISIBLE_DEVICES calls it."""
    name: str
    memory_bytes: int
    free_bytes: int
    driver: str


def visible_devices(environ: Mapping[str, str] | None = None) -> tuple[Device, ...]:
    """The GPUs that this process may use, in its order; none on a machine without GPUs."""
    visible = (os.environ if environ is None else environ).get(VISIBLE_ENV)
    if visible is not None and not visible.strip():
        return ()
    found = [
        (uuid, Device(id=index, name=name, memory_bytes=total, free_bytes=free, driver=driver))
        for index, uuid, name, total, free, driver in _query()
    ]
    if visible is None:
        return tuple(device for _, device in found)
    chosen: list[Device] = []
    for word in visible.split(","):
        named = word.strip()
        match = [d for uuid, d in found if named == d.id or (named and uuid.startswith(named))]
        if not match:  # CUDA ignores this entry and all that follow
            break
        chosen.append(match[0])
    return tuple(chosen)


def links() -> tuple[str, ...]:
    """How the GPUs of this machine reach each other: one line per GPU, like `GPU0 X NV18`."""
    lines = _run("topo", "-m").splitlines()
    return tuple(" ".join(line.split()) for line in lines if line.startswith("GPU"))


def _query() -> list[tuple[str, str, str, int, int, str]]:
    printed = _run(f"--query-gpu={','.join(_FIELDS)}", "--format=csv,noheader,nounits")
    rows = [[cell.strip() for cell in line.split(",")] for line in printed.splitlines() if line]
    try:
        return [
            (index, uuid, name, int(total) << 20, int(free) << 20, driver)
            for index, uuid, name, total, free, driver in rows
        ]
    except ValueError:  # a driver that does not answer: no GPU can be used
        return []


def _run(*arguments: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    try:
        command: Sequence[str] = (program, *arguments)
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
