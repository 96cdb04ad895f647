# SPDX-License-Identifier: Apache-2.0
"""What is made once per machine and kept: models, engines and traces of `make setup-engine`, and
environments for comparisons."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import ROOT, log_line

CACHE = Path(os.environ.get("PENSTOCK_CACHE", "~/.cache/penstock")).expanduser()


def set_up_engine() -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "setup_engine.py"], check=True)


def smollm2(*, quick: bool) -> Path:
    """The folder of SmolLM2-135M-Instruct; the first call makes it, unless it must be quick."""
    folder = CACHE / "models" / "SmolLM2-135M-Instruct"
    ensure(folder, quick=quick)
    return folder


def ensure(folder: Path, *, quick: bool) -> None:
    """Make a folder that `make setup-engine` makes, which takes far longer than a quick run may."""
    if (folder / ".made-of").exists():
        return
    if quick:
        sys.exit(f"{folder} is not there; run `make setup-engine` first (15 to 50 minutes, once)")
    set_up_engine()


def environment(name: str, pins: Path, project: Path | None = None) -> Path:
    """The interpreter of an environment of exactly these versions, which the first call installs,
    and of this checkout as it is now."""
    folder = CACHE / name
    python, marker = folder / "bin" / "python", folder / ".made-of"
    install = [str(python), "-m", "pip", "install", "--quiet", "--no-deps"]
    if not marker.exists() or marker.read_text() != pins.read_text():
        log_line(f"installing {folder}; once, some minutes")
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        subprocess.run([*install, "-r", str(pins)], check=True)
        marker.write_text(pins.read_text())
    if project is not None:  # compiled, as whoever installs a wheel has it
        subprocess.run([*install, "--force-reinstall", str(project)], check=True)
    return python
