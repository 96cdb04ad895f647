# SPDX-License-Identifier: Apache-2.0
"""The machine as `penstock doctor` shows it: devices, links between them, memory and disk."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.devices import Device, links
from penstock.fleet.run_folder import free_bytes
from penstock.requirements import Requirement
from penstock.runs.machine_limits import this_machine
from penstock.trainer.pipeline.memory_estimate import size_text

MOSTLY_FREE = 0.9
"""Less free memory than this share means that another program uses a device."""


def check_machine(devices: Sequence[Device]) -> Iterator[Requirement]:
    """Devices with their drivers and links, memory and disk."""
    needed_for = "training and vLLM on GPUs"
    if not devices:
        fix = ("runs compute on the CPU; for GPUs install NVIDIA's driver, which has nvidia-smi,",)
        fix += ("and show them in CUDA_VISIBLE_DEVICES",)
        yield Requirement("devices", False, "no GPU found", needed_for, fix)
    kinds = Counter((one.name, one.memory_bytes, one.driver) for one in devices)
    for (name, size, driver), count in kinds.items():
        detail = f"{count} × {name} with {size_text(size)}, driver {driver}"
        yield Requirement("devices", True, detail, needed_for)
    for one in devices:
        if one.free_bytes < MOSTLY_FREE * one.memory_bytes:
            detail = f"device {one.id} has {size_text(one.free_bytes)} free"
            fix = ("another program uses it: `nvidia-smi` shows which",)
            yield Requirement("devices", False, detail, needed_for, fix)
    if len(devices) > 1:
        yield _links()
    memory = f"{size_text(this_machine().memory_bytes)} available"
    yield Requirement("memory", True, memory, "everything")
    disk = f"{size_text(free_bytes(Path.cwd()))} free in {Path.cwd()}"
    yield Requirement("disk", True, disk, "checkpoints and versions")


def _links() -> Requirement:
    """How GPUs reach each other: NV18 is 18 NVLinks, SYS the slowest way through two sockets."""
    rows = [line.split() for line in links()]
    kinds = Counter(kind for row in rows for kind in row[1 : len(rows) + 1] if kind != "X")
    total = ", ".join(f"{kind} between {count // 2} pairs" for kind, count in kinds.items())
    fix = tuple(" ".join(row[: len(rows) + 1]) for row in rows) if len(kinds) > 1 else ()
    needed_for = "training on several GPUs"
    return Requirement("links", bool(kinds), total or "unknown", needed_for, fix)
