# SPDX-License-Identifier: Apache-2.0
"""What is made once per machine and kept: the models, engines and traces of `make setup-engine`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.harness import ROOT

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
