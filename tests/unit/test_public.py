# SPDX-License-Identifier: Apache-2.0
"""What the package promises to everybody: few names, no torch, quick to import."""

from __future__ import annotations

import inspect
import subprocess
import sys
from importlib.metadata import requires

import penstock

CORE = (
    "penstock.cli.main",
    "penstock.config",
    "penstock.dataflow.client.dataflow",
    "penstock.dataflow.service.server",
    "penstock.weights.client",
    "penstock.weights.serving.server",
    "penstock.fleet.launchers.local",
    "penstock.audit",
    "penstock.conformance",
    "penstock.observe",
)
HEAVY = ("torch", "transformers", "tokenizers", "jinja2", "safetensors", "vllm", "ray")


def test_public_names() -> None:
    public = {
        n for n, v in vars(penstock).items() if not n.startswith("_") and not inspect.ismodule(v)
    }
    assert {n for n in penstock.__all__ if not n.startswith("_")} == public


def test_the_core_names_no_heavy_dependency() -> None:
    core = [line for line in requires("penstock") or [] if "extra ==" not in line]
    assert core and not [line for line in core if line.lower().startswith(HEAVY)]


def test_the_core_runs_where_nothing_heavy_is_installed() -> None:
    """A module that is None in sys.modules cannot be imported, as if it were not there."""
    program = (
        f"import importlib, sys\n"
        f"sys.modules.update(dict.fromkeys({HEAVY!r}))\n"
        f"for name in {CORE!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
