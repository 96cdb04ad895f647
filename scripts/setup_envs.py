# SPDX-License-Identifier: Apache-2.0
"""Virtual environments of the libraries whose environments penstock plays, of trackers, of the
Tinker SDK, and of one that checks Kubernetes manifests, one each under `$PENSTOCK_CACHE/envs/`,
because their pins contradict one another. `setup_envs.py [NAME …]` makes those that are missing or
differ from their pins in `constraints/envs/NAME.txt`; with `--pin` it writes these pins anew.

Standard library only; the environment of this project stays as it is."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
import venv
from pathlib import Path

WANTED = {
    "gymnasium": ("gymnasium[toy-text]",),
    "openenv": ("openenv>=0.10,<0.11",),
    "verifiers": ("verifiers>=0.4,<0.5",),
    "reasoning_gym": ("reasoning-gym",),
    "kubernetes": ("kubernetes-validate",),
    "tinker": ("tinker>=0.36",),
    "trackers": ("wandb>=0.31", "mlflow-skinny>=3.17", "sqlalchemy", "alembic", "msgspec"),
}
"""What each is made for; the exact versions are in constraints/envs."""
MARKER = ".made-of"
"""File that says from what its folder was made; written last."""

PINS = Path(__file__).resolve().parent.parent / "constraints" / "envs"
CACHE = Path(os.environ.get("PENSTOCK_CACHE", "~/.cache/penstock")).expanduser() / "envs"
_PIN = re.compile(r"[A-Za-z0-9._-]+==[^ ]+")


def log_line(text: str) -> None:
    print(f"setup-envs: {text}", file=sys.stderr, flush=True)


def pip(folder: Path, *words: str) -> str:
    argv = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check", *words]
    done = subprocess.run(argv, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        fix = f"pip must find these packages (see above), and {CACHE} needs 2 GB of free space"
        sys.exit(f"setup-envs: `{' '.join(argv)}` ended with {done.returncode}: {fix}")
    return done.stdout


def install(folder: Path, *words: str) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    venv.create(folder, with_pip=True)
    pip(folder, "install", "--quiet", *words)


def make(name: str) -> None:
    """The environment, whole and made of just its pins."""
    folder, pins = CACHE / name, PINS / f"{name}.txt"
    marker = folder / MARKER
    if marker.exists() and marker.read_text() == pins.read_text():
        log_line(f"{folder} is there")
        return
    began = time.monotonic()
    log_line(f"making {folder}")
    install(folder, "--no-deps", "-r", str(pins))
    marker.write_text(pins.read_text())
    log_line(f"made {folder} in {time.monotonic() - began:.0f} s")


def pin(name: str) -> None:
    """Resolve anew, and keep only name==version lines: no index addresses, no build tags."""
    folder = CACHE / name
    install(folder, *WANTED[name])
    frozen = (line.partition("+")[0] for line in pip(folder, "freeze").splitlines())
    pins = sorted((line for line in frozen if _PIN.fullmatch(line)), key=str.lower)
    (PINS / f"{name}.txt").write_text("\n".join(pins) + "\n")
    (folder / MARKER).write_text((PINS / f"{name}.txt").read_text())


def main() -> None:
    names = [word for word in sys.argv[1:] if word != "--pin"]
    if unknown := set(names) - set(WANTED):
        sys.exit(f"setup-envs: no such environment {sorted(unknown)}; known: {', '.join(WANTED)}")
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "setup-envs.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name in names or WANTED:
            pin(name) if "--pin" in sys.argv else make(name)


if __name__ == "__main__":
    main()
