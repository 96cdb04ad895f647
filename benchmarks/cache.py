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


def smollm2() -> Path:
    """The folder of SmolLM2-135M-Instruct; the first call makes it."""
    folder = CACHE / "models" / "SmolLM2-135M-Instruct"
    if not (folder / ".made-of").exists():
        set_up_engine()
    return folder
