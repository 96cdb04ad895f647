# SPDX-License-Identifier: Apache-2.0
"""A machine with GPUs that are not there: a program called `nvidia-smi`, first in PATH."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

MB_80_GB = 81_559
"""What nvidia-smi reports for an H100 of 80 GB."""
PROGRAM = """#!/bin/sh
case "$1" in
  topo) cat {topology} ;;
  *) cat {devices} ;;
esac
"""


def fake_gpus(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    *,
    free_mb: Sequence[int] = (MB_80_GB,) * 8,
    visible: str | None = None,
) -> None:
    """This process, and those it starts, see these GPUs. `visible`: CUDA_VISIBLE_DEVICES."""
    folder.mkdir(exist_ok=True)
    devices, topology = folder / "devices.csv", folder / "topology.txt"
    devices.write_text(
        "".join(
            f"{index}, GPU-{index:08x}-aa, NVIDIA H100 80GB HBM3, {free}, {free}, 570.86.15\n"
            for index, free in enumerate(free_mb)
        )
    )
    names = [f"GPU{index}" for index in range(len(free_mb))]
    rows = [[name, *("X" if other == name else "NV18" for other in names)] for name in names]
    topology.write_text("\n".join("\t".join(row) for row in [["", *names], *rows]) + "\n")
    program = folder / "nvidia-smi"
    program.write_text(PROGRAM.format(devices=devices, topology=topology))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
