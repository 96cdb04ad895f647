# SPDX-License-Identifier: Apache-2.0
"""`penstock doctor`: list installed components and how to add missing ones, and the machine:
devices, links between them, memory and disk.

Changes nothing and imports neither torch nor vLLM; it reads their versions from metadata.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, distributions
from importlib.metadata import version as version_of
from pathlib import Path

from penstock import __version__
from penstock.requirements import Requirement

VLLM = "0.32"
"""The vLLM version that penstock supports."""
COMMAND = "penstock.cli.main:main"
"""What our command calls; another project called `penstock` has another one, or none."""
REINSTALL = (
    "both provide the package `penstock`: the files of one replace the other's",
    "pip uninstall -y penstock penstock-rl",
    "pip install penstock-rl",
)
SETUP = (
    "make setup-engine   # for CPUs, from a checkout of penstock; or:",
    "python3 -m venv {folder}",
    "{folder}/bin/pip install 'vllm=={vllm}.*'   # for GPUs; scripts/setup_engine.py for CPUs",
)


def doctor(*, environment: Path | None = None, json: bool = False) -> int:
    """List this machine's devices, memory and disk, the components installed on it, and how to add
    missing ones.

    Args:
        environment: Virtual environment with vLLM; by default the one that `make setup-engine`
            creates.
        json: Print one JSON object as the last line.
    """
    from penstock.cli.output import print_json, print_text
    from penstock.devices import visible_devices
    from penstock.rollout.engines.vllm.server import default_environment
    from penstock.runs.machine_requirements import check_machine

    devices = visible_devices()
    folder = environment or default_environment()
    found = [
        Requirement("python", True, f"{platform.python_version()} on {_cores()}", "everything"),
        check_distribution(),
        _package("torch", "training and the hf engine", "train"),
        _package("transformers", "training and the hf engine", "train"),
        _package("tokenizers", "the gateway", "tokens"),
        _package("matplotlib", "penstock plot", "plot"),
        _package("atif", "penstock export trajectories", "export"),
        _package("gguf", "penstock export gguf", "export"),
        check_vllm(folder),
        _models(folder.parent / "models"),
        *check_machine(devices),
    ]
    if json:
        listed = [asdict(device) for device in devices]
        print_json({"findings": [asdict(finding) for finding in found], "devices": listed})
        return 0
    for finding in found:
        mark = "+" if finding.is_present else "-"
        print_text(f"{mark} {finding.name:<12} {finding.detail}   ({finding.needed_for})")
        for line in finding.fix:
            print_text(f"      {line}")
    return 0


def check_distribution(paths: Sequence[str] | None = None) -> Requirement:
    """Whether another project of the name `penstock` is installed, which would replace our files.
    `paths`: folders to look in; by default all of this environment."""
    known = distributions() if paths is None else distributions(path=[*paths])
    for found in known:
        commands = found.entry_points.select(group="console_scripts", name="penstock")
        if found.name == "penstock" and not any(one.value == COMMAND for one in commands):
            detail = f"another project called penstock is installed too (version {found.version})"
            return Requirement("penstock-rl", False, detail, "everything", REINSTALL)
    return Requirement("penstock-rl", True, __version__, "everything")


def check_vllm(folder: Path) -> Requirement:
    """Whether an environment has a vLLM that the engine can start."""
    needed_for = "engine: vllm"
    program = folder / "bin" / "vllm"
    setup = tuple(line.format(folder=folder, vllm=VLLM) for line in SETUP)
    if not os.access(program, os.X_OK):
        return Requirement("vllm", False, f"{program} not found", needed_for, setup)
    paths = [str(path) for path in folder.glob("lib/python3*/site-packages")]
    known = {d.name: d.version for d in distributions(path=paths)}
    version = known.get("vllm", "")
    detail = f"{version or 'unknown version'} with torch {known.get('torch', '?')} in {folder}"
    if not version.startswith(f"{VLLM}."):
        fix = (
            f"penstock supports vLLM {VLLM}; other versions are checked at startup and may work",
        )
        return Requirement("vllm", True, detail, needed_for, fix)
    return Requirement("vllm", True, detail, needed_for)


def _package(name: str, needed_for: str, extra: str) -> Requirement:
    try:
        return Requirement(name, True, version_of(name), needed_for)
    except PackageNotFoundError:
        fix = (f"pip install 'penstock-rl[{extra}]'",)
        return Requirement(name, False, "not installed", needed_for, fix)


def _models(folder: Path) -> Requirement:
    names = sorted(path.parent.name for path in folder.glob("*/config.json"))
    detail = f"{', '.join(names) or 'none'} in {folder}"
    return Requirement("models", bool(names), detail, "tests and benchmarks with a real model")


def _cores() -> str:
    cores = len(os.sched_getaffinity(0))
    return f"{platform.system()} {platform.machine()}, {cores} core{'' if cores == 1 else 's'}"
